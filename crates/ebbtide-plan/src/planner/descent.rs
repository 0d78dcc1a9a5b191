//! Descent: every other way of a layer, then of two, as long as something gets better.

use ebbtide_sim::predict::Choice;

use super::search::Search;

/// Tries every way of every layer on the best plan, again and again until nothing helps.
pub(crate) fn descend(search: &mut Search<'_>) {
    while let Some((_, start)) = search.best.clone() {
        let mut choice = start;
        let (mut improved, mut left) = (false, u64::MAX);
        for layer in 0..search.space.layers.len() {
            improved |= try_ways(search, &mut choice, layer, &mut left);
        }
        if !improved || search.is_ideal() {
            return;
        }
    }
}

/// Tries every pair of ways of every pair of layers, at most so many.
pub(crate) fn descend_pairs(search: &mut Search<'_>, mut left: u64) {
    let layers = search.space.layers.len();
    let Some((_, mut choice)) = search.best.clone() else { return };
    for distance in 1..layers {
        for a in 0..layers - distance {
            let mut before = search.space.way(&choice, a);
            for way in search.space.layers[a].ways.clone() {
                if left == 0 || search.is_ideal() {
                    return;
                }
                search.space.set(&mut choice, a, way);
                if try_ways(search, &mut choice, a + distance, &mut left) {
                    before = way;
                } else {
                    search.space.set(&mut choice, a, before);
                }
            }
        }
    }
}

/// Leaves `choice` at the best way of a layer, if that is the best of all.
fn try_ways(search: &mut Search<'_>, choice: &mut Choice, layer: usize, left: &mut u64) -> bool {
    let before = search.space.way(choice, layer);
    let mut best = None;
    for at in 0..search.space.layers[layer].ways.len() {
        let way = search.space.layers[layer].ways[at];
        if *left == 0 || way == before {
            continue;
        }
        *left -= 1;
        search.space.set(choice, layer, way);
        if search.offer(choice) {
            best = Some(way);
        }
    }
    search.space.set(choice, layer, best.unwrap_or(before));
    best.is_some()
}
