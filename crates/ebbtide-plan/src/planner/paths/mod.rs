//! Bounds from paths: what must happen one after the other, for any plan that fits.
//!
//! Some operation needs more than the budget if everything is kept, by so many bytes. They must be
//! gone by then, and each way to treat a layer frees some of them at a price. Three paths through the
//! step grow with these prices:
//!
//! 1. all computing, with what is recomputed;
//! 2. the first forward, then copying out what must have left by the tight operation, then
//!    everything from that operation on;
//! 3. all forwards but the last, then copying in whatever was copied out, then the last backward.
//!
//! A step is no shorter than any mean of the three. For each mean the cheapest mixture of ways that
//! frees enough bytes is a knapsack, relaxed to fractions, whose items are sorted once.
//!
//! What is decided for the first layers says more: how long the link stands still before the copies
//! of the others, and what is left to compute after the last load.

mod effects;
mod mean;
mod prefix;

use std::ops::Range;

use ebbtide_core::{Op, Phase};
use ebbtide_sim::predict::Choice;

use super::search::Search;
use effects::{Effect, Item, effect, items, rate};
use mean::Mean;
use prefix::{Prefix, Queued, queued};

/// One tight operation.
struct Tight {
    /// Bytes that must be gone by then.
    excess: f64,
    /// By layer and way.
    effects: Vec<Vec<Effect>>,
    /// By mean: what layers free, the cheapest for each byte first.
    items: Vec<Vec<Item>>,
    /// The same without copies.
    without_copies: Vec<Vec<Item>>,
    /// By mean: what it costs to copy a byte out.
    copy_ns: Vec<f64>,
    /// Computing before the operation and from there on, without what is recomputed.
    compute: (f64, f64),
    /// When the first copy out may begin.
    first_out: f64,
    /// The path of everything that is copied in, without the copies.
    all_back: f64,
}

/// The bounds of one model and budget.
pub(crate) struct Paths {
    tight: Vec<Tight>,
    /// By layer and way, if there is one tier: with more of them a link may stand still for good.
    queued: Option<Vec<Vec<Queued>>>,
    /// By layer, in nanoseconds.
    forward: Vec<f64>,
    backward: Vec<f64>,
    means: Vec<Mean>,
    fixed_ns: f64,
}

impl Paths {
    pub(crate) fn new(search: &mut Search<'_>) -> Self {
        let model = search.model;
        let layers = model.layers.len();
        let (_, worst) = search.simulator.least(&Choice::keep(model));
        let minimal = search.simulator.minimal().to_vec();
        let mut ops = vec![worst, layers - 1, layers + 1];
        ops.sort_unstable();
        ops.dedup();
        let tight = ops.into_iter().filter(|&op| minimal[op] > search.budget);
        let means = Mean::all();
        let tight = tight.map(|op| Tight::new(search, op, minimal[op] - search.budget, &means));
        Self {
            tight: tight.collect(),
            queued: (model.tiers.len() == 1).then(|| queued(search)),
            forward: model.layers.iter().map(|layer| layer.ns.forward as f64).collect(),
            backward: model.layers.iter().map(|layer| layer.ns.backward as f64).collect(),
            fixed_ns: model.fixed_ns as f64,
            means,
        }
    }

    /// A time in nanoseconds that no plan beats which decides the first layers in these ways, as
    /// indices into theirs; infinite if none fits. What is at least `enough` need not be exact.
    pub(crate) fn bound(&self, decided: &[usize], enough: f64) -> f64 {
        let prefix = self
            .queued
            .as_ref()
            .map(|queued| Prefix::new(decided, queued, &self.forward, &self.backward));
        let mut most: f64 = 0.0;
        for tight in &self.tight {
            for (at, mean) in self.means.iter().enumerate() {
                most = most.max(self.fixed_ns + tight.bound(decided, at, mean, prefix));
                if most >= enough {
                    return most;
                }
            }
        }
        most
    }
}

/// What is spent on decided layers, and the bytes that must still go.
#[derive(Clone, Copy)]
struct Open {
    cost: f64,
    missing: f64,
    decided: usize,
}

impl Tight {
    fn new(search: &Search<'_>, op: usize, excess: u64, means: &[Mean]) -> Self {
        let model = search.model;
        let layers = model.layers.len();
        let of_layer = |layer: usize| {
            let ways = &search.space.layers[layer].ways;
            ways.iter().map(|way| effect(search, op, layer, *way)).collect()
        };
        let effects: Vec<Vec<Effect>> = (0..layers).map(of_layer).collect();
        let out = per_byte(model.tiers.iter().map(|tier| rate(&tier.out)).sum());
        let copy_ns: Vec<f64> = means.iter().map(|mean| mean.out() * out).collect();
        let with = means.iter().zip(&copy_ns).map(|(mean, ns)| items(&effects, mean, Some(*ns)));
        Self {
            excess: excess as f64,
            items: with.collect(),
            without_copies: means.iter().map(|mean| items(&effects, mean, None)).collect(),
            effects,
            copy_ns,
            compute: (sum(search, 0..op), sum(search, op..3 * layers)),
            first_out: if op == 0 { 0.0 } else { ns(search, 0) },
            all_back: sum(search, 0..layers - 1) + ns(search, 3 * layers - 1),
        }
    }

