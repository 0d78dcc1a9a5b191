//! Why a plan can't be played.

use std::fmt;

use ebbtide_core::{Op, size};

/// A plan that does not belong to a model, or that a budget can't hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// It has another number of layers.
    Layers {
        /// Of the plan.
        found: usize,
        /// Of the model.
        wanted: usize,
    },
    /// It swaps a storage that the layer does not have.
    Storage {
        /// The layer.
        layer: usize,
        /// The storage's index.
        storage: usize,
        /// How many the layer has.
        storages: usize,
    },
    /// It names a tier that the machine does not have.
    Tier {
        /// The layer.
        layer: usize,
        /// The tier's index.
        tier: usize,
        /// How many the machine has.
        tiers: usize,
    },
    /// It recomputes a layer that can't be.
    Recompute {
        /// The layer.
        layer: usize,
        /// Why it can't be.
        why: String,
    },
    /// It waits for an operation that the step does not have.
    LoadAt {
        /// The layer whose loads wait.
        layer: usize,
        /// The operation.
        op: Op,
    },
    /// An operation needs more than the budget, whatever the speeds.
    Budget {
        /// In bytes.
        budget: u64,
        /// In bytes.
        needed: u64,
        /// The operation.
        op: Op,
    },
    /// More is swapped to a tier than it can hold.
    Capacity {
        /// The tier's name.
        tier: String,
        /// In bytes.
        capacity: u64,
        /// In bytes.
        needed: u64,
    },
}

impl Misfit {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Budget { .. } => "raise the budget to what is needed, or plan again for this one",
            Self::Capacity { .. } => "swap less, or name a tier with more room",
            _ => "make a plan from a trace of this model",
        }
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers { found, wanted } => {
                write!(f, "the plan has {found} layers, the model has {wanted}")
            }
            Self::Storage { layer, storage, storages } => {
                write!(f, "layer {layer} has {storages} storages, the plan swaps number {storage}")
            }
            Self::Tier { layer, tier, tiers } => {
                write!(f, "layer {layer} goes to tier {tier}, the machine has {tiers}")
            }
            Self::Recompute { layer, why } => write!(f, "layer {layer} can't be recomputed: {why}"),
            Self::LoadAt { layer, op } => {
                write!(f, "layer {layer} loads at {op}, which the step does not have")
            }
            Self::Budget { budget, needed, op } => {
                let (needed, budget) = (size::format_up(*needed), size::format(*budget));
                write!(f, "the plan needs {needed} at {op}, the budget is {budget}")
            }
            Self::Capacity { tier, capacity, needed } => {
                let (needed, capacity) = (size::format_up(*needed), size::format(*capacity));
                write!(f, "{needed} are swapped to tier {tier}, which holds {capacity}")
            }
        }
    }
}

impl std::error::Error for Misfit {}
