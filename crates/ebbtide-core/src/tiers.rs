//! The tiers below a device: host memory, and a store below it.
//!
//! Both are bounded. When host memory is full the parcel that left the device first, which backward
//! will want last, moves down ("spills"); when there is nothing that can, the error says so and
//! nothing has changed.

use std::collections::VecDeque;

use crate::PoolId;
use crate::accel::Accelerator;
use crate::backend::{Done, Failed, Outcome, Store, StoreStats, Ticket};
use crate::class;
use crate::error::{BackendError, Error, Kind};
use crate::mark::{Mark, hit};
use crate::parcel::{Parcel, Parcels, Tier};
use crate::pool::{Buffer, HostPool};

pub(crate) struct Tiers<A: Accelerator, S: Store<A::Host>> {
    /// The default pool first.
    pub(crate) pools: Vec<HostPool<A>>,
    pub(crate) parcels: Parcels<A, S>,
    disk: Option<S>,
    /// Parcels of the default pool in the order in which they left the device. Some may be gone.
    oldest: VecDeque<(u32, u64)>,
    bytes_out: u64,
    bytes_in: u64,
}

/// One of the two ways in which a pool finds a buffer.
type Acquire<A> = fn(&mut HostPool<A>, &mut A, u64) -> Result<Buffer<A>, Error>;

impl<A: Accelerator, S: Store<A::Host>> Tiers<A, S> {
    pub(crate) fn new(host_bytes: u64, disk: Option<S>) -> Self {
        Self {
            pools: vec![HostPool::new(PoolId(0), host_bytes)],
            parcels: Parcels::new(),
            disk,
            oldest: VecDeque::new(),
            bytes_out: 0,
            bytes_in: 0,
        }
    }

    fn pool(&mut self, pool: PoolId) -> Result<&mut HostPool<A>, Error> {
        let pools = self.pools.get_mut(pool.0 as usize);
        pools.ok_or_else(|| Error::new(Kind::UnknownPool(pool.0)))
    }

    /// A host buffer, of the default pool by spilling others if need be.
    pub(crate) fn acquire(
        &mut self,
        device: &mut A,
        pool: Option<PoolId>,
        bytes: u64,
    ) -> Result<Buffer<A>, Error> {
        self.acquire_by(device, pool, bytes, HostPool::acquire)
    }

