//! The copies of one tier: a queue out and a queue back.

use super::model::{Link, Tier};
use super::residency::Flat;

/// Copies that run one after the other. Times are absolute, in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    /// What this play copies, in order.
    pub(crate) items: Vec<u32>,
    /// How many may start: those whose turn in the step has come.
    pub(crate) released: usize,
    /// How many are complete. The one behind them may be running.
    pub(crate) done: usize,
    /// When the running copy ends; infinite if none runs.
    pub(crate) end: f64,
    /// Time while computing divided by time alone, of the running copy.
    busy_factor: f64,
}

impl Queue {
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        (self.released, self.done, self.end) = (0, 0, f64::INFINITY);
    }

    pub(crate) fn runs(&self) -> bool {
        self.end < f64::INFINITY
    }

    /// What is first in the queue, running or not.
    pub(crate) fn head(&self) -> Option<usize> {
        self.items.get(self.done).map(|&item| item as usize)
    }

    pub(crate) fn start(&mut self, now: f64, computing: bool, copy: Copying) {
        self.end = now + if computing { copy.alone_ns * copy.busy_factor } else { copy.alone_ns };
        self.busy_factor = copy.busy_factor;
    }

    pub(crate) fn finish(&mut self) -> usize {
        let item = self.items[self.done] as usize;
        self.done += 1;
        self.end = f64::INFINITY;
        item
    }

    /// Compute begins or pauses: what is left of the running copy takes longer or shorter.
    fn stretch(&mut self, now: f64, computing: bool) {
        if self.runs() {
            let left = self.end - now;
            let left = if computing { left * self.busy_factor } else { left / self.busy_factor };
            self.end = now + left;
        }
    }
}

/// How long a copy takes: worked out once for each storage, tier and direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copying {
    /// While nothing is computed.
    alone_ns: f64,
    /// By how much it takes longer while something is.
    busy_factor: f64,
}

impl Copying {
    fn new(link: &Link, bytes: u64, pieces: u32) -> Self {
        let (alone_ns, busy_ns) = (link.alone_ns(bytes, pieces), link.busy_ns(bytes, pieces));
        let busy_factor = if alone_ns > 0.0 { busy_ns / alone_ns } else { 1.0 };
        Self { alone_ns, busy_factor }
    }
}

/// The queues of one tier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    /// Storages.
    pub(crate) out: Queue,
    /// Places in the order of loads.
    pub(crate) back: Queue,
    /// By storage: out, back.
    pub(crate) copies: Vec<(Copying, Copying)>,
}

impl Lane {
    pub(crate) fn new(tier: &Tier, storages: &[Flat]) -> Self {
        let both = |flat: &Flat| {
            let copy = |link| Copying::new(link, flat.bytes, flat.pieces);
            (copy(&tier.out), copy(&tier.back))
        };
        Self { copies: storages.iter().map(both).collect(), ..Self::default() }
    }

    pub(crate) fn clear(&mut self) {
        self.out.clear();
        self.back.clear();
    }

    pub(crate) fn runs(&self) -> bool {
        self.out.runs() || self.back.runs()
    }

    pub(crate) fn stretch(&mut self, now: f64, computing: bool) {
        self.out.stretch(now, computing);
        self.back.stretch(now, computing);
    }

    /// Whether an offload may start now, as far as the link goes.
    pub(crate) fn out_is_free(&self, tier: &Tier) -> bool {
        let waiting = self.out.done < self.out.released && !self.out.runs();
        waiting && !(tier.shared_duplex && self.back.runs())
    }

    /// Whether a load may start now, as far as the link goes. Offloads come first.
    pub(crate) fn back_is_free(&self, tier: &Tier) -> bool {
        let out_first = tier.shared_duplex && self.out.done < self.out.released;
        !self.back.runs() && !out_first
    }
}
