//! Plays a choice: one compute stream, two queues for each tier, and the byte gates of the core.
//!
//! A play depends on nothing but its input. Copies run at one speed while something is computed and
//! at another while compute waits; computing is slower while something is copied. So whenever one
//! of them begins or stops, what is under way is stretched.

use ebbtide_core::gate::{Gate, Load, set_triggers};

use super::choice::Choice;
use super::lane::Lane;
use super::model::Model;
use super::residency::{Layout, Settled, small};
use super::watch::{Step, Watch, Way};

/// What a play came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Played {
    /// It takes this long, in nanoseconds.
    Took(f64),
    /// It takes at least as long as the bound.
    TooSlow,
    /// An operation needs more bytes than the budget has.
    TooLarge { needed: u64, op: usize },
    /// More bytes go to a tier than it holds.
    TooFull { tier: usize, needed: u64 },
}

/// Plays choices on one model. It keeps its memory, so that a play allocates nothing.
#[derive(Clone, Debug)]
pub(crate) struct Machine<'m> {
    pub(crate) model: &'m Model,
    pub(crate) layout: Layout,
    pub(crate) settled: Settled,
    gate: Gate,
    lanes: Vec<Lane>,
    /// By storage: whether its offload is complete.
    away: Vec<bool>,
    pub(crate) loads: Vec<Load>,
    scratch: Vec<u64>,
    now: f64,
    computing: bool,
    /// When the running operation ends; infinite if none runs.
    compute_end: f64,
    /// How long a nanosecond of computing takes now.
    slow: f64,
    /// Whether copies slow down computing on any tier.
    slows: bool,
    /// Loads take no room: for bounds, see [`Optimist`](super::Optimist).
    pub(crate) optimist: bool,
}

impl<'m> Machine<'m> {
    pub(crate) fn new(model: &'m Model) -> Self {
        let layout = Layout::new(model);
        let lanes = model.tiers.iter().map(|tier| Lane::new(tier, &layout.storages));
        Self {
            model,
            lanes: lanes.collect(),
            settled: Settled::default(),
            gate: Gate::default(),
            layout,
            away: Vec::new(),
            loads: Vec::new(),
            scratch: Vec::new(),
            now: 0.0,
            computing: false,
            compute_end: f64::INFINITY,
            slow: 1.0,
            slows: model.tiers.iter().any(|tier| tier.slowdown_permille != 1000),
            optimist: false,
        }
    }

    /// Plays a choice, with layers from `decided` on left open, until it is over or takes at least
    /// `bound` nanoseconds.
    pub(crate) fn play<W: Watch>(
        &mut self,
        choice: &Choice,
        budget: u64,
        bound: f64,
        decided: usize,
        watch: &mut W,
    ) -> Played {
        if let Err(refused) = self.prepare(choice, budget, decided) {
            return refused;
        }
        self.rewind();
        let mut left = self.compute_ns(choice) as f64;
        let layers = self.layout.layers;
        for op in 0..3 * layers {
            let Some(ns) = self.duration(choice, op) else { continue };
            if self.now + left >= bound {
                return Played::TooSlow;
            }
            self.gate.reach(op);
            self.tell(watch, Step::Reached(op));
            let stuck = self.wait_for_room(watch).or_else(|| self.wait_for_loads(op, watch));
            if let Some(stuck) = stuck {
                return stuck;
            }
            self.compute(op, ns, watch);
            left -= ns;
            if op < layers {
                self.release(op, watch);
            }
        }
        Played::Took(self.now + self.model.fixed_ns as f64)
    }

    /// Everything that comes before time: residency, whether it fits, triggers.
    pub(crate) fn prepare(
        &mut self,
        choice: &Choice,
        budget: u64,
        decided: usize,
    ) -> Result<(), Played> {
        let (needed, op) = self.settled.settle(&self.layout, choice, decided);
        if needed > budget {
            return Err(Played::TooLarge { needed, op });
        }
        self.check_tiers(choice)?;
        self.settled.order(&self.layout);
        self.loads.clear();
        if self.optimist {
            self.loads_of_an_optimist(budget, decided);
        } else {
            self.loads.extend(self.settled.moving.iter().map(|moving| moving.load));
            set_triggers(&self.settled.minimal, budget, &mut self.loads, &mut self.scratch);
        }
        let minimal = &self.settled.minimal;
        self.gate.restart(budget, |bytes| bytes.clone_from(minimal));
        self.queue(choice);
        Ok(())
    }

