//! What autograd keeps instead of a saved tensor, and how the tensor comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::claim::Claim;
use crate::error::{Class, exception};
use crate::held::Found;
use crate::hub::{Hub, Locked};
use crate::torch::{Torch, storage_of, version_of};
use crate::types::Tensor;
use crate::view::View;

/// Stands for one saved tensor. May be dropped on any thread, and need not ever be unpacked.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Handle(pub(crate) Kept);

/// Where the tensor is.
pub(crate) enum Kept {
    /// Here, for as long as the handle lives.
    Here { alias: Py<PyAny>, version: Option<u64>, ahead: Option<Arc<Ahead>> },
    /// Wherever its span is.
    Saved { hub: Arc<Hub>, claim: Claim, number: usize, version: u64, view: Box<View> },
    /// Of a subclass that consists of tensors: a function of Python puts them together.
    Parts { parts: Py<PyAny> },
}

/// A group to load as soon as something of a region behind it is asked for.
pub(crate) struct Ahead {
    hub: Arc<Hub>,
    group: u64,
    started: AtomicBool,
}

impl Ahead {
    pub(crate) fn new(hub: &Arc<Hub>, group: u64) -> Self {
        Self { hub: Arc::clone(hub), group, started: AtomicBool::new(false) }
    }

    /// Starts the load, the first time. A hint: what can't be started is loaded when it is asked for.
    fn start(&self, py: Python<'_>) -> PyResult<()> {
        if self.hub.settings.prefetch == 0 || self.started.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let mut inner = self.hub.lock(py)?;
        if !matches!(inner.phase(self.group), "offloading" | "away") {
            return Ok(());
        }
        if let Err(error) = inner.each(self.group, |unit, id| unit.start_load(id, None)) {
            self.hub.log.warn(format!(
                "a prefetch could not be started, the group is loaded on demand: {error}"
            ));
        }
        Ok(())
    }
}

#[pymethods]
impl Handle {
    fn __repr__(&self) -> String {
        match &self.0 {
            Kept::Here { .. } => "Handle(kept)".into(),
            Kept::Saved { view, .. } => format!("Handle({:?})", view.sizes()),
            Kept::Parts { .. } => "Handle(parts)".into(),
        }
    }

    /// What Python's collector has to know. Aliases in a span belong to all of its handles together.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.0 {
            Kept::Here { alias, .. } => visit.call(alias),
            Kept::Saved { .. } => Ok(()),
            Kept::Parts { parts } => visit.call(parts),
        }
    }
}

/// The tensor that a pack hook was given: the same sizes, strides, type and bits. Loads the group of
/// the tensor, all of it, if it is away, and starts to load the group expected next.
///
/// Raises `ChangedError` where the tensor was modified in place after it was saved (as torch does
/// without hooks), `CopyError` if a copy failed, `PhaseError` if its step was given up.
#[pyfunction]
#[pyo3(signature = (packed: "object"))]
pub(crate) fn unpack<'py>(packed: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
    let py = packed.py();
    let Ok(handle) = packed.cast::<Handle>() else {
        // What can't be held is passed through as it is.
        return Ok(Tensor(packed.clone()));
    };
    match &handle.get().0 {
        Kept::Here { alias, version, ahead } => {
            if let Some(ahead) = ahead {
                ahead.start(py)?;
            }
            let alias = alias.bind(py);
            if let Some(version) = version {
                unchanged(alias, *version, || "a layer".into())?;
            }
            Ok(Tensor(alias.clone()))
        }
        Kept::Saved { hub, claim, number, version, view } => {
            bring(py, hub, claim, (*number, *version), view).map(Tensor)
        }
        Kept::Parts { parts } => {
            py.import("ebbtide.torch._subclass")?.call_method1("join", (parts,)).map(Tensor)
        }
    }
}

