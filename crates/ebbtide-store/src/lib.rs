//! Tiers below device memory for ebbtide: a spill file with direct I/O, and host memory.
//!
//! # How bytes travel
//!
//! ```text
//!  caller             queue (bounded)            workers                 spill file
//!
//!  put(block) ──────▶ writes │■│■│■│ ─┐
//!                                     ├──▶ ┌─────────────────────┐     ┌──────────────┐
//!  get(slot, block) ▶ loads  │■│ ──▶──┘    │ grains, straight    │◀───▶│ extent       │
//!                     (taken first)        │ rest, through a     │     ├──────────────┤
//!                                          │ staging buffer      │     │ hole         │
//!  wait(ticket) ◀──── outcomes ◀────────── │ put: drop the block │     ├──────────────┤
//!     slot, block, or error and block      └─────────────────────┘     │ extent       │
//!                                                                      └──────────────┘
//!                                                     no name, mode 0600, O_DIRECT
//! ```
//!
//! * Direct I/O: bytes in the page cache are still in RAM, so nothing would be saved.
//! * Memory of the tiers is mapped, not taken from the Rust heap, which on a CPU machine is the
//!   device memory that ebbtide counts.
//! * The block moves with the job. A finished `put` drops it; a failed job gives it back.
//! * Nothing remains: the file has no name, whatever ends the process.
//! * Straight bytes go by plain calls or through a ring (`io_uring`) for each worker, whichever is
//!   measured to be faster when the store is opened ([`IoChoice`]).
//! * With [`FileConfig::checksums`], a block that comes back is compared with the one that went.
//! * A child made by `fork` can't use the parent's store, and can't harm it ([`FileStore`]). Parents
//!   on kernels before 6.5 should not fork while loads are under way: see open(2) on `O_DIRECT`.
//!
//! # Map
//!
//! | item | what it is |
//! | --- | --- |
//! | [`FileStore`] | the file tier |
//! | [`HostStore`] | the host tier |
//! | [`AnyStore`] | one of them, chosen at run time |
//! | [`FileConfig`], [`IoChoice`], [`IoReport`] | its settings; the way of I/O, and why |
//! | [`measure`] | what memory, a disk and the tier can do here |
//! | [`SpillFile`] | opening the file; what was noticed about its folder |
//! | [`extent`] | which bytes of the file are taken |
//! | [`AlignedBuf`] | page-aligned memory outside the heap |
//! | [`spill_dir`] | where to spill by default |
//! | [`memory_limit`], [`host_bound`], [`free_space`] | what the container and the disk allow |
//!
//! # Example
//!
//! ```
//! use ebbtide_core::{BackendError, Done, Store};
//! use ebbtide_store::{AlignedBuf, FileConfig, FileStore};
//!
//! let mut store = FileStore::open(&FileConfig::new("/tmp"))?;
//! for notice in store.notices() {
//!     eprintln!("warning: {notice}");
//! }
//!
//! let mut block = AlignedBuf::zeroed(100_000)?;
//! block.as_mut_slice().fill(7);
//! let ticket = store.put(block).map_err(|failed| failed.error)?;
//! let (Done::Stored(slot, _), _) = store.wait(ticket).map_err(|failed| failed.error)? else {
//!     unreachable!("a put stores");
//! };
//! assert_eq!(store.stats().bytes_held, 102_400);
//!
//! let empty = AlignedBuf::zeroed(100_000)?;
//! let ticket = store.get(&slot, empty).map_err(|failed| failed.error)?;
//! let (Done::Loaded(block), _) = store.wait(ticket).map_err(|failed| failed.error)? else {
//!     unreachable!("a get loads");
//! };
//! assert!(block.as_slice().iter().all(|&byte| byte == 7));
//! store.discard(slot);
//! # Ok::<(), BackendError>(())
//! ```
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]

mod aligned;
mod any;
mod cache_hint;
mod checksum;
mod choose;
mod clock;
mod compare;
mod config;
pub mod extent;
#[doc(hidden)]
pub mod fault;
mod file;
mod host;
mod limits;
#[cfg(all(test, loom))]
mod loom_models;
pub mod measure;
mod owner;
mod piece;
mod queue;
mod raw;
mod ring;
mod space;
mod spill;
mod sync;
mod throttle;
mod timeline;
mod transfer;
mod worker;

pub use aligned::AlignedBuf;
pub use any::{AnySlot, AnyStore};
pub use cache_hint::{prefetch, prefetch_to_write};
pub use checksum::Mismatch;
pub use choose::{IoKind, IoReason, IoReport, uring_available};
pub use config::{FileConfig, IoChoice, Throttle};
pub use file::{FileSlot, FileStore};
pub use host::{HostConfig, HostSlot, HostStore, host_bound};
pub use limits::{free_space, memory_limit};
pub use spill::{SpillFile, spill_dir};
pub use timeline::{Row, Timeline};

/// Bytes that everything is rounded up to: a page, and what direct I/O needs of offsets and
/// lengths on any common disk.
pub(crate) const GRAIN: usize = 4096;
