//! The engine of ebbtide: a deterministic state machine that decides which storage of a training
//! step lives on the device, which one is away in a slower tier, and what moves next.
//!
//! The crate has no threads, no clock, no I/O and no `unsafe`. It validates; a [`Device`] and a
//! [`Store`] obey. That is what lets the same code run under a simulator, on a CPU and on a GPU.
//!
//! # Vocabulary
//!
//! * **storage**: one allocation of the framework, shared by any number of tensors (views).
//! * **device**: where the framework computes. On a CPU machine that is RAM.
//! * **offload** moves a storage out of the device, **load** brings it back.
//! * **group**: the storages that one layer saved in one pass. They move together.
//! * **pass**: one run of the forward. Several may be in flight (micro-batches).
//!
//! # Map
//!
//! | module | what is there |
//! | --- | --- |
//! | [`manager`] | groups by name and by layer, declared chains, the current group |
//! | [`engine`] | groups and their phases, identity, counters; `protect`, `prefetch` and `inspect` are parts of it |
//! | [`mover`] | the seam below groups: how the storages of one group travel |
//! | [`direct`] | memory that changes its owner, straight into a store |
//! | [`staged`] | streams and events: offload in `departure`, load in `arrival`, host memory and what is below it in `tiers` |
//! | [`pool`], [`class`] | which host buffer, when it may be used again, and how large it is |
//! | [`state`] | the states of one storage and every transition between them |
//! | [`backend`] | the traits [`Device`] and [`Store`] and what each may rely on |
//! | [`accel`] | the trait [`Accelerator`]: streams, events, pinned memory |
//! | [`order`] | which group will be needed next: learnt from backward |
//! | [`plan`], [`op`] | a plan as data; the operations of a step |
//! | [`gate`] | may an operation start, may a load start: bytes against the budget |
//! | [`policy`] | keep, swap or recompute for each layer, and the text form of it |
//! | [`observe`] | the one interface for warnings, counters and timings |
//! | [`size`], [`budget`] | byte sizes, and budgets of device memory, as people write them |
//! | [`error`] | the error type of the engine |
//! | [`model`], [`mark`] | for tests: a device of byte vectors, coverage marks |
//!
//! # Example
//!
//! A group of one storage goes out and comes home. The device and the store are those of the
//! crate's own tests: plain byte vectors.
//!
//! ```
//! use ebbtide_core::model::{ModelDevice, ModelStore};
//! use ebbtide_core::{Config, Direct, Engine, LayerId, Pass, Registered, Saved};
//!
//! let device = ModelDevice::default();
//! let storage = device.storage(vec![7; 4096]);
//! let mover = Direct::new(device, ModelStore::default());
//! let mut engine = Engine::new(Config::default(), mover);
//!
//! let group = engine.open(LayerId(0), Pass(1));
//! let label = engine.label("h.0 activation");
//! let saved = Saved::whole(storage.clone(), 4096).label(label);
//! let (tensor, registered) = engine.register(group, saved)?;
//! assert_eq!(registered, Registered::New);
//! engine.start_offload(group)?;
//! engine.wait_offload(group)?;
//! assert!(storage.is_away());
//! assert_eq!(engine.state(tensor)?, "host");
//!
//! engine.start_load(group)?;
//! engine.wait_load(group)?;
//! assert_eq!(*storage.bytes(), vec![7; 4096]);
//! engine.close(group);
//! # Ok::<(), ebbtide_core::Error>(())
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod accel;
mod arrival;
pub mod backend;
pub mod budget;
mod chain;
pub mod class;
mod context;
mod departure;
pub mod direct;
pub mod engine;
pub mod error;
pub mod gate;
mod group;
mod hash;
mod inspect;
mod label;
pub mod manager;
pub mod mark;
pub mod model;
pub mod mover;
pub mod observe;
pub mod op;
pub mod order;
mod owners;
mod pack;
mod parcel;
pub mod plan;
pub mod policy;
pub mod pool;
mod prefetch;
mod protect;
mod ranges;
mod region;
pub mod size;
pub mod staged;
pub mod state;
mod tiers;

pub use accel::{Accelerator, Direction, End};
pub use backend::{Bytes, Device, Done, Facts, Failed, Outcome, Store, StoreStats, Ticket, Timing};
pub use budget::MemoryBudget;
pub use chain::{Chain, Declared};
pub use context::Contexts;
pub use direct::Direct;
pub use engine::{Config, Counters, Engine};
pub use error::{BackendError, Error};
pub use gate::Gate;
pub use group::{GroupId, Registered, TensorId};
pub use label::{Label, Labels};
pub use manager::{Manager, Offered};
pub use mover::{Element, Mover, Saved};
pub use observe::{Event, Observer};
pub use op::{Op, Phase};
pub use parcel::Piece;
pub use plan::{LayerPlan, Plan, Schedule};
pub use policy::{CheckpointPolicy, Policies, Policy, TensorPolicy};
pub use pool::{Budget, Buffer, HostPool, PoolStats};
pub use ranges::{Ranges, view_bytes};
pub use region::{Item, Region};
pub use staged::{Cargo, Staged, StagedConfig};
pub use tiers::NoDisk;

/// Names a pool of host memory within one engine. The default pool has the number 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

/// Number of a layer in the order in which the front end declares layers, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(pub u32);

/// Number of one run of the forward. Never used twice within an engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass(pub u64);
