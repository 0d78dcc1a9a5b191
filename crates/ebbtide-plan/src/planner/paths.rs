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

use ebbtide_sim::predict::{Choice, Link, Storage, Tier};

use super::search::Search;
use super::space::Way;

/// Weights of the three paths.
const MEANS: [[f64; 3]; 12] = [
    [1.0, 0.0, 0.0],
    [0.0, 1.0, 0.0],
    [0.0, 0.0, 1.0],
    [0.75, 0.25, 0.0],
    [0.5, 0.5, 0.0],
    [0.25, 0.75, 0.0],
    [0.75, 0.0, 0.25],
    [0.5, 0.0, 0.5],
    [0.25, 0.0, 0.75],
    [0.34, 0.33, 0.33],
    [0.6, 0.2, 0.2],
    [0.0, 0.5, 0.5],
];

/// What a way of a layer frees at a tight operation at most, and what it costs at least.
#[derive(Clone, Copy, Debug, Default)]
struct Effect {
    /// Bytes that are recomputed, gone for certain.
    anew: f64,
    /// Bytes that are swapped, gone once they are copied.
    swapped: f64,
    recompute_ns: f64,
    /// Copying out what is in `swapped`, weighted over tiers.
    out_ns: f64,
    /// Copying in what is moved for certain, weighted over tiers.
    back_ns: f64,
    /// The recompute comes at or behind the tight operation.
    behind: bool,
}

/// One tight operation.
struct Tight {
    /// Bytes that must be gone by then.
    excess: f64,
    /// By layer and way.
    effects: Vec<Vec<Effect>>,
    /// By mean: the layers' items, the cheapest for each byte first: cost, bytes, layer.
    items: Vec<Vec<(f64, f64, usize)>>,
    /// The parts of the paths that don't depend on a plan.
    fixed: [f64; 3],
}

/// The bounds of one model and budget.
pub(crate) struct Paths {
    tight: Vec<Tight>,
    /// The least time to copy a byte out, weighted over tiers.
    out_ns_per_byte: f64,
}

impl Paths {
    pub(crate) fn new(search: &mut Search<'_>) -> Self {
        let model = search.model;
        let layers = model.layers.len();
        let keep = Choice::keep(model);
        let (_, worst) = search.simulator.least(&keep);
        let minimal = search.simulator.minimal().to_vec();
        let mut ops = vec![worst, layers - 1, layers + 1];
        ops.sort_unstable();
        ops.dedup();
        let total: f64 = model.tiers.iter().map(|tier| rate(&tier.out)).sum();
        let tight = ops.into_iter().filter(|&op| minimal[op] > search.budget);
        let tight = tight.map(|op| Tight::new(search, op, minimal[op] - search.budget));
        Self {
            tight: tight.collect(),
            out_ns_per_byte: if total > 0.0 { 1e9 / total } else { 0.0 },
        }
    }

    /// A time in nanoseconds that no plan beats which decides the first layers in these ways;
    /// infinite if none fits.
    pub(crate) fn bound(&self, decided: &[usize], enough: f64) -> f64 {
        let mut most: f64 = 0.0;
        for tight in &self.tight {
            for mean in 0..MEANS.len() {
                most = most.max(tight.bound(decided, mean, self.out_ns_per_byte));
                if most >= enough {
                    return most;
                }
            }
        }
        most
    }
}

/// The best speed of a link, in bytes a second.
fn rate(link: &Link) -> f64 {
    link.bytes_per_s.max(link.bytes_per_s_busy)
}

impl Tight {
    fn new(search: &Search<'_>, op: usize, excess: u64) -> Self {
        let layers = 0..search.model.layers.len();
        let effects: Vec<Vec<Effect>> = layers
            .map(|layer| {
                let ways = &search.space.layers[layer].ways;
                ways.iter().map(|way| effect(search, op, layer, *way)).collect()
            })
            .collect();
        let items = MEANS.iter().map(|mean| items(&effects, *mean)).collect();
        Self { excess: excess as f64, effects, items, fixed: fixed(search, op) }
    }

    fn bound(&self, decided: &[usize], mean: usize, out_ns_per_byte: f64) -> f64 {
        let weights = MEANS[mean];
        let fixed: f64 = weights.iter().zip(self.fixed).map(|(weight, ns)| weight * ns).sum();
        let (mut cost, mut missing, mut swapped) = (fixed, self.excess, 0.0);
        for (layer, &way) in decided.iter().enumerate() {
            let effect = &self.effects[layer][way];
            missing -= effect.anew;
            swapped += effect.swapped;
            cost += effect.sunk(weights);
        }
        // Copies of what is decided, as far as they are needed, beside the items of the others.
        let mut own = Some((weights[1] * out_ns_per_byte, swapped));
        for &(price, bytes, layer) in &self.items[mean] {
            if missing <= 0.0 {
                return cost;
            }
            if let Some((own_price, own_bytes)) = own.filter(|(own_price, _)| *own_price <= price) {
                cost += own_price * own_bytes.min(missing);
                missing -= own_bytes;
                own = None;
            }
            if layer >= decided.len() && missing > 0.0 {
                cost += price * bytes.min(missing);
                missing -= bytes;
            }
        }
        if let Some((price, bytes)) = own.filter(|_| missing > 0.0) {
            cost += price * bytes.min(missing);
            missing -= bytes;
        }
        // Sums of bytes are exact far beyond any machine.
        if missing > 0.5 { f64::INFINITY } else { cost }
    }
}

