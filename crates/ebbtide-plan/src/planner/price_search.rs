//! The search for good prices: a grid, then one number after the other.

use ebbtide_sim::predict::Choice;

use super::prices::{Greedy, Prices};
use super::search::Search;

/// Prices of copying relative to recomputing, as logarithms.
const COPY: [f64; 9] = [0.0, -0.5, 0.5, -1.0, 1.0, -1.7, 1.7, -2.6, 2.6];
const SLOPES: [f64; 2] = [0.0, 1.2];
const JITTERS: [f64; 2] = [0.0, 0.6];
/// The first and the last step of the descent.
const STEP: f64 = 0.6;
const LAST_STEP: f64 = 0.04;

/// Offers the plans of so many prices at most. What the best prices lead to is the best of `search`
/// if nothing better was there before.
pub(crate) fn price_search(search: &mut Search<'_>, evaluations: usize) {
    let mut greedy = Greedy::new(search);
    let mut left = evaluations;
    let mut best = None;
    for prices in grid(search) {
        if left == 0 || search.is_ideal() {
            return;
        }
        left -= 1;
        greedy.spread = search.space.tiers() > 1 && left.is_multiple_of(2);
        if offer(&mut greedy, search, &prices) || best.is_none() {
            best = Some((prices, greedy.spread));
        }
    }
    let Some((mut prices, spread)) = best else { return };
    greedy.spread = spread;
    let mut step = STEP;
    while step >= LAST_STEP {
        let mut improved = false;
        for at in 0..prices.numbers.len() {
            for change in [step, -step] {
                if left == 0 || search.is_ideal() {
                    return;
                }
                left -= 1;
                let mut changed = prices;
                changed.numbers[at] += change;
                if offer(&mut greedy, search, &changed) {
                    prices = changed;
                    improved = true;
                    break;
                }
            }
        }
        step = if improved { step } else { step / 2.0 };
    }
}

fn offer(greedy: &mut Greedy, search: &mut Search<'_>, prices: &Prices) -> bool {
    let choice: Option<Choice> = greedy.plan(search, prices);
    choice.is_some_and(|choice| search.offer(&choice))
}

/// Where only one means may be used, its price relative to the other says nothing.
fn grid(search: &Search<'_>) -> Vec<Prices> {
    let both = search.space.means.swap && search.space.means.recompute;
    let copies = if both { &COPY[..] } else { &COPY[..1] };
    let mut grid = Vec::new();
    for &copy in copies {
        for slope in SLOPES {
            grid.extend(JITTERS.map(|jitter| Prices::flat(copy, slope, jitter)));
        }
    }
    grid
}
