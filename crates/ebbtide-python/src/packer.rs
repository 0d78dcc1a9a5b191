//! The pack hook: which saved tensors a region gives to its group, and what is remembered of the others.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::claim::Claim;
use crate::group::Group;
use crate::handle::{Ahead, Handle, Kept};
use crate::held::Held;
use crate::hub::{Hub, Locked};
use crate::pool::Pool;
use crate::torch::{Torch, storage_key, storage_of, version_of};
use crate::types::{Decide, Find, Tensor, Tensors};
use crate::view::{Place, View};

/// Storages that never leave the device: those of parameters and buffers.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Keep(HashSet<usize>);

#[pymethods]
impl Keep {
    /// The storages of these tensors, which must outlive this object.
    #[new]
    fn new(tensors: Tensors<'_>) -> PyResult<Self> {
        let mut keys = HashSet::new();
        for tensor in tensors.0.try_iter()? {
            // What has no storage is not eligible anyway.
            if let Ok(storage) = storage_of(&tensor?) {
                keys.insert(storage_key(&storage)?);
            }
        }
        Ok(Self(keys))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }
}

/// A pack hook for one call of a piece of code: what autograd saves meanwhile is one region.
///
/// Eligible is a dense tensor with memory that is no parameter, no view of one, in none of the storages
/// to `keep`, and of at least `min_bytes` bytes. `decide` is asked once for each of them. The group is
/// `group`, or what `find` answers when it is first needed. Everything else stays where it is, and is
/// compared by version when it is unpacked, as torch does without hooks.
///
/// Small storages share host buffers unless `pack` is false; those of `pool`, if that is given.
///
/// `ahead` is the group of the region before this one: it starts to come back when the first of the
/// tensors that stayed is unpacked. Copies go to buffers of `pool`, if that is given.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Packer {
    group: Mutex<Option<Py<Group>>>,
    find: Mutex<Option<Py<PyAny>>>,
    keep: Option<Py<Keep>>,
    min_bytes: u64,
    decide: Option<Py<PyAny>>,
    marked_only: bool,
    /// How its storages travel: in which pool's buffers, and whether small ones share some.
    pool: Option<Py<Pool>>,
    pack: bool,
    ahead: Option<Arc<Ahead>>,
    tensors: AtomicUsize,
    kept: AtomicUsize,
}

#[pymethods]
impl Packer {
    /// A pack hook for the code that runs while it is installed.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "named by keyword in Python")]
    #[pyo3(signature = (group = None, *, find = None, keep = None, min_bytes: "int" = 0, decide = None, marked_only = false, ahead = None, pool = None, pack = true))]
    fn new(
        group: Option<Py<Group>>,
        find: Option<Find<'_>>,
        keep: Option<Py<Keep>>,
        min_bytes: u64,
        decide: Option<Decide<'_>>,
        marked_only: bool,
        ahead: Option<PyRef<'_, Group>>,
        pool: Option<Py<Pool>>,
        pack: bool,
    ) -> Self {
        Self {
            group: Mutex::new(group),
            find: Mutex::new(find.map(|find| find.0.unbind())),
            keep,
            min_bytes,
            decide: decide.map(|decide| decide.0.unbind()),
            marked_only,
            pool,
            pack,
            ahead: ahead.map(|group| Arc::new(Ahead::new(&group.hub, group.id))),
            tensors: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
        }
    }

    /// Takes a saved tensor and returns what autograd is to keep instead. Nothing is copied or freed here:
    /// the operation that the tensor is saved for may not have run yet.
    #[pyo3(signature = (tensor) -> "object")]
    fn __call__<'py>(&self, py: Python<'py>, tensor: Tensor<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tensor = tensor.0;
        let torch = Torch::get(py)?;
        let kept = if let Some(saved) = self.save(torch, &tensor)? {
            saved
        } else {
            self.kept.fetch_add(1, Ordering::Relaxed);
            match keep_here(&tensor, self.ahead.as_ref()) {
                Ok(kept) => kept,
                // It can't even be detached: as it is, then.
                Err(_) => return Ok(tensor),
            }
        };
        Ok(Bound::new(py, Handle(kept))?.into_any())
    }

    /// Tensors that went to the group.
    #[getter]
    fn tensors(&self) -> usize {
        self.tensors.load(Ordering::Relaxed)
    }

    /// Tensors that stay where they are.
    #[getter]
    fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    /// What Python's collector has to know: functions of the user may refer to whatever refers to this.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Ok(find) = self.find.try_lock() {
            visit.call(&*find)?;
        }
        visit.call(&self.decide)
    }

    fn __clear__(&self) {
        if let Ok(mut find) = self.find.try_lock() {
            drop(find.take());
        }
    }
}

/// Remembers a tensor that stays, by something that does not refer to the graph.
fn keep_here(tensor: &Bound<'_, PyAny>, ahead: Option<&Arc<Ahead>>) -> PyResult<Kept> {
    let alias = tensor.call_method0(intern!(tensor.py(), "detach"))?;
    let version = version_of(&alias).ok();
    Ok(Kept::Here { alias: alias.unbind(), version, ahead: ahead.cloned() })
}

