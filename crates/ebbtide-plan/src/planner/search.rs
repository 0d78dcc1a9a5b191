//! What all parts of the search share: the simulator, the budget, the best so far.

use ebbtide_sim::predict::{Choice, Model, Simulator};

use super::space::{Means, Space};

/// A search under way.
pub(crate) struct Search<'m> {
    pub(crate) model: &'m Model,
    pub(crate) simulator: Simulator<'m>,
    pub(crate) space: Space,
    pub(crate) budget: u64,
    /// The best plan, and its time in nanoseconds.
    pub(crate) best: Option<(f64, Choice)>,
    /// No plan is faster than the operations alone.
    ideal_ns: f64,
}

/// Times that differ by less are the same.
pub(crate) const SAME: f64 = 1e-9;

impl<'m> Search<'m> {
    pub(crate) fn new(model: &'m Model, budget: u64, means: Means) -> Self {
        let simulator = Simulator::new(model);
        let ideal_ns = simulator.compute_ns(&Choice::keep(model));
        let space = Space::new(model, means);
        Self { model, simulator, space, budget, best: None, ideal_ns }
    }

    /// The time of the best plan in nanoseconds; infinite if there is none yet.
    pub(crate) fn best_ns(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |(ns, _)| *ns)
    }

    /// Nothing can be better than what was found.
    pub(crate) fn is_ideal(&self) -> bool {
        self.best_ns() <= self.ideal_ns * (1.0 + SAME)
    }

    /// Plays a choice; it becomes the best if it is faster. Whether it did.
    pub(crate) fn offer(&mut self, choice: &Choice) -> bool {
        let bound = self.best_ns() * (1.0 - SAME);
        let found = self.simulator.time(choice, self.budget, bound);
        if let Some(ns) = found {
            self.best = Some((ns, choice.clone()));
        }
        found.is_some()
    }
}
