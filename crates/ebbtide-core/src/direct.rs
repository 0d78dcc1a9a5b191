//! Moving memory that changes its owner: from a device whose memory is RAM straight into a tier.
//!
//! A block is in exactly one place (see [`backend`](crate::backend)), so nothing can be freed while a
//! copy reads it. The price: between the start of an offload and its end nobody can use the storage,
//! and an offload that is called off has to be finished first. Where the device only lends its memory
//! ([`Device::LENDS`]) the storage stays usable meanwhile, and an offload that is called off frees nothing.

use crate::backend::{Device, Done, Facts, Failed, Outcome, Store, StoreStats, Ticket, Timing};
use crate::error::{BackendError, Error};
use crate::mover::{Freight, Mover, Trip};
use crate::state::{Owed, sure};

/// A [`Mover`] from a [`Device`] into one [`Store`].
#[derive(Debug)]
pub struct Direct<D, S> {
    device: D,
    store: S,
}

impl<D, S> Direct<D, S> {
    /// Moves between these two.
    pub fn new(device: D, store: S) -> Self {
        Self { device, store }
    }

    /// The device, for what the front end does with it beside the engine.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }
}

impl<D: Device, S: Store<D::Block>> Mover for Direct<D, S> {
    type Storage = D::Storage;
    type Stream = ();
    type Out = Ticket;
    type Place = S::Slot;
    type In = Ticket;
    type Cargo = ();

    const FULL_IN_D2H: bool = D::LENDS;

    fn key(&self, storage: &D::Storage) -> usize {
        self.device.key(storage)
    }

    fn facts(&self, storage: &D::Storage) -> Option<Facts> {
        self.device.facts(storage)
    }

    fn start_offload(
        &mut self,
        freight: &mut Freight<'_, Self>,
        _: Option<()>,
    ) -> Result<(), Error> {
        for index in 0..freight.records.len() {
            let record = &mut freight.records[index];
            if !record.leaves() {
                continue;
            }
            let taken = self.device.detach(&record.storage);
            let block = taken.map_err(|e| freight.error(Trip::Device, index, e))?;
            let record = &mut freight.records[index];
            match self.store.put(block) {
                Ok(ticket) => sure(record.residency.start_offload(ticket)),
                Err(Failed { error, block }) => {
                    let back = self.device.attach(&record.storage, block);
                    back.map_err(|e| freight.error(Trip::Device, index, e))?;
                    return Err(freight.error(Trip::Offload, index, error));
                }
            }
        }
        Ok(())
    }

    fn wait_offload(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let mut first = Ok(());
        for index in 0..freight.records.len() {
            first = first.and(self.finish_offload(freight, index));
            let record = &freight.records[index];
            if record.kept && record.residency.place().is_some() {
                first = first.and(self.retrieve(freight, index));
            }
        }
        first
    }

    fn offload_is_done(&mut self, freight: &mut Freight<'_, Self>) -> bool {
        let mut tickets = freight.records.iter().filter_map(|r| r.residency.offload());
        tickets.all(|&ticket| self.store.is_done(ticket))
    }

    fn start_load(&mut self, freight: &mut Freight<'_, Self>, _: Option<()>) -> Result<(), Error> {
        (0..freight.records.len()).try_for_each(|index| self.start_one(freight, index))
    }

    fn advance_load(&mut self, _: &mut Freight<'_, Self>) -> Result<(), Error> {
        Ok(())
    }

    fn wait_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let mut first = Ok(());
        for index in 0..freight.records.len() {
            first = first.and(self.finish_load(freight, index));
        }
        first
    }

    fn retrieve(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), Error> {
        let moved = self.finish_offload(freight, index);
        if freight.records[index].residency.is_device() {
            // A copy out that failed leaves it where it is wanted.
            return Ok(());
        }
        moved?;
        self.start_one(freight, index)?;
        self.finish_load(freight, index)
    }

    fn abandon(&mut self, freight: &mut Freight<'_, Self>) -> bool {
        for index in 0..freight.records.len() {
            match freight.records[index].residency.abandon() {
                Owed::Nothing => {}
                Owed::Place(slot) => self.store.discard(slot),
                Owed::Offload(ticket) => match stored(self.store.wait(ticket)) {
                    Ok((slot, _)) => self.store.discard(slot),
                    Err(failed) => freight.abandoned(&failed.error),
                },
                Owed::Load(ticket, slot) => {
                    let storage = &freight.records[index].storage;
                    let back = loaded(self.store.wait(ticket)).and_then(|(block, _)| {
                        // Memory that was lent to the load is the storage's already.
                        if D::LENDS { self.device.attach(storage, block) } else { Ok(()) }
                    });
                    if let Err(error) = back {
                        self.device.retract(storage);
                        freight.abandoned(&error);
                    }
                    self.store.discard(slot);
                }
            }
        }
        // Each copy owns the memory that it reads or writes.
        true
    }

    fn tier(&self, _: &S::Slot) -> &'static str {
        "host"
    }

    fn stats(&self) -> StoreStats {
        self.store.stats()
    }
}

