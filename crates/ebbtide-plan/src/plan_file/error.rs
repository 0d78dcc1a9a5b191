//! Why a plan file is refused.

use std::fmt;

use crate::file::FileError;

/// A plan that can't be used.
#[derive(Debug)]
pub enum PlanError {
    /// It is no plan at all.
    File(FileError),
    /// It does not fit the model.
    Bad(BadPlan),
}

/// What does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadPlan {
    /// The count of layers.
    Layers {
        /// Of the plan.
        found: usize,
        /// Of the model.
        wanted: usize,
    },
    /// A layer's name.
    Name {
        /// The layer, from 0.
        layer: usize,
        /// In the plan.
        found: String,
        /// In the model.
        wanted: String,
    },
    /// A layer swaps a storage that it does not have.
    UnknownStorage {
        /// The layer's name.
        layer: String,
        /// The storage.
        storage: String,
    },
    /// A storage is named twice.
    Twice {
        /// The layer's name.
        layer: String,
        /// The storage.
        storage: String,
    },
    /// A tier that the machine does not have.
    UnknownTier {
        /// The layer's name.
        layer: String,
        /// The tier; empty if none was named and there is none.
        tier: String,
        /// Those that there are.
        tiers: Vec<String>,
    },
    /// A layer that can't be recomputed.
    NotRecomputable {
        /// The layer's name.
        layer: String,
        /// Why.
        why: String,
    },
    /// A storage is to be swapped, and would not move.
    NoEffect {
        /// The layer's name.
        layer: String,
        /// The storage, or the key.
        what: String,
        /// Why it would not.
        why: &'static str,
    },
    /// An operation that the step does not have.
    LoadAt {
        /// The layer's name.
        layer: String,
        /// The operation's layer.
        found: usize,
        /// How many layers there are.
        layers: usize,
    },
}

impl PlanError {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::File(error) => error.hint(),
            Self::Bad(BadPlan::Layers { .. } | BadPlan::Name { .. }) => {
                "this is a plan of another model: plan again with `ebbtide plan`"
            }
            Self::Bad(BadPlan::UnknownStorage { .. }) => {
                "the names of a layer's storages are in the trace"
            }
            Self::Bad(BadPlan::UnknownTier { .. }) => "name a tier of the trace",
            Self::Bad(_) => "correct this line of the plan",
        }
    }
}

impl fmt::Display for BadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers { found, wanted } => write!(f, "{found} layers, the model has {wanted}"),
            Self::Name { layer, found, wanted } => {
                write!(f, "layer {layer} is `{found}`, in the model it is `{wanted}`")
            }
            Self::UnknownStorage { layer, storage } => {
                write!(f, "layer `{layer}` has no storage `{storage}`")
            }
            Self::Twice { layer, storage } => {
                write!(f, "layer `{layer}` names storage `{storage}` twice")
            }
            Self::UnknownTier { layer, tier, tiers } => {
                let there = if tiers.is_empty() { "none".to_owned() } else { tiers.join(", ") };
                write!(f, "layer `{layer}` goes to tier `{tier}`; tiers there are: {there}")
            }
            Self::NotRecomputable { layer, why } => {
                write!(f, "layer `{layer}` can't be recomputed: {why}")
            }
            Self::NoEffect { layer, what, why } => {
                write!(f, "layer `{layer}`: `{what}` has no effect, {why}")
            }
            Self::LoadAt { layer, found, layers } => {
                write!(f, "layer `{layer}` loads at layer {found}, there are {layers} from 0")
            }
        }
    }
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Bad(bad) => write!(f, "the plan does not fit the model: {bad}"),
        }
    }
}

impl std::error::Error for PlanError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File(error) => Some(error),
            Self::Bad(_) => None,
        }
    }
}

impl From<FileError> for PlanError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

impl From<BadPlan> for PlanError {
    fn from(bad: BadPlan) -> Self {
        Self::Bad(bad)
    }
}
