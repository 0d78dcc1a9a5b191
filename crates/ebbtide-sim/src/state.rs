//! The state of a world: time, streams, calls and the checker.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;

use ebbtide_core::{BackendError, Direction};

use crate::call::Call;
use crate::clock::{Clock, HOST};
use crate::heap::Heap;
use crate::inject::{Injector, Verdict};
use crate::memory::{Memory, Space, Span};
use crate::objects::{Buffer, Gone, Job, Slot, Storage};
use crate::options::{Function, Options};
use crate::random::{Random, Ratio, write_pattern};
use crate::report::{Kind, Report};
use crate::schedule::{Check, Effect, Owner, Schedule};
use crate::shadow::{Conflict, Op, Piece, Role, Shadow};
use crate::stats::Stats;

/// Where a call was made.
pub(crate) type Place = &'static Location<'static>;

/// The stream that the framework computes on.
pub(crate) const COMPUTE: usize = 0;

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) name: String,
    pub(crate) actor: usize,
    /// What is known at the end of what is queued.
    pub(crate) clock: Clock,
    /// When that is.
    pub(crate) end: u64,
}

/// A piece of work that was queued.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) op: Op,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) world: u64,
    pub(crate) options: Options,
    pub(crate) now: u64,
    pub(crate) host: Clock,
    pub(crate) streams: Vec<Stream>,
    pub(crate) copy_streams: [Option<usize>; 2],
    pub(crate) injector: Injector,
    pub(crate) schedule: Schedule,
    pub(crate) memory: Memory,
    pub(crate) heaps: [Heap; 3],
    pub(crate) stats: Stats,
    pub(crate) storages: Vec<Option<Storage>>,
    /// Numbers of storages to be used again, the last one first.
    pub(crate) free_storages: Vec<usize>,
    pub(crate) buffers: BTreeMap<u64, Buffer>,
    pub(crate) slots: BTreeMap<u64, Slot>,
    pub(crate) jobs: BTreeMap<u64, Job>,
    pub(crate) gone: Gone,
    pub(crate) reports: Vec<Report>,
    pub(crate) trace: Vec<String>,
    pub(crate) free_actors: Vec<usize>,
    shadows: [Shadow; 3],
    random: Random,
    calls: u64,
    objects: u64,
    actors: usize,
    reported: BTreeSet<(Kind, u64, u64)>,
}

impl State {
    pub(crate) fn new(world: u64, seed: u64, options: Options) -> Self {
        let mut random = Random::new(seed);
        let injector = Injector::new(options.faults.clone(), random.fork(1));
        let heaps = [
            Heap::new(Space::Device, options.device_bytes, false),
            Heap::new(Space::Host, options.pinned_bytes, false),
            Heap::new(Space::Disk, options.disk_bytes, true),
        ];
        let mut state = Self {
            world,
            options,
            now: 0,
            host: Clock::default(),
            streams: Vec::new(),
            copy_streams: [None; 2],
            injector,
            schedule: Schedule::default(),
            memory: Memory::default(),
            heaps,
            stats: Stats::default(),
            storages: Vec::new(),
            free_storages: Vec::new(),
            buffers: BTreeMap::new(),
            slots: BTreeMap::new(),
            jobs: BTreeMap::new(),
            gone: Gone::default(),
            reports: Vec::new(),
            trace: Vec::new(),
            free_actors: Vec::new(),
            shadows: Default::default(),
            random,
            calls: 0,
            objects: 0,
            actors: HOST + 1,
            reported: BTreeSet::new(),
        };
        state.add_stream("compute");
        state
    }

    // Calls and time.

    /// A call begins: it gets its number, and the host's time goes on.
    pub(crate) fn begin(&mut self, what: String, place: Place) -> Call {
        let call = Call::new(self.calls, what, place);
        self.calls += 1;
        assert!(self.calls < self.options.max_calls, "no end after {} calls: {call}", self.calls);
        self.host.tick(HOST);
        let late = self.options.lateness.host;
        let step = self.vary(self.options.speeds.call_ns, late);
        self.advance(self.now + step.max(1));
        if self.options.trace {
            self.trace.push(format!("{} ns: {call}", self.now));
        }
        call
    }

