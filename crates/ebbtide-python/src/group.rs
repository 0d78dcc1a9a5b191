//! A group for Python: what one layer saved in one pass, and its journey.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ebbtide_core::{Facts, Registered, Saved, TensorId};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::{phase, setting};
use crate::held::Held;
use crate::hub::{ByName, Hub, Inner, Locked};
use crate::outside::Outside;
use crate::pool::Pool;
use crate::torch::{Torch, storage_key, storage_of};
use crate::types::{Tensor, Tensors};
use crate::view::View;

/// What one layer saved in one pass. Its tensors leave and come back together.
///
/// The phases are `open`, `offloading`, `away`, `loading`, `home`, `closed`. A call that the phase does
/// not allow raises `PhaseError` and changes nothing.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Group {
    pub(crate) hub: Arc<Hub>,
    pub(crate) id: u64,
    name: String,
    pass: u64,
    /// Nothing that it held is left. A schedule can't know that, so its calls then do nothing, each once
    /// and in order.
    over: Arc<AtomicBool>,
    /// The last call that was made, by its place in [`PHASES`].
    called: AtomicUsize,
}

/// Phases in order; what a call leads to is its number.
const PHASES: [&str; 5] = ["open", "offloading", "away", "loading", "home"];

impl Group {
    pub(crate) fn open(py: Python<'_>, hub: &Arc<Hub>, name: &str, pass: u64) -> PyResult<Self> {
        let mut inner = hub.lock(py)?;
        let id = inner.open(hub, name, pass)?;
        let (over, called) = (Arc::clone(&inner.entry(id)?.over), AtomicUsize::new(0));
        drop(inner);
        Ok(Self { hub: Arc::clone(hub), id, name: name.into(), pass, over, called })
    }

    /// The lock, if the group may go on to this phase. `None` if nothing is left to do.
    fn go(&self, py: Python<'_>, to: usize, call: &str) -> PyResult<Option<Locked<'_>>> {
        let before = self.called.load(Ordering::Relaxed);
        let inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) && before < to {
            self.called.store(to, Ordering::Relaxed);
            return Ok(None);
        }
        let found = inner.phase(self.id);
        if found != PHASES[to - 1] {
            return Err(self.refusal(found, PHASES[to - 1], call));
        }
        self.called.store(to, Ordering::Relaxed);
        Ok(Some(inner))
    }

    /// The lock, if the group is in this phase.
    fn require(&self, py: Python<'_>, wanted: &str, call: &str) -> PyResult<Locked<'_>> {
        let inner = self.hub.lock(py)?;
        let found = inner.phase(self.id);
        if found == wanted {
            return Ok(inner);
        }
        Err(self.refusal(found, wanted, call))
    }

    fn refusal(&self, found: &str, wanted: &str, call: &str) -> PyErr {
        let message = format!(
            "{call} of group {} pass {}: its phase is `{found}`, needs `{wanted}`",
            self.name, self.pass
        );
        phase(&message, "offload, wait, load, wait: each once and in this order")
    }
}

#[pymethods]
impl Group {
    /// Its name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The pass that it belongs to.
    #[getter]
    fn pass_(&self) -> u64 {
        self.pass
    }

    /// The phase that it is in.
    #[getter]
    fn phase(&self, py: Python<'_>) -> PyResult<&'static str> {
        let inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(PHASES[self.called.load(Ordering::Relaxed)]);
        }
        Ok(inner.phase(self.id))
    }

    /// Storages and spans that it has.
    #[getter]
    fn tensors(&self, py: Python<'_>) -> PyResult<usize> {
        let inner = self.hub.lock(py)?;
        Ok(inner.groups.get(&self.id).map_or(0, |entry| entry.spans.len() + entry.named.len()))
    }

    /// Starts to copy out what the group has. On an accelerator the copies run on `stream`, or on a
    /// stream of the engine's own, behind what is queued on the current one.
    ///
    /// Raises `PhaseError` if the group is not open, `ChangedError` if a tensor in place was resized or
    /// modified since it was registered (nothing is copied then), `NoRoomError` or `CopyError` if a copy
    /// can't be started; what was not started is untouched.
    #[pyo3(signature = (stream: "object | None" = None))]
    fn start_offload(&self, py: Python<'_>, stream: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(mut inner) = self.go(py, 1, "start_offload")? else { return Ok(()) };
        register_spans(&self.hub, &mut inner, self.id)?;
        let entry = inner.entry(self.id)?;
        entry.phase = "offloading";
        if entry.live == 0 && entry.named.is_empty() {
            // Nothing was saved, or it is gone again: a backward inside of the region, a dropped graph.
            inner.close_by_itself(self.id);
            return Ok(());
        }
        self.hub.waiting(&self.name, || {
            inner.each(self.id, |unit, id| unit.start_offload(id, stream.as_ref()))
        })
    }

