//! The search for a plan.

mod anneal;
mod branch;
mod bundle;
mod descent;
mod fast;
mod floor;
mod no_plan;
mod paths;
mod price_search;
mod prices;
mod range;
mod search;
mod slack;
mod space;

pub use no_plan::NoPlan;
pub use range::{Range, range};

use ebbtide_core::Plan;
use ebbtide_sim::predict::{Choice, Model, Prediction, predict};

use branch::{Proof, branch};
use bundle::Bundled;
use fast::{Effort, GAP, search_all, search_pure};
use search::Search;
use space::Means;

/// How to search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Solver {
    /// Within about one percent of the best, in milliseconds.
    #[default]
    Fast,
    /// The same, searching so many times longer.
    Longer(u32),
    /// The best within 0.2 %, proven where the proof ends in time: up to about 12 layers. Of
    /// storages that live alike in a layer at most three parts are told apart.
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
    /// No plan is faster than this, in nanoseconds, as far as was proved.
    pub bound_ns: u64,
    /// The plan is within 0.2 % of the best.
    pub proven: bool,
}

/// How many plays the exact search may take: about half a minute for a dozen layers, and what it
/// takes to come to an end up to eight.
fn plays_of_exact(model: &Model) -> u64 {
    // A play, and what is computed between two, takes as long as there are layers and storages.
    let storages: usize = model.layers.iter().map(|layer| layer.storages.len()).sum();
    match model.layers.len() {
        0..=8 => 60_000_000,
        9..=12 => 10_000_000,
        layers => (10_000_000 * 48 / (storages.max(48) * layers) as u64).max(1000),
    }
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
    plan_from(model, budget, solver, None)
}

/// The same, where another plan is known that is not to be worse.
pub(crate) fn plan_from(
    model: &Model,
    budget: u64,
    solver: Solver,
    known: Option<&Plan>,
) -> Result<Planned, NoPlan> {
    let mut original = Search::new(model, budget, Means::ALL);
    let keep = Choice::keep(model);
    if original.simulator.least(&keep).0 <= budget {
        original.offer(&keep);
        return Ok(finish(original, 0, None));
    }
    let bundled = Bundled::new(model);
    let found = search_bundled(&bundled.model, budget, solver);
    // Bundles are played a little differently from the storages in them: the last word is theirs.
    for choice in &found.choices {
        original.offer(&bundled.unbundle(choice));
    }
    if let Some(known) = known.and_then(|plan| Choice::of(model, plan).ok()) {
        original.offer(&known);
    }
    if original.best.is_none() {
        let least = least_found(model, Means::ALL);
        return Err(NoPlan::new(model, budget, original.simulator.need(&least)));
    }
    Ok(finish(original, found.plays, found.proof))
}

/// What a search came to.
struct Found {
    /// Worth playing on the storages themselves, the best last.
    choices: Vec<Choice>,
    proof: Option<Proof>,
    plays: u64,
}

fn search_bundled(model: &Model, budget: u64, solver: Solver) -> Found {
    let times = if let Solver::Longer(times) = solver { times } else { 1 };
    let effort = Effort::of(model, times);
    let mut search = Search::new(model, budget, Means::ALL);
    let mut choices = vec![floor::floor(&mut search)];
    let mut plays = 0;
    for pure in [Pure::Swap, Pure::Recompute] {
        let (found, pure_plays) = search_pure(model, budget, pure.means(), effort);
        plays += pure_plays;
        if let Some(choice) = found {
            search.offer(&choice);
            choices.push(choice);
        }
        if search.is_ideal() {
            break;
        }
    }
    let mut proof = search_all(&mut search, &choices, effort);
    let is_open = search.best.is_some() && !proof.is_some_and(|proof| proof.closed);
    if solver == Solver::Exact && is_open {
        proof = Some(branch(&mut search, &model.at_best(), GAP, plays_of_exact(model)));
    }
    plays += search.simulator.plays();
    choices.extend(search.best.map(|(_, choice)| choice));
    Found { choices, proof, plays }
}

/// Finds the fastest plan that uses one means alone.
///
/// # Errors
/// No such plan fits; the error names the least that was found.
///
/// # Panics
/// The model has no layer.
pub fn plan_pure(model: &Model, budget: u64, pure: Pure) -> Result<Planned, NoPlan> {
    let mut original = Search::new(model, budget, pure.means());
    original.offer(&Choice::keep(model));
    let mut plays = 0;
    if original.best.is_none() {
        let bundled = Bundled::new(model);
        let effort = Effort::of(&bundled.model, 1);
        let found = search_pure(&bundled.model, budget, pure.means(), effort);
        plays = found.1;
        if let Some(choice) = found.0 {
            original.offer(&bundled.unbundle(&choice));
        }
    }
    if original.best.is_none() {
        let least = least_found(model, pure.means());
        return Err(NoPlan::new(model, budget, original.simulator.need(&least)));
    }
    Ok(finish(original, plays, None))
}

/// The choice that was found to need the least.
pub(crate) fn least_found(model: &Model, means: Means) -> Choice {
    let bundled = Bundled::new(model);
    let least = floor::floor(&mut Search::new(&bundled.model, 0, means));
    bundled.unbundle(&least)
}

impl Pure {
    fn means(self) -> Means {
        Means { swap: self == Self::Swap, recompute: self == Self::Recompute }
    }
}

/// Writes down the best plan of a search on the storages themselves.
fn finish(mut search: Search<'_>, plays: u64, proof: Option<Proof>) -> Planned {
    let ideal = search.is_ideal();
    let (_, choice) = search.best.take().expect("a plan was found");
    let plan = search.simulator.plan(&choice, search.budget).expect("it was played");
    let prediction = predict(search.model, &plan, search.budget).expect("it was played");
    let bound = proof.map_or(search.model.compute_ns() as f64, |proof| proof.bound_ns);
    // Bundles are played a little differently from the storages in them.
    let holds = prediction.step_ns as f64 * (1.0 - GAP) <= bound * (1.0 + GAP / 10.0);
    Planned {
        bound_ns: whole(bound).min(prediction.step_ns),
        proven: ideal || (holds && proof.is_some_and(|proof| proof.closed)),
        plays: plays + search.simulator.plays(),
        budget: search.budget,
        plan,
        prediction,
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive")]
fn whole(ns: f64) -> u64 {
    ns.floor() as u64
}
