//! Proof that nothing but its group uses a storage in place (row G6).
//!
//! What counts, and where it is looked up:
//!
//! | user | seen by |
//! | --- | --- |
//! | another tensor of the storage | the storage's use count: one for each tensor, one for Python's wrapper |
//! | autograd, which keeps the very tensor | the tensor's own use count: one is Python's |
//! | a variable of Python | the references of the Python object, if the caller wants that (`sole`) |
//!
//! A version of torch that does not tell proves nothing, and the storage stays.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use crate::group::protect;
use crate::held::Held;
use crate::hub::{Hub, Locked};
use crate::torch::Torch;

/// References that a tensor in place has without any user: the engine's, and the one of the object that
/// stands for it in Python.
const OWN_REFERENCES: isize = 2;

/// Keeps every storage in place of a group that something else uses.
///
/// # Errors
/// One can't be kept.
pub(crate) fn keep_what_is_used(py: Python<'_>, hub: &Hub, inner: &mut Locked<'_>, group: u64) -> PyResult<()> {
    let torch = Torch::get(py)?;
    let named: Vec<(Arc<Held>, bool)> = inner.entry(group)?.named.clone();
    if named.is_empty() {
        return Ok(());
    }
    let mut tensors: std::collections::HashMap<usize, HashSet<usize>> = std::collections::HashMap::new();
    for (held, _) in &named {
        if let Some(named) = held.named() {
            tensors.entry(held.key).or_default().insert(named.tensor.as_ptr().addr());
        }
    }
    let mut used = HashSet::new();
    for (held, sole) in &named {
        let ours = tensors.get(&held.key).map_or(0, HashSet::len) as u64;
        let registered = named.iter().filter(|(other, _)| same_tensor(other, held)).count();
        if !is_sole(py, torch, held, ours, sole.then_some(registered))? && used.insert(held.key) {
            hub.tally.not_freed.fetch_add(1, Ordering::Relaxed);
            let bytes = held.named().map_or(0, |named| named.facts.bytes);
            hub.tally.not_freed_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
    used.into_iter().try_for_each(|key| protect(inner, group, key).map(drop))
}

fn same_tensor(one: &Held, other: &Held) -> bool {
    let pointer = |held: &Held| held.named().map(|named| named.tensor.as_ptr());
    pointer(one) == pointer(other)
}

fn is_sole(py: Python<'_>, torch: &Torch, held: &Held, ours: u64, registered: Option<usize>) -> PyResult<bool> {
    let Some(named) = held.named() else { return Ok(true) };
    if torch.use_count(py, held.key) != Some(ours + 1) {
        return Ok(false);
    }
    let tensor = named.tensor.bind(py);
    let Ok(count) = tensor.call_method0(intern!(py, "_use_count")) else { return Ok(false) };
    if count.extract::<u64>()? != 1 {
        return Ok(false);
    }
    let Some(registered) = registered else { return Ok(true) };
    Ok(references(tensor) <= OWN_REFERENCES * isize::try_from(registered).unwrap_or(isize::MAX))
}

#[expect(unsafe_code, reason = "reads a reference count")]
fn references(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: a live object, with the GIL held.
    unsafe { ffi::Py_REFCNT(object.as_ptr()) }
}