    /// Whether `wait_offload` would return at once.
    fn offload_done(&self, py: Python<'_>) -> PyResult<bool> {
        let mut inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let mut done = true;
        inner.each(self.id, |unit, id| {
            done &= unit.offload_is_done(id);
            Ok(())
        })?;
        Ok(done)
    }

    /// Lets the memory of the group go. Waits for the copies, on an accelerator without making the host
    /// wait.
    ///
    /// Raises `PhaseError` if no offload was started, `CopyError` or `NoRoomError` for the first copy that
    /// failed and `ChangedError` for a tensor in place that was modified meanwhile: these stay where they
    /// are.
    fn wait_offload(&self, py: Python<'_>) -> PyResult<()> {
        let Some(mut inner) = self.go(py, 2, "wait_offload")? else { return Ok(()) };
        inner.entry(self.id)?.phase = "away";
        crate::sole::keep_what_is_used(py, &self.hub, &mut inner, self.id)?;
        self.hub.waiting(&self.name, || inner.each(self.id, |unit, id| unit.wait_offload(id)))
    }

    /// Starts to bring the group back.
    ///
    /// Raises `PhaseError` if it is not away, `NoRoomError` or `CopyError` if a load can't be started; it
    /// can be tried again.
    #[pyo3(signature = (stream: "object | None" = None))]
    fn start_load(&self, py: Python<'_>, stream: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        if self.hub.lock(py)?.phase(self.id) == "offloading" {
            self.wait_offload(py)?;
        }
        let Some(mut inner) = self.go(py, 3, "start_load")? else { return Ok(()) };
        inner.entry(self.id)?.phase = "loading";
        self.hub.waiting(&self.name, || {
            inner.each(self.id, |unit, id| unit.start_load(id, stream.as_ref()))
        })
    }

    /// Waits until the group is home. What was registered in place is forgotten then.
    ///
    /// Raises `PhaseError` if no load was started, `CopyError` for the first copy that failed (it can be
    /// tried again), `ChangedError` for a tensor in place that was modified since it was registered.
    fn wait_load(&self, py: Python<'_>) -> PyResult<()> {
        let Some(mut inner) = self.go(py, 4, "wait_load")? else { return Ok(()) };
        let done =
            self.hub.waiting(&self.name, || inner.each(self.id, |unit, id| unit.wait_load(id)));
        self.settle(&mut inner)?;
        done
    }

