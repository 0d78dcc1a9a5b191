//! What the engines tell: warnings for people, and times for the picture of a run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebbtide_core::{Event, Observer};

use crate::picture::Picture;

/// The notes of a hub, shared by the observers of its units.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    warnings: Arc<Mutex<Vec<String>>>,
    picture: Option<Picture>,
}

/// As many warnings are kept; later ones are counted only.
const MOST: usize = 100;

impl Log {
    pub(crate) fn new(picture: Option<Picture>) -> Self {
        Self { warnings: Arc::default(), picture }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner)
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
        if let Some(picture) = &self.picture {
            picture.event(event);
        }
        match event {
            Event::Repeats { name, count, .. } => {
                self.warn(format!(
                    "group {name}: {count} tensors were saved more than once; each moves once"
                ));
            }
            Event::PrefetchFailed { error, .. } => {
                self.warn(format!(
                    "a prefetch could not be started, the group is loaded on demand: {error}"
                ));
            }
            Event::AbandonedCopyFailed { error, .. } => {
                self.warn(format!("a copy failed while a step was given up: {error}"));
            }
            _ => {}
        }
    }
}
