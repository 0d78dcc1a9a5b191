//! What was dropped, on whatever thread, to be acted on by who next has the hub and the GIL.
//!
//! Dropping a handle must not take the hub's lock: Python may drop one while this very thread has it.
//! So it only leaves a note here, under a lock that is never held while anything else runs. A forked
//! child has a copy of the lock that a thread of the parent may have held, and nobody there acts on notes,
//! so it leaves none.

use std::sync::{Mutex, PoisonError};

use crate::owned::Process;

/// Notes of what was dropped.
pub(crate) struct Graveyard {
    dead: Mutex<Dead>,
    process: Process,
}

impl Default for Graveyard {
    fn default() -> Self {
        Self { dead: Mutex::default(), process: Process::here() }
    }
}

/// What was dropped since somebody looked.
#[derive(Default)]
pub(crate) struct Dead {
    /// The group of each claim.
    pub(crate) claims: Vec<u64>,
    /// Storages of which a span was dropped.
    pub(crate) storages: Vec<usize>,
    /// Weak references to give back.
    pub(crate) weak: Vec<usize>,
}

impl Graveyard {
    fn with(&self, note: impl FnOnce(&mut Dead)) {
        if self.process.is_here() {
            note(&mut self.dead.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// A claim on something of this group has ended.
    pub(crate) fn claim_ended(&self, group: u64) {
        self.with(|dead| dead.claims.push(group));
    }

    /// A span of this storage is gone.
    pub(crate) fn forgotten(&self, storage: usize, weak: Option<usize>) {
        self.with(|dead| {
            dead.storages.push(storage);
            dead.weak.extend(weak);
        });
    }

    /// Takes the notes. `None` if there are none.
    pub(crate) fn take(&self) -> Option<Dead> {
        let mut taken = None;
        self.with(|dead| {
            if !dead.claims.is_empty() || !dead.storages.is_empty() {
                taken = Some(std::mem::take(dead));
            }
        });
        taken
    }
}