    /// Everything is home when this returns, whatever the phase. What was away and not on its way counts
    /// as a missed prefetch.
    ///
    /// Raises as `wait_load`.
    fn need(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(());
        }
        let done = self.hub.waiting(&self.name, || inner.each(self.id, |unit, id| unit.need(id)));
        self.settle(&mut inner)?;
        done
    }

    /// Starts to load the groups that are expected after this one. A hint: what can't be started is loaded
    /// when it is asked for.
    fn prefetch(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(());
        }
        inner.each(self.id, |unit, id| {
            unit.prefetch(id);
            Ok(())
        })
    }

    /// Forgets the group: waits for its copies, gives all buffers back. What is away then can't be had any
    /// more. Does nothing the second time.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.hub.lock(py)?;
        self.hub.waiting(&self.name, || inner.close(self.id));
        Ok(())
    }

    /// Registers a storage to be moved in place: it is resized to zero when it is away, and every tensor of
    /// it is attached to the memory again that it gets when it comes back.
    ///
    /// It is only freed when it is proven that nothing else uses it: no other tensor, nothing that
    /// autograd keeps, and (unless `sole` is false) no reference of Python to this tensor but `references`,
    /// which the caller holds itself. `version` and `nbytes` are what the tensor was, if that was earlier
    /// than now. Its copy goes to a buffer of `pool`, if that is given.
    ///
    /// Raises `PhaseError` if the group is not open, `SettingError` for what can't be moved, and for a pool
    /// where the tier needs no host memory.
    #[pyo3(signature = (tensor, label, *, pack = false, version: "int | None" = None, nbytes: "int | None" = None, sole = true, references: "int" = 0, pool = None))]
    #[expect(clippy::too_many_arguments, reason = "named by keyword in Python")]
    fn add(
        &self,
        py: Python<'_>,
        tensor: Tensor<'_>,
        label: &str,
        pack: bool,
        version: Option<u64>,
        nbytes: Option<u64>,
        sole: bool,
        references: usize,
        pool: Option<&Bound<'_, Pool>>,
    ) -> PyResult<SavedTensor> {
        let tensor = tensor.0;
        let Some((view, place)) = View::of(Torch::get(py)?, &tensor)? else {
            let hint = "only dense tensors with memory can be moved";
            return Err(setting("this tensor can't be moved in place", hint));
        };
        let facts = version.zip(nbytes).map(|(version, bytes)| Facts { bytes, version });
        let mut inner = self.require(py, "open", "add")?;
        let held = Held::in_place(&tensor, (&view, place), facts, Arc::clone(&self.hub.graveyard));
        let held = held.map_err(|error| {
            if !error.get_type(py).is(py.get_type::<PyRuntimeError>()) {
                return error;
            }
            let hint =
                "tensors of inference mode count no changes: clone it outside of inference mode";
            setting(&format!("this tensor can't be moved in place: {error}"), hint)
        })?;
        let held = Arc::new(held);
        let mut saved = named(py, &held, &view, pack)?;
        let unit = inner.unit_of(&self.hub, &held.place)?;
        if let Some(pool) = pool {
            saved = saved.pool(pool.get().id_in(py, &self.hub, &mut inner, unit)?);
        }
        let part = inner.part(self.id, unit)?;
        let (id, registered) = inner.unit(unit).register(part, saved, label)?;
        if !is_resizable(&held, py)? {
            inner.unit(unit).protect(&held)?;
        }
        let lost = Arc::clone(&held.lost);
        inner.entry(self.id)?.named.push((held, sole.then_some(references)));
        let what = What::Named { unit, id, registered, lost };
        Ok(SavedTensor { hub: Arc::clone(&self.hub), group: self.id, what })
    }

    /// Registers a storage that an object looks after, which has these methods:
    ///
    /// * `facts()`: its size in bytes and its version, compared with those at this call;
    /// * `lend()`: the address of its memory, which stays until `vacate()`, `retract()` or the end of the group;
    /// * `vacate()`: its bytes are copied, the memory may go;
    /// * `allocate()`: the address of memory for its bytes;
    /// * `arrive()`: they are there, or its copy was called off before it left;
    /// * `retract()`: the memory that was allocated is not needed.
    ///
    /// They must not call the hub. `key` tells storages apart: one that another group has stays for both.
    ///
    /// Raises `PhaseError` if the group is not open.
    fn look_after(
        &self,
        py: Python<'_>,
        storage: Bound<'_, PyAny>,
        label: &str,
        key: usize,
    ) -> PyResult<SavedTensor> {
        let mut inner = self.require(py, "open", "look_after")?;
        let outside = Outside::new(&storage)?;
        let bytes = outside.bytes() as u64;
        let held = Arc::new(Held::outside(outside, key, Arc::clone(&self.hub.graveyard)));
        let unit = inner.unit_of(&self.hub, &held.place)?;
        let part = inner.part(self.id, unit)?;
        let saved = Saved::whole(Arc::clone(&held), bytes).element(held.element);
        let (id, registered) = inner.unit(unit).register(part, saved, label)?;
        let lost = Arc::clone(&held.lost);
        inner.entry(self.id)?.named.push((held, None));
        let what = What::Named { unit, id, registered, lost };
        Ok(SavedTensor { hub: Arc::clone(&self.hub), group: self.id, what })
    }

    /// Keeps the storages with these keys where they are, as `protect` does.
    ///
    /// Raises as `protect`.
    fn protect_keys(&self, py: Python<'_>, keys: Vec<usize>) -> PyResult<usize> {
        let mut inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut count = 0;
        for key in keys {
            count += usize::from(protect(&mut inner, self.id, key)?);
        }
        Ok(count)
    }

    /// Marks a storage to be swapped in this group, for a packer with `marked_only`: what autograd saved or
    /// will save of it in this region leaves, and its memory goes when its last owner goes. Its copy goes to a
    /// buffer of `pool`, if that is given.
    ///
    /// Raises `PhaseError` if the group is not open, `SettingError` as `add` does.
    #[pyo3(signature = (tensor, label, *, pool = None, pack = true))]
    fn mark(
        &self,
        py: Python<'_>,
        tensor: Tensor<'_>,
        label: &str,
        pool: Option<&Bound<'_, Pool>>,
        pack: bool,
    ) -> PyResult<SavedTensor> {
        let mut inner = self.require(py, "open", "mark")?;
        let key = storage_key(&storage_of(&tensor.0)?)?;
        let pool = match (pool, View::of(Torch::get(py)?, &tensor.0)?) {
            (Some(pool), Some((_, place))) => {
                Some(pool.get().id_at(py, &self.hub, &mut inner, &place)?)
            }
            _ => None,
        };
        let named = ByName { label: label.into(), pool, pack };
        let fresh = inner.entry(self.id)?.marks.insert(key, named).is_none();
        let what = What::Marked { key, fresh };
        Ok(SavedTensor { hub: Arc::clone(&self.hub), group: self.id, what })
    }

    /// Keeps the storages of these tensors where they are: something outside of the group uses them. An
    /// offload under way is called off, what is away is brought back. Returns how many there were.
    ///
    /// Raises `CopyError` if one can't be brought back, `NotSavedError` if only a part of it was saved.
    fn protect(&self, py: Python<'_>, tensors: Tensors<'_>) -> PyResult<usize> {
        let mut inner = self.hub.lock(py)?;
        if self.over.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut count = 0;
        for tensor in tensors.0.try_iter()? {
            let Ok(storage) = storage_of(&tensor?) else { continue };
            count += usize::from(protect(&mut inner, self.id, storage_key(&storage)?)?);
        }
        Ok(count)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Group({:?}, pass {}, {})", self.name, self.pass, self.phase(py)?))
    }
}

