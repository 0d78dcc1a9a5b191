//! Branch and bound: every way to decide every layer, from the first to the last, except those that
//! a bound shows to be no better.

use ebbtide_sim::predict::{Choice, Model, Optimist};

use super::paths::Paths;
use super::search::Search;

/// What is proved about the best plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Proof {
    /// No plan is faster, in nanoseconds.
    pub(crate) bound_ns: f64,
    /// The whole tree was seen.
    pub(crate) closed: bool,
}

struct Branch<'a, 'm> {
    search: &'a mut Search<'m>,
    optimist: Optimist<'a>,
    paths: Paths,
    /// A plan is better only if it is faster by this part.
    gap: f64,
    /// How many more plays there may be.
    left: u64,
    /// The ways of the layers that are decided.
    decided: Vec<usize>,
    choice: Choice,
    /// The least bound of what was not seen.
    unseen: f64,
}

/// Looks for better plans than the best of `search`, and proves that there is none faster by more
/// than `gap` (a part of its time), with at most `plays` plays. `at_best` is the model's
/// [`at_best`](Model::at_best).
pub(crate) fn branch(search: &mut Search<'_>, at_best: &Model, gap: f64, plays: u64) -> Proof {
    let paths = Paths::new(search);
    let choice = Choice::keep(search.model);
    let mut branch = Branch {
        optimist: Optimist::new(at_best),
        paths,
        gap,
        left: plays,
        decided: Vec::new(),
        choice,
        unseen: f64::INFINITY,
        search,
    };
    branch.expand();
    let (unseen, best) = (branch.unseen, branch.search.best_ns());
    Proof { bound_ns: unseen.min(best * (1.0 - gap)), closed: unseen == f64::INFINITY }
}

impl Branch<'_, '_> {
    /// What a plan has to beat.
    fn cutoff(&self) -> f64 {
        self.search.best_ns() * (1.0 - self.gap)
    }

    fn expand(&mut self) {
        let layer = self.decided.len();
        let layers = self.search.space.layers.len();
        let before = self.search.space.way(&self.choice, layer);
        let mut children = Vec::new();
        for way in 0..self.search.space.layers[layer].ways.len() {
            if let Some(bound) = self.bound(layer, way) {
                children.push((bound, way));
            }
        }
        children.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for &(bound, way) in &children {
            if bound >= self.cutoff() {
                break;
            }
            if self.left == 0 {
                self.unseen = self.unseen.min(bound);
                break;
            }
            self.search.space.set(
                &mut self.choice,
                layer,
                self.search.space.layers[layer].ways[way],
            );
            if layer + 1 == layers {
                self.left -= 1;
                self.search.offer(&self.choice);
            } else {
                self.decided.push(way);
                self.expand();
                self.decided.pop();
            }
        }
        self.search.space.set(&mut self.choice, layer, before);
    }

    /// No plan that begins like this is faster; `None` if none is worth looking at.
    fn bound(&mut self, layer: usize, way: usize) -> Option<f64> {
        let cutoff = self.cutoff();
        self.decided.push(way);
        let path = self.paths.bound(&self.decided, cutoff);
        self.decided.pop();
        if path >= cutoff {
            return None;
        }
        self.search.space.set(&mut self.choice, layer, self.search.space.layers[layer].ways[way]);
        self.left = self.left.saturating_sub(1);
        let play = self.optimist.bound(&self.choice, self.search.budget, cutoff, layer + 1)?;
        Some(path.max(play))
    }
}
