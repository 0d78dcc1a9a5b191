//! From names in a file to a plan of a model, or the reason why not.

use ebbtide_core::{LayerPlan, Op, Plan};
use ebbtide_sim::predict::{Choice, Fate, Layer, Model, Simulator};

use super::{BadPlan, PlanError, PlanFile, PlanLine};

impl PlanFile {
    /// The plan, for this model.
    ///
    /// # Errors
    /// It does not fit: another count or other names of layers, storages or tiers that are not
    /// there, a layer that can't be recomputed, or a line that would have no effect.
    pub fn plan(&self, model: &Model) -> Result<Plan, PlanError> {
        let (found, wanted) = (self.layers.len(), model.layers.len());
        if found != wanted {
            return Err(BadPlan::Layers { found, wanted }.into());
        }
        let mut plan = Plan::default();
        for (at, line) in self.layers.iter().enumerate() {
            plan.layers.push(resolve(model, at, line)?);
        }
        have_effect(model, &plan)?;
        Ok(plan)
    }
}

fn resolve(model: &Model, at: usize, line: &PlanLine) -> Result<LayerPlan, BadPlan> {
    let layer = &model.layers[at];
    let name = || layer.name.clone();
    if line.name != layer.name {
        return Err(BadPlan::Name { layer: at, found: line.name.clone(), wanted: name() });
    }
    if let (true, Some(why)) = (line.recompute, &layer.not_recomputable) {
        return Err(BadPlan::NotRecomputable { layer: name(), why: why.clone() });
    }
    if line.swap.is_empty() && (line.tier.is_some() || line.load_at.is_some()) {
        let what = if line.tier.is_some() { "tier" } else { "load_at" };
        let why = "nothing is swapped";
        return Err(BadPlan::NoEffect { layer: name(), what: what.to_owned(), why });
    }
    let load_at = line.load_at.map(Op::from);
    if let Some(op) = load_at.filter(|op| op.layer >= model.layers.len()) {
        let layers = model.layers.len();
        return Err(BadPlan::LoadAt { layer: name(), found: op.layer, layers });
    }
    let swap = storages(layer, line)?;
    let tier = if swap.is_empty() { 0 } else { tier(model, line)? };
    Ok(LayerPlan { recompute: line.recompute, swap, tier, load_at })
}

fn storages(layer: &Layer, line: &PlanLine) -> Result<Vec<usize>, BadPlan> {
    let mut swap = Vec::new();
    for wanted in &line.swap {
        let found = layer.storages.iter().position(|storage| storage.name == *wanted);
        let (layer, storage) = (layer.name.clone(), wanted.clone());
        match found {
            None => return Err(BadPlan::UnknownStorage { layer, storage }),
            Some(at) if swap.contains(&at) => return Err(BadPlan::Twice { layer, storage }),
            Some(at) => swap.push(at),
        }
    }
    swap.sort_unstable();
    Ok(swap)
}

fn tier(model: &Model, line: &PlanLine) -> Result<usize, BadPlan> {
    let at = match &line.tier {
        Some(name) => model.tiers.iter().position(|tier| tier.name == *name),
        None => (!model.tiers.is_empty()).then_some(0),
    };
    at.ok_or_else(|| BadPlan::UnknownTier {
        layer: line.name.clone(),
        tier: line.tier.clone().unwrap_or_default(),
        tiers: model.tiers.iter().map(|tier| tier.name.clone()).collect(),
    })
}

/// A storage that is named and would stay is a mistake of whoever named it.
fn have_effect(model: &Model, plan: &Plan) -> Result<(), BadPlan> {
    let choice = Choice::of(model, plan).expect("names were resolved");
    let simulator = Simulator::new(model);
    for (at, (layer, decided)) in model.layers.iter().zip(&plan.layers).enumerate() {
        for &storage in &decided.swap {
            let fate = simulator.fate(simulator.storages_of(at).start + storage, &choice).0;
            let why = match fate {
                Fate::Dead => "nobody reads it after forward",
                Fate::Recomputed => "it is recomputed",
                _ => continue,
            };
            let what = layer.storages[storage].name.clone();
            return Err(BadPlan::NoEffect { layer: layer.name.clone(), what, why });
        }
    }
    Ok(())
}
