//! Storages of another framework than torch, each with an object of Python that looks after it.
//!
//! # Access contract
//!
//! The keeper has six methods, called with the GIL and under the hub's lock, so they must not call the hub:
//!
//! | method | when | memory afterwards |
//! | --- | --- | --- |
//! | `facts()` | at any time | as before |
//! | `lend()` | its copy out starts | stays where it is, until `vacate()` or the end of the group |
//! | `vacate()` | its copy is complete | may go |
//! | `allocate()` | its copy home starts | stays where it is, until `retract()` or the end of the group |
//! | `arrive()` | its copy home is complete, or it never left | has its bytes |
//! | `retract()` | its copy home has failed or was called off | may go |
//!
//! A keeper that lets memory go too early would have it read or written when it is another's: what
//! `lend()` and `allocate()` return is the one thing that this crate has to believe. What a version does not
//! tell is a change that nobody finds.

use ebbtide_core::{BackendError, Facts};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::held::backend_error;

/// A storage that an object looks after.
pub(crate) struct Outside {
    keeper: Py<PyAny>,
    bytes: usize,
}

impl Outside {
    /// # Errors
    /// The object has no `facts()`, or it fails.
    pub(crate) fn new(keeper: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (bytes, _): (usize, u64) =
            keeper.call_method0(intern!(keeper.py(), "facts"))?.extract()?;
        Ok(Self { keeper: keeper.clone().unbind(), bytes })
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What the engine compares. `None` if it can't be told: the copy is then no use.
    pub(crate) fn facts(&self) -> Option<Facts> {
        Python::attach(|py| {
            let facts = self.keeper.bind(py).call_method0(intern!(py, "facts")).ok()?;
            let (bytes, version) = facts.extract().ok()?;
            Some(Facts { bytes, version })
        })
    }

    /// # Errors
    /// It has no memory that could be lent.
    pub(crate) fn lend(&self) -> Result<usize, BackendError> {
        let done = Python::attach(|py| self.address(py, intern!(py, "lend")));
        done.map_err(|error| refused("can't find the memory of a storage", &error))
    }

    /// # Errors
    /// The memory can't go; it is as it was.
    pub(crate) fn vacate(&self) -> Result<(), BackendError> {
        let done =
            Python::attach(|py| self.keeper.bind(py).call_method0(intern!(py, "vacate")).map(drop));
        done.map_err(|error| refused("a storage can't be let go of", &error))
    }

    /// # Errors
    /// No memory.
    pub(crate) fn allocate(&self) -> Result<usize, BackendError> {
        let done = Python::attach(|py| self.address(py, intern!(py, "allocate")));
        done.map_err(|error| refused("no memory to bring a storage back to", &error))
    }

    /// Its bytes are in its memory.
    ///
    /// # Errors
    /// The object has none.
    pub(crate) fn arrive(&self) -> Result<(), BackendError> {
        let done =
            Python::attach(|py| self.keeper.bind(py).call_method0(intern!(py, "arrive")).map(drop));
        done.map_err(|error| refused("a storage can't take its bytes back", &error))
    }

    /// What it was given is not needed.
    pub(crate) fn retract(&self) {
        Python::attach(|py| {
            if let Err(error) = self.keeper.bind(py).call_method0(intern!(py, "retract")) {
                // Costs memory until the group ends.
                error.write_unraisable(py, None);
            }
        });
    }

    fn address(&self, py: Python<'_>, method: &Bound<'_, PyString>) -> PyResult<usize> {
        self.keeper.bind(py).call_method0(method)?.extract()
    }
}

fn refused(what: &str, error: &PyErr) -> BackendError {
    Python::attach(|py| backend_error(py, what, error))
}