    fn bound(&self, decided: &[usize], at: usize, mean: &Mean, prefix: Option<Prefix>) -> f64 {
        let behind_load = prefix.map_or(0.0, |prefix| prefix.behind_last_load);
        let mut cost = mean.compute_before() * self.compute.0
            + mean.out() * self.first_out
            + mean.compute_behind() * self.compute.1
            + mean.all_back * (self.all_back + behind_load);
        let (mut missing, mut swapped) = (self.excess, 0.0);
        for (layer, &way) in decided.iter().enumerate() {
            let effect = &self.effects[layer][way];
            missing -= effect.anew;
            swapped += effect.swapped;
            cost += effect.sunk(mean);
        }
        let open = Open { cost, missing, decided: decided.len() };
        let own = Item { price: self.copy_ns[at], bytes: swapped, layer: 0 };
        let any = open.cheapest(&self.items[at], Some(own));
        let Some(prefix) = prefix.filter(|_| missing > swapped && mean.out() > 0.0) else {
            return any;
        };
        // More must go than what is decided. Either some of the others is copied, behind that, or
        // none is. In the first case all copies of what is decided are over by then, too.
        let later = mean.out() * (prefix.link_free - self.first_out).max(0.0);
        let behind = Open { cost: cost + later, missing: missing - swapped, ..open };
        let copied = behind.cheapest(&self.items[at], None);
        let none = open.cheapest(&self.without_copies[at], Some(own));
        any.max(copied.min(none))
    }
}

/// Nanoseconds for a byte at so many bytes a second.
fn per_byte(rate: f64) -> f64 {
    if rate > 0.0 { 1e9 / rate } else { 0.0 }
}

impl Open {
    /// What it costs at least to free what is missing, with items of layers that are not decided,
    /// and with copies of those that are, as far as they have to be complete; infinite if it can't
    /// be freed.
    fn cheapest(mut self, items: &[Item], mut own: Option<Item>) -> f64 {
        for item in items {
            if self.missing <= 0.0 {
                return self.cost;
            }
            if own.is_some_and(|own| own.price <= item.price) {
                own.take().into_iter().for_each(|own| self.take(own));
            }
            if item.layer >= self.decided {
                self.take(*item);
            }
        }
        if let Some(own) = own {
            self.take(own);
        }
        // Sums of bytes are exact far beyond any machine.
        if self.missing > 0.5 { f64::INFINITY } else { self.cost }
    }

    fn take(&mut self, item: Item) {
        self.cost += item.price * item.bytes.min(self.missing.max(0.0));
        self.missing -= item.bytes;
    }
}

fn sum(search: &Search<'_>, ops: Range<usize>) -> f64 {
    ops.map(|op| ns(search, op)).sum()
}

/// How long an operation takes that every plan has.
fn ns(search: &Search<'_>, op: usize) -> f64 {
    let op = Op::at(op, search.model.layers.len());
    let ns = &search.model.layers[op.layer].ns;
    match op.phase {
        Phase::Forward => ns.forward as f64,
        Phase::Recompute => 0.0,
        Phase::Backward => ns.backward as f64,
    }
}

#[cfg(test)]
mod tests {
    use ebbtide_sim::Random;

    use super::*;
    use crate::planner::bundle::Bundled;
    use crate::planner::space::Means;
    use crate::synthetic::{Kind, of_kind};

    /// Random ways of all layers: however many of them are decided, no bound is above the time that
    /// they take together, nor above that of any other way that begins like them.
    #[test]
    fn no_plan_beats_a_bound() {
        let mut played = 0;
        for seed in 0..300u64 {
            let mut random = Random::new(seed);
            let kind = Kind::ALL[(seed % 5) as usize];
            let ratio = [0.2, 1.0, 2.0, 5.0][(seed % 4) as usize];
            let layers = 3 + (seed % 6) as usize;
            let model =
                of_kind(kind, layers, 1 + (seed % 3) as usize, ratio, seed).unwrap().model();
            let mut model = Bundled::new(&model).model;
            if seed % 7 == 3 {
                let mut second = model.tiers[0].clone();
                second.out.bytes_per_s /= 2.0;
                model.tiers.push(second);
            }
            let mut search = Search::new(&model, 0, Means::ALL);
            let least = search.simulator.least(&search.space.swap_all(&model)).0;
            let most = search.simulator.least(&Choice::keep(&model)).0;
            search.budget = least + (most - least) * random.below(90) / 100;
            let paths = Paths::new(&mut search);
            let mut choice = Choice::keep(&model);
            for _ in 0..300 {
                let mut ways = Vec::new();
                for layer in 0..layers {
                    let all = &search.space.layers[layer].ways;
                    let way = usize::try_from(random.below(all.len() as u64)).unwrap();
                    let way = if random.below(2) == 0 { all.len() / 2 - 1 } else { way };
                    search.space.set(&mut choice, layer, all[way]);
                    ways.push(way);
                }
                let budget = search.budget;
                let Some(ns) = search.simulator.time(&choice, budget, f64::INFINITY) else {
                    continue;
                };
                played += 1;
                for decided in 0..=layers {
                    let bound = paths.bound(&ways[..decided], f64::INFINITY);
                    let about = format!("seed {seed}, {decided} decided");
                    assert!(bound <= ns * (1.0 + 1e-9), "{about}: {bound} above {ns}");
                }
            }
        }
        assert!(played > 10_000, "{played}");
    }
}
