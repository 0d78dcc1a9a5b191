//! The offload of a group: what [`Staged`] queues, and how it calls off what failed half-way.

use crate::PoolId;
use crate::accel::{Accelerator, Direction, End};
use crate::backend::Store;
use crate::error::{BackendError, Error, Kind};
use crate::mark::{Mark, hit};
use crate::mover::{Freight, Trip};
use crate::pack::{Berth, Bucket, Plan};
use crate::parcel::{Piece, Tier};
use crate::pool::Buffer;
use crate::staged::{Fence, Staged};
use crate::state::sure;

impl<A: Accelerator, S: Store<A::Host>> Staged<A, S> {
    /// Queues all copies of a group, or none: after an error every record is in `device`.
    pub(crate) fn depart(
        &mut self,
        freight: &mut Freight<'_, Self>,
        plan: &Plan,
        stream: Option<A::Stream>,
    ) -> Result<(), Error> {
        if plan.berths.iter().all(|berth| *berth == Berth::Stays) {
            return Ok(());
        }
        let whole = |freight: &Freight<'_, Self>, what, cause| {
            Error::caused_by(Self::whole(freight, Trip::Offload, what), cause)
        };
        let out = self.stream(Direction::Out, stream);
        let out = out.map_err(|e| whole(freight, "no copy stream", e))?;
        freight.cargo.last = Some(out);
        let queued = self.queue_offload(freight, plan, out).and_then(|()| {
            let event = self.device.record(out);
            event.map_err(|e| whole(freight, "its end can't be marked", e))
        });
        match queued {
            Ok(event) => {
                self.commit(freight, plan, &event);
                Ok(())
            }
            Err(error) => {
                self.call_off(freight, out);
                Err(error)
            }
        }
    }

    fn queue_offload(
        &mut self,
        freight: &mut Freight<'_, Self>,
        plan: &Plan,
        out: A::Stream,
    ) -> Result<(), Error> {
        let direct = self.device.gathers();
        if !direct {
            self.gather(freight, plan)?;
        }
        let compute = self.device.compute();
        let produced = self.device.record(compute);
        let ordered = produced.and_then(|produced| self.device.wait(out, &produced));
        ordered.map_err(|cause| {
            let what = "the copies can't be ordered behind the computation";
            Error::caused_by(Self::whole(freight, Trip::Offload, what), cause)
        })?;
        for (number, bucket) in plan.buckets.iter().enumerate().filter(|(_, b)| b.pieces > 1) {
            let sent = self.send_bucket(freight, plan, number, out);
            sent.map_err(|cause| bucket_error(freight, number, bucket, cause))?;
        }
        for index in 0..freight.records.len() {
            if plan.berths[index] == Berth::Alone {
                let sent = self.send_alone(freight, index, out);
                sent.map_err(|cause| freight.detailed_error(Trip::Offload, index, cause))?;
            }
        }
        Ok(())
    }

    /// Packs the buckets into staging memory, on the compute stream.
    fn gather(&mut self, freight: &mut Freight<'_, Self>, plan: &Plan) -> Result<(), Error> {
        let compute = self.device.compute();
        for (number, bucket) in plan.buckets.iter().enumerate().filter(|(_, b)| b.pieces > 1) {
            let failed = |freight: &Freight<'_, Self>, e| bucket_error(freight, number, bucket, e);
            let block = self.device.stage(bucket.bytes).map_err(|e| failed(freight, e))?;
            // Owned by the group before anything is queued: an error below frees it in order.
            freight.cargo.staging.push((u32::MAX, block));
            let Some((_, block)) = freight.cargo.staging.last() else { continue };
            for (record, offset) in pieces(freight, plan, number) {
                let (from, to) = (End::Storage(&record.storage, 0), End::Block(block, offset));
                let copied = self.device.copy(compute, from, to, record.bytes);
                copied.map_err(|e| failed(freight, e))?;
            }
        }
        Ok(())
    }

    /// One copy for a bucket that is staged, else one for each piece of it.
    fn send_bucket(
        &mut self,
        freight: &mut Freight<'_, Self>,
        plan: &Plan,
        number: usize,
        out: A::Stream,
    ) -> Result<(), BackendError> {
        let bucket = &plan.buckets[number];
        let buffer = self.buffer_for(freight, bucket.pool, bucket.bytes, out)?;
        let parcel = self.tiers.wrap(buffer, bucket.bytes, true);
        freight.cargo.parcels.push(parcel);
        let Tier::Host(buffer) = &self.tiers.parcels.get(parcel).tier else {
            unreachable!("a new parcel is in host memory")
        };
        let staged = freight.cargo.staging.iter_mut().find(|(number, _)| *number == u32::MAX);
        if let Some((owner, block)) = staged {
            hit(Mark::Bucket);
            *owner = parcel;
            let (from, to) = (End::Block(block, 0), End::Host(buffer.memory(), 0));
            return self.device.copy(out, from, to, bucket.bytes);
        }
        hit(Mark::BucketGathered);
        for (record, offset) in pieces(freight, plan, number) {
            let from = End::Storage(&record.storage, 0);
            self.device.copy(out, from, End::Host(buffer.memory(), offset), record.bytes)?;
        }
        Ok(())
    }

    /// A host buffer. When nothing else can move down to make room for it, what this group itself has
    /// queued so far can: a group may be larger than host memory.
    fn buffer_for(
        &mut self,
        freight: &mut Freight<'_, Self>,
        pool: Option<PoolId>,
        bytes: u64,
        out: A::Stream,
    ) -> Result<Buffer<A>, Error> {
        let buffer = self.tiers.acquire(&mut self.device, pool, bytes);
        if pool.is_some() || !buffer.as_ref().is_err_and(Error::is_no_room) {
            return buffer;
        }
        let event = self.device.record(out).map_err(|cause| {
            let what = "what is queued can't be marked";
            Error::caused_by(Self::whole(freight, Trip::Offload, what), cause)
        })?;
        for &number in &freight.cargo.parcels {
            self.tiers.settled(number, &event);
        }
        self.tiers.acquire(&mut self.device, pool, bytes)
    }

    /// A buffer of its own for one record: its ranges, one behind the other.
    fn send_alone(
        &mut self,
        freight: &mut Freight<'_, Self>,
        index: usize,
        out: A::Stream,
    ) -> Result<(), BackendError> {
        let (pool, bytes) = (freight.records[index].pool, freight.records[index].ranges.bytes());
        let buffer = self.buffer_for(freight, pool, bytes, out)?;
        let record = &freight.records[index];
        let parcel = self.tiers.wrap(buffer, bytes, false);
        freight.cargo.parcels.push(parcel);
        let Tier::Host(buffer) = &self.tiers.parcels.get(parcel).tier else {
            unreachable!("a new parcel is in host memory")
        };
        hit(if record.ranges.is_whole(record.bytes) { Mark::Alone } else { Mark::Slices });
        let mut at = 0;
        for range in record.ranges.iter() {
            let length = range.end - range.start;
            let from = End::Storage(&record.storage, range.start);
            self.device.copy(out, from, End::Host(buffer.memory(), at), length)?;
            at += length;
        }
        Ok(())
    }

    /// Everything is queued: records and parcels say so. Parcels are in the order in which they were
    /// sent: buckets first.
    fn commit(&mut self, freight: &mut Freight<'_, Self>, plan: &Plan, event: &A::Event) {
        let packed = plan.buckets.iter().filter(|bucket| bucket.pieces > 1).count();
        let mut alone = packed;
        for (record, berth) in freight.records.iter_mut().zip(&plan.berths) {
            let (which, offset) = match *berth {
                Berth::Stays => continue,
                Berth::Alone => (alone, 0),
                Berth::Bucket { number, offset } => {
                    let before = &plan.buckets[..number as usize];
                    (before.iter().filter(|bucket| bucket.pieces > 1).count(), offset)
                }
            };
            alone += usize::from(*berth == Berth::Alone);
            let parcel = freight.cargo.parcels[which];
            self.tiers.parcels.get(parcel).users += 1;
            sure(record.residency.start_offload(Piece { parcel, offset }));
        }
        for &number in &freight.cargo.parcels {
            self.tiers.settled(number, event);
        }
        freight.cargo.event = Some(event.clone());
    }

    /// Takes back everything that a failed offload has taken, behind what it has queued.
    fn call_off(&mut self, freight: &mut Freight<'_, Self>, out: A::Stream) {
        hit(Mark::OffloadCalledOff);
        let fence = self.fence(out);
        // Staging memory and the storages themselves may be freed from now on.
        let ended = self.compute_behind(&fence);
        freight.cargo.loose = !ended;
        if !ended {
            self.unproven.push(out);
        }
        self.drop_staging(freight.cargo, ended);
        for number in freight.cargo.parcels.drain(..) {
            match &fence {
                Fence::Event(event) => self.tiers.remove(number, Some(event.clone())),
                Fence::Seen => self.tiers.remove(number, None),
                Fence::Lost => self.tiers.lose(number),
            }
        }
    }
}

