//! What is decided for the first layers says of the link, when there is one tier.

use crate::planner::search::Search;
use crate::planner::space::Way;

use super::effects::copies;

/// What a way of a layer puts on the link for certain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queued {
    /// Copies out that are queued when the layer's forward ends.
    out_ns: f64,
    /// The lowest layer whose backward is the first to need something that comes back.
    needed_by: Option<usize>,
    recompute_ns: f64,
}

/// By layer and way.
pub(super) fn queued(search: &Search<'_>) -> Vec<Vec<Queued>> {
    let layers = search.space.layers.iter().enumerate();
    layers
        .map(|(at, layer)| layer.ways.iter().map(|way| of_way(search, at, *way)).collect())
        .collect()
}

fn of_way(search: &Search<'_>, layer: usize, way: Way) -> Queued {
    let from = &search.model.layers[layer];
    let first = search.simulator.storages_of(layer).start;
    let mut queued = Queued::default();
    if way.recompute {
        queued.recompute_ns = from.ns.recompute as f64;
    }
    for (bit, &number) in search.space.layers[layer].movable.iter().enumerate() {
        let storage = &from.storages[number - first];
        if way.mask >> bit & 1 == 0 {
            continue;
        }
        let own = way.recompute && storage.recomputable;
        let Some((user, _)) = storage.backward.filter(|(user, _)| !(own && *user == layer)) else {
            // It moves only if a reader is recomputed.
            continue;
        };
        queued.needed_by = Some(queued.needed_by.map_or(user, |lowest| lowest.min(user)));
        if storage.last_forward == layer {
            queued.out_ns += copies(search, storage, usize::from(way.tier)).0;
        }
    }
    queued
}

/// What follows from ways of the first layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefix {
    /// When the link out has time for the layers that are not decided.
    pub(super) link_free: f64,
    /// What is computed behind the last load, beside the last backward.
    pub(super) behind_last_load: f64,
}

impl Prefix {
    /// `forward` and `backward` are nanoseconds by layer.
    pub(super) fn new(
        decided: &[usize],
        queued: &[Vec<Queued>],
        forward: &[f64],
        backward: &[f64],
    ) -> Self {
        let (mut now, mut link_free) = (0.0, 0.0f64);
        // Of the loads that count, the last one is for this layer or a higher one: the layers that
        // are not decided have nothing for a lower one.
        let mut lowest = decided.len().min(forward.len() - 1);
        for (layer, &way) in decided.iter().enumerate() {
            let way = &queued[layer][way];
            now += forward[layer];
            if way.out_ns > 0.0 {
                link_free = link_free.max(now) + way.out_ns;
            }
            lowest = lowest.min(way.needed_by.unwrap_or(lowest));
        }
        now += forward.get(decided.len()).copied().unwrap_or(0.0);
        let again =
            |layer: usize| decided.get(layer).map_or(0.0, |&way| queued[layer][way].recompute_ns);
        let behind = (1..=lowest).map(|layer| backward[layer] + again(layer - 1)).sum();
        Self { link_free: link_free.max(now), behind_last_load: behind }
    }
}
