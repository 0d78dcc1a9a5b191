//! The budget is below what any plan needs.

use std::fmt;

use ebbtide_core::{Phase, size};
use ebbtide_sim::predict::{Model, Need};

/// No plan fits a budget. The message names the least that was found, rounded up, so that a budget
/// of as much as is printed can be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoPlan {
    /// In bytes.
    pub budget: u64,
    /// The least that was found: bytes, the operation that needs them, and what they are.
    pub least: Need,
    /// The name of the operation's layer.
    pub layer: String,
    /// The largest storages: their layer, their name, their bytes.
    pub storages: Vec<(String, String, u64)>,
}

/// How many storages the message names.
const NAMED: usize = 3;

impl NoPlan {
    pub(crate) fn new(model: &Model, budget: u64, least: Need) -> Self {
        let layer = model.layers[least.op.layer].name.clone();
        let storages = least.storages.iter().map(|held| {
            let layer = &model.layers[held.layer];
            (layer.name.clone(), layer.storages[held.storage].name.clone(), held.bytes)
        });
        let storages = storages.collect();
        Self { budget, least, layer, storages }
    }

    /// What can be done about it.
    pub fn hint(&self) -> String {
        format!("give at least {}, or make the batch smaller", size::format_up(self.least.bytes))
    }
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (budget, least) = (size::format(self.budget), size::format_up(self.least.bytes));
        let op = match self.least.op.phase {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
        };
        write!(f, "no plan fits {budget}: the least found is {least} ({op} of `{}`: ", self.layer)?;
        write!(f, "static {}", size::format(self.least.static_bytes))?;
        if self.least.workspace > 0 {
            write!(f, ", workspace {}", size::format(self.least.workspace))?;
        }
        for (layer, name, bytes) in self.storages.iter().take(NAMED) {
            write!(f, ", `{layer}/{name}` {}", size::format(*bytes))?;
        }
        let rest: u64 = self.storages.iter().skip(NAMED).map(|(_, _, bytes)| bytes).sum();
        if rest > 0 {
            let count = self.storages.len() - NAMED;
            write!(f, ", {count} more {}", size::format(rest))?;
        }
        write!(f, ")")
    }
}

impl std::error::Error for NoPlan {}
