//! Calls of Python with one argument, without the objects that `PyO3` makes for them where the stable
//! interface of Python is all that is used (a bound method, a tuple): they would cost more than what is
//! called.
#![expect(unsafe_code, reason = "functions of C with any number of arguments")]

use std::ptr::null_mut;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// `object.name(argument)`.
///
/// # Errors
/// What Python raises.
pub(crate) fn method<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
    argument: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let end = null_mut::<ffi::PyObject>();
    // SAFETY: live objects, with the GIL held; the arguments end with a null pointer. A new reference or
    // an exception comes back.
    unsafe {
        let result =
            ffi::PyObject_CallMethodObjArgs(object.as_ptr(), name.as_ptr(), argument.as_ptr(), end);
        Bound::from_owned_ptr_or_err(object.py(), result)
    }
}

/// `function(argument)`.
///
/// # Errors
/// What Python raises.
pub(crate) fn function<'py>(
    function: &Bound<'py, PyAny>,
    argument: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let end = null_mut::<ffi::PyObject>();
    // SAFETY: as above.
    unsafe {
        let result = ffi::PyObject_CallFunctionObjArgs(function.as_ptr(), argument.as_ptr(), end);
        Bound::from_owned_ptr_or_err(function.py(), result)
    }
}
