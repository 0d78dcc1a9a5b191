//! A simulated machine with an accelerator, for programs that order copies by streams and events.
//!
//! A [`World`] has streams, events, device memory, pinned host memory and a disk, all with real bytes
//! and on a virtual clock that is drawn from a seed. [`SimDevice`] and [`SimDisk`] are what an engine
//! drives; storages and kernels are what the framework around it does.
//!
//! # What is checked
//!
//! * *Order*, by vector clocks, when a call is made: two accesses of one byte that nothing orders are
//!   a [`Report`] naming both calls, on every schedule, however the times fall.
//! * *Values*: a wrong order moves wrong bytes, since a copy reads when it starts and writes when it
//!   ends, and memory is handed out again at once. New memory holds garbage.
//! * *Life*: memory freed in use, used when freed, freed twice, never given back.
//!
//! # Example
//!
//! A copy that does not wait for the kernel in front of it:
//!
//! ```
//! use ebbtide_core::{Accelerator, Direction, End};
//! use ebbtide_sim::{Kind, Options, World};
//!
//! let world = World::new(1, Options::default());
//! let mut device = world.device();
//! let storage = world.storage(4096)?;
//! world.fill(&storage, 0..4096, 7);
//! let out = device.copy_stream(Direction::Out)?;
//! let host = device.pin(4096)?;
//! device.copy(out, End::Storage(&storage, 0), End::Host(&host, 0), 4096)?;
//! device.sync_stream(out)?;
//! drop(host);
//!
//! let reports = world.finish();
//! assert_eq!(reports[0].kind, Kind::Race);
//! assert!(reports[0].to_string().starts_with("race: copy storage#0[0..4096] -> host#1[0..4096]"));
//! # Ok::<(), ebbtide_core::BackendError>(())
//! ```
//!
//! # Map
//!
//! | module | what is there |
//! | --- | --- |
//! | `world` | the machine and what a test asks of it |
//! | `device`, `disk` | what an engine drives |
//! | `handles`, `objects` | what a program holds, and what the world knows of it |
//! | `kernels` | kernels that write known bytes and compare |
//! | `state` | time, streams, calls |
//! | `shadow`, `clock` | the checker: who touched which bytes, and what is ordered |
//! | `schedule`, `memory`, `heap` | bytes, addresses, and what happens when |
//! | `options`, `inject`, `random` | speeds, lateness, faults |
//! | `report`, `call`, `stats` | what comes out |
//! | [`play`] | whole runs of the engine, drawn from a seed |
//! | [`predict`] | the other use: what a plan will take, given times and speeds |
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod call;
mod clock;
mod device;
mod disk;
mod handles;
mod heap;
mod inject;
mod kernels;
mod memory;
mod objects;
mod options;
pub mod play;
pub mod predict;
mod random;
mod report;
mod schedule;
mod shadow;
mod state;
mod stats;
mod world;

pub use call::Call;
pub use device::SimDevice;
pub use disk::SimDisk;
pub use handles::{SimBlock, SimEvent, SimHost, SimSlot, SimStorage, SimStream};
pub use options::{Faults, Function, Lateness, Options, Speeds};
pub use random::{Random, Ratio, pattern};
pub use report::{Kind, Report};
pub use stats::Stats;
pub use world::World;