    /// Each load as if it were alone. One that a layer still to be decided may need earlier is left
    /// out, since that would change the order.
    fn loads_of_an_optimist(&mut self, budget: u64, decided: usize) {
        let layout = &self.layout;
        self.settled.moving.retain(|moving| !layout.is_open(moving.storage as usize, decided));
        for moving in &self.settled.moving {
            let mut load = moving.load;
            let room = budget.saturating_sub(load.bytes);
            let low = load.earliest.min(load.first_use);
            let fits = |&op: &usize| self.settled.minimal[op - 1] <= room;
            let ops = (low + 1..=load.first_use).rev().take_while(fits);
            load.trigger = load.first_use - ops.count();
            self.loads.push(load);
        }
    }

    /// The budget of the last play, in bytes.
    pub(crate) fn budget(&self) -> u64 {
        self.gate.budget()
    }

    /// All that is swapped to a tier must fit it at once: at the turn nearly all of it is there.
    pub(crate) fn check_tiers(&self, choice: &Choice) -> Result<(), Played> {
        for (at, tier) in self.model.tiers.iter().enumerate() {
            let Some(capacity) = tier.capacity else { continue };
            let needed = self.settled.swapped(&self.layout, choice, at);
            if needed > capacity {
                return Err(Played::TooFull { tier: at, needed });
            }
        }
        Ok(())
    }

    fn queue(&mut self, choice: &Choice) {
        self.lanes.iter_mut().for_each(Lane::clear);
        for &storage in &self.layout.leaving {
            if self.settled.moves[storage as usize] {
                let layer = self.layout.storages[storage as usize].layer as usize;
                self.lanes[usize::from(choice.tier[layer])].out.items.push(storage);
            }
        }
        for (at, load) in self.loads.iter().enumerate() {
            self.lanes[load.channel].back.items.push(small(at));
        }
    }

    fn rewind(&mut self) {
        self.away.clear();
        self.away.resize(self.layout.storages.len(), false);
        (self.now, self.computing, self.compute_end, self.slow) = (0.0, false, f64::INFINITY, 1.0);
    }

    /// What the operations take alone, in nanoseconds, with the fixed part of a step.
    pub(crate) fn compute_ns(&self, choice: &Choice) -> u64 {
        let again = self.model.layers.iter().zip(&choice.recompute);
        let again: u64 = again.filter(|(_, on)| **on).map(|(layer, _)| layer.ns.recompute).sum();
        self.layout.compute_ns + again
    }

    /// How long an operation takes alone; `None` if it does not take place.
    fn duration(&self, choice: &Choice, op: usize) -> Option<f64> {
        let layers = self.layout.layers;
        if op < layers {
            return Some(self.model.layers[op].ns.forward as f64);
        }
        let layer = layers - 1 - (op - layers) / 2;
        let ns = &self.model.layers[layer].ns;
        if (op - layers) % 2 == 1 {
            return Some(ns.backward as f64);
        }
        choice.recompute[layer].then_some(ns.recompute as f64)
    }

    fn wait_for_room<W: Watch>(&mut self, watch: &mut W) -> Option<Played> {
        if !self.gate.may_start() {
            self.set_computing(false);
            while !self.gate.may_start() {
                if !self.next_copy(f64::INFINITY, watch) {
                    return Some(stuck());
                }
            }
        }
        self.tell(watch, Step::Entered(self.gate.op()));
        None
    }

    fn wait_for_loads<W: Watch>(&mut self, op: usize, watch: &mut W) -> Option<Played> {
        self.start_loads(watch);
        if self.has_loads(op) {
            return None;
        }
        self.set_computing(false);
        while !self.has_loads(op) {
            if !self.next_copy(f64::INFINITY, watch) {
                return Some(stuck());
            }
        }
        None
    }

    /// Whether every load that this operation needs is complete.
    fn has_loads(&self, op: usize) -> bool {
        let open = |lane: &Lane| lane.back.head().is_some_and(|at| self.loads[at].first_use <= op);
        !self.lanes.iter().any(open)
    }

    fn compute<W: Watch>(&mut self, op: usize, ns: f64, watch: &mut W) {
        self.tell(watch, Step::Started(op));
        self.compute_end = self.now + ns * self.slow;
        self.set_computing(true);
        while self.next_copy(self.compute_end, watch) {}
        self.advance(self.compute_end, watch);
        self.compute_end = f64::INFINITY;
        self.tell(watch, Step::Ended(op));
    }

    /// Compute begins or pauses.
    fn set_computing(&mut self, computing: bool) {
        if self.computing != computing {
            self.computing = computing;
            let now = self.now;
            self.lanes.iter_mut().for_each(|lane| lane.stretch(now, computing));
        }
    }

