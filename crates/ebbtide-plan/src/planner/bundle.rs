//! Fewer storages: those of a layer that live alike are decided together.
//!
//! With many layers it matters little which storage of a layer moves, only how many bytes do. So a
//! group of like storages becomes at most three bundles of a half and two quarters of its bytes, and
//! a model of 1,000 layers with 20 storages each is as cheap to search as one with 4.

use std::cmp::Reverse;
use std::collections::HashMap;

use ebbtide_sim::predict::{Choice, Layer, Model, Storage};

/// Parts that the bytes of a group are divided into.
const SHARES: [u64; 3] = [2, 1, 1];

/// A smaller model, and how to come back from it.
#[derive(Clone, Debug)]
pub(crate) struct Bundled {
    pub(crate) model: Model,
    /// By storage of the original, numbered through all layers: its bundle.
    bundle_of: Vec<usize>,
}

impl Bundled {
    pub(crate) fn new(original: &Model) -> Self {
        let mut model = original.clone();
        let mut bundle_of = Vec::new();
        let mut first = 0;
        for layer in &mut model.layers {
            let places = bundle(layer);
            bundle_of.extend(places.into_iter().map(|place| first + place));
            first += layer.storages.len();
        }
        Self { model, bundle_of }
    }

    /// What a choice for the bundles means for the storages.
    pub(crate) fn unbundle(&self, choice: &Choice) -> Choice {
        let swap = self.bundle_of.iter().map(|&bundle| choice.swap[bundle]).collect();
        Choice { swap, ..choice.clone() }
    }
}

/// Replaces a layer's storages by bundles. By storage: its bundle.
fn bundle(layer: &mut Layer) -> Vec<usize> {
    let storages = std::mem::take(&mut layer.storages);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known = HashMap::new();
    for (at, storage) in storages.iter().enumerate() {
        let Storage { last_forward, backward, recomputable, read_by, .. } = storage;
        let key = (*last_forward, *backward, *recomputable, read_by.clone());
        let group = *known.entry(key).or_insert(groups.len());
        if group == groups.len() {
            groups.push(Vec::new());
        }
        groups[group].push(at);
    }
    let mut bundles: Vec<Vec<usize>> =
        groups.into_iter().flat_map(|group| divide(&storages, group)).collect();
    // Copies start in the order of storages; that stays as it was, as far as it can.
    bundles.sort_by_key(|members| members.iter().min().copied());
    let mut places = vec![0; storages.len()];
    for members in bundles {
        for &at in &members {
            places[at] = layer.storages.len();
        }
        layer.storages.push(joined(&storages, &members));
    }
    places
}

/// The largest first, each to where most is missing.
fn divide(storages: &[Storage], mut group: Vec<usize>) -> Vec<Vec<usize>> {
    let never_moves =
        group.iter().all(|&at| storages[at].backward.is_none() && storages[at].read_by.is_empty());
    if never_moves {
        return vec![group];
    }
    if group.len() <= SHARES.len() {
        return group.into_iter().map(|at| vec![at]).collect();
    }
    group.sort_by_key(|&at| (Reverse(storages[at].bytes), at));
    let total: u64 = group.iter().map(|&at| storages[at].bytes).sum();
    let parts: u64 = SHARES.iter().sum();
    let mut missing = SHARES.map(|share| i128::from(total) * i128::from(share) / i128::from(parts));
    let mut bundles = vec![Vec::new(); SHARES.len()];
    for at in group {
        let most = (0..SHARES.len()).max_by_key(|&bundle| (missing[bundle], Reverse(bundle)));
        let bundle = most.expect("there are shares");
        missing[bundle] -= i128::from(storages[at].bytes);
        bundles[bundle].push(at);
    }
    bundles.retain(|bundle| !bundle.is_empty());
    bundles
}

fn joined(storages: &[Storage], members: &[usize]) -> Storage {
    let first = &storages[members[0]];
    let bytes = members.iter().map(|&at| storages[at].bytes).sum();
    let pieces = members.iter().map(|&at| storages[at].pieces.max(1)).sum();
    Storage { bytes, pieces, ..first.clone() }
}