impl Group {
    /// A group that is home keeps nothing that was registered in place.
    fn settle(&self, inner: &mut Locked<'_>) -> PyResult<()> {
        if inner.phase(self.id) == "home" || inner.entry(self.id)?.parts.is_empty() {
            let entry = inner.entry(self.id)?;
            entry.phase = "home";
            entry.named.clear();
            if entry.live == 0 {
                inner.close(self.id);
            }
        }
        Ok(())
    }
}

/// Keeps one storage of a group. Spans need none: nothing is taken from under a user.
pub(crate) fn protect(inner: &mut Inner, group: u64, key: usize) -> PyResult<bool> {
    let entry = inner.entry(group)?;
    entry.marks.remove(&key);
    let found =
        entry.named.iter().find(|(held, _)| held.key == key).map(|(held, _)| Arc::clone(held));
    let Some(held) = found else { return Ok(false) };
    let unit = inner.unit_of_known(&held.place);
    match unit {
        Some(unit) => inner.unit(unit).protect(&held),
        None => Ok(false),
    }
}

/// Gives the engine the spans that somebody still has a claim on.
fn register_spans(hub: &Hub, inner: &mut Locked<'_>, group: u64) -> PyResult<()> {
    let entry = inner.entry(group)?;
    let name = entry.name.clone();
    let wanted = |held: Arc<Held>| {
        let mark = entry.marks.get(&held.key);
        if mark.is_none() && !held.wanted.load(Ordering::Relaxed) {
            return None;
        }
        let pool = held.pool.get().copied().or(mark.and_then(|mark| mark.pool));
        let pack = mark.map_or(held.packed.load(Ordering::Relaxed), |mark| mark.pack);
        let label = held.label(mark.map_or(&name, |mark| &mark.label));
        Some((held, pool, pack, label))
    };
    let spans: Vec<_> =
        entry.spans.iter().filter_map(std::sync::Weak::upgrade).filter_map(wanted).collect();
    for (held, pool, pack, label) in spans {
        let unit = inner.unit_of(hub, &held.place)?;
        let part = inner.part(group, unit)?;
        let bytes = held.range().len() as u64;
        let mut saved = Saved::whole(Arc::clone(&held), bytes).element(held.element);
        if pack {
            saved = saved.pack();
        }
        if let Some(pool) = pool {
            saved = saved.pool(pool);
        }
        // A span is the engine's business once, so it is always new.
        let _ = inner.unit(unit).register(part, saved, &label)?;
    }
    Ok(())
}

