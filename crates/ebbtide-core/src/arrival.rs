//! The load of a group: what [`Staged`] fetches and queues, and how it undoes what failed half-way.

use crate::accel::{Accelerator, Direction, End};
use crate::backend::Store;
use crate::error::{BackendError, Error};
use crate::mark::{Mark, hit};
use crate::mover::{Freight, Record, Trip};
use crate::parcel::{Piece, Tier};
use crate::pool::Buffer;
use crate::staged::{Cargo, Staged};
use crate::state::sure;

impl<A: Accelerator, S: Store<A::Host>> Staged<A, S> {
    /// Starts bringing the group's parcels up to host memory, as many as fit; from now on none of them
    /// moves down.
    pub(crate) fn fetch(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        self.recover_lost();
        let mut fetched = 0;
        for at in 0..freight.cargo.parcels.len() {
            let number = freight.cargo.parcels[at];
            self.tiers.parcels.get(number).busy = true;
            match self.tiers.fetch(&mut self.device, number) {
                Ok(()) => fetched += 1,
                // The others come when these have gone on to the device.
                Err(error) if error.is_no_room() && fetched > 0 => {
                    hit(Mark::LoadInTurns);
                    return Ok(());
                }
                Err(error) => {
                    let kind = Self::whole(freight, Trip::Load, "host memory can't be filled");
                    return Err(Error::caused_by(kind, error.into()));
                }
            }
        }
        Ok(())
    }

    /// Waits until what is being fetched is in host memory.
    pub(crate) fn arrive(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        let mut first = Ok(());
        for &number in &freight.cargo.parcels {
            first = first.and(self.tiers.arrive(number));
        }
        first.map_err(|error| {
            let kind = Self::whole(freight, Trip::Load, "host memory can't be filled");
            Error::caused_by(kind, error.into())
        })
    }

