//! Explicit pools of host memory for Python (rows P2, P3): buffers that a program takes by hand, and those
//! that groups use for the tensors which name the pool.
//!
//! The decisions are those of the engine's [`HostPool`]. What is taken by hand comes from one of these
//! ([`Own`]); an engine that is given the pool keeps another ([`Share`]), because its buffers are of another
//! kind. All have one [`Budget`], so the bound holds for all of them together; what is free with one is
//! given up when another needs the room.
//!
//! # Access contract
//!
//! * [`Own`] is behind a lock of its own. Whoever has it takes no hub's; a hub's thread may take it.
//! * A buffer is known by the very tensor object that was handed out. The pool keeps that object until it
//!   is given back, so no other one can be taken for it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ebbtide_core::{
    Accelerator, BackendError, Budget, Buffer, Direction, End, Error, Facts, HostPool, PoolId,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Class, exception, raise, setting};
use crate::held::backend_error;
use crate::hub::{Hub, Inner};
use crate::owned::Owned;
use crate::quiet::quietly;
use crate::torch::Torch;
use crate::types::Tensor;
use crate::view::Place;

/// Host memory with a bound, reused between copies; pinned where there is an accelerator.
///
/// Any thread may use it.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Pool {
    budget: Budget,
    own: Owned<Own>,
    shares: Mutex<Vec<Share>>,
}

/// What is taken by hand.
struct Own {
    pool: HostPool<HostMemory>,
    device: HostMemory,
    /// What is handed out, by the address of the tensor object.
    out: HashMap<usize, (Buffer<HostMemory>, Py<PyAny>)>,
}

/// What an engine keeps of the pool.
struct Share {
    hub: Weak<Hub>,
    unit: usize,
    id: PoolId,
}

impl Pool {
    /// A pool of at most so many bytes.
    ///
    /// # Errors
    /// There is nothing in it, or torch can't be imported.
    pub(crate) fn new(py: Python<'_>, max_host_bytes: u64) -> PyResult<Self> {
        if max_host_bytes == 0 {
            return Err(setting(
                "a pool of 0 bytes",
                "max_host_bytes is in bytes, and more than 0",
            ));
        }
        let budget = Budget::new(max_host_bytes);
        let own = Own {
            pool: HostPool::sharing(PoolId(0), budget.clone()),
            device: HostMemory { pinned: has_accelerator(py)? },
            out: HashMap::new(),
        };
        Ok(Self { budget, own: Owned::new(own), shares: Mutex::default() })
    }

    /// What the engine of a unit calls this pool.
    ///
    /// # Errors
    /// The unit has no host memory that a pool could be for.
    pub(crate) fn id_in(
        &self,
        py: Python<'_>,
        hub: &Arc<Hub>,
        inner: &mut Inner,
        unit: usize,
    ) -> PyResult<PoolId> {
        // The engine can't ask for the room of what is free here.
        self.own.lock(py)?.give_up_free();
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        shares.retain(|share| share.hub.strong_count() > 0);
        let of = Arc::downgrade(hub);
        let known = shares.iter().find(|share| share.unit == unit && share.hub.ptr_eq(&of));
        if let Some(share) = known {
            return Ok(share.id);
        }
        let Some(id) = inner.unit(unit).add_pool(&self.budget) else {
            let message = "a pool has no effect: tensors of the CPU go straight into the file";
            return Err(setting(message, "use tier=\"host\", or leave the pool out"));
        };
        shares.push(Share { hub: of, unit, id });
        Ok(id)
    }

    /// The same for the unit of a device.
    ///
    /// # Errors
    /// Its unit can't be opened, or as above.
    pub(crate) fn id_at(
        &self,
        py: Python<'_>,
        hub: &Arc<Hub>,
        inner: &mut Inner,
        place: &Place,
    ) -> PyResult<PoolId> {
        let unit = inner.unit_of(hub, place)?;
        self.id_in(py, hub, inner, unit)
    }

