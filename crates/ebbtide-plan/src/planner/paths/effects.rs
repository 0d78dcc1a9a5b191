//! What the ways of a layer free and cost, and the cheapest mixtures of them.

use ebbtide_sim::predict::{Link, Storage, Tier};

use crate::planner::search::Search;
use crate::planner::space::Way;

use super::mean::Mean;

/// What a way of a layer frees at a tight operation at most, and what it costs at least.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Effect {
    /// Bytes that are recomputed, gone for certain.
    pub(super) anew: f64,
    /// Bytes that are swapped, gone once they are copied.
    pub(super) swapped: f64,
    recompute_ns: f64,
    /// Copying in what is moved for certain, weighted over tiers.
    back_ns: f64,
    /// The recompute comes at or behind the tight operation.
    behind: bool,
}

impl Effect {
    /// What is paid for the way of a layer, whatever else happens.
    pub(super) fn sunk(&self, mean: &Mean) -> f64 {
        let again = if self.behind { mean.compute_behind() } else { mean.compute_before() };
        again * self.recompute_ns + mean.all_back * self.back_ns
    }
}

pub(super) fn effect(search: &Search<'_>, op: usize, layer: usize, way: Way) -> Effect {
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
        effect.back_ns += copies(search, storage, usize::from(way.tier)).1;
        if is_there && op < use_op(first) {
            effect.swapped += bytes;
        }
    }
    effect
}

/// The best speed of a link, in bytes a second.
pub(super) fn rate(link: &Link) -> f64 {
    link.bytes_per_s.max(link.bytes_per_s_busy)
}

/// Nanoseconds out and back at the best speed, weighted by the share of a tier in all speed.
pub(super) fn copies(search: &Search<'_>, storage: &Storage, tier: usize) -> (f64, f64) {
    let tiers = &search.model.tiers;
    let share = |of: fn(&Tier) -> f64| of(&tiers[tier]) / tiers.iter().map(of).sum::<f64>();
    let at = &tiers[tier];
    let best = |link: &Link| {
        let (bytes, pieces) = (storage.bytes, storage.pieces.max(1));
        link.alone_ns(bytes, pieces).min(link.busy_ns(bytes, pieces))
    };
    (best(&at.out) * share(|tier| rate(&tier.out)), best(&at.back) * share(|tier| rate(&tier.back)))
}

/// Bytes that a layer can free, and what each of them costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) price: f64,
    pub(super) bytes: f64,
    pub(super) layer: usize,
}

/// By layer, what each further byte costs if the cheapest mixture of ways is taken: the lower hull.
/// `copy_ns` is what it costs to copy a byte; without it, only ways that copy nothing.
pub(super) fn items(effects: &[Vec<Effect>], mean: &Mean, copy_ns: Option<f64>) -> Vec<Item> {
    let mut items = Vec::new();
    for (layer, effects) in effects.iter().enumerate() {
        let allowed = effects.iter().filter(|effect| copy_ns.is_some() || effect.swapped == 0.0);
        let points = allowed.map(|effect| {
            let cost = effect.sunk(mean) + copy_ns.unwrap_or(0.0) * effect.swapped;
            (effect.anew + effect.swapped, cost)
        });
        let mut points: Vec<(f64, f64)> = points.collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut at = (0.0, 0.0);
        while let Some(next) = flattest(&points, at) {
            let (bytes, cost) = (next.0 - at.0, next.1 - at.1);
            items.push(Item { price: cost / bytes, bytes, layer });
            at = next;
        }
    }
    items.sort_by(|a, b| a.price.total_cmp(&b.price).then(a.layer.cmp(&b.layer)));
    items
}

/// The point behind `from` with the least slope; the farthest of those.
fn flattest(points: &[(f64, f64)], from: (f64, f64)) -> Option<(f64, f64)> {
    let slope = |point: &(f64, f64)| (point.1 - from.1) / (point.0 - from.0);
    let behind = points.iter().filter(|point| point.0 > from.0);
    let best = behind.min_by(|a, b| slope(a).total_cmp(&slope(b)).then(b.0.total_cmp(&a.0)));
    best.copied()
}
