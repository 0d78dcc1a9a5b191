//! What can be decided, layer by layer.

use std::ops::Range;

use ebbtide_sim::predict::{Choice, Model};

/// Which means a plan may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Means {
    pub(crate) swap: bool,
    pub(crate) recompute: bool,
}

impl Means {
    pub(crate) const ALL: Self = Self { swap: true, recompute: true };
}

/// One way to treat a layer. Bits of `mask` are the layer's movable bundles, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) recompute: bool,
    pub(crate) mask: u32,
    pub(crate) tier: u8,
}

/// What can be decided for one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerSpace {
    /// Storages that somebody may need after forward, numbered through all layers.
    pub(crate) movable: Vec<usize>,
    /// Those of `movable` that recomputing the layer makes anew, unless a reader needs them earlier.
    pub(crate) made_anew: u32,
    pub(crate) recomputable: bool,
    /// Every way, or a choice of them if there are very many. The first keeps everything.
    pub(crate) ways: Vec<Way>,
}

/// What can be decided for a model.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    pub(crate) layers: Vec<LayerSpace>,
    pub(crate) means: Means,
    tiers: u8,
}

/// Up to so many bundles, a layer's ways are all subsets of them.
const ALL_SUBSETS: usize = 5;
/// A mask has no more bits.
const MAX_MOVABLE: usize = 32;

impl Space {
    pub(crate) fn new(model: &Model, means: Means) -> Self {
        let tiers = u8::try_from(model.tiers.len()).expect("a model has at most 16 tiers");
        let mut layers = Vec::with_capacity(model.layers.len());
        let mut first = 0;
        for at in 0..model.layers.len() {
            let count = model.layers[at].storages.len();
            layers.push(layer(model, at, first..first + count, means));
            first += count;
        }
        Self { layers, means, tiers }
    }

    /// Number of tiers that can be used.
    pub(crate) fn tiers(&self) -> u8 {
        if self.means.swap { self.tiers } else { 0 }
    }

    /// Decides a layer. What the layer can't do is left out.
    pub(crate) fn set(&self, choice: &mut Choice, layer: usize, way: Way) {
        let space = &self.layers[layer];
        choice.recompute[layer] = way.recompute && space.recomputable;
        choice.tier[layer] = way.tier.min(self.tiers().saturating_sub(1));
        let skip = if choice.recompute[layer] { space.made_anew } else { 0 };
        for (bit, &storage) in space.movable.iter().enumerate() {
            choice.swap[storage] = self.tiers() > 0 && (way.mask & !skip) >> bit & 1 == 1;
        }
    }

    /// What was decided for a layer.
    pub(crate) fn way(&self, choice: &Choice, layer: usize) -> Way {
        let bits = self.layers[layer].movable.iter().enumerate();
        let mask = bits.filter(|(_, storage)| choice.swap[**storage]).map(|(bit, _)| 1 << bit);
        Way { recompute: choice.recompute[layer], mask: mask.sum(), tier: choice.tier[layer] }
    }

    /// Everything that may move does, to the first tier.
    pub(crate) fn swap_all(&self, model: &Model) -> Choice {
        let mut choice = Choice::keep(model);
        for layer in 0..self.layers.len() {
            self.set(&mut choice, layer, Way { mask: u32::MAX, ..Way::default() });
        }
        choice
    }
}

fn layer(model: &Model, at: usize, range: Range<usize>, means: Means) -> LayerSpace {
    let layer = &model.layers[at];
    let mut movable = Vec::new();
    let mut made_anew = 0;
    for (number, storage) in range.zip(&layer.storages) {
        let may_be_needed = storage.backward.is_some() || !storage.read_by.is_empty();
        if !may_be_needed || movable.len() == MAX_MOVABLE {
            continue;
        }
        let own = storage.backward.is_some_and(|(first, _)| first == at);
        if storage.recomputable && own && storage.read_by.is_empty() {
            made_anew |= 1 << movable.len();
        }
        movable.push(number);
    }
    let recomputable = means.recompute && layer.not_recomputable.is_none();
    let tiers = if means.swap { model.tiers.len() } else { 0 };
    let ways = ways(movable.len(), made_anew, recomputable, tiers);
    LayerSpace { movable, made_anew, recomputable, ways }
}

fn ways(movable: usize, made_anew: u32, recomputable: bool, tiers: usize) -> Vec<Way> {
    let mut ways = Vec::new();
    for recompute in [false, true] {
        if recompute && !recomputable {
            continue;
        }
        for mask in masks(movable, if recompute { made_anew } else { 0 }) {
            let tiers = if mask == 0 { 1 } else { tiers };
            let tiers = u8::try_from(tiers).expect("a model has at most 16 tiers");
            ways.extend((0..tiers).map(|tier| Way { recompute, mask, tier }));
        }
    }
    ways
}

/// Subsets of so many bundles that have nothing of `without`.
fn masks(movable: usize, without: u32) -> Vec<u32> {
    let all = if movable == MAX_MOVABLE { u32::MAX } else { (1 << movable) - 1 } & !without;
    if movable <= ALL_SUBSETS {
        return (0..=all).filter(|mask| mask & !all == 0).collect();
    }
    let singles = (0..movable).map(|bit| 1u32 << bit);
    let growing = (1..movable).map(|bits| (1u32 << bits) - 1);
    let mut masks: Vec<u32> = singles.chain(growing).chain([all]).map(|mask| mask & all).collect();
    masks.push(0);
    masks.sort_unstable();
    masks.dedup();
    masks
}