    /// Engines give back what is free of this pool. Returns bytes.
    fn take_back(&self, py: Python<'_>) -> u64 {
        let shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |share: &Share| Some((share.hub.upgrade()?, share.unit, share.id));
        let alive: Vec<_> = shares.iter().filter_map(alive).collect();
        drop(shares);
        let mut bytes = 0;
        for (hub, unit, id) in alive {
            // A hub that is at work in this thread needs what it has.
            let Ok(mut inner) = hub.lock(py) else { continue };
            if !inner.closed {
                bytes += inner.unit(unit).shrink_pool(id);
            }
        }
        bytes
    }
}

#[pymethods]
impl Pool {
    /// Bytes that are allocated now, handed out or not, by hand and for groups.
    #[getter]
    fn total_allocated(&self) -> u64 {
        self.budget.allocated()
    }

    /// The bound, in bytes. Buffers count with their whole size, up to an eighth more than was asked for.
    #[getter]
    fn max_host_bytes(&self) -> u64 {
        self.budget.maximum()
    }

    /// A tensor of `size` bytes on the CPU. If there is no room, what has been given back is used again, or
    /// waited for in the order in which it was given back.
    ///
    /// Raises `NoRoomError` if all is in use, with the bytes that were asked for, that are pooled, and the
    /// bound; `SettingError` for a size that is none.
    #[pyo3(signature = (size: "int"))]
    fn acquire<'py>(&self, py: Python<'py>, size: i64) -> PyResult<Tensor<'py>> {
        let bytes = u64::try_from(size).unwrap_or(0);
        if bytes == 0 {
            return Err(setting(
                &format!("a buffer of {size} bytes"),
                "size is in bytes, and more than 0",
            ));
        }
        let found = self.own.lock(py)?.acquire(py, bytes);
        match found {
            Err(Refused::Pool(error)) if error.is_no_room() && self.take_back(py) > 0 => {
                self.own.lock(py)?.acquire(py, bytes)
            }
            found => found,
        }
        .map_err(Refused::raise)
    }

    /// Gives back what `acquire` has returned. With an `event` (anything with `query()` and `synchronize()`)
    /// it is used again only when that has completed.
    ///
    /// Raises `EbbtideError` for a tensor that is not from this pool or was given back before, `SettingError`
    /// for what is no event.
    #[pyo3(signature = (tensor, event: "object | None" = None))]
    fn release(
        &self,
        py: Python<'_>,
        tensor: Tensor<'_>,
        event: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let event = event.map(Event::of).transpose()?;
        self.own.lock(py)?.release(&tensor.0, event)
    }

    /// Gives the memory back that is free. Returns bytes.
    fn shrink(&self, py: Python<'_>) -> PyResult<u64> {
        let own = self.own.lock(py)?.give_up_free();
        Ok(own + self.take_back(py))
    }

    fn __repr__(&self) -> String {
        format!("Pool({} of {} bytes allocated)", self.budget.allocated(), self.budget.maximum())
    }
}

/// Why there is no buffer.
enum Refused {
    Pool(Error),
    Python(PyErr),
}

impl Refused {
    fn raise(self) -> PyErr {
        match self {
            Self::Pool(error) => raise(error),
            Self::Python(error) => error,
        }
    }
}

impl Own {
    fn acquire<'py>(&mut self, py: Python<'py>, bytes: u64) -> Result<Tensor<'py>, Refused> {
        let buffer = self.pool.acquire(&mut self.device, bytes).map_err(Refused::Pool)?;
        let whole = buffer.memory().bind(py);
        let part = quietly(py, || whole.call_method1(intern!(py, "narrow"), (0, 0, bytes)));
        match part {
            Ok(part) => {
                let out = (buffer, part.clone().unbind());
                self.out.insert(part.as_ptr().addr(), out);
                Ok(Tensor(part))
            }
            Err(error) => {
                drop(self.pool.release(buffer, None));
                Err(Refused::Python(error))
            }
        }
    }

    fn release(&mut self, tensor: &Bound<'_, PyAny>, event: Option<Event>) -> PyResult<()> {
        let Some((buffer, _tensor)) = self.out.remove(&tensor.as_ptr().addr()) else {
            let message = "the tensor is not from this pool, or was given back before";
            let hint = "give back the very tensor that acquire returned, once";
            return Err(exception(Class::Other, message, Some(hint)));
        };
        self.pool.release(buffer, event).map_err(|(_, error)| raise(error))
    }

    fn give_up_free(&mut self) -> u64 {
        self.pool.reclaim(&mut self.device);
        self.pool.shrink_to(0)
    }
}