impl<D: Device, S: Store<D::Block>> Direct<D, S> {
    fn finish_offload(
        &mut self,
        freight: &mut Freight<'_, Self>,
        index: usize,
    ) -> Result<(), Error> {
        let record = &mut freight.records[index];
        let Some(&ticket) = record.residency.offload() else { return Ok(()) };
        match stored(self.store.wait(ticket)) {
            Ok((slot, timing)) => self.let_go(freight, index, slot, timing),
            Err(Failed { error, block }) => {
                // The job is over: the ticket owes nothing any more.
                let _over: Ticket = sure(record.residency.keep_on_device());
                let back = self.device.attach(&record.storage, block);
                back.map_err(|e| freight.error(Trip::Device, index, e))?;
                Err(freight.error(Trip::Offload, index, error))
            }
        }
    }

    /// The bytes of a record are in the tier. Memory that was only lent goes now, unless the offload was
    /// called off meanwhile.
    fn let_go(
        &mut self,
        freight: &mut Freight<'_, Self>,
        index: usize,
        slot: S::Slot,
        timing: Timing,
    ) -> Result<(), Error> {
        let record = &mut freight.records[index];
        let gone = if !D::LENDS {
            Ok(true)
        } else if record.kept {
            Ok(false)
        } else {
            self.device.vacate(&record.storage).map(|()| true)
        };
        if let Ok(true) = gone {
            sure(record.residency.finish_offload(slot));
            // A block holds the whole storage, whatever was registered of it.
            let bytes = record.bytes;
            freight.stored(bytes, Some(timing));
            return Ok(());
        }
        self.store.discard(slot);
        let _over: Ticket = sure(record.residency.keep_on_device());
        gone.map(drop).map_err(|e| freight.error(Trip::Device, index, e))
    }

    fn start_one(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), Error> {
        let record = &mut freight.records[index];
        let Some(slot) = record.residency.place() else { return Ok(()) };
        let started = self.device.allocate(&record.storage).and_then(|block| {
            let ticket = self.store.get(slot, block);
            ticket.map_err(|failed| failed.error)
        });
        match started {
            Ok(ticket) => {
                sure(record.residency.start_load(ticket));
                Ok(())
            }
            Err(error) => {
                self.device.retract(&record.storage);
                Err(freight.error(Trip::Load, index, error))
            }
        }
    }

    fn finish_load(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), Error> {
        let record = &mut freight.records[index];
        let Some((&ticket, _)) = record.residency.load() else { return Ok(()) };
        let device = &mut self.device;
        let home = loaded(self.store.wait(ticket))
            .and_then(|(block, timing)| device.attach(&record.storage, block).map(|()| timing));
        match home {
            Ok(timing) => {
                self.store.discard(sure(record.residency.finish_load()));
                let bytes = record.bytes;
                freight.loaded(bytes, Some(timing));
                Ok(())
            }
            Err(error) => {
                self.device.retract(&record.storage);
                sure(record.residency.fail_load());
                Err(freight.error(Trip::Load, index, error))
            }
        }
    }
}

fn stored<B, Slot>(done: Outcome<B, Slot>) -> Result<(Slot, Timing), Failed<B>> {
    match done? {
        (Done::Stored(slot, _), timing) => Ok((slot, timing)),
        (Done::Loaded(_), _) => unreachable!("the store answered a put with a load"),
    }
}

fn loaded<B, Slot>(done: Outcome<B, Slot>) -> Result<(B, Timing), BackendError> {
    match done.map_err(|failed| failed.error)? {
        (Done::Loaded(block), timing) => Ok((block, timing)),
        // As a store in a forked child does, which must not touch what is the parent's.
        (Done::Stored(..), _) => Err(BackendError::new("the store gave no bytes")),
    }
}
