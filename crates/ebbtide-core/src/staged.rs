//! Moving storages of a device with streams and events: through pinned host buffers, on copy streams,
//! and further down when host memory is full.
//!
//! # Order of work
//!
//! ```text
//!  offload   compute  ──kernels──[gather]──●────────────────────────────◆ free
//!                                          │ produced                   │
//!            out                           ◆──D2H──D2H──●───────────────┘
//!                                                       offloaded
//!  load      compute  ──restore──●──────────────────────◆ use
//!                                │ allocated            │
//!            in                  ◆──H2D──[scatter]──●───┘
//!                                                   loaded
//! ```
//!
//! `●` records an event, `◆` waits for it. A host buffer goes back to its pool with the event behind
//! its last copy; staging memory is dropped when the compute stream waits for the copies that use it.
//!
//! * The offload is in `departure.rs`, the load in `arrival.rs`; what is common to both is here.
//! * When a call fails in the middle, what is queued already is fenced off before anything is given
//!   back: by an event, else by waiting for the stream, else the memory is put aside until the stream has answered.

use std::mem;

use crate::PoolId;
use crate::accel::{Accelerator, Direction};
use crate::backend::{Facts, Store, StoreStats};
use crate::departure::lose_offload;
use crate::error::{BackendError, Error, Kind};
use crate::mark::{Mark, hit};
use crate::mover::{Freight, Mover, Trip};
use crate::pack::Plan;
use crate::parcel::Piece;
use crate::pool::{Budget, HostPool, PoolStats};
use crate::state::sure;
use crate::tiers::Tiers;

/// Bounds of a [`Staged`] mover.
#[derive(Clone, Debug)]
pub struct StagedConfig {
    /// Bytes of host memory that the default pool may hold. Take the container's limit into account
    /// (case C15).
    pub host_bytes: u64,
    /// Bytes of a bucket of packed storages, at most. Default: 32 MiB.
    pub bucket_bytes: u64,
}

impl StagedConfig {
    /// The defaults with this bound of host memory.
    pub fn new(host_bytes: u64) -> Self {
        Self { host_bytes, bucket_bytes: 32 << 20 }
    }
}

/// A [`Mover`] from an [`Accelerator`] into host memory and a [`Store`] below it.
pub struct Staged<A: Accelerator, S: Store<A::Host>> {
    pub(crate) device: A,
    pub(crate) tiers: Tiers<A, S>,
    pub(crate) plan: Plan,
    bucket_bytes: u64,
    streams: [Option<A::Stream>; 2],
    /// Streams of the callers' choice.
    asked: Vec<A::Stream>,
    /// Staging memory whose copies can't be proven to have ended. It is not used before that is so.
    lost: Vec<A::Block>,
    /// The same for storages.
    kept: Vec<A::Storage>,
    /// The streams of these copies.
    pub(crate) unproven: Vec<A::Stream>,
}

/// What one group has on the way.
pub struct Cargo<A: Accelerator> {
    pub(crate) parcels: Vec<u32>,
    /// Staging memory on the device, by parcel.
    pub(crate) staging: Vec<(u32, A::Block)>,
    /// Behind the copies that are queued: those of the offload, then those of the load.
    pub(crate) event: Option<A::Event>,
    /// The stream that was asked for.
    pub(crate) stream: Option<A::Stream>,
    /// What the last copies were queued on.
    pub(crate) last: Option<A::Stream>,
    /// Copies of a call that failed may still run there: nothing stands behind them.
    pub(crate) loose: bool,
}

impl<A: Accelerator> std::fmt::Debug for Cargo<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cargo").field("parcels", &self.parcels).finish_non_exhaustive()
    }
}

impl<A: Accelerator> Default for Cargo<A> {
    fn default() -> Self {
        let (parcels, staging) = (Vec::new(), Vec::new());
        Self { parcels, staging, event: None, stream: None, last: None, loose: false }
    }
}

/// What stands behind the work on a stream.
pub(crate) enum Fence<E> {
    /// This event.
    Event(E),
    /// The host has seen the end of it.
    Seen,
    /// Nothing: the device does not answer.
    Lost,
}