impl Drop for Own {
    /// Copies that are under way end first.
    fn drop(&mut self) {
        // What can't be waited for any more does not run any more.
        let _ = self.pool.settle(&mut self.device);
    }
}

/// Whatever the host can wait for.
#[derive(Clone)]
struct Event(Arc<Py<PyAny>>);

impl Event {
    /// # Errors
    /// It is none.
    fn of(object: Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if object.hasattr(intern!(py, "query"))? && object.hasattr(intern!(py, "synchronize"))? {
            return Ok(Self(Arc::new(object.unbind())));
        }
        let message = format!("the event is a {}", object.get_type().name()?);
        Err(setting(&message, "an event has `query()` and `synchronize()`, as torch.Event"))
    }
}

/// What a pool by hand needs of a device: memory, and events to wait for. Nobody copies here.
struct HostMemory {
    pinned: bool,
}

fn has_accelerator(py: Python<'_>) -> PyResult<bool> {
    let torch = py.import("torch")?;
    torch.getattr("accelerator")?.call_method0("is_available")?.is_truthy()
}

impl HostMemory {
    fn allocate(&self, py: Python<'_>, bytes: u64) -> PyResult<Py<PyAny>> {
        let torch = Torch::get(py)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item(intern!(py, "dtype"), torch.uint8.bind(py))?;
        kwargs.set_item(intern!(py, "device"), "cpu")?;
        kwargs.set_item(intern!(py, "pin_memory"), self.pinned)?;
        let module = torch.module.bind(py);
        let made =
            quietly(py, || module.call_method(intern!(py, "empty"), (bytes,), Some(&kwargs)));
        made.map(Bound::unbind)
    }
}

fn nobody_copies<T>() -> Result<T, BackendError> {
    Err(BackendError::new("a pool by hand has no device"))
}

impl Accelerator for HostMemory {
    type Storage = Infallible;
    type Block = Infallible;
    type Host = Py<PyAny>;
    type Stream = ();
    type Event = Event;

    fn key(&self, storage: &Infallible) -> usize {
        match *storage {}
    }

    fn facts(&self, storage: &Infallible) -> Option<Facts> {
        match *storage {}
    }

    fn compute(&self) {}

    fn copy_stream(&mut self, _: Direction) -> Result<(), BackendError> {
        nobody_copies()
    }

    fn record(&mut self, (): ()) -> Result<Event, BackendError> {
        nobody_copies()
    }

    fn wait(&mut self, (): (), _: &Event) -> Result<(), BackendError> {
        nobody_copies()
    }

    fn is_done(&mut self, event: &Event) -> bool {
        Python::attach(|py| {
            let answer = event.0.bind(py).call_method0(intern!(py, "query"));
            // What can't be asked is waited for, which tells why.
            answer.is_ok_and(|answer| answer.is_truthy().unwrap_or(false))
        })
    }

    fn sync(&mut self, event: &Event) -> Result<(), BackendError> {
        Python::attach(|py| {
            let done = event.0.bind(py).call_method0(intern!(py, "synchronize"));
            done.map(drop)
                .map_err(|error| backend_error(py, "the device does not complete its work", &error))
        })
    }

    fn sync_stream(&mut self, (): ()) -> Result<(), BackendError> {
        nobody_copies()
    }

    fn free(&mut self, storage: &mut Infallible) -> Result<(), BackendError> {
        match *storage {}
    }

    fn restore(&mut self, storage: &mut Infallible, _: u64) -> Result<(), BackendError> {
        match *storage {}
    }

    fn stage(&mut self, _: u64) -> Result<Infallible, BackendError> {
        nobody_copies()
    }

    fn pin(&mut self, bytes: u64) -> Result<Py<PyAny>, BackendError> {
        Python::attach(|py| {
            let made = self.allocate(py, bytes);
            made.map_err(|error| backend_error(py, "torch can't allocate it", &error))
        })
    }

    fn copy(
        &mut self,
        (): (),
        _: End<'_, Self>,
        _: End<'_, Self>,
        _: u64,
    ) -> Result<(), BackendError> {
        nobody_copies()
    }
}
