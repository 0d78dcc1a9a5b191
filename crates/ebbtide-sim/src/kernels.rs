//! Kernels for a program that drives an engine: they write bytes that are known in advance, and
//! compare.

use std::ops::Range;
use std::panic::Location;

use crate::call::Call;
use crate::handles::{SimStorage, SimStream};
use crate::memory::Span;
use crate::report::Kind;
use crate::schedule::{Check, Effect, Owner};
use crate::shadow::Role;
use crate::state::{Place, State};
use crate::world::World;

/// What a kernel works on.
struct Target<'a> {
    stream: SimStream,
    storage: &'a SimStorage,
    range: Range<u64>,
}

impl World {
    /// A kernel on the compute stream writes [`pattern`](crate::pattern) into a part of a storage.
    #[track_caller]
    pub fn fill(&self, storage: &SimStorage, range: Range<u64>, seed: u64) {
        self.fill_on(self.compute(), storage, range, seed);
    }

    /// The same on another stream.
    #[track_caller]
    pub fn fill_on(&self, stream: SimStream, storage: &SimStorage, range: Range<u64>, seed: u64) {
        let target = Target { stream, storage, range };
        self.lock().kernel_fill("fill", self, &target, seed, Location::caller());
    }

    /// A kernel on the compute stream reads a part of a storage, and reports when it finds anything
    /// but what [`fill`](World::fill) with this seed wrote.
    #[track_caller]
    pub fn check(&self, storage: &SimStorage, range: Range<u64>, seed: u64) {
        self.check_on(self.compute(), storage, range, seed);
    }

    /// The same on another stream.
    #[track_caller]
    pub fn check_on(&self, stream: SimStream, storage: &SimStorage, range: Range<u64>, seed: u64) {
        let target = Target { stream, storage, range };
        self.lock().kernel_check(self, &target, seed, Location::caller());
    }

    #[track_caller]
    pub(crate) fn modify(&self, storage: &SimStorage, range: Range<u64>, seed: u64) {
        let target = Target { stream: self.compute(), storage, range };
        let mut state = self.lock();
        state.kernel_fill("modify", self, &target, seed, Location::caller());
        if let Some(storage) = state.storages[storage.0.number].as_mut() {
            storage.version += 1;
        }
    }
}

impl State {
    fn kernel_fill(
        &mut self,
        verb: &str,
        world: &World,
        target: &Target<'_>,
        seed: u64,
        place: Place,
    ) {
        let (call, found) = self.kernel(verb, world, target, place);
        let Some((stream, span)) = found else { return };
        let ns = self.kernel_ns(span.bytes);
        let work = self.queue(stream, &call, Role::Use, ns);
        self.writes(span, &work.op, true);
        let effect = Effect::Fill { span, seed, position: target.range.start };
        self.schedule.at(work.end, Owner::Device, effect);
    }

    fn kernel_check(&mut self, world: &World, target: &Target<'_>, seed: u64, place: Place) {
        let (call, found) = self.kernel("check", world, target, place);
        let Some((stream, span)) = found else { return };
        let ns = self.kernel_ns(span.bytes);
        let work = self.queue(stream, &call, Role::Use, ns);
        let pieces = self.reads(span, &work.op);
        let position = target.range.start;
        if let Some(piece) = pieces.iter().find(|piece| !piece.written) {
            let first = piece.write.as_ref().unwrap_or(&call).clone();
            let from = piece.range.start - span.start + position;
            self.report(Kind::NeverWritten, &first, &call, format!("from byte {from} on"));
            return;
        }
        let check = Check { span, seed, position, call, pieces };
        self.schedule.at(work.start, Owner::Device, Effect::Check(Box::new(check)));
    }

    /// The stream and the memory of a kernel; `None` if it can't run.
    fn kernel(
        &mut self,
        verb: &str,
        world: &World,
        target: &Target<'_>,
        place: Place,
    ) -> (Call, Option<(usize, Span)>) {
        let Target { stream, storage, range } = target;
        let bytes = range.end.saturating_sub(range.start);
        let ours = storage.0.world.is(world);
        let what = if ours {
            self.describe(storage.name(), range.start, bytes)
        } else {
            format!("{storage:?} of another world")
        };
        let on = self.stream_name(*stream);
        let call = self.begin(format!("kernel {verb} {what} on {on}"), place);
        if !ours {
            self.report(Kind::OtherWorld, &call, &call, String::new());
            return (call, None);
        }
        if self.injector.is_lost() {
            return (call, None);
        }
        let stream = self.stream(*stream, &call);
        let span = self.part(storage.name(), range.start, bytes, &call);
        (call, stream.zip(span))
    }

    fn kernel_ns(&mut self, bytes: u64) -> u64 {
        let (latency, rate) = (self.options.speeds.kernel_ns, self.options.speeds.kernel);
        self.duration(latency, bytes, rate, self.options.lateness.kernels)
    }
}
