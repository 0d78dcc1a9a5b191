//! How the storages of a group travel: the seam between the engine, which knows groups and their
//! phases, and the two ways of moving bytes.
//!
//! | mover | device | copies | frees by |
//! | --- | --- | --- | --- |
//! | [`Direct`](crate::Direct) | memory that changes its owner (RAM) | a store's workers | handing the memory over |
//! | [`Staged`](crate::Staged) | streams and events | copy streams, through pinned host buffers, to a tier below when those are full | the framework's allocator, behind events |
//!
//! The engine calls the methods in the order of a group's phases only, so a mover does not check
//! phases again.

use std::fmt;
use std::ops::Range;

use crate::backend::{Facts, StoreStats, Timing};
use crate::engine::Counters;
use crate::error::{BackendError, Error, Kind};
use crate::label::Label;
use crate::observe::{Event, Observer};
use crate::ranges::Ranges;
use crate::state::Residency;
use crate::{GroupId, LayerId, PoolId};

/// Moves the storages of a group out of the device and back.
pub trait Mover {
    /// Names one allocation of the framework and keeps its storage object alive.
    type Storage;
    /// A queue of work on the device, for those who want to choose it.
    type Stream: Copy;
    /// What an offload under way is known by.
    type Out;
    /// Where the bytes of a storage are, away from the device.
    type Place;
    /// What a load under way is known by.
    type In;
    /// What is remembered of one group while its storages travel. Reused for later groups.
    type Cargo: Default;

    /// See [`Device::key`](crate::Device::key).
    fn key(&self, storage: &Self::Storage) -> usize;

    /// See [`Device::facts`](crate::Device::facts).
    fn facts(&self, storage: &Self::Storage) -> Option<Facts>;

    /// Queues the copies out of every record that is in `device` and not kept.
    ///
    /// # Errors
    /// A copy can't be started. What was not started is in `device`, its memory untouched.
    fn start_offload(
        &mut self,
        freight: &mut Freight<'_, Self>,
        stream: Option<Self::Stream>,
    ) -> Result<(), Error>;

    /// Lets the device memory of every record in `d2h` go.
    ///
    /// # Errors
    /// The first copy that failed; its record is in `device` again.
    fn wait_offload(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error>;

    /// Whether a storage keeps its memory until [`Mover::wait_offload`], so that its size still says
    /// something while its offload is under way.
    const FULL_IN_D2H: bool;

    /// Whether [`Mover::wait_offload`] would return without making anybody wait.
    fn offload_is_done(&mut self, freight: &mut Freight<'_, Self>) -> bool;

    /// Queues the copies back of every record in `host`.
    ///
    /// # Errors
    /// A copy can't be started. What was not started is in `host`.
    fn start_load(
        &mut self,
        freight: &mut Freight<'_, Self>,
        stream: Option<Self::Stream>,
    ) -> Result<(), Error>;

    /// Goes on with a load whose bytes have meanwhile come up from a lower tier. A hint.
    ///
    /// # Errors
    /// As [`Mover::start_load`].
    fn advance_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error>;

    /// Makes every record in `h2d` usable.
    ///
    /// # Errors
    /// The first copy that failed; its record is in `host`.
    fn wait_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error>;

    /// Brings one record home, now, whatever its state (row T14).
    ///
    /// # Errors
    /// It can't be brought home; it is where it was.
    fn retrieve(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), Error>;

    /// Gives everything back that a group has, whatever the state of its records; the host waits for
    /// copies in flight. `false` if some may go on for all that is known: their storages must not be
    /// freed, and are handed to [`Mover::keep`].
    fn abandon(&mut self, freight: &mut Freight<'_, Self>) -> bool;

    /// Keeps a storage that copies may still use, until the end.
    fn keep(&mut self, storage: Self::Storage) {
        drop(storage);
    }

    /// Whether a storage was handed to [`Mover::keep`] and may still be in use by a copy: it must not
    /// leave the device again.
    fn is_kept(&self, _key: usize) -> bool {
        false
    }

    /// The tier that a place is in, as the state `host` is refined for people.
    fn tier(&self, place: &Self::Place) -> &'static str;

    /// A step is over: memory that is not used any more may be given back.
    fn end_of_step(&mut self) {}

    /// What has been moved so far.
    fn stats(&self) -> StoreStats;
}

/// One storage of a group.
#[expect(clippy::struct_excessive_bools, reason = "facts that don't depend on each other")]
pub struct Record<M: Mover + ?Sized> {
    pub(crate) storage: M::Storage,
    pub(crate) key: usize,
    /// Size of the whole storage.
    pub(crate) bytes: u64,
    /// What the registered tensors reach of it.
    pub(crate) ranges: Ranges,
    /// The bytes that each registered tensor reaches: the first one's, and those that differ.
    pub(crate) reaches: (Range<u64>, Vec<Range<u64>>),
    pub(crate) label: Label,
    pub(crate) element: Element,
    /// Registered once, as a whole, contiguous, by someone who allows packing.
    pub(crate) packable: bool,
    pub(crate) pool: Option<PoolId>,
    /// Somebody outside the group uses it: it does not leave the device.
    pub(crate) kept: bool,
    /// It has been freed since it was registered: of its bytes only those that were saved come back.
    pub(crate) emptied: bool,
    /// In `host`, but with its memory back already: a load that has not succeeded yet gave it.
    pub(crate) filled: bool,
    pub(crate) residency: Residency<M>,
}

impl<M: Mover + ?Sized> Record<M> {
    /// Size of the whole storage in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it may leave the device now.
    pub(crate) fn leaves(&self) -> bool {
        self.residency.is_device() && !self.kept && self.ranges.bytes() > 0
    }
}

impl<M: Mover + ?Sized> fmt::Debug for Record<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("bytes", &self.bytes)
            .field("ranges", &self.ranges)
            .field("kept", &self.kept)
            .field("residency", &self.residency)
            .finish_non_exhaustive()
    }
}

/// What the elements of a tensor are: the name of their type, and the size of one in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Element {
    /// As the framework writes it: `float32`.
    pub name: &'static str,
    /// Bytes of one element.
    pub bytes: u32,
}

