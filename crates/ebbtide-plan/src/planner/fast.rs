//! The fast search: prices, annealing, descent, and a short branch and bound for small models.
//!
//! Its effort is counted in plays, not in seconds, so that the same model and budget give the same
//! plan on any machine and under any load.

use ebbtide_sim::predict::{Choice, Model};

use super::anneal::{Schedule, anneal};
use super::branch::{Proof, branch};
use super::descent::{descend, descend_pairs};
use super::floor::floor;
use super::price_search::price_search;
use super::search::Search;
use super::space::Means;

/// How much to search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    evaluations: usize,
    tries: u64,
    pairs: u64,
    plays_of_proof: u64,
}

/// Up to so many layers, pairs are tried and a proof is looked for.
const SMALL: usize = 20;
/// Up to so many layers, annealing begins from several plans, and hot.
const MEDIUM: usize = 64;
/// How far from the best a proof may end.
pub(crate) const GAP: f64 = 0.002;

impl Effort {
    /// For a model of this size; `times` makes it so many times longer.
    pub(crate) fn of(model: &Model, times: u32) -> Self {
        let layers = model.layers.len();
        // About the work of a play.
        let size = (model.storages() + 3 * layers) as u64;
        let times = u64::from(times.max(1));
        let small = layers <= SMALL;
        Self {
            evaluations: if layers <= MEDIUM { 120 } else { evaluations_of_large(size) },
            tries: times * (4_000_000 / size.max(1)).clamp(250, 5_000),
            pairs: if small { times * 6_000 } else { 0 },
            plays_of_proof: if small { times * 20_000 } else { 0 },
        }
    }

    /// For the pure policies, which have less to choose from.
    fn for_one_means(self) -> Self {
        Self {
            evaluations: self.evaluations / 3,
            tries: self.tries / 4,
            pairs: 0,
            plays_of_proof: 0,
        }
    }
}

/// A plan from prices takes about as long as ten plays.
fn evaluations_of_large(size: u64) -> usize {
    usize::try_from(500_000 / size.max(1)).map_or(60, |count| count.clamp(30, 80))
}

/// The best choice that uses one means alone, if one fits.
pub(crate) fn search_pure(
    model: &Model,
    budget: u64,
    means: Means,
    effort: Effort,
) -> (Option<Choice>, u64) {
    let effort = effort.for_one_means();
    let mut search = Search::new(model, budget, means);
    let least = floor(&mut search);
    search.offer(&least);
    price_search(&mut search, effort.evaluations);
    refine(&mut search, effort, 1);
    let plays = search.simulator.plays();
    (search.best.map(|(_, choice)| choice), plays)
}

/// The best choice, beginning from these, and what is proved of it.
pub(crate) fn search_all(
    search: &mut Search<'_>,
    starts: &[Choice],
    effort: Effort,
) -> Option<Proof> {
    let mut tried = Vec::new();
    if !search.is_ideal() {
        // Prices are compared with one another, not with what is known already.
        let known = search.best.take();
        price_search(search, effort.evaluations);
        tried.extend(search.best.clone().map(|(_, choice)| choice));
        if search.best_ns() > known.as_ref().map_or(f64::INFINITY, |(ns, _)| *ns) {
            search.best = known;
        }
    }
    for start in starts {
        search.offer(start);
        if search.space.layers.len() <= MEDIUM {
            tried.push(start.clone());
        }
    }
    if search.is_ideal() {
        return Some(Proof { bound_ns: search.best_ns(), closed: true });
    }
    for (seed, start) in (1..).zip(&tried) {
        anneal(search, start, schedule(search, effort, seed), seed);
    }
    if search.space.layers.len() <= MEDIUM {
        refine(search, Effort { tries: effort.tries / 2, ..effort }, 9);
    }
    if effort.plays_of_proof == 0 || search.best.is_none() {
        return None;
    }
    let at_best = search.model.at_best();
    Some(branch(search, &at_best, GAP, effort.plays_of_proof))
}

/// From the best plan on: annealing, then descent.
fn refine(search: &mut Search<'_>, effort: Effort, seed: u64) {
    let Some((_, start)) = search.best.clone() else { return };
    if search.is_ideal() {
        return;
    }
    anneal(search, &start, schedule(search, effort, 0), seed);
    if search.space.layers.len() <= MEDIUM {
        descend(search);
        descend_pairs(search, effort.pairs);
    }
}

/// Small models are searched hotter, each start more than the one before; large ones have no time
/// to cool down.
fn schedule(search: &Search<'_>, effort: Effort, start: u64) -> Schedule {
    let hot = [0.02, 0.02, 0.06, 0.12];
    let small = hot[usize::try_from(start).unwrap_or(0).min(hot.len() - 1)];
    let heat = if search.space.layers.len() <= MEDIUM { small } else { 0.001 };
    Schedule { tries: effort.tries, heat }
}
