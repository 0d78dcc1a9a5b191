//! Plays a scenario: the steps, and what happens after an error.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ebbtide_core::{Config, Engine, Error, GroupId, PoolId, Staged, TensorId};

use crate::device::SimDevice;
use crate::disk::SimDisk;
use crate::handles::{SimStorage, SimStream};
use crate::play::draw::{HALF, STREAMS};
use crate::play::features::Feature;
use crate::play::oracle::Oracle;
use crate::play::outcome::Outcome;
use crate::play::plan::{Event, Step, Visit};
use crate::play::scenario::Scenario;
use crate::random::Random;
use crate::report::{Kind, Report};
use crate::world::World;

type Sim = Engine<Staged<SimDevice, SimDisk>>;

/// A group in flight.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) group: GroupId,
    /// For each value the last of its tensors.
    pub(super) tensors: Vec<TensorId>,
    pub(super) started: bool,
    pub(super) waited: bool,
}

/// Why a step ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The plan says so; with or without the engine.
    Planned(bool),
    /// A call failed.
    Failed(String),
    /// Something is wrong.
    Wrong(String),
}

pub(super) type Played<T = ()> = Result<T, Stop>;

pub(super) struct Player<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) world: World,
    engine: Option<Sim>,
    pub(super) pools: Vec<PoolId>,
    streams: [SimStream; STREAMS],
    pub(super) oracle: Oracle,
    pub(super) tables: Vec<SimStorage>,
    pub(super) random: Random,
    pub(super) step: &'a Step,
    pub(super) live: BTreeMap<usize, Live>,
    /// The group that was closed last: its number means nothing any more.
    pub(super) last_closed: Option<GroupId>,
    /// The user's handles, by visit and value.
    pub(super) values: BTreeMap<(usize, usize), SimStorage>,
    /// Added to the numbers of passes, which are unique in the life of an engine.
    pub(super) first_pass: u64,
    /// Any call may fail.
    pub(super) tolerant: bool,
    /// Some bytes went out and were given up there.
    given_up: bool,
    pub(super) errors: u64,
}

/// Plays a scenario; a panic is a report.
pub(super) fn play(scenario: &Scenario) -> Outcome {
    let world = World::new(scenario.seed, scenario.machine.clone());
    let mut outcome = Outcome::default();
    let mut player = Player::new(scenario, world.clone());
    let result = catch_unwind(AssertUnwindSafe(|| player.run()));
    outcome.calls = world.calls();
    outcome.errors = player.errors;
    match result {
        Ok(reports) => {
            outcome.reports = reports;
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| player.end())) {
                outcome.reports.push(panic_text(payload.as_ref()));
            }
        }
        Err(payload) => {
            // What an interrupted engine holds can't be dropped safely.
            std::mem::forget(player);
            outcome.reports.push(panic_text(payload.as_ref()));
            outcome.trace = world.trace();
            return outcome;
        }
    }
    let found = world.finish();
    outcome.reports.extend(found.iter().filter(|r| !is_users_race(r)).map(Report::to_string));
    let stats = world.stats();
    let left = (stats.device_now, stats.pinned_now, stats.disk_now);
    if left != (0, 0, 0) {
        outcome.reports.push(format!("in use at the end (device, pinned, disk): {left:?}"));
    }
    outcome.trace = world.trace();
    outcome
}

/// A user who changes a tensor in place while it is copied out races with the copy. The engine notices
/// and does not use the copy.
fn is_users_race(report: &Report) -> bool {
    let (first, second) = (report.first.what(), report.second.what());
    report.kind == Kind::Race
        && second.starts_with("kernel modify")
        && first.starts_with("copy storage")
}

pub(super) fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("without a message"))
}

/// An error with its causes.
pub(super) fn text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

impl<'a> Player<'a> {
    fn new(scenario: &'a Scenario, world: World) -> Self {
        let mut player = Self {
            scenario,
            engine: None,
            pools: Vec::new(),
            streams: ["first", "second"].map(|name| world.stream(name)),
            oracle: Oracle::new(world.clone()),
            world,
            tables: Vec::new(),
            random: Random::new(scenario.seed).fork(3),
            step: &scenario.plan.steps[0],
            live: BTreeMap::new(),
            last_closed: None,
            values: BTreeMap::new(),
            first_pass: 0,
            tolerant: scenario.mix.has_faults(),
            given_up: false,
            errors: 0,
        };
        player.new_engine();
        player
    }

