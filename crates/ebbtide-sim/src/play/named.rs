//! Whole steps driven by names and by layers, as module hooks and pipeline schedules do, drawn from a
//! seed.

mod hooks;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ebbtide_core::{Config, Engine, Manager, Pass, PoolId, Staged, StagedConfig};

use crate::device::SimDevice;
use crate::disk::SimDisk;
use crate::handles::{SimStorage, SimStream};
use crate::options::{Faults, Options};
use crate::play::draw::HALF;
use crate::play::outcome::Outcome;
use crate::play::player::{Played, Stop, panic_text, text};
use crate::random::{Random, Ratio};
use crate::world::World;

type Named = Manager<Staged<SimDevice, SimDisk>>;

/// What a layer or a stage saved.
#[derive(Clone, Debug)]
struct Value {
    storage: SimStorage,
    bytes: u64,
    seed: u64,
    /// A group has it.
    saved: bool,
    /// Something outside its group uses it.
    kept: bool,
}

/// Driven as a layer of the chain, or by name alone.
#[derive(Clone, Copy, Debug)]
enum Item {
    Layer(usize),
    Stage(u64),
}

/// One run of an item.
#[derive(Debug)]
struct Use {
    item: Item,
    /// How many groups of a stage have left.
    groups: usize,
    values: Vec<Value>,
}

/// A pass in flight: its forward goes through the items, its backward takes the uses from the end.
#[derive(Debug)]
struct Flight {
    pass: Pass,
    items: Vec<Item>,
    next: usize,
    uses: Vec<Use>,
}

impl Flight {
    fn is_forward(&self) -> bool {
        self.next < self.items.len()
    }

    fn is_over(&self) -> bool {
        !self.is_forward() && self.uses.is_empty()
    }
}

/// The order of forwards and backwards of several passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// One forward, one backward, after a start of several forwards; the oldest pass first.
    Alternating,
    /// All forwards, then the newest pass first.
    LastFirst,
    /// Any pass goes on by one item.
    Mixed,
}

struct Run {
    world: World,
    manager: Named,
    random: Random,
    layers: Vec<String>,
    stream: SimStream,
    passes: u64,
    values: u64,
    faults: bool,
    tolerant: bool,
    /// After an error the step goes on.
    stubborn: bool,
    errors: u64,
}

const STAGES: u64 = 3;

/// Plays one seed through a [`Manager`]: a declared chain of layers, stages that are driven by name,
/// several passes in flight, evaluation and steps that are given up. Every value is checked when its
/// backward begins.
pub fn named(seed: u64, faults: bool) -> Outcome {
    let mut random = Random::new(seed).fork(4);
    let mut machine = Options { max_calls: 400_000, ..Options::default() };
    machine.gathers = random.chance(HALF);
    if faults {
        machine.faults = draw_faults(&mut random);
    }
    let world = World::new(seed, machine);
    let mut run = Run::new(world.clone(), random, faults);
    let mut outcome = Outcome::default();
    let played = catch_unwind(AssertUnwindSafe(|| run.play()));
    outcome.errors = run.errors;
    outcome.calls = world.calls();
    match played {
        Ok(Ok(())) => {}
        Ok(Err(report)) => outcome.reports.push(report),
        Err(payload) => {
            // What an interrupted engine holds can't be dropped safely.
            std::mem::forget(run);
            outcome.reports.push(panic_text(payload.as_ref()));
            return outcome;
        }
    }
    world.heal();
    drop(run);
    outcome.reports.extend(world.finish().iter().map(ToString::to_string));
    let stats = world.stats();
    let left = (stats.device_now, stats.pinned_now, stats.disk_now);
    if left != (0, 0, 0) {
        outcome.reports.push(format!("in use at the end (device, pinned, disk): {left:?}"));
    }
    outcome
}

fn draw_faults(random: &mut Random) -> Faults {
    let (call, rate) = (random.below(600), Ratio(1, 20 << random.below(5)));
    match random.below(8) {
        0..4 => Faults { fail_call: Some(call), ..Faults::default() },
        4 => Faults { lost_at: Some(call), ..Faults::default() },
        5 => Faults { fail_calls: call..call + 2 + random.below(6), ..Faults::default() },
        _ => Faults { device: rate, disk: rate, ..Faults::default() },
    }
}

impl Run {
    fn new(world: World, mut random: Random, faults: bool) -> Self {
        let mut config = StagedConfig::new(1 << 30);
        config.bucket_bytes = 1024 << random.below(4);
        let disk = random.chance(HALF).then(|| world.disk());
        if disk.is_some() && random.chance(HALF) {
            // Room for a few copies: the others go to the disk.
            config.host_bytes = 16_384 << random.below(3);
        }
        let mover = Staged::new(&config, world.device(), disk);
        let prefetch = usize::try_from(random.below(4)).unwrap_or(1);
        let engine = Engine::new(Config { prefetch }, mover);
        let layers = (0..2 + random.below(7)).map(|layer| format!("h.{layer}")).collect();
        let stream = world.stream("the user's copies");
        let stubborn = random.chance(HALF);
        let manager = Manager::new(engine);
        let (passes, values, errors, tolerant) = (0, 0, 0, faults);
        Self {
            world,
            manager,
            random,
            layers,
            stream,
            passes,
            values,
            faults,
            tolerant,
            stubborn,
            errors,
        }
    }

