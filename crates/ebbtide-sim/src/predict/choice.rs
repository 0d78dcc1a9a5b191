//! A plan as flat arrays, which a search changes and plays millions of times.

use ebbtide_core::{LayerPlan, Op, Plan};

use super::error::Misfit;
use super::model::Model;

/// A plan in arrays. Storages are numbered through all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// By layer: whether it is recomputed.
    pub recompute: Vec<bool>,
    /// By layer: the tier of its swapped storages.
    pub tier: Vec<u8>,
    /// By layer: index of the operation before which its loads don't start; 0 says nothing.
    pub load_at: Vec<u32>,
    /// By storage: whether it is swapped, unless it is recomputed or nobody needs it.
    pub swap: Vec<bool>,
}

impl Choice {
    /// Everything is kept.
    pub fn keep(model: &Model) -> Self {
        let layers = model.layers.len();
        Self {
            recompute: vec![false; layers],
            tier: vec![0; layers],
            load_at: vec![0; layers],
            swap: vec![false; model.storages()],
        }
    }

    /// Reads a plan.
    ///
    /// # Errors
    /// The plan does not fit the model: the count of layers, a storage or a tier that is not there,
    /// a layer that can't be recomputed.
    pub fn of(model: &Model, plan: &Plan) -> Result<Self, Misfit> {
        let (found, wanted) = (plan.layers.len(), model.layers.len());
        if found != wanted {
            return Err(Misfit::Layers { found, wanted });
        }
        let mut choice = Self::keep(model);
        let mut first = 0;
        for (layer, decided) in plan.layers.iter().enumerate() {
            choice.read_layer(model, layer, decided, first)?;
            first += model.layers[layer].storages.len();
        }
        Ok(choice)
    }

    fn read_layer(
        &mut self,
        model: &Model,
        layer: usize,
        decided: &LayerPlan,
        first: usize,
    ) -> Result<(), Misfit> {
        let (storages, tiers) = (model.layers[layer].storages.len(), model.tiers.len());
        let why = model.layers[layer].not_recomputable.as_ref();
        if let (true, Some(why)) = (decided.recompute, why) {
            return Err(Misfit::Recompute { layer, why: why.clone() });
        }
        if !decided.swap.is_empty() && decided.tier >= tiers {
            return Err(Misfit::Tier { layer, tier: decided.tier, tiers });
        }
        for &storage in &decided.swap {
            if storage >= storages {
                return Err(Misfit::Storage { layer, storage, storages });
            }
            self.swap[first + storage] = true;
        }
        self.recompute[layer] = decided.recompute;
        self.tier[layer] = if decided.swap.is_empty() { 0 } else { small_tier(decided.tier) };
        if let Some(op) = decided.load_at {
            if op.layer >= model.layers.len() {
                return Err(Misfit::LoadAt { layer, op });
            }
            self.load_at[layer] = super::residency::small(op.index(model.layers.len()));
        }
        Ok(())
    }

    /// The same plan by layer. Triggers are left open where the choice says nothing of them.
    pub fn plan(&self, model: &Model) -> Plan {
        let mut first = 0;
        let mut layers = Vec::with_capacity(model.layers.len());
        for (at, layer) in model.layers.iter().enumerate() {
            let count = layer.storages.len();
            let swap = (0..count).filter(|s| self.swap[first + s]).collect();
            first += count;
            let load_at = self.load_at[at] as usize;
            layers.push(LayerPlan {
                recompute: self.recompute[at],
                swap,
                tier: usize::from(self.tier[at]),
                load_at: (load_at > 0).then(|| Op::at(load_at, model.layers.len())),
            });
        }
        Plan { layers }
    }
}

fn small_tier(tier: usize) -> u8 {
    u8::try_from(tier).expect("a model has at most 16 tiers")
}