impl<A: Accelerator, S: Store<A::Host>> Staged<A, S> {
    /// Moves from `device` into host memory, and from there into `disk` if there is one.
    pub fn new(config: &StagedConfig, device: A, disk: Option<S>) -> Self {
        Self {
            device,
            tiers: Tiers::new(config.host_bytes, disk),
            plan: Plan::default(),
            bucket_bytes: config.bucket_bytes,
            streams: [None; 2],
            asked: Vec::new(),
            lost: Vec::new(),
            kept: Vec::new(),
            unproven: Vec::new(),
        }
    }

    /// A new pool of its own for tensors that ask for it (row P2): it never spills.
    pub fn add_pool(&mut self, maximum: u64) -> PoolId {
        self.add_pool_sharing(Budget::new(maximum))
    }

    /// [`Staged::add_pool`], with a bound that holds for other pools of the budget as well.
    pub fn add_pool_sharing(&mut self, budget: Budget) -> PoolId {
        let id = PoolId(crate::group::number(self.tiers.pools.len()));
        self.tiers.pools.push(HostPool::sharing(id, budget));
        id
    }

    /// Gives the free buffers of one pool back. Returns bytes.
    pub fn shrink_pool(&mut self, pool: PoolId) -> u64 {
        let Some(pool) = self.tiers.pools.get_mut(pool.0 as usize) else { return 0 };
        pool.reclaim(&mut self.device);
        pool.shrink_to(0)
    }

    /// What a pool holds; `None` for one that was never made.
    pub fn pool_stats(&self, pool: PoolId) -> Option<PoolStats> {
        self.tiers.pools.get(pool.0 as usize).map(HostPool::stats)
    }

    /// Gives free host memory back until at most `bytes` bytes are allocated, by all pools together
    /// (case C14). Returns the bytes given back.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let mut allocated: u64 = self.tiers.pools.iter().map(|p| p.stats().allocated).sum();
        let before = allocated;
        for pool in &mut self.tiers.pools {
            pool.reclaim(&mut self.device);
            let target = pool.stats().allocated.saturating_sub(allocated.saturating_sub(bytes));
            allocated -= pool.shrink_to(target);
        }
        before - allocated
    }

    /// The device, for what the front end does with it beside the engine.
    pub fn device_mut(&mut self) -> &mut A {
        &mut self.device
    }

    pub(crate) fn stream(
        &mut self,
        direction: Direction,
        asked: Option<A::Stream>,
    ) -> Result<A::Stream, BackendError> {
        if let Some(stream) = asked {
            if !self.asked.contains(&stream) {
                self.asked.push(stream);
            }
            return Ok(stream);
        }
        let made = &mut self.streams[usize::from(direction == Direction::In)];
        if let Some(stream) = *made {
            return Ok(stream);
        }
        let stream = self.device.copy_stream(direction)?;
        *made = Some(stream);
        Ok(stream)
    }

    /// Marks the end of what is queued on a stream, by whatever still works.
    pub(crate) fn fence(&mut self, stream: A::Stream) -> Fence<A::Event> {
        match self.device.record(stream) {
            Ok(event) => Fence::Event(event),
            Err(_) if self.device.sync_stream(stream).is_ok() => {
                hit(Mark::FenceByStream);
                Fence::Seen
            }
            Err(_) => {
                hit(Mark::FenceLost);
                Fence::Lost
            }
        }
    }

    /// Orders later work on the compute stream behind an event, by whatever still works.
    pub(crate) fn compute_waits(&mut self, event: &A::Event) -> Result<(), BackendError> {
        let compute = self.device.compute();
        self.device.wait(compute, event).or_else(|_| {
            hit(Mark::WaitedOnHost);
            self.device.sync(event)
        })
    }

    /// The same for a fence. `false` if nothing is known about the end of the copies.
    pub(crate) fn compute_behind(&mut self, fence: &Fence<A::Event>) -> bool {
        match fence {
            Fence::Event(event) => self.compute_waits(event).is_ok(),
            Fence::Seen => true,
            Fence::Lost => false,
        }
    }

    /// Drops staging memory, or keeps it for ever if copies may still use it.
    pub(crate) fn drop_staging(&mut self, cargo: &mut Cargo<A>, ended: bool) {
        let staging = cargo.staging.drain(..).map(|(_, block)| block);
        if ended { staging.for_each(drop) } else { self.lost.extend(staging) }
    }

    /// The host sees the end of the copies of a group: of those that an event marks, and of those that
    /// a failed call has left.
    fn prove_end(&mut self, cargo: &mut Cargo<A>) -> Result<(), BackendError> {
        if let (Some(event), false) = (&cargo.event, cargo.loose)
            && self.device.sync(event).is_ok()
        {
            return Ok(());
        }
        if let Some(last) = cargo.last.filter(|_| cargo.loose || cargo.event.is_some()) {
            self.device.sync_stream(last)?;
        }
        cargo.loose = false;
        Ok(())
    }

    /// What a failed call has left on a stream has ended.
    pub(crate) fn prove_loose_end(&mut self, cargo: &mut Cargo<A>) -> Result<(), BackendError> {
        if cargo.loose { self.prove_end(cargo) } else { Ok(()) }
    }

    /// The group's parcels may move down again, unless a copy may still read them.
    fn release_parcels(&mut self, cargo: &mut Cargo<A>) {
        // If that fails, too, `cargo.loose` says so.
        let _ = self.prove_loose_end(cargo);
        if cargo.event.is_none() && !cargo.loose {
            for &number in &cargo.parcels {
                self.tiers.parcels.get(number).busy = false;
            }
        }
    }

    /// Uses again what was lost, once the device answers for all the streams that may still use it.
    pub(crate) fn recover_lost(&mut self) {
        if self.unproven.is_empty() {
            return;
        }
        let device = &mut self.device;
        self.unproven.retain(|&stream| device.sync_stream(stream).is_err());
        if self.unproven.is_empty() {
            hit(Mark::LostRecovered);
            self.lost.clear();
            self.kept.clear();
            for pool in &mut self.tiers.pools {
                pool.recover_lost();
            }
        }
    }

    /// Forgets the numbers of parcels that are gone.
    pub(crate) fn forget_parcels(&mut self, cargo: &mut Cargo<A>) {
        cargo.parcels.retain(|&number| self.tiers.parcels.is_live(number));
    }

    pub(crate) fn whole(freight: &Freight<'_, Self>, trip: Trip, what: &'static str) -> Kind {
        Kind::Whole { trip, group: freight.name.to_string(), what }
    }

    /// Brings everything home; what does not fit into host memory at once comes in turns.
    fn load_in_turns(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        self.finish_load(freight)?;
        while freight.records.iter().any(|record| record.residency.place().is_some()) {
            self.fetch(freight)?;
            self.arrive(freight)?;
            self.queue_load(freight)?;
            if freight.cargo.event.is_none() {
                break;
            }
            self.finish_load(freight)?;
        }
        Ok(())
    }

    /// A record stays on the device after all; its part of a parcel goes back behind the copies.
    fn stays(&mut self, freight: &mut Freight<'_, Self>, index: usize, event: Option<A::Event>) {
        let piece: Piece = sure(freight.records[index].residency.keep_on_device());
        self.tiers.leave(piece.parcel, event);
    }
}