    fn one_in(&mut self, many: u32) -> bool {
        self.random.chance(Ratio(1, many))
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random.below(limit as u64)).unwrap_or(0)
    }

    fn play(&mut self) -> Result<(), String> {
        self.declare()?;
        for _ in 0..3 {
            match self.step() {
                Ok(()) => {}
                Err(Stop::Planned(_)) => self.manager.abort_all(),
                Err(Stop::Failed(_)) => {
                    self.manager.abort_all();
                    self.world.heal();
                    if self.world.is_lost() {
                        return Ok(());
                    }
                    self.tolerant = false;
                }
                Err(Stop::Wrong(report)) => return Err(report),
            }
            self.nothing_is_left()?;
        }
        Ok(())
    }

    /// Pairs of neighbours in any order make the chain.
    fn declare(&mut self) -> Result<(), String> {
        let mut pairs: Vec<usize> = (1..self.layers.len()).collect();
        while !pairs.is_empty() {
            let at = self.below(pairs.len());
            let second = pairs.swap_remove(at);
            let (first, second) = (&self.layers[second - 1], &self.layers[second]);
            let _ = self.manager.follow(first, second).map_err(|error| text(&error))?;
        }
        Ok(())
    }

    fn flight(&mut self) -> Flight {
        self.passes += 1;
        let mut items = Vec::new();
        for layer in 0..self.layers.len() {
            let uses = if self.one_in(4) { 2 + self.below(2) } else { 1 };
            items.extend((0..uses).map(|_| Item::Layer(layer)));
            if self.one_in(6) {
                items.push(Item::Stage(self.random.below(STAGES)));
            }
        }
        if self.layers.len() > 2 && self.one_in(4) {
            // The layers run once more, as in a recurrent network.
            items.extend_from_within(..);
        }
        Flight { pass: Pass(self.passes), items, next: 0, uses: Vec::new() }
    }

    fn step(&mut self) -> Played {
        let order = [Order::Alternating, Order::LastFirst, Order::Mixed][self.below(3)];
        let (mut left, most) = (1 + self.below(5), 1 + self.below(4));
        let mut flights: Vec<Flight> = Vec::new();
        while left > 0 || !flights.is_empty() {
            let wait = order == Order::Mixed && !flights.is_empty() && self.one_in(2);
            let at = if left > 0 && !wait && (order == Order::LastFirst || flights.len() < most) {
                left -= 1;
                let flight = self.flight();
                flights.push(flight);
                flights.len() - 1
            } else {
                match order {
                    Order::Alternating => 0,
                    Order::LastFirst => flights.len() - 1,
                    Order::Mixed => self.below(flights.len()),
                }
            };
            let forward = flights[at].is_forward();
            while !flights[at].is_over() && flights[at].is_forward() == forward {
                self.beside(&mut flights)?;
                self.go_on(&mut flights[at])?;
                if order == Order::Mixed {
                    break;
                }
            }
            if flights[at].is_over() || self.one_in(60) {
                let flight = flights.remove(at);
                self.abort(&flight);
            }
        }
        Ok(())
    }

    /// What happens now and then between two items of any pass: evaluation, the step's end.
    fn beside(&mut self, flights: &mut [Flight]) -> Played {
        if self.one_in(15) {
            let mut evaluation = self.flight();
            for _ in 0..self.below(2 * evaluation.items.len()) {
                self.go_on(&mut evaluation)?;
            }
            self.abort(&evaluation);
        }
        if self.one_in(150) && !flights.is_empty() {
            return Err(Stop::Planned(false));
        }
        Ok(())
    }

    /// Forgets all groups of one pass.
    fn abort(&mut self, flight: &Flight) {
        self.manager.begin_pass(flight.pass);
        for layer in 0..self.layers.len() {
            let group = self.group(layer);
            self.manager.abort(&group);
        }
        (0..STAGES).for_each(|stage| self.manager.abort(&stage_name(stage)));
    }

    fn group(&self, layer: usize) -> String {
        self.manager.chain().group(&self.layers[layer]).unwrap_or_default().to_owned()
    }

    fn go_on(&mut self, flight: &mut Flight) -> Played {
        self.manager.begin_pass(flight.pass);
        if flight.is_forward() {
            let item = flight.items[flight.next];
            flight.next += 1;
            return match item {
                Item::Layer(layer) => self.layer(layer, flight),
                Item::Stage(stage) => self.stage(stage, flight),
            };
        }
        let Some(used) = flight.uses.pop() else { return Ok(()) };
        self.backward(&used)?;
        for value in &used.values {
            self.world.check(&value.storage, 0..value.bytes, value.seed);
        }
        if flight.uses.is_empty() {
            self.manager.engine().finish_backward();
        }
        Ok(())
    }

    fn stop(&mut self, call: &str, error: impl std::error::Error) -> Stop {
        self.errors += 1;
        let mut what = format!("{call}: {error}");
        let mut cause = error.source();
        while let Some(next) = cause {
            what = format!("{what}: {next}");
            cause = next.source();
        }
        if self.tolerant { Stop::Failed(what) } else { Stop::Wrong(what) }
    }

    fn nothing_is_left(&mut self) -> Result<(), String> {
        if let Some(report) = self.world.reports().first() {
            return Err(report.to_string());
        }
        let groups = self.manager.active_groups();
        let engine = self.manager.engine();
        let (held, stats) = (engine.store_stats().bytes_held, self.world.stats());
        let in_use = engine.mover_mut().pool_stats(PoolId(0)).map_or(0, |pool| pool.in_use);
        let left = (groups, held, in_use);
        let world = (stats.device_now, stats.disk_now);
        if left != (0, 0, 0) || (!self.faults && world != (0, 0)) {
            return Err(format!("after a step: groups, held, in use {left:?}; world {world:?}"));
        }
        Ok(())
    }
}

fn stage_name(stage: u64) -> String {
    format!("stage {stage}")
}
