//! What the engines tell: warnings for people, and times for the picture of a run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebbtide_core::{Event, Observer};

/// The notes of a hub, shared by the observers of its units.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

/// As many warnings are kept; later ones are counted only.
const MOST: usize = 100;

impl Log {
    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something that people should know.
    pub(crate) fn warn(&self, message: String) {
        let mut warnings = self.lock();
        if warnings.len() < MOST {
            warnings.push(message);
        }
    }

    /// The warnings since somebody asked.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lock())
    }
}

impl Observer for Log {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Repeats { name, count, .. } => {
                self.warn(format!("group {name}: {count} tensors were saved more than once; each moves once"));
            }
            Event::PrefetchFailed { error, .. } => {
                self.warn(format!("a prefetch could not be started, the group is loaded on demand: {error}"));
            }
            Event::AbandonedCopyFailed { error, .. } => {
                self.warn(format!("a copy failed while a step was given up: {error}"));
            }
            _ => {}
        }
    }
}