    fn acquire_by(
        &mut self,
        device: &mut A,
        pool: Option<PoolId>,
        bytes: u64,
        acquire: Acquire<A>,
    ) -> Result<Buffer<A>, Error> {
        let id = pool.unwrap_or_default();
        loop {
            match acquire(self.pool(id)?, device, bytes) {
                Err(error) if error.is_no_room() && pool.is_none() => {
                    let fits = class::bytes(class::of(bytes)) <= self.pools[0].maximum();
                    if !fits || !self.spill_oldest(device)? {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }

    /// A new parcel around a buffer; from now on it can be spilled, once it is `written`.
    pub(crate) fn wrap(&mut self, buffer: Buffer<A>, bytes: u64, packed: bool) -> u32 {
        let default = buffer.pool() == PoolId(0);
        let number = self.parcels.add(buffer, bytes, packed);
        // Until the offload is complete nothing marks its end: it must not move.
        let parcel = self.parcels.get(number);
        parcel.busy = true;
        let serial = parcel.serial;
        if default && self.disk.is_some() {
            self.oldest.push_back((number, serial));
            self.forget_the_gone();
        }
        self.bytes_out += bytes;
        number
    }

    /// The copy that fills a parcel is in front of `event`: behind it, the parcel may move down.
    pub(crate) fn settled(&mut self, number: u32, event: &A::Event) {
        let parcel = self.parcels.get(number);
        parcel.busy = false;
        if matches!(parcel.tier, Tier::Host(_)) {
            parcel.written = Some(event.clone());
        }
    }

    /// Keeps the queue of candidates within twice what there is.
    fn forget_the_gone(&mut self) {
        if self.oldest.len() > 2 * self.parcels.len() + 16 {
            let parcels = &mut self.parcels;
            self.oldest.retain(|&(number, serial)| parcels.find(number, serial).is_some());
        }
    }

    /// Moves the oldest parcel that can move one tier down. `false` if there is none.
    fn spill_oldest(&mut self, device: &mut A) -> Result<bool, Error> {
        let parcels = &mut self.parcels;
        let movable = self.oldest.iter().position(|&(number, serial)| {
            let parcel = parcels.find(number, serial);
            parcel.is_some_and(|p| !p.busy && matches!(p.tier, Tier::Host(_)))
        });
        let Some(position) = movable else { return Ok(false) };
        let Some((number, _)) = self.oldest.get(position).copied() else { return Ok(false) };
        self.spill(device, number)?;
        self.oldest.remove(position);
        Ok(true)
    }

    fn spill(&mut self, device: &mut A, number: u32) -> Result<(), Error> {
        let Some(disk) = &mut self.disk else { return Ok(()) };
        let parcel = self.parcels.get(number);
        let bytes = parcel.bytes;
        let failed = |cause| Error::caused_by(Kind::Spill { bytes }, cause);
        // The store reads the buffer as the host does: only behind the copy that fills it.
        if let Some(written) = &parcel.written {
            device.sync(written).map_err(failed)?;
            parcel.written = None;
        }
        let Tier::Host(buffer) = std::mem::replace(&mut parcel.tier, Tier::Between) else {
            unreachable!("only a parcel in host memory is spilled")
        };
        let (memory, place) = buffer.lend();
        let stored = disk.put(memory).and_then(|ticket| disk.wait(ticket));
        let (slot, memory) = match stored {
            Ok((Done::Stored(slot, memory), _)) => (slot, memory),
            Ok((Done::Loaded(_), _)) => unreachable!("the store answered a put with a load"),
            Err(Failed { error, block }) => {
                hit(Mark::SpillFailed);
                parcel.tier = Tier::Host(place.back(block));
                return Err(failed(error));
            }
        };
        hit(Mark::Spill);
        parcel.tier = Tier::Disk(slot, place.bytes());
        match memory {
            Some(memory) => self.give(place.back(memory), None),
            None => self.pools[0].freed(place),
        }
        Ok(())
    }

    /// Starts bringing a parcel up into host memory. Does nothing for one that is there or on its way.
    pub(crate) fn fetch(&mut self, device: &mut A, number: u32) -> Result<(), Error> {
        let parcel = self.parcels.get(number);
        let (bytes, pool) = (parcel.bytes, parcel.pool);
        let Tier::Disk(_, stored) = parcel.tier else { return Ok(()) };
        let buffer = self.acquire_by(
            device,
            Some(pool).filter(|pool| pool.0 != 0),
            stored,
            HostPool::acquire_exact,
        )?;
        let Some(disk) = &mut self.disk else { return Ok(()) };
        let parcel = self.parcels.get(number);
        let Tier::Disk(slot, stored) = std::mem::replace(&mut parcel.tier, Tier::Between) else {
            unreachable!("a busy parcel does not move")
        };
        let (memory, place) = buffer.lend();
        match disk.get(&slot, memory) {
            Ok(ticket) => {
                hit(Mark::Fetch);
                parcel.tier = Tier::Fetching(ticket, slot, place);
                Ok(())
            }
            Err(Failed { error, block }) => {
                hit(Mark::FetchFailed);
                parcel.tier = Tier::Disk(slot, stored);
                self.give(place.back(block), None);
                Err(Error::caused_by(Kind::Fetch { bytes }, error))
            }
        }
    }

    /// Whether [`Tiers::arrive`] would wait.
    pub(crate) fn is_coming(&mut self, number: u32) -> bool {
        match (&self.parcels.get(number).tier, &mut self.disk) {
            (Tier::Fetching(ticket, ..), Some(disk)) => !disk.is_done(*ticket),
            _ => false,
        }
    }

    /// Waits until a parcel that is being fetched is in host memory.
    pub(crate) fn arrive(&mut self, number: u32) -> Result<(), Error> {
        let parcel = self.parcels.get(number);
        let bytes = parcel.bytes;
        if !matches!(parcel.tier, Tier::Fetching(..)) {
            return Ok(());
        }
        let Tier::Fetching(ticket, slot, place) =
            std::mem::replace(&mut parcel.tier, Tier::Between)
        else {
            unreachable!("looked at just before")
        };
        let Some(disk) = &mut self.disk else { unreachable!("a fetch needs a store") };
        match disk.wait(ticket) {
            Ok((Done::Loaded(memory), _)) => {
                hit(Mark::Arrived);
                parcel.tier = Tier::Host(place.back(memory));
                disk.discard(slot);
                self.oldest.push_back((number, self.parcels.get(number).serial));
                Ok(())
            }
            // As a store in a forked child does, which must not touch what is the parent's.
            Ok((Done::Stored(..), _)) => {
                parcel.tier = Tier::Disk(slot, place.bytes());
                self.pools[0].freed(place);
                let error = BackendError::new("the store gave no bytes");
                Err(Error::caused_by(Kind::Fetch { bytes }, error))
            }
            Err(Failed { error, block }) => {
                hit(Mark::ArriveFailed);
                parcel.tier = Tier::Disk(slot, place.bytes());
                self.give(place.back(block), None);
                Err(Error::caused_by(Kind::Fetch { bytes }, error))
            }
        }
    }

    /// One storage needs its parcel no more. The last one gives the memory back: behind `event`, if
    /// the host has not seen the copies end.
    pub(crate) fn leave(&mut self, number: u32, event: Option<A::Event>) {
        let parcel = self.parcels.get(number);
        parcel.users -= 1;
        if parcel.users == 0 {
            self.remove(number, event);
        }
    }

    /// Gives a parcel's memory back.
    pub(crate) fn remove(&mut self, number: u32, event: Option<A::Event>) {
        // What is being fetched is waited for; whether it succeeded no longer matters.
        let _ = self.arrive(number);
        match self.parcels.remove(number).tier {
            Tier::Host(buffer) => self.give(buffer, event),
            Tier::Disk(slot, _) => {
                if let Some(disk) = &mut self.disk {
                    disk.discard(slot);
                }
            }
            Tier::Fetching(..) | Tier::Between => unreachable!("it has arrived"),
        }
    }

    /// Gives a parcel up whose copy can't be proven to have ended: its buffer is put aside.
    pub(crate) fn lose(&mut self, number: u32) {
        hit(Mark::ParcelLost);
        let _ = self.arrive(number);
        let Parcel { tier, written, .. } = self.parcels.remove(number);
        match tier {
            Tier::Host(buffer) => {
                let pool = buffer.pool().0 as usize;
                self.pools[pool].lose(buffer, written);
            }
            Tier::Disk(slot, _) => {
                if let Some(disk) = &mut self.disk {
                    disk.discard(slot);
                }
            }
            Tier::Fetching(..) | Tier::Between => unreachable!("it has arrived"),
        }
    }

    fn give(&mut self, buffer: Buffer<A>, event: Option<A::Event>) {
        let pool = buffer.pool().0 as usize;
        let given = self.pools[pool].release(buffer, event);
        assert!(given.is_ok(), "a buffer carries the number of its pool");
    }

    /// Counts bytes that are home again.
    pub(crate) fn came_home(&mut self, bytes: u64) {
        self.bytes_in += bytes;
    }

    pub(crate) fn end_of_step(&mut self, device: &mut A) {
        for pool in &mut self.pools {
            pool.end_of_step(device);
        }
    }

    pub(crate) fn settle(&mut self, device: &mut A) {
        for pool in &mut self.pools {
            // A lost device runs no copies any more.
            let _ = pool.settle(device);
        }
    }

    pub(crate) fn stats(&self) -> StoreStats {
        let disk = self.disk.as_ref().map(Store::stats).unwrap_or_default();
        let host: u64 = self.pools.iter().map(|pool| pool.stats().in_use).sum();
        StoreStats {
            bytes_out: self.bytes_out,
            bytes_in: self.bytes_in,
            bytes_held: host + disk.bytes_held,
            blocked_ns: disk.blocked_ns,
        }
    }
}

/// A tier below host memory that does not exist.
#[derive(Debug)]
pub struct NoDisk;

impl<B> Store<B> for NoDisk {
    type Slot = std::convert::Infallible;

    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        Err(Failed {
            error: BackendError::new("there is no tier below host memory").no_room(),
            block,
        })
    }

    fn get(&mut self, slot: &Self::Slot, _: B) -> Result<Ticket, Failed<B>> {
        match *slot {}
    }

    fn is_done(&mut self, _: Ticket) -> bool {
        true
    }

    /// # Panics
    /// Always: there is no ticket to wait for.
    fn wait(&mut self, ticket: Ticket) -> Outcome<B, Self::Slot> {
        unreachable!("{ticket:?} of a store that takes nothing")
    }

    fn discard(&mut self, slot: Self::Slot) {
        match slot {}
    }

    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }
}
