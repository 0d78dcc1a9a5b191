//! Weights of paths.

/// A mean of the paths. Weights are parts of 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mean {
    /// What bounds the time before the tight operation: computing, and for the rest copying out.
    before: f64,
    /// What bounds the time from then on: computing, and for the rest copying in.
    behind: f64,
    /// How much of it all is instead the path on which everything is copied in from the turn on.
    pub(super) all_back: f64,
}

/// Computing against copying, in front of the tight operation and behind it.
const SHARES: [f64; 5] = [1.0, 0.0, 0.5, 0.75, 0.25];

impl Mean {
    /// All that are tried, those first that decide most often.
    pub(super) fn all() -> Vec<Self> {
        let mut means = Vec::new();
        for before in SHARES {
            means.extend(SHARES.map(|behind| Self { before, behind, all_back: 0.0 }));
        }
        means.extend([1.0, 0.5].map(|all_back| Self { before: 1.0, behind: 1.0, all_back }));
        means.extend([0.5, 0.25].map(|all_back| Self { before: 0.5, behind: 1.0, all_back }));
        means
    }

    fn rest(&self) -> f64 {
        1.0 - self.all_back
    }

    /// Computing in front of the tight operation.
    pub(super) fn compute_before(&self) -> f64 {
        self.rest() * self.before
    }

    /// Copying out.
    pub(super) fn out(&self) -> f64 {
        self.rest() * (1.0 - self.before)
    }

    /// Computing from the tight operation on.
    pub(super) fn compute_behind(&self) -> f64 {
        self.rest() * self.behind
    }

    /// Copying in what was away at the tight operation.
    pub(super) fn back(&self) -> f64 {
        self.rest() * (1.0 - self.behind)
    }
}