    /// A call that can fail begins.
    pub(crate) fn attempt(
        &mut self,
        function: Function,
        what: String,
        place: Place,
    ) -> Result<Call, BackendError> {
        let call = self.begin(what, place);
        let was_lost = self.injector.is_lost();
        let verdict = self.injector.next(function);
        if self.injector.is_lost() && !was_lost {
            self.lose();
        }
        let why = match verdict {
            Verdict::Works => return Ok(call),
            Verdict::Fails => "made to fail",
            Verdict::Lost => "the device is lost",
        };
        self.note(|| format!("fails: {why}"));
        Err(BackendError::new(format!("{}: {why}", call.what())))
    }

    /// Adds to the trace of the call under way.
    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(line) = self.trace.last_mut() {
            line.push_str(", ");
            line.push_str(&text());
        }
    }

    /// The number of the next call.
    pub(crate) fn next_call(&self) -> u64 {
        self.calls
    }

    pub(crate) fn object(&mut self) -> u64 {
        self.objects += 1;
        self.objects - 1
    }

    /// The host's time reaches `time`, and all that is due by then happens.
    pub(crate) fn advance(&mut self, time: u64) {
        self.now = self.now.max(time);
        while let Some(effect) = self.schedule.next_until(self.now) {
            self.apply(effect);
        }
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::Load { copy, from } => {
                let bytes = self.memory.read(from);
                self.schedule.in_flight.insert(copy, bytes);
            }
            Effect::Save { copy, to } => {
                if let Some(bytes) = self.schedule.in_flight.remove(&copy) {
                    self.memory.write(to, &bytes);
                }
            }
            Effect::Fill { span, seed, position } => {
                let mut bytes = self.memory.read(span);
                write_pattern(seed, position, &mut bytes);
                self.memory.write(span, &bytes);
            }
            Effect::Check(check) => self.compare(&check),
            Effect::Poison(span) => self.memory.poison(span),
        }
    }

    fn compare(&mut self, check: &Check) {
        let found = self.memory.read(check.span);
        let mut wanted = found.clone();
        write_pattern(check.seed, check.position, &mut wanted);
        let Some(at) = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted) else {
            return;
        };
        let address = check.span.start + at as u64;
        let writer = check.pieces.iter().find(|piece| piece.range.contains(&address));
        let writer = writer.and_then(|piece| piece.write.as_ref()).unwrap_or(&check.call);
        let (position, found, wanted) = (check.position + at as u64, found[at], wanted[at]);
        let detail = format!("byte {position} is {found:#04x} instead of {wanted:#04x}");
        self.report(Kind::WrongValue, &writer.clone(), &check.call, detail);
    }

    /// No call fails any more, and there is room for everything.
    pub(crate) fn heal(&mut self) {
        self.injector.heal();
        self.heaps.iter_mut().for_each(Heap::grow);
    }

    /// The device is lost: nothing runs on it any more, and the host knows.
    fn lose(&mut self) {
        self.schedule.stop_device();
        for stream in &mut self.streams {
            self.host.join(&stream.clock);
            stream.end = self.now;
        }
    }

    /// How long work of so many bytes takes.
    pub(crate) fn duration(&mut self, latency: u64, bytes: u64, rate: u64, late: Ratio) -> u64 {
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        let ns = latency.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX >> 8));
        self.vary(ns, late)
    }

    fn vary(&mut self, ns: u64, late: Ratio) -> u64 {
        let (times, jitter) = (self.options.lateness.times, self.options.lateness.jitter);
        let ns = if jitter { ns / 2 + self.random.below(ns + 1) } else { ns };
        let factor = 1 + self.random.below(times);
        if self.random.chance(late) { ns.saturating_mul(factor) } else { ns }
    }

    // Streams.

    pub(crate) fn add_actor(&mut self) -> usize {
        self.actors += 1;
        self.actors - 1
    }

    pub(crate) fn add_stream(&mut self, name: &str) -> usize {
        let actor = self.add_actor();
        let (name, clock) = (name.to_owned(), Clock::default());
        self.streams.push(Stream { name, actor, clock, end: 0 });
        self.streams.len() - 1
    }

    pub(crate) fn copy_stream(&mut self, direction: Direction) -> usize {
        let (at, name) = match direction {
            Direction::Out => (0, "out"),
            Direction::In => (1, "in"),
        };
        if let Some(stream) = self.copy_streams[at] {
            return stream;
        }
        let stream = self.add_stream(name);
        self.copy_streams[at] = Some(stream);
        stream
    }

    /// Queues work on a stream.
    pub(crate) fn queue(&mut self, stream: usize, call: &Call, role: Role, ns: u64) -> Queued {
        let now = self.now;
        let stream = &mut self.streams[stream];
        stream.clock.join(&self.host);
        stream.clock.tick(stream.actor);
        let start = stream.end.max(now);
        let end = start.saturating_add(ns);
        stream.end = end;
        let op = Op { actor: stream.actor, clock: stream.clock.clone(), call: call.clone(), role };
        self.note(|| format!("runs {start}..{end}"));
        Queued { op, start, end }
    }

    /// Something that the host does itself, now.
    pub(crate) fn by_host(&self, call: &Call, role: Role) -> Op {
        Op { actor: HOST, clock: self.host.clone(), call: call.clone(), role }
    }

    // The checker.

    pub(crate) fn report(&mut self, kind: Kind, first: &Call, second: &Call, detail: String) {
        if self.reported.insert((kind, first.number(), second.number())) {
            let (first, second) = (first.clone(), second.clone());
            self.reports.push(Report { kind, first, second, detail });
        }
    }

    fn conflicts(&mut self, op: &Op, span: Span, conflicts: &[Conflict]) {
        for Conflict { with, range } in conflicts {
            let kind = match (with.role, op.role) {
                (_, Role::Free) => Kind::FreeInUse,
                (Role::Allocate, _) => Kind::BeforeAllocation,
                _ => Kind::Race,
            };
            let (from, to) = (range.start - span.start, range.end - span.start);
            let detail = format!("bytes {from}..{to} of those of the later call");
            self.report(kind, &with.call, &op.call, detail);
        }
    }

    pub(crate) fn reads(&mut self, span: Span, op: &Op) -> Vec<Piece> {
        let (pieces, conflicts) = self.shadows[span.space as usize].read(&span.range(), op);
        self.conflicts(op, span, &conflicts);
        pieces
    }

    pub(crate) fn writes(&mut self, span: Span, op: &Op, written: bool) {
        let conflicts = self.shadows[span.space as usize].write(&span.range(), op, written);
        self.conflicts(op, span, &conflicts);
    }

    /// Copies bytes, and the knowledge which of them were ever written.
    pub(crate) fn transfer(&mut self, from: Span, to: Span, work: &Queued, owner: Owner) {
        let pieces = self.reads(from, &work.op);
        self.writes(to, &work.op, true);
        for piece in pieces.iter().filter(|piece| !piece.written) {
            let shift = |at: u64| at - from.start + to.start;
            let range = shift(piece.range.start)..shift(piece.range.end);
            self.shadows[to.space as usize].unwrite(&range);
        }
        self.schedule.copy((work.start, work.end), owner, from, to);
    }

    // Memory.

    /// Memory of the device, on the compute stream; `None` if there is none left.
    pub(crate) fn allocate(&mut self, bytes: u64, call: &Call) -> Option<Span> {
        let span = self.heaps[Space::Device as usize].take(bytes)?;
        let work = self.queue(COMPUTE, call, Role::Allocate, 0);
        self.writes(span, &work.op, false);
        self.schedule.at(work.end, Owner::Device, Effect::Poison(span));
        Some(span)
    }

    /// Frees memory of the device on the compute stream.
    pub(crate) fn deallocate(&mut self, span: Span, call: &Call) {
        let work = self.queue(COMPUTE, call, Role::Free, 0);
        self.writes(span, &work.op, false);
        self.heaps[Space::Device as usize].give(span);
    }

    /// Memory of the host or the disk, by the host, now.
    pub(crate) fn take(&mut self, space: Space, bytes: u64, call: &Call) -> Option<Span> {
        let span = self.heaps[space as usize].take(bytes)?;
        let op = self.by_host(call, Role::Allocate);
        self.writes(span, &op, false);
        self.memory.poison(span);
        Some(span)
    }

    /// Gives it back.
    pub(crate) fn give(&mut self, span: Span, call: &Call) {
        let op = self.by_host(call, Role::Free);
        self.writes(span, &op, false);
        self.heaps[span.space as usize].give(span);
    }

    pub(crate) fn stats(&self) -> Stats {
        let [device, pinned, disk] = &self.heaps;
        Stats {
            device_now: device.used(),
            device_peak: device.peak(),
            pinned_now: pinned.used(),
            pinned_peak: pinned.peak(),
            disk_now: disk.used(),
            disk_peak: disk.peak(),
            ..self.stats
        }
    }
}