impl<A: Accelerator, S: Store<A::Host>> Mover for Staged<A, S> {
    type Storage = A::Storage;
    type Stream = A::Stream;
    type Out = Piece;
    type Place = Piece;
    type In = ();
    type Cargo = Cargo<A>;

    const FULL_IN_D2H: bool = true;

    fn key(&self, storage: &A::Storage) -> usize {
        self.device.key(storage)
    }

    fn facts(&self, storage: &A::Storage) -> Option<Facts> {
        self.device.facts(storage)
    }

    fn start_offload(
        &mut self,
        freight: &mut Freight<'_, Self>,
        stream: Option<A::Stream>,
    ) -> Result<(), Error> {
        self.recover_lost();
        let mut plan = mem::take(&mut self.plan);
        plan.make(freight.records, self.bucket_bytes);
        let done = self.depart(freight, &plan, stream);
        self.plan = plan;
        done
    }

    fn wait_offload(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let Some(event) = freight.cargo.event.clone() else { return Ok(()) };
        if let Err(cause) = self.compute_waits(&event) {
            lose_offload(freight);
            let kind = Self::whole(freight, Trip::Offload, "the compute stream can't wait for it");
            return Err(Error::caused_by(kind, cause));
        }
        freight.cargo.event = None;
        self.drop_staging(freight.cargo, true);
        let mut first = Ok(());
        for index in 0..freight.records.len() {
            let record = &mut freight.records[index];
            let Some(&piece) = record.residency.offload() else { continue };
            if record.kept {
                self.stays(freight, index, Some(event.clone()));
                continue;
            }
            if let Err(cause) = self.device.free(&mut record.storage) {
                hit(Mark::FreeRefused);
                self.stays(freight, index, Some(event.clone()));
                first = first.and(Err(freight.detailed_error(Trip::Device, index, cause)));
                continue;
            }
            sure(record.residency.finish_offload(piece));
            record.emptied = true;
            let bytes = record.ranges.bytes();
            freight.stored(bytes, None);
        }
        self.forget_parcels(freight.cargo);
        first
    }

