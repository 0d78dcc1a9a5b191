//! What a plan does with each layer, in bytes.

use ebbtide_core::Op;
use ebbtide_plan::{Model, Plan, Prediction};
use ebbtide_sim::predict::{Choice, Fate, Misfit, Simulator, Waits};

/// One layer under a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerFate {
    pub(crate) name: String,
    pub(crate) recompute: bool,
    /// Bytes that stay from forward to backward.
    pub(crate) kept: u64,
    /// Bytes that are away in between.
    pub(crate) swapped: u64,
    /// Bytes that are made anew.
    pub(crate) recomputed: u64,
    /// Bytes that nobody needs after forward.
    pub(crate) dropped: u64,
    /// The storages that are away, by name.
    pub(crate) swap: Vec<String>,
    /// Where they are.
    pub(crate) tier: Option<String>,
    /// When the first of them may start to come home.
    pub(crate) load_at: Option<Op>,
    pub(crate) waits: Waits,
}

/// What the plan does, layer by layer.
pub(crate) fn of(
    model: &Model,
    plan: &Plan,
    prediction: &Prediction,
) -> Result<Vec<LayerFate>, Misfit> {
    let choice = Choice::of(model, plan)?;
    let simulator = Simulator::new(model);
    let triggers = triggers(model, prediction);
    let layers = (0..model.layers.len()).map(|at| {
        let mut fate = bytes(model, at, &simulator, &choice);
        let decided = &plan.layers[at];
        fate.recompute = decided.recompute;
        if !fate.swap.is_empty() {
            fate.tier = Some(model.tiers[decided.tier].name.clone());
        }
        fate.load_at = triggers[at].map(|op| Op::at(op, model.layers.len()));
        fate.waits = prediction.waits[at];
        fate
    });
    Ok(layers.collect())
}

/// By layer: the earliest operation at which a load of it may start.
fn triggers(model: &Model, prediction: &Prediction) -> Vec<Option<usize>> {
    let mut first: Vec<Option<usize>> = vec![None; model.layers.len()];
    for moved in &prediction.schedule.moves {
        let trigger = moved.load.trigger;
        let first = &mut first[moved.layer];
        *first = Some(first.map_or(trigger, |first| first.min(trigger)));
    }
    first
}

fn bytes(model: &Model, at: usize, simulator: &Simulator<'_>, choice: &Choice) -> LayerFate {
    let layer = &model.layers[at];
    let mut fates = LayerFate { name: layer.name.clone(), ..LayerFate::default() };
    for (storage, number) in layer.storages.iter().zip(simulator.storages_of(at)) {
        let sum = match simulator.fate(number, choice).0 {
            Fate::Dead => &mut fates.dropped,
            Fate::Kept | Fate::Undecided => &mut fates.kept,
            Fate::Recomputed => &mut fates.recomputed,
            Fate::Swapped => {
                fates.swap.push(storage.name.clone());
                &mut fates.swapped
            }
        };
        *sum += storage.bytes;
    }
    fates
}
