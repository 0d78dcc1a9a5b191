//! Any accelerator that torch knows, through torch's device-generic public interface.
//!
//! | the engine's word | here |
//! | --- | --- |
//! | stream | a number for a `torch.Stream` ([`stream`](crate::stream)) |
//! | event | one `torch.Event`, or one for each stream that computes |
//! | host buffer | pinned tensors ([`pinned`](crate::pinned)) |
//! | staging block | a tensor of bytes, allocated on the compute stream |
//! | copy | `copy_(…, non_blocking=True)` between tensors of bytes, with the stream as the current one |
//!
//! # Access contract
//!
//! * Torch's allocator hands freed memory out again for later work of the stream that it was allocated
//!   on. The engine lets the compute stream wait for copies before it frees; the compute stream stands for
//!   all on which the program computes (`stream.rs`), so it does not matter which of them is current.
//! * What a load brings home is allocated on the current stream. Where the program computes on several,
//!   the allocator is told of the others, because the last user of the tensor may run there.
//! * A copy into a storage goes through a tensor of bytes that is made for it, so the versions of the
//!   program's tensors stay as they are.

use std::cell::RefCell;
use std::sync::Arc;

use ebbtide_core::{
    Accelerator, BackendError, Budget, Direction, End, Facts, PoolId, Staged, StagedConfig,
};
use ebbtide_store::{FileStore, host_bound};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dlpack::Dims;
use crate::error::setting;
use crate::held::{Freed, Held, backend_error, phase};
use crate::hub::{Hub, Tier, cannot_open};
use crate::pinned::{Part, Parted, Pinned, narrow};
use crate::quiet::quietly;
use crate::ram::Tally;
use crate::stream::{Mark, StreamId, Streams};
use crate::torch::{Torch, storage_of};
use crate::unit::{Unit, unit};
use crate::waiting::Waiting;

/// Through pinned memory, and further down into a file when that is full.
pub(crate) type AcceleratorMover = Staged<TorchAccelerator, Parted<Waiting<FileStore<Part>>>>;

/// Opens the unit of an accelerator.
///
/// # Errors
/// It is not the accelerator that torch works with, or has no streams; the tier can't be opened.
pub(crate) fn open(hub: &Hub, kind: &str, index: u32) -> PyResult<Box<dyn Unit>> {
    let device =
        Python::attach(|py| TorchAccelerator::open(py, kind, index, Arc::clone(&hub.tally)));
    let device = device.map_err(|error| {
        let message = format!("tensors of {kind}:{index} can't be moved: {error}");
        setting(&message, "use tensors of the CPU, or of the accelerator that torch works with")
    })?;
    let mut config = StagedConfig::new(host_bound(hub.settings.host_bytes).map_err(cannot_open)?);
    // Several buckets fit, so that one is filled while another is emptied.
    config.bucket_bytes = config.bucket_bytes.min(config.host_bytes / 4);
    let disk = match hub.settings.tier {
        Tier::Host => None,
        Tier::File => {
            let witness = Python::attach(|py| witness(py, kind));
            Some(Parted::new(Waiting(crate::open::spill_file::<Part>(hub)?), witness))
        }
    };
    let mover: AcceleratorMover = Staged::new(&config, device, disk);
    Ok(unit(hub.settings.prefetch, mover, hub.log.clone()))
}

/// Who is told of what the host does with pinned memory, on a device that checks orders.
fn witness(py: Python<'_>, kind: &str) -> Option<Py<PyAny>> {
    let module = py.import("torch").ok()?.call_method1("get_device_module", (kind,)).ok()?;
    module.getattr("_ebbtide_host_access").ok().map(Bound::unbind)
}

/// One device.
#[derive(Debug)]
pub(crate) struct TorchAccelerator {
    /// Asked for the current stream through `&self`; never borrowed twice, under the hub's lock.
    streams: RefCell<Streams>,
    /// The stream that was current last could not be found out.
    lost: RefCell<Option<BackendError>>,
    /// The stream that was current last.
    current: std::cell::Cell<StreamId>,
    tally: Arc<Tally>,
}

type Bytes<'py> = Bound<'py, PyAny>;

impl TorchAccelerator {
    fn open(py: Python<'_>, kind: &str, index: u32, tally: Arc<Tally>) -> PyResult<Self> {
        let mut streams = Streams::open(py, kind, index)?;
        let current = streams.note(py)?;
        // A device without events is found out now.
        streams.record(py, current)?;
        let (lost, current) = (RefCell::new(None), std::cell::Cell::new(current));
        Ok(Self { streams: RefCell::new(streams), lost, current, tally })
    }