impl Effect {
    /// What is paid for the way of a layer, whatever else happens.
    fn sunk(&self, weights: [f64; 3]) -> f64 {
        let again = weights[0] + if self.behind { weights[1] } else { 0.0 };
        again * self.recompute_ns + weights[2] * self.back_ns
    }
}

fn effect(search: &Search<'_>, op: usize, layer: usize, way: Way) -> Effect {
    let (model, space) = (search.model, &search.space.layers[layer]);
    let layers = model.layers.len();
    let again = layers + 2 * (layers - 1 - layer);
    let first = search.simulator.storages_of(layer).start;
    let mut effect = Effect { behind: again >= op, ..Effect::default() };
    if way.recompute {
        effect.recompute_ns = model.layers[layer].ns.recompute as f64;
    }
    for (bit, &number) in space.movable.iter().enumerate() {
        let storage = &model.layers[layer].storages[number - first];
        // When nothing is recomputed. With a recompute the first use only comes earlier.
        let Some((first, last)) = storage.backward else { continue };
        let use_op = |layer: usize| layers + 2 * (layers - 1 - layer) + 1;
        let is_there = storage.last_forward < op && op <= use_op(last);
        let bytes = storage.bytes as f64;
        let own = way.recompute && storage.recomputable && first == layer;
        if own {
            effect.anew += if is_there && op < again { bytes } else { 0.0 };
        }
        if own || way.mask >> bit & 1 == 0 {
            continue;
        }
        let (out_ns, back_ns) = copies(search, storage, usize::from(way.tier));
        effect.back_ns += back_ns;
        if is_there && op < use_op(first) {
            effect.swapped += bytes;
            effect.out_ns += out_ns;
        }
    }
    effect
}

/// Nanoseconds out and back at the best speed, weighted by the share of a tier in all speed.
fn copies(search: &Search<'_>, storage: &Storage, tier: usize) -> (f64, f64) {
    let tiers = &search.model.tiers;
    let share = |of: fn(&Tier) -> f64| of(&tiers[tier]) / tiers.iter().map(of).sum::<f64>();
    let at = &tiers[tier];
    let best = |link: &Link| {
        let (bytes, pieces) = (storage.bytes, storage.pieces.max(1));
        link.alone_ns(bytes, pieces).min(link.busy_ns(bytes, pieces))
    };
    (best(&at.out) * share(|tier| rate(&tier.out)), best(&at.back) * share(|tier| rate(&tier.back)))
}

/// The three paths, without what depends on a plan.
fn fixed(search: &Search<'_>, op: usize) -> [f64; 3] {
    let model = search.model;
    let layers = model.layers.len();
    let ns = |at: usize| {
        let op = ebbtide_core::Op::at(at, layers);
        let ns = &model.layers[op.layer].ns;
        match op.phase {
            ebbtide_core::Phase::Forward => ns.forward as f64,
            ebbtide_core::Phase::Recompute => 0.0,
            ebbtide_core::Phase::Backward => ns.backward as f64,
        }
    };
    let sum = |from: usize, to: usize| (from..to).map(ns).sum::<f64>();
    let end = 3 * layers;
    let rest = model.fixed_ns as f64;
    let first_out = if op == 0 { 0.0 } else { ns(0) };
    [rest + sum(0, end), rest + first_out + sum(op, end), rest + sum(0, layers - 1) + ns(end - 1)]
}

/// By layer, what each further byte costs if the cheapest mixture of ways is taken: the lower hull.
fn items(effects: &[Vec<Effect>], weights: [f64; 3]) -> Vec<(f64, f64, usize)> {
    let mut items = Vec::new();
    for (layer, effects) in effects.iter().enumerate() {
        let points = effects.iter().map(|effect| {
            let cost = effect.sunk(weights) + weights[1] * effect.out_ns;
            (effect.anew + effect.swapped, cost)
        });
        let mut points: Vec<(f64, f64)> = points.collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut at = (0.0, 0.0);
        while let Some(next) = flattest(&points, at) {
            items.push(((next.1 - at.1) / (next.0 - at.0), next.0 - at.0, layer));
            at = next;
        }
    }
    items.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.2.cmp(&b.2)));
    items
}

/// The point behind `from` with the least slope; the farthest of those.
fn flattest(points: &[(f64, f64)], from: (f64, f64)) -> Option<(f64, f64)> {
    let slope = |point: &(f64, f64)| (point.1 - from.1) / (point.0 - from.0);
    let behind = points.iter().filter(|point| point.0 > from.0);
    let best = behind.min_by(|a, b| slope(a).total_cmp(&slope(b)).then(b.0.total_cmp(&a.0)));
    best.copied()
}
