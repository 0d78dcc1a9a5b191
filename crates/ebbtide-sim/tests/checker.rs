//! The checker against the plainest model of order: for each operation, the set of all that is in
//! front of it.

use std::ops::Range;

use ebbtide_core::Accelerator;
use ebbtide_sim::{Kind, Options, SimEvent, SimStream, World};
use proptest::prelude::*;

const BYTES: u64 = 32;
const STREAMS: usize = 3;

/// One call of a random program. Numbers of events count from the last one back.
#[derive(Clone, Debug)]
enum Step {
    Write(usize, Range<u64>),
    Read(usize, Range<u64>),
    Record(usize),
    Wait(usize, usize),
    Sync(usize),
    Poll(usize),
    SyncStream(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BYTES - 1).prop_flat_map(|from| (Just(from), from + 1..BYTES));
    let range = move || range().prop_map(|(from, to)| from..to);
    let stream = || 0..STREAMS;
    prop_oneof![
        3 => (stream(), range()).prop_map(|(stream, range)| Step::Write(stream, range)),
        3 => (stream(), range()).prop_map(|(stream, range)| Step::Read(stream, range)),
        4 => stream().prop_map(Step::Record),
        5 => (stream(), 0..3usize).prop_map(|(stream, event)| Step::Wait(stream, event)),
        1 => (0..3usize).prop_map(Step::Sync),
        1 => (0..3usize).prop_map(Step::Poll),
        1 => stream().prop_map(Step::SyncStream),
    ]
}

struct Access {
    range: Range<u64>,
    writes: bool,
    /// The accesses in front of it, one bit each.
    before: u64,
}

/// What is known where: one bit for each access.
#[derive(Default)]
struct Model {
    accesses: Vec<Access>,
    host: u64,
    streams: [u64; STREAMS],
    events: Vec<(SimEvent, u64)>,
}

impl Model {
    fn access(&mut self, stream: usize, range: Range<u64>, writes: bool) {
        let before = self.streams[stream] | self.host;
        self.streams[stream] = before | 1 << self.accesses.len();
        self.accesses.push(Access { range, writes, before });
    }

    fn event(&self, back: usize) -> Option<(SimEvent, u64)> {
        self.events.iter().rev().nth(back).cloned()
    }

    fn has_race(&self) -> bool {
        self.accesses.iter().enumerate().any(|(at, later)| {
            self.accesses[..at].iter().enumerate().any(|(number, earlier)| {
                let overlap =
                    earlier.range.start < later.range.end && later.range.start < earlier.range.end;
                let conflict = overlap && (earlier.writes || later.writes);
                conflict && later.before & (1 << number) == 0
            })
        })
    }
}

/// The number of the first step at which the world, and the model, know of a race.
fn run(seed: u64, steps: Vec<Step>) -> [Option<usize>; 2] {
    let world = World::new(seed, Options::default());
    let mut device = world.device();
    let streams: [SimStream; STREAMS] =
        [world.compute(), world.stream("second"), world.stream("third")];
    let storage = world.storage(BYTES).unwrap();
    world.fill(&storage, 0..BYTES, 1);
    device.sync_stream(world.compute()).unwrap();
    let mut model = Model::default();
    let mut found = [None; 2];
    for (number, step) in steps.into_iter().enumerate() {
        match step {
            Step::Write(stream, range) => {
                world.fill_on(streams[stream], &storage, range.clone(), 1);
                model.access(stream, range, true);
            }
            Step::Read(stream, range) => {
                world.check_on(streams[stream], &storage, range.clone(), 1);
                model.access(stream, range, false);
            }
            Step::Record(stream) => {
                let event = device.record(streams[stream]).unwrap();
                model.events.push((event, model.streams[stream]));
            }
            Step::Wait(stream, event) => {
                if let Some((event, known)) = model.event(event) {
                    device.wait(streams[stream], &event).unwrap();
                    model.streams[stream] |= known;
                }
            }
            Step::Sync(event) => {
                if let Some((event, known)) = model.event(event) {
                    device.sync(&event).unwrap();
                    model.host |= known;
                }
            }
            Step::Poll(event) => {
                if let Some((event, known)) = model.event(event)
                    && device.is_done(&event)
                {
                    model.host |= known;
                }
            }
            Step::SyncStream(stream) => {
                device.sync_stream(streams[stream]).unwrap();
                model.host |= model.streams[stream];
            }
        }
        let races = [!world.reports().is_empty(), model.has_race()];
        found = [0, 1].map(|at| found[at].or(races[at].then_some(number)));
    }
    for stream in streams {
        device.sync_stream(stream).unwrap();
    }
    drop(storage);
    let reports = world.finish();
    let others = reports.iter().filter(|report| report.kind != Kind::Race).count();
    assert_eq!(others, 0, "{reports:#?}");
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// There is a report at the very call that is the first without an order behind an access that
    /// it conflicts with, and none before.
    #[test]
    fn what_has_no_order_is_reported_at_once_and_nothing_else(
        seed: u64,
        steps in prop::collection::vec(step(), 2..60),
    ) {
        let [reported, race] = run(seed, steps);
        prop_assert_eq!(reported, race);
    }
}