fn bring<'py>(
    py: Python<'py>,
    hub: &Arc<Hub>,
    claim: &Claim,
    (number, version): (usize, u64),
    view: &View,
) -> PyResult<Bound<'py, PyAny>> {
    let mut inner = hub.lock(py)?;
    let found = claim.held.find(py, number);
    let there = matches!(found, Found::Alias(_) | Found::Changed { .. } | Found::Gone);
    inner.takes(py, hub, &claim.held.place)?;
    come_closer(hub, &mut inner, claim.group, there)?;
    // Where the bytes are is only certain once the group is home.
    let found = claim.held.find(py, number);
    let start = claim.held.range().start;
    let name =
        || inner.groups.get(&claim.group).map_or_else(|| "a layer".into(), |g| g.name.clone());
    let home = matches!(found, Found::Ram(..) | Found::Torch(_));
    let shown = if home { claim.held.shown(py, number, &view.reach())? } else { Ok(None) };
    let name = if home && shown.is_ok() { String::new() } else { name() };
    drop(inner);
    match shown {
        Ok(None) => {}
        Ok(Some(tensor)) => return Ok(tensor.into_bound(py)),
        Err((was, now)) => return Err(changed(view.sizes(), &name, was, now)),
    }
    let torch = Torch::get(py)?;
    match found {
        Found::Alias(alias) => {
            let alias = alias.into_bound(py);
            unchanged(&alias, version, || name)?;
            Ok(alias)
        }
        Found::Ram(buffer, at) => {
            let tensor = view.over_buffer(py, torch, &buffer, at + (view.data - start))?;
            claim.held.show(number, view.reach(), &tensor)?;
            Ok(tensor)
        }
        Found::Torch(bytes) => {
            let bytes = bytes.bind(py);
            let first: u64 = bytes.call_method0(intern!(py, "storage_offset"))?.extract()?;
            let storage = storage_of(bytes)?;
            let tensor = view.in_storage(torch, &storage, first + (view.data - start) as u64)?;
            claim.held.show(number, view.reach(), &tensor)?;
            Ok(tensor)
        }
        Found::Changed { was, now } => Err(changed(view.sizes(), &name, was, now)),
        Found::Away | Found::Gone => Err(exception(
            Class::Phase,
            "a saved tensor is asked for whose step was given up",
            Some("run forward again; a step is given up when an exception leaves it"),
        )),
    }
}

/// Brings the group home unless the tensor is here, and starts loads ahead the first time that one of
/// its tensors is asked for.
fn come_closer(hub: &Hub, inner: &mut Locked<'_>, group: u64, there: bool) -> PyResult<()> {
    let first = match inner.groups.get_mut(&group) {
        Some(entry) => !std::mem::replace(&mut entry.asked, true),
        None => return Ok(()),
    };
    if first {
        inner.each(group, |unit, id| {
            unit.prefetch(id);
            Ok(())
        })?;
    }
    if there || inner.phase(group) == "home" {
        return Ok(());
    }
    let name = inner.groups.get(&group).map_or_else(String::new, |entry| entry.name.clone());
    hub.waiting(&name, || inner.each(group, |unit, id| unit.need(id)))
}

fn unchanged(alias: &Bound<'_, PyAny>, was: u64, name: impl FnOnce() -> String) -> PyResult<()> {
    let now = version_of(alias)?;
    if now == was {
        return Ok(());
    }
    let sizes: Vec<i64> = alias.call_method0(intern!(alias.py(), "size"))?.extract()?;
    Err(changed(&sizes, &name(), was, now))
}

fn changed(sizes: &[i64], name: &str, was: u64, now: u64) -> PyErr {
    let message = format!(
        "a tensor of sizes {sizes:?} that {name} saved for backward was modified in place: its version was {was} \
         when it was saved, is {now}"
    );
    let hint = "don't change a tensor in place between forward and backward; use the operation that makes \
                a new tensor, or save a clone";
    exception(Class::Changed, &message, Some(hint))
}
