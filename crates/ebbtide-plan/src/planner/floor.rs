//! The least that a plan can do with.
//!
//! If everything may be swapped and finds room, that is to swap everything and recompute nothing: a
//! recompute only adds its input and its workspace. Otherwise (no tier, too little room on it, no
//! swap allowed) it is a search, and the result is the least *found*.

use ebbtide_sim::predict::Choice;

use super::search::Search;
use super::space::Way;

/// How many times all layers are looked at.
const ROUNDS: usize = 3;

/// The choice that was found to need the least, within what the tiers hold.
pub(crate) fn floor(search: &mut Search<'_>) -> Choice {
    let mut best = Choice::keep(search.model);
    if search.space.tiers() > 0 {
        let mut all = search.space.swap_all(search.model);
        all.swap.fill(true);
        if search.simulator.tiers_hold(&all) {
            return all;
        }
    }
    let mut least = search.simulator.least(&best).0;
    for start in starts(search) {
        let mut choice = start;
        if !search.simulator.tiers_hold(&choice) {
            continue;
        }
        let found = descend(search, &mut choice);
        if found < least {
            (least, best) = (found, choice);
        }
    }
    best
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
    let mut least = need(search, choice);
    for _ in 0..ROUNDS {
        let before = least;
        for layer in 0..search.space.layers.len() {
            let mut best = search.space.way(choice, layer);
            for at in 0..search.space.layers[layer].ways.len() {
                let way = search.space.layers[layer].ways[at];
                search.space.set(choice, layer, way);
                if !search.simulator.tiers_hold(choice) {
                    continue;
                }
                let found = need(search, choice);
                if found < least {
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

fn need(search: &mut Search<'_>, choice: &Choice) -> (u64, u128) {
    let most = search.simulator.least(choice).0;
    (most, search.simulator.minimal().iter().map(|&bytes| u128::from(bytes)).sum())
}
