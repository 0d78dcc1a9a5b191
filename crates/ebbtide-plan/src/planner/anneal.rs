//! Annealing on the ways of layers, from a plan that is good already.

use ebbtide_sim::Random;
use ebbtide_sim::predict::Choice;

use super::search::{SAME, Search};
use super::space::Way;

/// How long and how wild.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// How many changes are tried.
    pub(crate) tries: u64,
    /// How much slower a change may be at first, as a part of the time. It falls to 0.
    pub(crate) heat: f64,
}

/// Changes a plan at random. Only the best of `search` is kept.
pub(crate) fn anneal(search: &mut Search<'_>, start: &Choice, schedule: Schedule, seed: u64) {
    let Some(mut ns) = search.simulator.time(start, search.budget, f64::INFINITY) else { return };
    let mut random = Random::new(seed);
    let mut choice = start.clone();
    let mut undo: Vec<(usize, Way)> = Vec::new();
    for at in 0..schedule.tries {
        if search.is_ideal() {
            return;
        }
        let left = 1.0 - at as f64 / schedule.tries as f64;
        change(search, &mut choice, &mut random, left, &mut undo);
        let bound = ns * (1.0 + SAME + schedule.heat * left * exponential(&mut random));
        match search.simulator.time(&choice, search.budget, bound) {
            Some(found) => {
                ns = found;
                if ns < search.best_ns() * (1.0 - SAME) {
                    search.best = Some((ns, choice.clone()));
                }
            }
            None => {
                for (layer, way) in undo.drain(..).rev() {
                    search.space.set(&mut choice, layer, way);
                }
            }
        }
    }
}

fn unit(random: &mut Random) -> f64 {
    (random.draw() >> 11) as f64 / (1u64 << 53) as f64
}

/// Of mean 1.
fn exponential(random: &mut Random) -> f64 {
    -(1.0 - unit(random)).ln()
}

fn below(random: &mut Random, limit: usize) -> usize {
    usize::try_from(random.below(limit as u64)).expect("below a usize")
}

/// Changes a few layers, or a run of them; many at first in large models, when `left` is near 1.
fn change(
    search: &Search<'_>,
    choice: &mut Choice,
    random: &mut Random,
    left: f64,
    undo: &mut Vec<(usize, Way)>,
) {
    undo.clear();
    let layers = search.space.layers.len();
    let kind = random.below(8);
    let (a, b) = (below(random, layers), below(random, layers));
    match kind {
        0..=3 => {
            // One layer, or up to three.
            let count = 1 + below(random, 3) * usize::from(kind < 2);
            for _ in 0..count {
                let layer = below(random, layers);
                set(search, choice, layer, some_way(search, random, layer), undo);
            }
        }
        4 | 5 => {
            let run = run_length(random, layers, left);
            for at in 0..run.min(layers - a).min(layers - b) {
                let ways = [a + at, b + at].map(|layer| search.space.way(choice, layer));
                set(search, choice, a + at, ways[1], undo);
                set(search, choice, b + at, ways[0], undo);
            }
        }
        6 => {
            let way = some_way(search, random, a);
            for layer in a..(a + run_length(random, layers, left)).min(layers) {
                set(search, choice, layer, way, undo);
            }
        }
        _ => flip(search, choice, random, a, undo),
    }
}

/// A power of two; long ones only while there is much left to try.
fn run_length(random: &mut Random, layers: usize, left: f64) -> usize {
    let longest = (layers as f64 / 4.0).powf(left);
    let mut run = 1;
    while (run * 2) as f64 <= longest && random.below(4) > 0 {
        run *= 2;
    }
    run
}

fn some_way(search: &Search<'_>, random: &mut Random, layer: usize) -> Way {
    let ways = &search.space.layers[layer].ways;
    ways[below(random, ways.len())]
}

/// One bundle goes, or stays.
fn flip(
    search: &Search<'_>,
    choice: &mut Choice,
    random: &mut Random,
    layer: usize,
    undo: &mut Vec<(usize, Way)>,
) {
    let movable = search.space.layers[layer].movable.len();
    if movable > 0 {
        let mut way = search.space.way(choice, layer);
        way.mask ^= 1 << below(random, movable);
        set(search, choice, layer, way, undo);
    }
}

fn set(
    search: &Search<'_>,
    choice: &mut Choice,
    layer: usize,
    way: Way,
    undo: &mut Vec<(usize, Way)>,
) {
    undo.push((layer, search.space.way(choice, layer)));
    search.space.set(choice, layer, way);
}
