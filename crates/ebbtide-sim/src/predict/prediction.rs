//! What is told of a play: times, the peak and what makes it, waits, copies.

use ebbtide_core::plan::{Move, Schedule};
use ebbtide_core::{Op, Phase};

use super::choice::Choice;
use super::machine::Machine;
use super::residency::{Fate, recompute_op};
use super::watch::{Step, Watch, Way};

/// Why a storage is on the device at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The operation cannot do without it, or the plan keeps it.
    Resident,
    /// It is on its way out.
    Leaving,
    /// It was loaded ahead of its use.
    Prefetched,
}

/// A storage on the device at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The layer that made it.
    pub layer: usize,
    /// Its index among that layer's storages.
    pub storage: usize,
    /// Its bytes.
    pub bytes: u64,
    /// Why it is there.
    pub why: Why,
}

/// The most bytes that are in use at one moment, and what they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// All of them.
    pub bytes: u64,
    /// The operation that runs then.
    pub op: Op,
    /// What is on the device all the time.
    pub static_bytes: u64,
    /// What the operation itself needs.
    pub workspace: u64,
    /// The storages, the largest first.
    pub storages: Vec<Held>,
}

/// How long the operations of a layer were held back, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// For bytes to come home.
    pub load_ns: u64,
    /// For bytes to leave.
    pub memory_ns: u64,
}

/// One direction of a tier in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// Bytes copied.
    pub bytes: u64,
    /// How long it copied, in nanoseconds.
    pub busy_ns: u64,
    /// How long of that compute ran.
    pub hidden_ns: u64,
    /// How long of that compute waited.
    pub exposed_ns: u64,
}

/// A tier in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUse {
    /// From the device.
    pub out: LinkUse,
    /// To the device.
    pub back: LinkUse,
}

/// What a plan is predicted to come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// The whole step, in nanoseconds, rounded up.
    pub step_ns: u64,
    /// The operations alone, recompute among them, in nanoseconds.
    pub compute_ns: u64,
    /// What is computed a second time, in nanoseconds.
    pub recompute_ns: u64,
    /// The most bytes of the device in use at one moment.
    pub peak_bytes: u64,
    /// The moment, and what is on the device then.
    pub peak: Need,
    /// By layer.
    pub waits: Vec<Waits>,
    /// By tier.
    pub tiers: Vec<TierUse>,
    /// What an executor follows.
    pub schedule: Schedule,
}

impl Prediction {
    /// All waits together.
    pub fn waits_in_all(&self) -> Waits {
        // On a hopeless link each of them may be as long as can be told.
        let sum =
            |part: fn(&Waits) -> u64| self.waits.iter().map(part).fold(0, u64::saturating_add);
        Waits { load_ns: sum(|w| w.load_ns), memory_ns: sum(|w| w.memory_ns) }
    }