impl Element {
    /// Bytes without a type.
    pub const BYTE: Self = Self { name: "byte", bytes: 1 };
}

/// A tensor as a front end registers it (row T2).
///
/// ```
/// use ebbtide_core::{Element, Saved};
/// // A slice of 16 bytes of a storage of 64.
/// let saved = Saved::whole("a handle", 64).slice(16..32).element(Element { name: "f32", bytes: 4 });
/// assert!(saved.is_slice());
/// ```
#[derive(Clone, Debug)]
pub struct Saved<S> {
    pub(crate) storage: S,
    pub(crate) bytes: u64,
    pub(crate) range: Range<u64>,
    pub(crate) element: Element,
    pub(crate) label: Label,
    pub(crate) contiguous: bool,
    pub(crate) pack: bool,
    pub(crate) pool: Option<PoolId>,
}

impl<S> Saved<S> {
    /// A tensor that reaches all of a storage of `bytes` bytes.
    pub fn whole(storage: S, bytes: u64) -> Self {
        Self {
            storage,
            bytes,
            range: 0..bytes,
            element: Element::BYTE,
            label: Label::default(),
            contiguous: true,
            pack: false,
            pool: None,
        }
    }

    /// The tensor reaches these bytes only; see [`view_bytes`](crate::view_bytes).
    #[must_use]
    pub fn slice(mut self, range: Range<u64>) -> Self {
        self.range = range;
        self
    }

    /// The type of its elements. Default: bytes.
    #[must_use]
    pub fn element(mut self, element: Element) -> Self {
        self.element = element;
        self
    }

    /// What errors call it. Default: a tensor without a name.
    #[must_use]
    pub fn label(mut self, label: Label) -> Self {
        self.label = label;
        self
    }

    /// Its elements are not one after the other in memory, so it is never packed.
    #[must_use]
    pub fn strided(mut self) -> Self {
        self.contiguous = false;
        self
    }

    /// It may share a host buffer with others (row G2). Default: no.
    #[must_use]
    pub fn pack(mut self) -> Self {
        self.pack = true;
        self
    }

    /// It goes to a buffer of this pool. Default: the default pool.
    #[must_use]
    pub fn pool(mut self, pool: PoolId) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Its own bytes differ from its storage's.
    pub fn is_slice(&self) -> bool {
        self.range != (0..self.bytes)
    }
}

/// The records of one group and what belongs to their journey, lent to a [`Mover`] for one call.
pub struct Freight<'a, M: Mover + ?Sized> {
    pub(crate) id: GroupId,
    pub(crate) layer: LayerId,
    /// The group's name, for errors.
    pub(crate) name: &'a dyn fmt::Display,
    pub(crate) labels: &'a crate::label::Labels,
    pub(crate) records: &'a mut [Record<M>],
    pub(crate) cargo: &'a mut M::Cargo,
    pub(crate) counters: &'a mut Counters,
    pub(crate) observer: &'a mut (dyn Observer + Send),
}

impl<M: Mover + ?Sized> fmt::Debug for Freight<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Freight").field("id", &self.id).field("records", &self.records).finish()
    }
}

impl<M: Mover + ?Sized> Freight<'_, M> {
    /// A record has left the device.
    pub(crate) fn stored(&mut self, bytes: u64, timing: Option<Timing>) {
        self.counters.moved_out_bytes += bytes;
        let (group, layer) = (self.id, self.layer);
        self.observer.event(&Event::Stored { group, layer, bytes, timing });
    }

    /// A record is home again.
    pub(crate) fn loaded(&mut self, bytes: u64, timing: Option<Timing>) {
        self.counters.moved_in_bytes += bytes;
        let (group, layer) = (self.id, self.layer);
        self.observer.event(&Event::Loaded { group, layer, bytes, timing });
    }

    /// A copy of a group that is being forgotten failed.
    pub(crate) fn abandoned(&mut self, error: &BackendError) {
        let error = crate::error::chain(error);
        self.observer.event(&Event::AbandonedCopyFailed { group: self.id, error });
    }

    /// The error of one record's journey.
    pub(crate) fn error(&self, trip: Trip, index: usize, cause: BackendError) -> Error {
        self.error_of(trip, index, cause, String::new())
    }

    /// The same where there are several ways of copying.
    pub(crate) fn detailed_error(&self, trip: Trip, index: usize, cause: BackendError) -> Error {
        let record = &self.records[index];
        let whole = record.ranges.is_whole(record.bytes);
        let mode = if whole { "whole storage" } else { "slice" };
        let pool = if record.pool.is_some() { "explicit pool" } else { "default pool" };
        let how = format!("{}, {mode}, {pool}, ", record.element.name);
        self.error_of(trip, index, cause, how)
    }

    fn error_of(&self, trip: Trip, index: usize, cause: BackendError, how: String) -> Error {
        let record = &self.records[index];
        let label = self.labels.name(record.label).to_string();
        let (group, bytes) = (self.name.to_string(), record.bytes);
        Error::caused_by(Kind::Trip { trip, group, label, bytes, how }, cause)
    }
}

/// Which part of a journey failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trip {
    /// The copy out; the bytes are on the device.
    Offload,
    /// The copy back; the bytes are still away.
    Load,
    /// The device refused to give up or to take back the memory.
    Device,
}

impl Trip {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Offload => "offload",
            Self::Load => "load",
            Self::Device => "move",
        }
    }
}