    /// The copies of storages that this operation read for the last time may begin.
    fn release<W: Watch>(&mut self, op: usize, watch: &mut W) {
        for at in 0..self.lanes.len() {
            let queue = &mut self.lanes[at].out;
            while let Some(&item) = queue.items.get(queue.released) {
                let storage = &self.layout.storages[item as usize];
                if storage.last_forward as usize != op {
                    break;
                }
                queue.released += 1;
                self.gate.offload_pending(storage.bytes);
                if W::ON {
                    watch.step(self.now, self.gate.bytes(), Step::OutQueued(item as usize));
                }
            }
            self.start_out(at);
        }
        self.set_slow();
    }

    fn start_out(&mut self, at: usize) {
        let (lane, tier) = (&mut self.lanes[at], &self.model.tiers[at]);
        if lane.out_is_free(tier) {
            let Some(storage) = lane.out.head() else { return };
            let copy = lane.copies[storage].0;
            lane.out.start(self.now, self.computing, copy);
        }
    }

    fn start_loads<W: Watch>(&mut self, watch: &mut W) {
        for at in 0..self.lanes.len() {
            let (lane, tier) = (&mut self.lanes[at], &self.model.tiers[at]);
            let Some(head) = lane.back.head() else { continue };
            if !lane.back_is_free(tier) {
                continue;
            }
            let (load, moving) = (&self.loads[head], &self.settled.moving[head]);
            let storage = moving.storage as usize;
            let reached = load.trigger <= self.gate.op();
            let may = if self.optimist { reached } else { self.gate.may_load(load) };
            if !self.away[storage] || !may {
                continue;
            }
            if !self.optimist {
                self.gate.load_started(load);
            }
            let copy = lane.copies[storage].1;
            lane.back.start(self.now, self.computing, copy);
            self.tell(watch, Step::BackStarted(storage));
        }
        self.set_slow();
    }

    /// Goes on to the end of the copy that ends first, if it ends by `until`.
    fn next_copy<W: Watch>(&mut self, until: f64, watch: &mut W) -> bool {
        let mut first = (f64::INFINITY, 0, Way::Out);
        for (at, lane) in self.lanes.iter().enumerate() {
            if lane.out.end < first.0 {
                first = (lane.out.end, at, Way::Out);
            }
            if lane.back.end < first.0 {
                first = (lane.back.end, at, Way::Back);
            }
        }
        let (end, at, way) = first;
        if end > until || end == f64::INFINITY {
            return false;
        }
        self.advance(end, watch);
        match way {
            Way::Out => self.finish_out(at, watch),
            Way::Back => self.finish_back(at, watch),
        }
        self.start_out(at);
        self.start_loads(watch);
        true
    }

    fn finish_out<W: Watch>(&mut self, at: usize, watch: &mut W) {
        let storage = self.lanes[at].out.finish();
        self.away[storage] = true;
        self.gate.offload_done(self.layout.storages[storage].bytes);
        self.tell(watch, Step::OutDone(storage));
    }

    fn finish_back<W: Watch>(&mut self, at: usize, watch: &mut W) {
        let head = self.lanes[at].back.finish();
        self.tell(watch, Step::BackDone(self.settled.moving[head].storage as usize));
    }

    fn advance<W: Watch>(&mut self, to: f64, watch: &mut W) {
        if W::ON {
            let ns = to - self.now;
            for (at, lane) in self.lanes.iter().enumerate() {
                if lane.out.runs() {
                    watch.copied(at, Way::Out, ns, self.computing);
                }
                if lane.back.runs() {
                    watch.copied(at, Way::Back, ns, self.computing);
                }
            }
        }
        self.now = to;
    }

    /// Copies began or stopped: what is left of the running operation takes longer or shorter.
    fn set_slow(&mut self) {
        if !self.slows {
            return;
        }
        let running = self.lanes.iter().zip(&self.model.tiers).filter(|(lane, _)| lane.runs());
        let slow = running.map(|(_, tier)| f64::from(tier.slowdown_permille) / 1000.0);
        let slow = slow.fold(1.0, f64::max);
        if self.compute_end < f64::INFINITY {
            self.compute_end = self.now + (self.compute_end - self.now) * slow / self.slow;
        }
        self.slow = slow;
    }

    fn tell<W: Watch>(&self, watch: &mut W, step: Step) {
        if W::ON {
            watch.step(self.now, self.gate.bytes(), step);
        }
    }
}

/// Cannot happen: see the contract of the gates. A plan that would is at least never chosen.
fn stuck() -> Played {
    debug_assert!(false, "a step waits for nothing");
    Played::Took(f64::INFINITY)
}
