//! Weights of paths.

/// A mean of the three paths. Weights are parts of 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mean {
    /// All computing before the tight operation; for the rest, copying out.
    before: f64,
    /// How much of it all is instead the path on which everything is copied in.
    pub(super) all_back: f64,
}

impl Mean {
    /// All that are tried.
    pub(super) fn all() -> Vec<Self> {
        let pairs = [
            (1.0, 0.0),
            (0.0, 0.0),
            (0.5, 0.0),
            (0.75, 0.0),
            (0.25, 0.0),
            (1.0, 1.0),
            (1.0, 0.5),
            (1.0, 0.25),
            (0.5, 0.5),
            (0.5, 0.25),
            (0.0, 0.5),
        ];
        pairs.map(|(before, all_back)| Self { before, all_back }).to_vec()
    }

    /// Computing in front of the tight operation.
    pub(super) fn compute_before(&self) -> f64 {
        (1.0 - self.all_back) * self.before
    }

    /// Copying out.
    pub(super) fn out(&self) -> f64 {
        (1.0 - self.all_back) * (1.0 - self.before)
    }

    /// Computing from the tight operation on.
    pub(super) fn compute_behind(&self) -> f64 {
        1.0 - self.all_back
    }
}
