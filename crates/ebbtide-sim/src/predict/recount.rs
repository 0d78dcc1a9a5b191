//! For tests: a second way to count.
//!
//! It looks at what is on the device at each moment of a play, and knows nothing of minimal bytes,
//! triggers and gates, nor of how the simulator tells what becomes of a storage.

use std::collections::HashSet;

use ebbtide_core::{Op, Phase, Plan};

use super::{Model, Step, Storage, timeline};

/// Plays a plan within a budget in bytes and counts it again. The most bytes that were on the device
/// at one moment come back; `None` if the plan can't be played.
///
/// # Panics
/// The play breaks a promise: it is over the budget, reads what is not there, moves what it must not,
/// or leaves something behind.
pub fn recount(model: &Model, plan: &Plan, budget: u64) -> Option<u64> {
    let steps = timeline(model, plan, budget).ok()?;
    let mut count = Count::new(model, plan);
    let mut last = 0.0;
    for (now, step) in steps {
        assert!(now >= last, "time goes on");
        last = now;
        count.step(step);
    }
    assert!(count.present.is_empty() && count.loading.is_empty(), "something is left");
    assert!(count.peak <= budget, "{} of {budget} bytes", count.peak);
    Some(count.peak)
}

/// What an operation reads of what was made before it; what lies between a first and a last
/// backward use is there, too.
fn reads(model: &Model, op: Op, at: usize, storage: &Storage) -> bool {
    match op.phase {
        Phase::Forward | Phase::Recompute => storage.read_by.contains(&op.layer),
        Phase::Backward => storage.backward.is_some_and(|(first, last)| {
            (last..=first).contains(&op.layer) && at < model.layers.len()
        }),
    }
}

/// What is on the device at one moment.
struct Count<'a> {
    model: &'a Model,
    plan: &'a Plan,
    /// (layer, storage), in the order of the numbers in a timeline.
    all: Vec<(usize, usize)>,
    present: HashSet<usize>,
    leaving: HashSet<usize>,
    loading: HashSet<usize>,
    workspace: u64,
    running: bool,
    peak: u64,
}

impl<'a> Count<'a> {
    fn new(model: &'a Model, plan: &'a Plan) -> Self {
        let layers = model.layers.iter().enumerate();
        let all = layers.flat_map(|(at, layer)| (0..layer.storages.len()).map(move |s| (at, s)));
        Self {
            model,
            plan,
            all: all.collect(),
            present: HashSet::new(),
            leaving: HashSet::new(),
            loading: HashSet::new(),
            workspace: 0,
            running: false,
            peak: 0,
        }
    }

    fn op(&self, index: usize) -> Op {
        Op::at(index, self.model.layers.len())
    }

    fn storage(&self, number: usize) -> (usize, &'a Storage) {
        let (layer, at) = self.all[number];
        (layer, &self.model.layers[layer].storages[at])
    }

    /// Whether an operation after `op` reads a storage.
    fn is_read_later(&self, number: usize, op: usize) -> bool {
        let (layer, storage) = self.storage(number);
        let behind = op + 1..3 * self.model.layers.len();
        behind.into_iter().map(|index| self.op(index)).any(|op| {
            let takes_place = op.phase != Phase::Recompute || self.plan.layers[op.layer].recompute;
            takes_place && reads(self.model, op, layer, storage)
        })
    }

    /// Made again by its layer, since its first use after forward is that layer's backward.
    fn is_made_again(&self, number: usize) -> bool {
        let (layer, storage) = self.storage(number);
        let made_again = Op::new(Phase::Recompute, layer).index(self.model.layers.len());
        let between = self.model.layers.len()..made_again;
        let earlier = between.into_iter().any(|index| {
            let op = self.op(index);
            let takes_place = op.phase != Phase::Recompute || self.plan.layers[op.layer].recompute;
            takes_place && reads(self.model, op, layer, storage)
        });
        self.plan.layers[layer].recompute && storage.recomputable && !earlier
    }

    fn enter(&mut self, index: usize) {
        let op = self.op(index);
        let workspace = &self.model.layers[op.layer].workspace;
        self.workspace = match op.phase {
            Phase::Forward => workspace.forward,
            Phase::Recompute => workspace.recompute,
            Phase::Backward => workspace.backward,
        };
        for number in 0..self.all.len() {
            let made_here = self.storage(number).0 == op.layer;
            let made = match op.phase {
                Phase::Forward => made_here,
                Phase::Recompute => {
                    made_here && self.is_made_again(number) && self.is_read_later(number, index)
                }
                Phase::Backward => false,
            };
            if made {
                assert!(self.present.insert(number), "made twice");
            }
        }
    }

    fn start(&mut self, index: usize) {
        assert!(!self.running, "one operation at a time");
        self.running = true;
        let op = self.op(index);
        for number in 0..self.all.len() {
            let (layer, storage) = self.storage(number);
            if reads(self.model, op, layer, storage) {
                let there = self.present.contains(&number) && !self.loading.contains(&number);
                assert!(there, "{op} reads storage {number} of layer {layer}, which is away");
            }
        }
    }

    fn end(&mut self, index: usize) {
        self.running = false;
        self.workspace = 0;
        for number in 0..self.all.len() {
            let (_, storage) = self.storage(number);
            if index < storage.last_forward || !self.present.contains(&number) {
                continue;
            }
            let swapped = self.is_swapped(number);
            let left_forward = index == storage.last_forward;
            let unused = !self.is_read_later(number, index);
            let dropped = left_forward && self.is_made_again(number);
            if unused || dropped {
                self.present.remove(&number);
            } else if left_forward && swapped {
                self.leaving.insert(number);
            }
        }
    }

    fn is_swapped(&self, number: usize) -> bool {
        let (layer, at) = self.all[number];
        let turn = self.model.layers.len() - 1;
        let needed = self.is_read_later(number, turn);
        self.plan.layers[layer].swap.contains(&at) && needed && !self.is_made_again(number)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Entered(op) => self.enter(op),
            Step::Started(op) => self.start(op),
            Step::Ended(op) => self.end(op),
            Step::OutDone(number) => {
                assert!(self.leaving.remove(&number) && self.present.remove(&number));
            }
            Step::BackStarted(number) => {
                assert!(!self.leaving.contains(&number) && self.loading.insert(number));
                assert!(self.present.insert(number), "loaded what is there");
            }
            Step::BackDone(number) => assert!(self.loading.remove(&number)),
            Step::OutQueued(number) => assert!(self.leaving.contains(&number)),
            Step::Reached(_) => {}
        }
        let storages: u64 = self.present.iter().map(|&number| self.storage(number).1.bytes).sum();
        let bytes = self.model.static_bytes + self.workspace + storages;
        self.peak = self.peak.max(bytes);
    }
}