    /// The program computes, or is about to, on the stream that is current now.
    fn note(&self, py: Python<'_>) {
        match self.streams.borrow_mut().note(py) {
            Ok(stream) => self.current.set(stream),
            Err(error) => {
                let error = backend_error(py, "the current stream is not to be had", &error);
                *self.lost.borrow_mut() = Some(error);
            }
        }
    }

    /// Something with torch that the program's modes do not see.
    fn with<T>(
        what: &str,
        run: impl FnOnce(Python<'_>, &'static Torch) -> PyResult<T>,
    ) -> Result<T, BackendError> {
        Python::attach(|py| {
            let done = Torch::get(py).and_then(|torch| quietly(py, || run(py, torch)));
            done.map_err(|error| backend_error(py, what, &error))
        })
    }

    /// A tensor of bytes on the device, of undefined content.
    fn allocate<'py>(&self, py: Python<'py>, torch: &Torch, bytes: u64) -> PyResult<Bytes<'py>> {
        torch.bytes(self.streams.borrow().device.bind(py), bytes)
    }

    /// Tells torch's allocator of the other streams on which the program computes.
    fn used_elsewhere(&self, py: Python<'_>, bytes: &Bytes<'_>) -> PyResult<()> {
        for stream in self.streams.borrow().others(py, self.current.get()) {
            bytes.call_method1(intern!(py, "record_stream"), (stream,))?;
        }
        Ok(())
    }

    /// A range of a storage, as a tensor of bytes of its own.
    fn bytes_of<'py>(
        py: Python<'py>,
        torch: &Torch,
        held: &Held,
        at: u64,
        len: u64,
    ) -> PyResult<Bytes<'py>> {
        if let Some(named) = held.named() {
            return reach(torch, named.storage.bind(py), at, len);
        }
        if let Some(bytes) = held.torch_bytes(py) {
            return narrow(bytes.bind(py), at, len);
        }
        let Some(alias) = held.alias(py) else {
            return Err(pyo3::exceptions::PyRuntimeError::new_err("a storage without memory"));
        };
        let storage = storage_of(alias.bind(py))?;
        let start: usize = storage.call_method0(intern!(py, "data_ptr"))?.extract()?;
        reach(torch, &storage, (held.range().start - start) as u64 + at, len)
    }

    /// The pairs of tensors that a copy consists of, as destination and source.
    fn pairs<'py>(
        py: Python<'py>,
        torch: &Torch,
        (from, to): (End<'_, Self>, End<'_, Self>),
        len: u64,
    ) -> PyResult<Vec<(Bytes<'py>, Bytes<'py>)>> {
        let one = |end: End<'_, Self>| match end {
            End::Storage(held, at) => Self::bytes_of(py, torch, held, at, len),
            End::Block(block, at) => narrow(block.bind(py), at, len),
            End::Host(..) => {
                Err(pyo3::exceptions::PyRuntimeError::new_err("a copy within the host"))
            }
        };
        let (host, at, device, out) = match (from, to) {
            (from, End::Host(host, at)) => (host, at, one(from)?, true),
            (End::Host(host, at), to) => (host, at, one(to)?, false),
            (from, to) => return Ok(vec![(one(to)?, one(from)?)]),
        };
        let slices = host.slices(py, at, len)?.into_iter().map(|slice| {
            let device = narrow(&device, slice.before, slice.len)?;
            Ok(if out { (slice.bytes, device) } else { (device, slice.bytes) })
        });
        slices.collect()
    }
}

/// A tensor of bytes that reaches into a storage.
fn reach<'py>(
    torch: &Torch,
    storage: &Bound<'py, PyAny>,
    at: u64,
    len: u64,
) -> PyResult<Bytes<'py>> {
    let dims = Dims::new(&[i64::try_from(len)?], &[1]);
    torch.reach(storage, torch.uint8.bind(storage.py()), at, &dims)
}

impl Accelerator for TorchAccelerator {
    type Storage = Arc<Held>;
    type Block = Py<PyAny>;
    type Host = Pinned;
    type Stream = StreamId;
    type Event = Arc<Mark>;

    fn key(&self, storage: &Arc<Held>) -> usize {
        storage.engine_key()
    }

    fn facts(&self, storage: &Arc<Held>) -> Option<Facts> {
        storage.facts()
    }

    fn compute(&self) -> StreamId {
        Python::attach(|py| self.note(py));
        self.current.get()
    }

    fn copy_stream(&mut self, _: Direction) -> Result<StreamId, BackendError> {
        Self::with("no stream for copies", |py, _| self.streams.get_mut().make(py))
    }

    fn record(&mut self, stream: StreamId) -> Result<Arc<Mark>, BackendError> {
        if let Some(error) = self.lost.get_mut().take() {
            return Err(error);
        }
        Self::with("an event can't be recorded", |py, _| self.streams.get_mut().record(py, stream))
    }

