//! The declared order of layers for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebbtide_core::{Chain as Declared, Declared as Answer};
use pyo3::prelude::*;

use crate::error::raise;

/// Which layer runs right after which.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Chain(Mutex<Declared>);

impl Chain {
    fn lock(&self) -> MutexGuard<'_, Declared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Chain {
    /// An empty chain.
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    /// Declares that `second` runs right after `first`. Answers `new`, `known` or `itself` (nothing
    /// changed).
    ///
    /// Raises `SettingError` naming the three layers if one of the two has another neighbour already.
    fn follow(&self, first: &str, second: &str) -> PyResult<&'static str> {
        Ok(match self.lock().follow(first, second).map_err(raise)? {
            Answer::New => "new",
            Answer::Known => "known",
            Answer::Itself => "itself",
        })
    }

    /// Takes a layer out; its neighbours become each other's.
    fn unlink(&self, layer: &str) {
        self.lock().unlink(layer);
    }

    /// The name of a layer's group.
    fn group(&self, layer: &str) -> Option<String> {
        self.lock().group(layer).map(str::to_string)
    }

    /// The layer behind this one.
    fn next(&self, layer: &str) -> Option<String> {
        self.lock().next(layer).map(str::to_string)
    }

    /// The layer before this one.
    fn previous(&self, layer: &str) -> Option<String> {
        self.lock().previous(layer).map(str::to_string)
    }

    /// Whether a declared layer has none behind it.
    fn is_last(&self, layer: &str) -> bool {
        self.lock().is_last(layer)
    }

    /// Whether the layer of a group has none behind it.
    fn is_last_group(&self, group: &str) -> bool {
        self.lock().is_last_group(group)
    }
}
