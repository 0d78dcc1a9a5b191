//! How long a step takes, over the budget.

use ebbtide_sim::predict::Model;

use crate::planner::{Planned, Pure, Range, Solver, plan_from, plan_pure};

/// A budget, and the step under the best plan of each kind; `None` where none fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// In bytes.
    pub budget: u64,
    /// Any plan, in nanoseconds.
    pub auto_ns: Option<u64>,
    /// Nothing is recomputed, in nanoseconds.
    pub swap_ns: Option<u64>,
    /// Nothing is swapped, in nanoseconds.
    pub recompute_ns: Option<u64>,
}

/// Plans for each of these budgets, in bytes.
///
/// ```
/// use ebbtide_plan::{curve, range, synthetic};
///
/// let model = synthetic::trace(8, 3, 1)?.model();
/// let points = curve(&model, &range(&model).steps(5));
/// assert_eq!(points.len(), 5);
/// // More memory never makes the step slower.
/// assert!(points.windows(2).all(|pair| pair[1].auto_ns <= pair[0].auto_ns));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// The model has no layer.
pub fn curve(model: &Model, budgets: &[u64]) -> Vec<Point> {
    let step = |planned: Planned| planned.prediction.step_ns;
    let mut points = Vec::new();
    let mut last: Option<Planned> = None;
    for &budget in budgets {
        // A plan for less is a plan for more: the curve does not rise where the search is unlucky.
        let known = last.filter(|last| last.budget <= budget);
        let found = plan_from(model, budget, Solver::Fast, known.as_ref().map(|known| &known.plan));
        last = found.ok();
        points.push(Point {
            budget,
            auto_ns: last.as_ref().map(|planned| planned.prediction.step_ns),
            swap_ns: plan_pure(model, budget, Pure::Swap).ok().map(step),
            recompute_ns: plan_pure(model, budget, Pure::Recompute).ok().map(step),
        });
    }
    points
}

impl Range {
    /// So many budgets in equal steps, from the least to the most that makes a difference.
    pub fn steps(&self, count: usize) -> Vec<u64> {
        let last = count.saturating_sub(1).max(1);
        (0..count).map(|at| self.at(at as f64 / last as f64)).collect()
    }
}