/// The end of an offload can't be waited for. The storages are untouched; what the copies use goes back
/// when the group does.
pub(crate) fn lose_offload<A: Accelerator, S: Store<A::Host>>(
    freight: &mut Freight<'_, Staged<A, S>>,
) {
    hit(Mark::OffloadLost);
    for record in freight.records.iter_mut().filter(|r| r.residency.offload().is_some()) {
        // Its parcel goes back as a whole.
        let _piece: Piece = sure(record.residency.keep_on_device());
    }
}

/// The records of a bucket, and where each starts in it.
fn pieces<'a, A: Accelerator, S: Store<A::Host>>(
    freight: &'a Freight<'_, Staged<A, S>>,
    plan: &'a Plan,
    bucket: usize,
) -> impl Iterator<Item = (&'a crate::mover::Record<Staged<A, S>>, u64)> {
    freight.records.iter().zip(&plan.berths).filter_map(move |(record, berth)| match *berth {
        Berth::Bucket { number, offset } if number as usize == bucket => Some((record, offset)),
        _ => None,
    })
}

fn bucket_error<A: Accelerator, S: Store<A::Host>>(
    freight: &Freight<'_, Staged<A, S>>,
    number: usize,
    bucket: &Bucket,
    cause: BackendError,
) -> Error {
    let kind = Kind::Bucket {
        group: freight.name.to_string(),
        bucket: number,
        element: bucket.element.name,
        elements: bucket.payload / u64::from(bucket.element.bytes.max(1)),
        bytes: bucket.bytes,
        pool: bucket.pool.is_some(),
    };
    Error::caused_by(kind, cause)
}