    /// Index of the earliest operation at which a load of this layer may start, if it has any.
    pub fn first_trigger(&self, layer: usize) -> Option<usize> {
        let here = self.schedule.moves.iter().filter(|moved| moved.layer == layer);
        here.map(|moved| moved.load.trigger).min()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Copied {
    busy: f64,
    hidden: f64,
}

/// Listens to a play and remembers what a [`Prediction`] needs.
#[derive(Debug)]
pub(crate) struct Detail {
    layers: usize,
    /// By storage: the operation that uses it first after it was away.
    first_use: Vec<usize>,
    op: usize,
    since: f64,
    waits: Vec<(f64, f64)>,
    /// By tier: out, back.
    copied: Vec<(Copied, Copied)>,
    /// Storages on their way, and why they count.
    moving: Vec<(usize, Why)>,
    peak: (u64, usize),
    peak_moving: Vec<(usize, Why)>,
}

impl Detail {
    pub(crate) fn new(machine: &Machine<'_>, choice: &Choice) -> Self {
        let layout = &machine.layout;
        let first = |at| layout.fate(at, choice, usize::MAX).1.first as usize;
        Self {
            layers: layout.layers,
            first_use: (0..layout.storages.len()).map(first).collect(),
            op: 0,
            since: 0.0,
            waits: vec![(0.0, 0.0); layout.layers],
            copied: vec![Default::default(); machine.model.tiers.len()],
            moving: Vec::new(),
            peak: (0, 0),
            peak_moving: Vec::new(),
        }
    }

    fn level(&mut self, bytes: u64) {
        if bytes > self.peak.0 {
            self.peak = (bytes, self.op);
            self.peak_moving.clone_from(&self.moving);
        }
    }

    fn waiting(&mut self) -> &mut (f64, f64) {
        &mut self.waits[Op::at(self.op, self.layers).layer]
    }

    pub(crate) fn finish(self, machine: &Machine<'_>, choice: &Choice, step_ns: f64) -> Prediction {
        let compute_ns = machine.compute_ns(choice);
        let waits = self.waits.iter();
        let waits =
            waits.map(|&(load, memory)| Waits { load_ns: whole(load), memory_ns: whole(memory) });
        let mut peak = need_of(machine, choice, self.peak.0, self.peak.1);
        let layout = &machine.layout;
        let moving = self.peak_moving.iter().map(|&(at, why)| held(layout, at, why));
        peak.storages.extend(moving);
        sort(&mut peak.storages);
        let schedule = schedule_of(machine, choice, machine.budget());
        Prediction {
            step_ns: whole(step_ns.ceil()),
            compute_ns,
            recompute_ns: compute_ns - layout.compute_ns,
            peak_bytes: self.peak.0,
            peak,
            waits: waits.collect(),
            tiers: tiers(&self.copied, &schedule),
            schedule,
        }
    }
}

impl Watch for Detail {
    fn step(&mut self, now: f64, bytes: u64, step: Step) {
        match step {
            Step::Reached(op) => {
                (self.op, self.since) = (op, now);
                let first_use = &self.first_use;
                self.moving.retain(|&(at, why)| why != Why::Prefetched || first_use[at] > op);
            }
            Step::Entered(_) => {
                self.waiting().1 += now - self.since;
                self.since = now;
                self.level(bytes);
            }
            Step::Started(_) => self.waiting().0 += now - self.since,
            Step::OutQueued(at) => self.moving.push((at, Why::Leaving)),
            Step::OutDone(at) => self.moving.retain(|&(other, _)| other != at),
            Step::BackStarted(at) => {
                if self.first_use[at] > self.op {
                    self.moving.push((at, Why::Prefetched));
                }
                self.level(bytes);
            }
            Step::Ended(_) | Step::BackDone(_) => {}
        }
    }

    fn copied(&mut self, tier: usize, way: Way, ns: f64, hidden: bool) {
        let (out, back) = &mut self.copied[tier];
        let copied = if way == Way::Out { out } else { back };
        copied.busy += ns;
        copied.hidden += if hidden { ns } else { 0.0 };
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive")]
fn whole(ns: f64) -> u64 {
    ns.round() as u64
}

fn tiers(copied: &[(Copied, Copied)], schedule: &Schedule) -> Vec<TierUse> {
    let link = |copied: &Copied, bytes: u64| {
        let (busy_ns, hidden_ns) = (whole(copied.busy), whole(copied.hidden));
        LinkUse { bytes, busy_ns, hidden_ns, exposed_ns: busy_ns.saturating_sub(hidden_ns) }
    };
    let mut tiers = Vec::with_capacity(copied.len());
    for (at, (out, back)) in copied.iter().enumerate() {
        let moves = schedule.moves.iter().filter(|moved| moved.load.channel == at);
        let bytes = moves.map(|moved| moved.load.bytes).sum();
        tiers.push(TierUse { out: link(out, bytes), back: link(back, bytes) });
    }
    tiers
}

pub(crate) fn schedule_of(machine: &Machine<'_>, choice: &Choice, budget: u64) -> Schedule {
    let layout = &machine.layout;
    let moves = machine.settled.moving.iter().zip(&machine.loads).map(|(moving, load)| {
        let storage = moving.storage as usize;
        let flat = &layout.storages[storage];
        let layer = flat.layer as usize;
        Move {
            layer,
            storage: storage - layout.of_layer[layer].start,
            leave_after: flat.last_forward as usize,
            load: *load,
        }
    });
    Schedule {
        budget,
        minimal: machine.settled.minimal.clone(),
        recompute: choice.recompute.clone(),
        moves: moves.collect(),
    }
}

fn held(layout: &super::residency::Layout, at: usize, why: Why) -> Held {
    let flat = &layout.storages[at];
    let layer = flat.layer as usize;
    Held { layer, storage: at - layout.of_layer[layer].start, bytes: flat.bytes, why }
}

fn sort(storages: &mut [Held]) {
    storages.sort_by_key(|held| (std::cmp::Reverse(held.bytes), held.layer, held.storage));
}

/// What is resident at an operation.
pub(crate) fn need_of(machine: &Machine<'_>, choice: &Choice, bytes: u64, op: usize) -> Need {
    let layout = &machine.layout;
    let mut storages = Vec::new();
    for (at, flat) in layout.storages.iter().enumerate() {
        let (fate, uses) = layout.fate(at, choice, usize::MAX);
        let back_from = match fate {
            Fate::Dead => usize::MAX,
            Fate::Kept => 0,
            Fate::Recomputed => recompute_op(layout.layers, flat.layer as usize),
            Fate::Swapped | Fate::Undecided => uses.first as usize,
        };
        let in_forward = (flat.layer as usize..=flat.last_forward as usize).contains(&op);
        let later = op > flat.last_forward as usize && op >= back_from && op <= uses.last as usize;
        if in_forward || later {
            storages.push(held(layout, at, Why::Resident));
        }
    }
    sort(&mut storages);
    let op = Op::at(op, layout.layers);
    let each = &machine.model.layers[op.layer].workspace;
    let workspace = match op.phase {
        Phase::Forward => each.forward,
        Phase::Recompute if choice.recompute[op.layer] => each.recompute,
        Phase::Recompute => 0,
        Phase::Backward => each.backward,
    };
    Need { bytes, op, static_bytes: machine.model.static_bytes, workspace, storages }
}
