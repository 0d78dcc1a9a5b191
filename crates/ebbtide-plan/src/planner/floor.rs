//! The least that a plan can do with.
//!
//! If everything may be swapped and finds room, that is to swap everything and recompute nothing: a
//! recompute only adds its input and its workspace. Otherwise (no tier, too little room on it, no
//! swap allowed) it is a search, and the result is the least *found*.

use std::ops::Range;

use ebbtide_core::Op;
use ebbtide_sim::predict::Choice;

use super::search::Search;
use super::space::Way;

/// Up to so many layers, each of them is looked at in a round; else those next to the operation
/// that needs most.
const SMALL: usize = 64;
/// How many rounds there are at most.
const ROUNDS: usize = 30;

/// The choice that was found to need the least, within what the tiers hold.
pub(crate) fn floor(search: &mut Search<'_>) -> Choice {
    if search.space.tiers() > 0 {
        let mut all = search.space.swap_all(search.model);
        all.swap.fill(true);
        if search.simulator.least_that_tiers_hold(&all).is_some() {
            return all;
        }
    }
    let mut best = (u64::MAX, Choice::keep(search.model));
    for mut choice in starts(search) {
        let least = descend(search, &mut choice);
        if least < best.0 {
            best = (least, choice);
        }
    }
    best.1
}

/// Recompute nothing, all, all but the last, every other.
fn starts(search: &Search<'_>) -> Vec<Choice> {
    let layers = search.space.layers.len();
    let start = |on: &dyn Fn(usize) -> bool| {
        let mut choice = Choice::keep(search.model);
        for layer in 0..layers {
            search.space.set(&mut choice, layer, Way { recompute: on(layer), ..Way::default() });
        }
        choice
    };
    vec![
        start(&|_| false),
        start(&|_| true),
        start(&|at| at + 1 < layers),
        start(&|at| at % 2 == 0),
    ]
}

/// Changes single layers as long as that lowers the need of the operation that needs most, or, at
/// the same need, the sum over all operations.
fn descend(search: &mut Search<'_>, choice: &mut Choice) -> u64 {
    let Some(mut least) = need(search, choice) else { return u64::MAX };
    for _ in 0..ROUNDS {
        let before = least;
        for layer in layers_to_try(search, choice) {
            let mut best = search.space.way(choice, layer);
            for at in 0..search.space.layers[layer].ways.len() {
                let way = search.space.layers[layer].ways[at];
                search.space.set(choice, layer, way);
                if let Some(found) = need(search, choice).filter(|found| *found < least) {
                    (least, best) = (found, way);
                }
            }
            search.space.set(choice, layer, best);
        }
        if least == before {
            break;
        }
    }
    least.0
}

fn layers_to_try(search: &mut Search<'_>, choice: &Choice) -> Range<usize> {
    let layers = search.space.layers.len();
    if layers <= SMALL {
        return 0..layers;
    }
    let worst = Op::at(search.simulator.least(choice).1, layers).layer;
    worst.saturating_sub(2)..(worst + 3).min(layers)
}

fn need(search: &mut Search<'_>, choice: &Choice) -> Option<(u64, u128)> {
    let (most, _) = search.simulator.least_that_tiers_hold(choice)?;
    Some((most, search.simulator.minimal().iter().map(|&bytes| u128::from(bytes)).sum()))
}