    fn wait(&mut self, stream: StreamId, event: &Arc<Mark>) -> Result<(), BackendError> {
        if let Some(error) = self.lost.get_mut().take() {
            return Err(error);
        }
        Self::with("a stream can't wait", |py, _| self.streams.get_mut().wait(py, stream, event))
    }

    fn is_done(&mut self, event: &Arc<Mark>) -> bool {
        Python::attach(|py| event.is_complete(py))
    }

    fn sync(&mut self, event: &Arc<Mark>) -> Result<(), BackendError> {
        Self::with("the device does not complete its work", |py, _| event.synchronize(py))
    }

    fn sync_stream(&mut self, stream: StreamId) -> Result<(), BackendError> {
        let what = "the device does not complete its work";
        Self::with(what, |py, _| self.streams.get_mut().synchronize(py, stream))
    }

    fn free(&mut self, storage: &mut Arc<Held>) -> Result<(), BackendError> {
        if storage.named().is_none() && !storage.is_as_saved() {
            // The memory of a load that failed.
            storage.leave_again();
            return Ok(());
        }
        let bytes = storage.range().len() as u64;
        let freed = Self::with("torch can't let go of a storage", |py, _| match storage.named() {
            Some(_) => storage.empty(py).map(|()| Freed::Yes),
            None => storage.let_go(py),
        })?;
        self.tally.let_go(freed, bytes);
        Ok(())
    }

    fn restore(&mut self, storage: &mut Arc<Held>, bytes: u64) -> Result<(), BackendError> {
        Self::with("no memory to bring a storage back to", |py, torch| {
            if let Some(named) = storage.named() {
                storage.resize(py, bytes)?;
                let whole = reach(torch, named.storage.bind(py), 0, bytes);
                let told = whole.and_then(|whole| self.used_elsewhere(py, &whole));
                return told.or_else(|error| storage.empty(py).and(Err(error)));
            }
            let at = phase(storage.range().start) as u64;
            let memory = self.allocate(py, torch, at + bytes)?;
            self.used_elsewhere(py, &memory)?;
            let memory = if at == 0 { memory } else { narrow(&memory, at, bytes)? };
            storage.come_home_as(memory.unbind());
            Ok(())
        })
    }

    fn stage(&mut self, bytes: u64) -> Result<Py<PyAny>, BackendError> {
        Self::with("no memory for staging", |py, torch| {
            Ok(self.allocate(py, torch, bytes)?.unbind())
        })
    }

    fn pin(&mut self, bytes: u64) -> Result<Pinned, BackendError> {
        Self::with("host memory can't be pinned", |py, torch| Pinned::new(torch, py, bytes))
    }

    fn copy(
        &mut self,
        stream: StreamId,
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError> {
        Self::with("a copy can't be queued", |py, torch| {
            let pairs = Self::pairs(py, torch, (from, to), bytes)?;
            let kwargs = PyDict::new(py);
            kwargs.set_item(intern!(py, "non_blocking"), true)?;
            let copy = intern!(py, "copy_");
            self.streams.get_mut().on(py, stream, || {
                pairs.iter().try_for_each(|(to, from)| {
                    to.call_method(copy, (from,), Some(&kwargs)).map(drop)
                })
            })
        })
    }
}

impl crate::unit::Streams for AcceleratorMover {
    fn asked(&mut self, stream: &Bound<'_, PyAny>) -> Result<StreamId, BackendError> {
        let streams = self.device_mut().streams.get_mut();
        let named = streams.named(stream);
        named.map_err(|error| BackendError::new(error.value(stream.py()).to_string()))
    }

    fn note_producer(&mut self, py: Python<'_>) {
        self.device_mut().note(py);
    }

    /// Torch keeps pinned memory that is freed, so it is asked to let go of it as well.
    fn shrink(&mut self) -> u64 {
        let bytes = AcceleratorMover::shrink(self, 0);
        Python::attach(|py| {
            let accelerator = py.import("torch").and_then(|torch| torch.getattr("accelerator"));
            // Newer versions only.
            drop(accelerator.and_then(|module| module.call_method0("empty_host_cache")));
        });
        bytes
    }

    fn add_pool(&mut self, budget: &Budget) -> Option<PoolId> {
        Some(self.add_pool_sharing(budget.clone()))
    }

    fn shrink_pool(&mut self, pool: PoolId) -> u64 {
        AcceleratorMover::shrink_pool(self, pool)
    }

    fn host_bytes(&self) -> (u64, u64) {
        let pool = self.pool_stats(PoolId(0)).unwrap_or_default();
        (pool.allocated, pool.in_use)
    }
}
