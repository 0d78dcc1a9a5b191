//! Exceptions: those of `ebbtide.errors`, each with its hint and its cause.

use std::error::Error as StdError;

use ebbtide_core::{BackendError, Error};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A class of `ebbtide.errors`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Setting,
    Phase,
    Changed,
    Copy,
    NoRoom,
    NotSaved,
    Other,
}

impl Class {
    fn name(self) -> &'static str {
        match self {
            Self::Setting => "SettingError",
            Self::Phase => "PhaseError",
            Self::Changed => "ChangedError",
            Self::Copy => "CopyError",
            Self::NoRoom => "NoRoomError",
            Self::NotSaved => "NotSavedError",
            Self::Other => "EbbtideError",
        }
    }

    fn of(error: &Error) -> Self {
        if error.is_setting() {
            Self::Setting
        } else if error.is_phase() {
            Self::Phase
        } else if error.is_changed() {
            Self::Changed
        } else if error.is_no_room() {
            Self::NoRoom
        } else if error.is_copy() {
            Self::Copy
        } else if error.is_not_saved() {
            Self::NotSaved
        } else {
            Self::Other
        }
    }
}

/// An exception with a message that says what to do.
pub(crate) fn exception(class: Class, message: &str, hint: Option<&str>) -> PyErr {
    Python::attach(|py| make(py, class, message, hint).unwrap_or_else(|error| error))
}

fn make(py: Python<'_>, class: Class, message: &str, hint: Option<&str>) -> PyResult<PyErr> {
    let class = py.import("ebbtide.errors")?.getattr(class.name())?;
    let kwargs = PyDict::new(py);
    kwargs.set_item("hint", hint)?;
    Ok(PyErr::from_value(class.call((message,), Some(&kwargs))?))
}

/// A setting that makes no sense.
pub(crate) fn setting(message: &str, hint: &str) -> PyErr {
    exception(Class::Setting, message, Some(hint))
}

/// A call in a wrong order.
pub(crate) fn phase(message: &str, hint: &str) -> PyErr {
    exception(Class::Phase, message, Some(hint))
}

/// The engine's error as an exception.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(crate) fn raise(error: Error) -> PyErr {
    let raised = exception(Class::of(&error), &error.to_string(), error.hint());
    with_causes(raised, error.source())
}

/// A tier's error as an exception of this class.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(crate) fn raise_backend(class: Class, error: BackendError) -> PyErr {
    let raised = exception(class, &error.to_string(), error.hint());
    with_causes(raised, error.source())
}

fn with_causes(error: PyErr, cause: Option<&(dyn StdError + 'static)>) -> PyErr {
    let Some(cause) = cause else { return error };
    Python::attach(|py| {
        let below = with_causes(PyRuntimeError::new_err(cause.to_string()), cause.source());
        error.set_cause(py, Some(below));
    });
    error
}