    fn offload_is_done(&mut self, freight: &mut Freight<'_, Self>) -> bool {
        freight.cargo.event.as_ref().is_none_or(|event| self.device.is_done(event))
    }

    fn start_load(
        &mut self,
        freight: &mut Freight<'_, Self>,
        stream: Option<A::Stream>,
    ) -> Result<(), Error> {
        freight.cargo.stream = stream;
        if freight.records.iter().all(|record| record.residency.place().is_none()) {
            return Ok(());
        }
        let done = self.fetch(freight).and_then(|()| self.advance_load(freight));
        if done.is_err() {
            self.release_parcels(freight.cargo);
        }
        done
    }

    fn advance_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let coming = freight.cargo.parcels.iter().any(|&p| self.tiers.is_coming(p));
        if coming || freight.cargo.event.is_some() {
            return Ok(());
        }
        self.arrive(freight)?;
        self.queue_load(freight)
    }

    fn wait_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let done = self.load_in_turns(freight);
        if done.is_err() {
            self.release_parcels(freight.cargo);
        }
        done
    }

    fn retrieve(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), Error> {
        let residency = &freight.records[index].residency;
        if residency.offload().is_some() {
            let event = freight.cargo.event.clone();
            self.stays(freight, index, event);
            self.forget_parcels(freight.cargo);
        } else if residency.place().is_some() {
            self.bring_home(freight, index)?;
        } else if residency.load().is_some() {
            self.finish_load(freight)?;
        }
        Ok(())
    }

    fn abandon(&mut self, freight: &mut Freight<'_, Self>) -> bool {
        if freight.cargo.event.is_some() {
            hit(Mark::AbandonedInFlight);
        }
        let ended = self.prove_end(freight.cargo);
        if let Err(error) = &ended {
            hit(Mark::EndUnproven);
            freight.abandoned(error);
            if let Some(last) = freight.cargo.last {
                self.unproven.push(last);
            }
        }
        let ended = ended.is_ok();
        (freight.cargo.event, freight.cargo.loose) = (None, false);
        self.drop_staging(freight.cargo, ended);
        for record in freight.records.iter_mut() {
            if ended && record.filled {
                // Nobody is to read what a failed load has left. If it can't be freed it stays.
                let _ = self.device.free(&mut record.storage);
            }
            // What is owed belongs to the parcels, which are given back below.
            let _owed = record.residency.abandon();
        }
        for number in freight.cargo.parcels.drain(..) {
            if ended {
                let written = self.tiers.parcels.get(number).written.take();
                self.tiers.remove(number, written);
            } else {
                self.tiers.lose(number);
            }
        }
        ended
    }

    fn keep(&mut self, storage: A::Storage) {
        self.kept.push(storage);
    }

    fn is_kept(&self, key: usize) -> bool {
        self.kept.iter().any(|storage| self.device.key(storage) == key)
    }

    fn tier(&self, place: &Piece) -> &'static str {
        self.tiers.parcels.tier(place.parcel)
    }

    fn end_of_step(&mut self) {
        self.tiers.end_of_step(&mut self.device);
    }

    fn stats(&self) -> StoreStats {
        self.tiers.stats()
    }
}

impl<A: Accelerator, S: Store<A::Host>> Drop for Staged<A, S> {
    /// Host memory goes only when no copy uses it.
    fn drop(&mut self) {
        self.tiers.settle(&mut self.device);
        let asked = mem::take(&mut self.asked);
        for stream in self.streams.into_iter().flatten().chain(asked) {
            // Once more if it does not answer at first. A lost device runs no copies any more.
            let _ = self.device.sync_stream(stream).or_else(|_| self.device.sync_stream(stream));
        }
    }
}

impl<A: Accelerator, S: Store<A::Host>> std::fmt::Debug for Staged<A, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staged")
            .field("bucket_bytes", &self.bucket_bytes)
            .field("pools", &self.tiers.pools)
            .finish_non_exhaustive()
    }
}