/// Memory that is not torch's own (of numpy, of a file, shared) can't be given up.
fn is_resizable(held: &Held, py: Python<'_>) -> PyResult<bool> {
    let Some(named) = held.named() else { return Ok(true) };
    named.storage.bind(py).call_method0(intern!(py, "resizable"))?.extract()
}

/// A storage in place as the engine registers it.
fn named(py: Python<'_>, held: &Arc<Held>, view: &View, pack: bool) -> PyResult<Saved<Arc<Held>>> {
    let Some(named) = held.named() else { return Err(setting("not in place", "")) };
    let start: usize = named.storage.bind(py).call_method0(intern!(py, "data_ptr"))?.extract()?;
    let reach = view.reach();
    // A tensor without elements has no address.
    let first = reach.start.saturating_sub(start) as u64;
    let range = first..first + reach.len() as u64;
    let mut saved =
        Saved::whole(Arc::clone(held), named.facts.bytes).slice(range).element(held.element);
    if pack {
        saved = saved.pack();
    }
    Ok(if view.is_contiguous() { saved } else { saved.strided() })
}

/// One tensor of a group.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct SavedTensor {
    hub: Arc<Hub>,
    group: u64,
    what: What,
}

enum What {
    Named { unit: usize, id: TensorId, registered: Registered, lost: Arc<AtomicBool> },
    Marked { key: usize, fresh: bool },
}

#[pymethods]
impl SavedTensor {
    /// `device`, `d2h`, `host` (in whatever tier) or `h2d`.
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.tier(py)? {
            "device" => "device",
            "d2h" => "d2h",
            "h2d" => "h2d",
            _ => "host",
        })
    }

    /// The same, with the name of the tier instead of `host`; `gone` if the group was given up while it was
    /// away.
    #[getter]
    fn tier(&self, py: Python<'_>) -> PyResult<&'static str> {
        let mut inner = self.hub.lock(py)?;
        if !inner.groups.contains_key(&self.group) {
            let lost =
                matches!(&self.what, What::Named { lost, .. } if lost.load(Ordering::Relaxed));
            return Ok(if lost { "gone" } else { "device" });
        }
        match self.what {
            What::Named { unit, id, .. } => inner.unit(unit).state(id),
            What::Marked { key, .. } => Ok(marked_state(&inner, self.group, key)),
        }
    }

    /// `new`, `duplicate` (exactly these bytes are in the group already), `merged` (other bytes of the
    /// storage are) or `shared` (another group has the storage: it stays on the device for both).
    #[getter]
    fn registered(&self) -> &'static str {
        match self.what {
            What::Named { registered: Registered::New, .. } | What::Marked { fresh: true, .. } => {
                "new"
            }
            What::Named { registered: Registered::Duplicate, .. } | What::Marked { .. } => {
                "duplicate"
            }
            What::Named { registered: Registered::Merged, .. } => "merged",
            What::Named { registered: Registered::Shared(_), .. } => "shared",
        }
    }

    /// One line for debugging.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let state = self.state(py)?;
        let mut inner = self.hub.lock(py)?;
        match self.what {
            What::Named { unit, id, .. } if inner.groups.contains_key(&self.group) => {
                inner.unit(unit).describe(id)
            }
            _ => Ok(format!(
                "a tensor: state {state}, duplicate {}",
                self.registered() == "duplicate"
            )),
        }
    }

    /// Raises an error that names the state unless the value may be read now.
    fn readable(&self, py: Python<'_>) -> PyResult<()> {
        match self.tier(py)? {
            "device" => Ok(()),
            "gone" => {
                let hint = "its storage is empty; make the tensor anew";
                Err(phase("the group of the tensor was given up while it was away", hint))
            }
            state => {
                let message = format!("the value is not on the device: its state is `{state}`");
                Err(phase(&message, "load it and wait for the load first"))
            }
        }
    }
}

fn marked_state(inner: &Locked<'_>, group: u64, key: usize) -> &'static str {
    let spans = inner.spans.get(&key).into_iter().flatten();
    let mut spans =
        spans.filter(|(_, owner)| *owner == group).filter_map(|(span, _)| span.upgrade());
    let Some(span) = spans.next() else { return "device" };
    match inner.phase(group) {
        "offloading" if inner.groups[&group].marks.contains_key(&key) => "d2h",
        "loading" if !span.on_device() => "h2d",
        _ if span.on_device() => "device",
        _ => "host",
    }
}