    fn new_engine(&mut self) {
        // The old one first: only then all that it holds is given back.
        self.engine = None;
        self.last_closed = None;
        let disk = (!self.scenario.mix.has(Feature::NoDisk)).then(|| self.world.disk());
        let mut mover = Staged::new(&self.scenario.bounds, self.world.device(), disk);
        self.pools = self.scenario.pools.iter().map(|&bytes| mover.add_pool(bytes)).collect();
        self.engine = Some(Engine::new(Config { prefetch: self.scenario.prefetch }, mover));
        self.given_up = false;
    }

    pub(super) fn engine(&mut self) -> &mut Sim {
        self.engine.as_mut().expect("an engine is there until the end")
    }

    pub(super) fn visit(&self, visit: usize) -> &'a Visit {
        let step: &'a Step = self.step;
        &step.visits[visit]
    }

    /// Whether another group has a storage, too.
    pub(super) fn is_shared(&self, visit: usize, storage: &SimStorage) -> bool {
        let others = self.values.iter().filter(|((other, _), _)| *other != visit);
        others
            .filter(|((other, _), _)| self.live.contains_key(other))
            .any(|(_, other)| other.id() == storage.id())
    }

    /// The stream that a visit asks for.
    pub(super) fn own_stream(&self, visit: usize) -> Option<SimStream> {
        Some(self.streams[self.visit(visit).own_stream?])
    }

    /// Bytes of a value's storage.
    pub(super) fn bytes(&self, visit: usize, value: usize) -> u64 {
        let source = self.visit(visit).values[value].source;
        self.scenario.plan.size(self.step, source)
    }

    /// An error that nothing in the plan explains.
    pub(super) fn failed(&mut self, call: &str, error: &dyn std::fmt::Display) -> Stop {
        self.errors += 1;
        if self.tolerant {
            Stop::Failed(format!("{call}: {error}"))
        } else {
            Stop::Wrong(format!("{call} failed without a fault: {error}"))
        }
    }

    fn run(&mut self) -> Vec<String> {
        for step in &self.scenario.plan.steps {
            self.step = step;
            match self.play_step() {
                Ok(()) => {}
                Err(Stop::Planned(drop_engine)) => self.give_up(drop_engine),
                Err(Stop::Failed(_)) => return self.recover().err().into_iter().collect(),
                Err(Stop::Wrong(report)) => return vec![report],
            }
        }
        Vec::new()
    }

    /// A call has failed: the step is given up, and the same step goes well without faults.
    fn recover(&mut self) -> Result<(), String> {
        self.give_up(false);
        self.heal();
        if self.world.is_lost() {
            return Ok(());
        }
        match self.play_step() {
            Ok(()) => Ok(()),
            Err(Stop::Planned(drop_engine)) => {
                self.give_up(drop_engine);
                Ok(())
            }
            Err(Stop::Failed(report) | Stop::Wrong(report)) => {
                Err(format!("after a failed step: {report}"))
            }
        }
    }

    /// Nothing fails from now on.
    pub(super) fn heal(&mut self) {
        self.world.heal();
        self.tolerant = self.world.is_lost();
    }

    fn give_up(&mut self, drop_engine: bool) {
        self.values.clear();
        if !drop_engine {
            self.close_all();
            self.engine().abandon_backward();
            if self.random.chance(HALF) {
                // All memory that is not in use any more goes at once.
                self.engine().mover_mut().shrink(0);
            }
            return self.tables.clear();
        }
        self.live.clear();
        self.tables.clear();
        // A device that neither answers nor is lost leaves an engine no way to end.
        self.heal();
        self.new_engine();
    }

    fn close_all(&mut self) {
        for visit in self.live.keys().copied().collect::<Vec<_>>() {
            self.close(visit);
        }
    }

    /// Closes a visit's group.
    pub(super) fn close(&mut self, visit: usize) {
        let Some(live) = self.live.remove(&visit) else { return };
        for (value, &tensor) in live.tensors.iter().enumerate() {
            if self.engine().state(tensor).is_ok_and(|state| state != "device") {
                self.given_up = true;
                // Nobody can use that storage any more.
                if let Some(lost) = self.values.get(&(visit, value)).map(SimStorage::id) {
                    self.values.retain(|_, storage| storage.id() != lost);
                }
            }
        }
        self.engine().close(live.group);
        self.last_closed = Some(live.group);
    }

    fn play_step(&mut self) -> Played {
        let (calls, started) = (self.world.all_calls(), self.world.now());
        self.make_tables()?;
        for event in &self.step.events {
            match *event {
                Event::Forward(visit) => self.forward(visit)?,
                Event::Backward(visit) => self.backward(visit)?,
                Event::Evaluate(bytes) => {
                    let done = self.oracle.scratch(bytes);
                    done.map_err(|error| self.failed("evaluation", &error))?;
                }
                Event::Finish => self.engine().finish_backward(),
                Event::Abort(drop_engine) => return Err(Stop::Planned(drop_engine)),
            }
        }
        self.close_all();
        self.values.clear();
        self.first_pass += 1000;
        self.bound(self.world.all_calls() - calls, self.world.now() - started)?;
        self.nothing_is_left()
    }

    fn make_tables(&mut self) -> Played {
        while self.tables.len() < self.scenario.plan.tables.len() {
            let bytes = self.scenario.plan.tables[self.tables.len()];
            let table = self.world.storage(bytes);
            let table = table.map_err(|error| self.failed("a table", &error))?;
            self.oracle.fill(&table, bytes);
            self.tables.push(table);
        }
        Ok(())
    }

    /// A step comes to its end within a bound of calls and of time.
    fn bound(&self, calls: u64, ns: u64) -> Played {
        if self.tolerant {
            return Ok(());
        }
        let visits = u64::try_from(self.step.visits.len()).unwrap_or(0);
        let values: usize = self.step.visits.iter().map(|visit| visit.values.len()).sum();
        let values = u64::try_from(values).unwrap_or(0);
        let most = 200 + 80 * visits + 120 * values;
        if calls > most {
            let what = format!("{calls} calls for {visits} groups and {values} values");
            return Err(Stop::Wrong(format!("a step took {what}: more than {most}")));
        }
        let longest = self.scenario.longest_ns();
        if ns > calls.saturating_mul(longest) {
            return Err(Stop::Wrong(format!("a step took {ns} ns, {calls} calls")));
        }
        Ok(())
    }

    /// Between two steps nobody holds anything.
    fn nothing_is_left(&mut self) -> Played {
        let wrong = |what: String| Err(Stop::Wrong(format!("after a step: {what}")));
        let (groups, held) =
            (self.engine().active_groups(), self.engine().store_stats().bytes_held);
        if groups != 0 || held != 0 {
            return wrong(format!("{groups} groups, {held} bytes held"));
        }
        if let Some(bytes) = self.step.shrink {
            self.engine().mover_mut().shrink(bytes);
        }
        let all = (0..=self.pools.len()).map(|number| PoolId(u32::try_from(number).unwrap_or(0)));
        let all: Vec<_> =
            all.filter_map(|pool| self.engine().mover_mut().pool_stats(pool)).collect();
        if let Some(stats) = all.iter().find(|stats| {
            stats.in_use != 0 || stats.allocated != stats.pending + stats.free + stats.lost
        }) {
            return wrong(format!("{stats:?}"));
        }
        let (stats, counters) = (self.world.stats(), self.engine().counters());
        let allocated: u64 = all.iter().map(|stats| stats.allocated).sum();
        if self.scenario.mix.has_faults() {
            return Ok(());
        }
        let tables: u64 = self.tables.iter().map(SimStorage::bytes).sum();
        let seen = (stats.pinned_now, stats.disk_now, stats.device_now);
        if seen != (allocated, 0, tables) {
            return wrong(format!("pinned, disk, device {seen:?}, not ({allocated}, 0, {tables})"));
        }
        let (out, home) = (counters.moved_out_bytes, counters.moved_in_bytes);
        if out < home || (out > home && !self.given_up) {
            return wrong(format!("{out} bytes went out, {home} came home"));
        }
        Ok(())
    }

    /// The end of the run: all is given back.
    fn end(&mut self) {
        self.give_up(false);
        self.heal();
        self.engine = None;
    }
}