impl Packer {
    fn save(&self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Kept>> {
        let py = tensor.py();
        if !torch.is_plain(tensor) {
            return self.save_parts(torch, tensor);
        }
        let Some((view, place)) = View::of(torch, tensor)? else { return Ok(None) };
        let reach = view.reach();
        if reach.is_empty()
            || view.data == 0
            || view.bytes() < self.min_bytes
            || torch.is_parameter(tensor)?
        {
            return Ok(None);
        }
        let storage = storage_of(tensor)?;
        let key = storage_key(&storage)?;
        if self.keep.as_ref().is_some_and(|keep| keep.get().0.contains(&key)) {
            return Ok(None);
        }
        if let Some(decide) = &self.decide
            && !decide.bind(py).call1((tensor,))?.is_truthy()?
        {
            return Ok(None);
        }
        let Some(group) = self.group(py)? else { return Ok(None) };
        let group = group.get();
        let saved = claim(
            py,
            &group.hub,
            group.id,
            (self.marked_only, self.pack, self.pool.as_ref()),
            (tensor, view, place, key),
        )?;
        self.tensors.fetch_add(usize::from(saved.is_some()), Ordering::Relaxed);
        Ok(saved)
    }

    /// A tensor of a subclass that consists of others, such as a distributed one: its parts are saved.
    fn save_parts(&self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Kept>> {
        let py = tensor.py();
        if torch.is_parameter(tensor)? {
            return Ok(None);
        }
        let pack = |part: &Bound<'_, PyAny>| -> PyResult<Option<Kept>> { self.save(torch, part) };
        let module = py.import("ebbtide.torch._subclass")?;
        let split = module.call_method1("split", (tensor,))?;
        if split.is_none() {
            return Ok(None);
        }
        let (names, context): (Vec<(String, Bound<'_, PyAny>)>, Bound<'_, PyAny>) =
            split.extract()?;
        let packed = pyo3::types::PyList::empty(py);
        let mut any = false;
        for (name, part) in names {
            let kept = match pack(&part)? {
                Some(kept) => {
                    any = true;
                    kept
                }
                None => keep_here(&part, None)?,
            };
            packed.append((name, Bound::new(py, Handle(kept))?))?;
        }
        let parts = (packed, context).into_pyobject(py)?.into_any().unbind();
        Ok(any.then_some(Kept::Parts { parts }))
    }

    /// The region's group, looked for once.
    fn group(&self, py: Python<'_>) -> PyResult<Option<Py<Group>>> {
        let find = {
            let group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(group) = &*group {
                return Ok(Some(group.clone_ref(py)));
            }
            self.find.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let Some(find) = find else { return Ok(None) };
        let found: Option<Py<Group>> = find.bind(py).call0()?.extract()?;
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        *group = found.as_ref().map(|found| found.clone_ref(py));
        Ok(found)
    }
}

type Eligible<'a, 'py> = (&'a Bound<'py, PyAny>, View, Place, usize);

/// Gives a tensor to a group: to a span that has its bytes, or may grow by them, or to a new one. `None`
/// if the group takes nothing any more.
fn claim(
    py: Python<'_>,
    hub: &Arc<Hub>,
    group: u64,
    (marked_only, pack, pool): (bool, bool, Option<&Py<Pool>>),
    (tensor, view, place, key): Eligible<'_, '_>,
) -> PyResult<Option<Kept>> {
    let version = version_of(tensor)?;
    let mut inner = hub.lock(py)?;
    if inner.phase(group) != "open" || !inner.takes(py, hub, &place)? {
        return Ok(None);
    }
    let alias = || Ok(tensor.call_method0(intern!(py, "detach"))?.unbind());
    let found = share(&mut inner, (&view, key, version), alias)?;
    let (held, owner, number) = match found {
        Some(found) => found,
        None if is_common(&inner, group, key) => return Ok(None),
        None => {
            let pool =
                pool.map(|pool| pool.get().id_at(py, hub, &mut inner, &place)).transpose()?;
            let held =
                Held::span((place, key), &view, (alias()?, version), Arc::clone(&hub.graveyard));
            held.packed.store(pack, Ordering::Relaxed);
            if let Some(pool) = pool {
                let _ = held.pool.set(pool);
            }
            let held = Arc::new(held);
            inner.spans.entry(key).or_default().push((Arc::downgrade(&held), group));
            let entry = inner.entry(group)?;
            if entry.spans.len() > 2 * entry.live + 64 {
                entry.spans.retain(|span| span.strong_count() > 0);
            }
            entry.spans.push(Arc::downgrade(&held));
            (held, group, 0)
        }
    };
    inner.entry(owner)?.live += 1;
    held.wanted.fetch_or(!marked_only, Ordering::Relaxed);
    drop(inner);
    let claim = Claim::new(held, owner, Arc::clone(&hub.graveyard));
    let view = Box::new(view);
    Ok(Some(Kept::Saved { hub: Arc::clone(hub), claim, number, version, view }))
}

/// So many groups have swapped a storage that is still alive: it belongs to all layers, as a rotary table or
/// a mask does, and another copy would free nothing.
const COMMON: usize = 2;

fn is_common(inner: &Locked<'_>, group: u64, key: usize) -> bool {
    let spans = inner.spans.get(&key).into_iter().flatten();
    let others = spans.filter(|(span, owner)| *owner != group && span.strong_count() > 0);
    others.map(|(_, owner)| owner).collect::<HashSet<_>>().len() >= COMMON
}

/// A span of a group that is still open which has these bytes in this version, or can grow by them.
fn share(
    inner: &mut Locked<'_>,
    (view, key, version): (&View, usize, u64),
    alias: impl Fn() -> PyResult<Py<PyAny>>,
) -> PyResult<Option<(Arc<Held>, u64, usize)>> {
    let Some(spans) = inner.spans.get(&key) else { return Ok(None) };
    let spans: Vec<_> =
        spans.iter().filter_map(|(span, owner)| Some((span.upgrade()?, *owner))).collect();
    let reach = view.reach();
    for (held, owner) in spans {
        if inner.phase(owner) != "open" {
            continue;
        }
        if let Some(number) = held.join(&reach, version, &alias)? {
            inner.merged += 1;
            return Ok(Some((held, owner, number)));
        }
    }
    Ok(None)
}