    /// Queues the copies of every record whose parcel is in host memory; none of them, if one fails.
    pub(crate) fn queue_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        if !(0..freight.records.len()).any(|index| self.is_ready(freight, index)) {
            return Ok(());
        }
        let stream = self.stream(Direction::In, freight.cargo.stream);
        let stream = stream.map_err(|e| whole(freight, "no copy stream", e))?;
        self.prove_loose_end(freight.cargo)
            .map_err(|e| whole(freight, "the copies can't be ordered behind earlier ones", e))?;
        freight.cargo.last = Some(stream);
        // An earlier fetch may have stopped half-way: what a copy reads does not move.
        for &number in &freight.cargo.parcels {
            self.tiers.parcels.get(number).busy = true;
        }
        let queued = self
            .restore(freight)
            .and_then(|()| self.order_and_copy(freight, stream))
            .and_then(|()| {
                let event = self.device.record(stream);
                event.map_err(|e| whole(freight, "its end can't be marked", e))
            });
        match queued {
            Ok(event) => {
                for index in 0..freight.records.len() {
                    if self.is_ready(freight, index) {
                        sure(freight.records[index].residency.start_load(()));
                        freight.records[index].filled = false;
                    }
                }
                freight.cargo.event = Some(event);
                Ok(())
            }
            Err(error) => {
                self.undo(freight, stream);
                Err(error)
            }
        }
    }

    /// In `host`, with its bytes in host memory.
    fn is_ready(&mut self, freight: &Freight<'_, Self>, index: usize) -> bool {
        let place = freight.records[index].residency.place();
        place
            .is_some_and(|piece| matches!(self.tiers.parcels.get(piece.parcel).tier, Tier::Host(_)))
    }

    /// Gives the storages their memory again, and the buckets theirs for staging.
    fn restore(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        for index in 0..freight.records.len() {
            if self.is_ready(freight, index) {
                let done = self.fill(freight, index);
                done.map_err(|e| freight.detailed_error(Trip::Load, index, e))?;
            }
        }
        if self.device.gathers() {
            return Ok(());
        }
        for at in 0..freight.cargo.parcels.len() {
            let number = freight.cargo.parcels[at];
            let parcel = self.tiers.parcels.get(number);
            if parcel.packed && matches!(parcel.tier, Tier::Host(_)) {
                let block = self.device.stage(parcel.bytes);
                let block = block.map_err(|e| whole(freight, "no memory for staging", e))?;
                freight.cargo.staging.push((number, block));
            }
        }
        Ok(())
    }

    /// Memory for one record, unless it has that already.
    fn fill(&mut self, freight: &mut Freight<'_, Self>, index: usize) -> Result<(), BackendError> {
        let record = &mut freight.records[index];
        if record.filled {
            hit(Mark::FilledAlready);
            return Ok(());
        }
        self.device.restore(&mut record.storage, record.bytes)?;
        record.filled = true;
        Ok(())
    }

    /// Takes the memory back after a load that failed. If the device refuses, the record keeps it for
    /// the next load.
    fn empty(&mut self, freight: &mut Freight<'_, Self>, index: usize) {
        let record = &mut freight.records[index];
        record.filled = self.device.free(&mut record.storage).is_err();
    }

    fn order_and_copy(
        &mut self,
        freight: &mut Freight<'_, Self>,
        stream: A::Stream,
    ) -> Result<(), Error> {
        let compute = self.device.compute();
        let allocated = self.device.record(compute);
        let ordered = allocated.and_then(|allocated| self.device.wait(stream, &allocated));
        ordered.map_err(|e| whole(freight, "the copies can't be ordered behind the memory", e))?;
        for (number, block) in &freight.cargo.staging {
            let parcel = self.tiers.parcels.get(*number);
            let Tier::Host(buffer) = &parcel.tier else { continue };
            let (from, to) = (End::Host(buffer.memory(), 0), End::Block(block, 0));
            let copied = self.device.copy(stream, from, to, parcel.bytes);
            copied.map_err(|e| whole(freight, "a bucket can't be copied", e))?;
        }
        for index in 0..freight.records.len() {
            if !self.is_ready(freight, index) {
                continue;
            }
            let copied = self.copy_home(&freight.records[index], freight.cargo, stream);
            copied.map_err(|e| freight.detailed_error(Trip::Load, index, e))?;
        }
        Ok(())
    }

    /// The copies of one record: from the staging of its bucket, else straight from the host buffer.
    fn copy_home(
        &mut self,
        record: &Record<Self>,
        cargo: &Cargo<A>,
        stream: A::Stream,
    ) -> Result<(), BackendError> {
        let Some(&Piece { parcel, offset }) = record.residency.place() else { return Ok(()) };
        let staged = cargo.staging.iter().find(|(number, _)| *number == parcel);
        if let Some((_, block)) = staged {
            let (from, to) = (End::Block(block, offset), End::Storage(&record.storage, 0));
            return self.device.copy(stream, from, to, record.bytes);
        }
        match &self.tiers.parcels.get(parcel).tier {
            Tier::Host(buffer) => copy_ranges(&mut self.device, record, buffer, offset, stream),
            _ => Ok(()),
        }
    }

    /// Orders the compute stream, and whoever gets the host buffers next, behind what a failed load has
    /// queued. `false` if nothing is known about the end of it.
    fn fence_failed_load(&mut self, cargo: &mut Cargo<A>, stream: A::Stream) -> bool {
        let fence = self.fence(stream);
        let ended = self.compute_behind(&fence);
        // The compute stream is behind the offload as well.
        let behind = ended.then(|| self.device.record(self.device.compute()).ok()).flatten();
        cargo.loose = behind.is_none();
        if cargo.loose {
            self.unproven.push(stream);
        }
        for &number in &cargo.parcels {
            let parcel = self.tiers.parcels.get(number);
            if matches!(parcel.tier, Tier::Host(_)) {
                parcel.written = behind.clone().or(parcel.written.take());
            }
        }
        ended
    }

    /// A load failed half-way: storages are emptied again behind what was queued, so that the load can
    /// be tried again.
    fn undo(&mut self, freight: &mut Freight<'_, Self>, stream: A::Stream) {
        hit(Mark::LoadUndone);
        let ended = self.fence_failed_load(freight.cargo, stream);
        self.drop_staging(freight.cargo, ended);
        for index in 0..freight.records.len() {
            if ended && freight.records[index].filled {
                self.empty(freight, index);
            }
        }
    }

    /// Makes what is queued usable and gives the host buffers back behind it.
    pub(crate) fn finish_load(&mut self, freight: &mut Freight<'_, Self>) -> Result<(), Error> {
        self.arrive(freight)?;
        if freight.cargo.event.is_none() {
            self.queue_load(freight)?;
        }
        let Some(event) = freight.cargo.event.clone() else { return Ok(()) };
        let waits = self.compute_waits(&event);
        waits.map_err(|e| whole(freight, "the compute stream can't wait for it", e))?;
        freight.cargo.event = None;
        self.drop_staging(freight.cargo, true);
        for index in 0..freight.records.len() {
            let record = &mut freight.records[index];
            if record.residency.load().is_none() {
                continue;
            }
            let piece: Piece = sure(record.residency.finish_load());
            let bytes = record.ranges.bytes();
            self.tiers.came_home(bytes);
            freight.loaded(bytes, None);
            self.tiers.leave(piece.parcel, Some(event.clone()));
        }
        self.forget_parcels(freight.cargo);
        Ok(())
    }

    /// Brings one record of a group home by itself; the host waits for the copy.
    pub(crate) fn bring_home(
        &mut self,
        freight: &mut Freight<'_, Self>,
        index: usize,
    ) -> Result<(), Error> {
        let Some(&piece) = freight.records[index].residency.place() else { return Ok(()) };
        self.tiers.parcels.get(piece.parcel).busy = true;
        let fetched = self.tiers.fetch(&mut self.device, piece.parcel);
        let here = fetched.and_then(|()| self.tiers.arrive(piece.parcel));
        let home = here.map_err(BackendError::from).and_then(|()| {
            let stream = self.stream(Direction::In, None)?;
            self.prove_loose_end(freight.cargo)?;
            freight.cargo.last = Some(stream);
            self.fill(freight, index)?;
            let copied = self.copy_and_wait(&freight.records[index], piece, stream);
            if copied.is_err() && self.fence_failed_load(freight.cargo, stream) {
                self.empty(freight, index);
            }
            copied
        });
        // What may still be read does not move.
        self.tiers.parcels.get(piece.parcel).busy = freight.cargo.loose;
        home.map_err(|e| freight.detailed_error(Trip::Load, index, e))?;
        let record = &mut freight.records[index];
        record.filled = false;
        sure(record.residency.start_load(()));
        let _same_piece: Piece = sure(record.residency.finish_load());
        let bytes = record.ranges.bytes();
        self.tiers.came_home(bytes);
        freight.loaded(bytes, None);
        let written = self.tiers.parcels.get(piece.parcel).written.clone();
        self.tiers.leave(piece.parcel, written);
        self.forget_parcels(freight.cargo);
        Ok(())
    }

    fn copy_and_wait(
        &mut self,
        record: &Record<Self>,
        piece: Piece,
        stream: A::Stream,
    ) -> Result<(), BackendError> {
        let compute = self.device.compute();
        let allocated = self.device.record(compute)?;
        self.device.wait(stream, &allocated)?;
        let Tier::Host(buffer) = &self.tiers.parcels.get(piece.parcel).tier else {
            unreachable!("it has arrived")
        };
        copy_ranges(&mut self.device, record, buffer, piece.offset, stream)?;
        let loaded = self.device.record(stream)?;
        self.device.sync(&loaded)
    }
}

/// The ranges of a record lie one behind the other in its buffer.
fn copy_ranges<A: Accelerator, S: Store<A::Host>>(
    device: &mut A,
    record: &Record<Staged<A, S>>,
    buffer: &Buffer<A>,
    offset: u64,
    stream: A::Stream,
) -> Result<(), BackendError> {
    let mut at = offset;
    for range in record.ranges.iter() {
        let (from, to) =
            (End::Host(buffer.memory(), at), End::Storage(&record.storage, range.start));
        device.copy(stream, from, to, range.end - range.start)?;
        at += range.end - range.start;
    }
    Ok(())
}

fn whole<A: Accelerator, S: Store<A::Host>>(
    freight: &Freight<'_, Staged<A, S>>,
    what: &'static str,
    cause: BackendError,
) -> Error {
    Error::caused_by(Staged::whole(freight, Trip::Load, what), cause)
}
