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
//! The tensor that a view is of counts as the view's, as far as nothing else holds it.
//!
//! A version of torch that does not tell proves nothing, and the storage stays.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;

use crate::group::protect;
use crate::held::Held;
use crate::hub::{Hub, Locked};
use crate::torch::Torch;

/// Keeps every storage in place of a group that something else uses.
///
/// # Errors
/// One can't be kept.
pub(crate) fn keep_what_is_used(
    py: Python<'_>,
    hub: &Hub,
    inner: &mut Locked<'_>,
    group: u64,
) -> PyResult<()> {
    let mut named = inner.entry(group)?.named.clone();
    named.retain(|(held, _)| held.named().is_some());
    if named.is_empty() {
        return Ok(());
    }
    let known = Known::of(py, &named)?;
    let mut used = HashSet::new();
    for (held, proof) in &named {
        if !known.is_sole(py, held, proof.is_some())? && used.insert(held.key) {
            hub.tally.not_freed.fetch_add(1, Ordering::Relaxed);
            let bytes = held.named().map_or(0, |named| named.facts.bytes);
            hub.tally.not_freed_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
    used.into_iter().try_for_each(|key| protect(inner, group, key).map(drop))
}

/// What the group itself, and who registered with it, has of each storage and of each tensor.
struct Known<'py> {
    torch: &'static Torch,
    tensors: HashMap<usize, Uses<'py>>,
    /// Different tensors of each storage, those that views hold included.
    of_storage: HashMap<usize, Vec<usize>>,
}

/// Uses of one tensor that are known.
struct Uses<'py> {
    tensor: Bound<'py, PyAny>,
    /// References of Python.
    references: usize,
    /// Views of it, each of which holds it.
    views: u64,
}

impl<'py> Known<'py> {
    fn of(py: Python<'py>, named: &[(Arc<Held>, Option<usize>)]) -> PyResult<Self> {
        let torch = Torch::get(py)?;
        let mut known = Self { torch, tensors: HashMap::new(), of_storage: HashMap::new() };
        for (held, theirs) in named {
            let Some(named) = held.named() else { continue };
            let tensor = named.tensor.bind(py);
            // One is the engine's.
            let references = 1 + theirs.unwrap_or_default();
            if !known.count(held.key, tensor, references) {
                continue;
            }
            let base = tensor.getattr(intern!(py, "_base"))?;
            if !base.is_none() {
                known.count(held.key, &base, 0);
                known.tensors.entry(base.as_ptr().addr()).and_modify(|uses| uses.views += 1);
            }
        }
        Ok(known)
    }

    /// Counts references to a tensor. Whether it is met for the first time.
    fn count(&mut self, storage: usize, tensor: &Bound<'py, PyAny>, references: usize) -> bool {
        let address = tensor.as_ptr().addr();
        let first = !self.tensors.contains_key(&address);
        if first {
            self.of_storage.entry(storage).or_default().push(address);
        }
        // One is the reference that is taken here.
        let uses = self.tensors.entry(address);
        let uses = uses.or_insert_with(|| Uses { tensor: tensor.clone(), references: 1, views: 0 });
        let counted = uses.references > 1 || references == 0;
        uses.references += references;
        first || !counted
    }

    /// Whether nothing but what is known uses a storage; `strict` counts variables of Python, too.
    fn is_sole(&self, py: Python<'py>, held: &Held, strict: bool) -> PyResult<bool> {
        let Some(tensors) = self.of_storage.get(&held.key) else { return Ok(false) };
        // The wrapper that is asked counts as well.
        if self.torch.use_count(py, held.key) != Some(tensors.len() as u64 + 1) {
            return Ok(false);
        }
        for address in tensors {
            let Some(uses) = self.tensors.get(address) else { return Ok(false) };
            let Ok(count) = uses.tensor.call_method0(intern!(py, "_use_count")) else {
                return Ok(false);
            };
            // One is Python's.
            let autograd = count.extract::<u64>()? != 1 + uses.views;
            let known = isize::try_from(uses.references).unwrap_or(isize::MAX);
            let known = known + if uses.views > 0 { self.torch.shared_references } else { 0 };
            if autograd || (strict && references(&uses.tensor) > known) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[expect(unsafe_code, reason = "reads a reference count")]
pub(crate) fn references(object: &Bound<'_, PyAny>) -> isize {
    // SAFETY: a live object, with the GIL held.
    unsafe { ffi::Py_REFCNT(object.as_ptr()) }
}
