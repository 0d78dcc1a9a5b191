//! A tier whose waits let other Python threads run.
//!
//! The engine runs with the GIL and with the hub's lock; what may block in here lets go of the GIL, and
//! of nothing else. What the tier's own threads do needs neither.

use ebbtide_core::{Failed, Outcome, Store, StoreStats, Ticket};
use pyo3::prelude::*;

/// Lets go of the GIL while the tier inside may make its caller wait.
#[derive(Debug)]
pub(crate) struct Waiting<S>(pub(crate) S);

/// Runs something that may take long and touches nothing of Python.
pub(crate) fn released<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    Python::attach(|py| py.detach(run))
}

impl<B, S> Store<B> for Waiting<S>
where
    B: Send,
    S: Store<B> + Send,
    S::Slot: Send + Sync,
{
    type Slot = S::Slot;

    /// Waits while the tier's queue is full.
    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        released(|| self.0.put(block))
    }

    /// Waits while the tier's queue is full.
    fn get(&mut self, slot: &S::Slot, block: B) -> Result<Ticket, Failed<B>> {
        released(|| self.0.get(slot, block))
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        self.0.is_done(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Outcome<B, S::Slot> {
        if self.0.is_done(ticket) {
            return self.0.wait(ticket);
        }
        released(|| self.0.wait(ticket))
    }

    fn discard(&mut self, slot: S::Slot) {
        self.0.discard(slot);
    }

    fn stats(&self) -> StoreStats {
        self.0.stats()
    }
}
