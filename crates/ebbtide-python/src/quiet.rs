//! Calls of torch that the program's own modes do not see.
//!
//! What the engine allocates and copies is nobody's business: a mode that counts or caches operations
//! (selective checkpointing is one) would take it for the model's. And a buffer that was made in inference
//! mode could not be written outside of it later. Both are rare, so they are only looked for here.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// What tells of modes, and what switches them off.
struct Modes {
    is_inference: Py<PyAny>,
    inference_mode: Py<PyAny>,
    /// Private to torch, so they may be missing.
    dispatch: Option<(Py<PyAny>, Py<PyAny>)>,
}

static MODES: PyOnceLock<Modes> = PyOnceLock::new();

fn modes(py: Python<'_>) -> PyResult<&'static Modes> {
    MODES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let depth = torch.getattr("_C")?.getattr("_len_torch_dispatch_stack");
        let off = py
            .import("torch.utils._python_dispatch")
            .and_then(|module| module.getattr("_disable_current_modes"));
        Ok(Modes {
            is_inference: torch.getattr("is_inference_mode_enabled")?.unbind(),
            inference_mode: torch.getattr("inference_mode")?.unbind(),
            dispatch: depth.ok().zip(off.ok()).map(|(depth, off)| (depth.unbind(), off.unbind())),
        })
    })
}

/// Runs something outside of the modes that are on.
///
/// # Errors
/// What `run` returns, or torch refuses to leave a mode.
pub(crate) fn quietly<T>(py: Python<'_>, run: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let modes = modes(py)?;
    let mut off = Vec::new();
    if modes.is_inference.bind(py).call0()?.is_truthy()? {
        off.push(modes.inference_mode.bind(py).call1((false,))?);
    }
    if let Some((depth, disable)) = &modes.dispatch
        && depth.bind(py).call0()?.extract::<usize>()? > 0
    {
        off.push(disable.bind(py).call0()?);
    }
    outside(py, &off, run)
}

/// Runs something within contexts, the first outermost.
fn outside<T>(
    py: Python<'_>,
    contexts: &[Bound<'_, PyAny>],
    run: impl FnOnce() -> PyResult<T>,
) -> PyResult<T> {
    let Some((context, others)) = contexts.split_first() else { return run() };
    context.call_method0(intern!(py, "__enter__"))?;
    let done = outside(py, others, run);
    let left = context.call_method1(intern!(py, "__exit__"), (py.None(), py.None(), py.None()));
    done.and_then(|done| left.map(|_| done))
}
