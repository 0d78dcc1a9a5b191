//! The engine of one device, whatever it moves with.

use std::sync::Arc;

use ebbtide_core::{
    BackendError, Budget, Counters, Direct, Engine, GroupId, LayerId, Mover, Observer, Pass,
    PoolId, Registered, Saved, StoreStats, TensorId,
};
use ebbtide_store::AnyStore;
use pyo3::prelude::*;

use crate::error::{Class, raise, raise_backend};
use crate::held::Held;
use crate::ram::{Block, Lender};
use crate::waiting::Waiting;

/// Straight from RAM into a tier.
pub(crate) type RamMover = Direct<Lender, Waiting<AnyStore<Block>>>;

/// A mover that a front end may name streams to.
pub(crate) trait Streams: Mover {
    /// The stream that a Python object stands for.
    ///
    /// # Errors
    /// It stands for none of this device.
    fn asked(&mut self, stream: &Bound<'_, PyAny>) -> Result<Self::Stream, BackendError>;

    /// Tensors are saved on the stream that is current now: copies have to wait for it.
    fn note_producer(&mut self, _: Python<'_>) {}

    /// Gives host memory back that is not in use. Returns bytes.
    fn shrink(&mut self) -> u64 {
        0
    }

    /// Bytes of host memory that are allocated, and that are in use.
    fn host_bytes(&self) -> (u64, u64) {
        (0, 0)
    }

    /// A pool of host memory with this bound, for tensors that name it. `None` without host memory.
    fn add_pool(&mut self, _: &Budget) -> Option<PoolId> {
        None
    }

    /// Gives the free memory of such a pool back. Returns bytes.
    fn shrink_pool(&mut self, _: PoolId) -> u64 {
        0
    }
}

impl Streams for RamMover {
    /// Copies of RAM run in threads of the tier: a stream has nothing to say.
    fn asked(&mut self, stream: &Bound<'_, PyAny>) -> Result<(), BackendError> {
        crate::stream::is_stream(stream)
    }
}

/// An engine, by what the hub asks of it. The methods are those of [`Engine`].
pub(crate) trait Unit: Send {
    fn open(&mut self, layer: LayerId, pass: Pass, name: &str) -> GroupId;
    fn register(
        &mut self,
        group: GroupId,
        saved: Saved<Arc<Held>>,
        label: &str,
    ) -> PyResult<(TensorId, Registered)>;
    fn protect(&mut self, storage: &Arc<Held>) -> PyResult<bool>;
    fn start_offload(&mut self, group: GroupId, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()>;
    fn wait_offload(&mut self, group: GroupId) -> PyResult<()>;
    fn offload_is_done(&mut self, group: GroupId) -> bool;
    fn start_load(&mut self, group: GroupId, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()>;
    fn wait_load(&mut self, group: GroupId) -> PyResult<()>;
    fn need(&mut self, group: GroupId) -> PyResult<()>;
    fn prefetch(&mut self, group: GroupId);
    fn close(&mut self, group: GroupId);
    fn phase(&self, group: GroupId) -> Option<&'static str>;
    fn state(&self, tensor: TensorId) -> PyResult<&'static str>;
    fn describe(&self, tensor: TensorId) -> PyResult<String>;
    fn finish_backward(&mut self);
    fn abandon_backward(&mut self);
    fn note_producer(&mut self, py: Python<'_>);
    fn shrink(&mut self) -> u64;
    fn add_pool(&mut self, budget: &Budget) -> Option<PoolId>;
    fn shrink_pool(&mut self, pool: PoolId) -> u64;
    fn counters(&self) -> (Counters, StoreStats, (u64, u64));
}

/// An engine with its observer.
pub(crate) fn unit<M>(
    prefetch: usize,
    mover: M,
    observer: impl Observer + Send + 'static,
) -> Box<dyn Unit>
where
    M: Streams<Storage = Arc<Held>> + Send + 'static,
    Engine<M>: Send,
{
    let mut engine = Engine::new(ebbtide_core::Config { prefetch }, mover);
    engine.observe(observer);
    Box::new(engine)
}

fn stream<M: Streams>(
    engine: &mut Engine<M>,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<M::Stream>> {
    let asked = stream.map(|stream| engine.mover_mut().asked(stream)).transpose();
    asked.map_err(|error| raise_backend(Class::Setting, error))
}

impl<M> Unit for Engine<M>
where
    M: Streams<Storage = Arc<Held>>,
    Engine<M>: Send,
{
    fn open(&mut self, layer: LayerId, pass: Pass, name: &str) -> GroupId {
        self.name_layer(layer, name);
        Engine::open(self, layer, pass)
    }

    fn register(
        &mut self,
        group: GroupId,
        saved: Saved<Arc<Held>>,
        label: &str,
    ) -> PyResult<(TensorId, Registered)> {
        let label = self.label(label);
        Engine::register(self, group, saved.label(label)).map_err(raise)
    }

    fn protect(&mut self, storage: &Arc<Held>) -> PyResult<bool> {
        Engine::protect(self, storage).map_err(raise)
    }

    fn start_offload(&mut self, group: GroupId, asked: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = stream(self, asked)?;
        self.start_offload_on(group, stream).map_err(raise)
    }

    fn wait_offload(&mut self, group: GroupId) -> PyResult<()> {
        Engine::wait_offload(self, group).map_err(raise)
    }

    fn offload_is_done(&mut self, group: GroupId) -> bool {
        self.offload_is_complete(group)
    }

    fn start_load(&mut self, group: GroupId, asked: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = stream(self, asked)?;
        self.start_load_on(group, stream).map_err(raise)
    }

    fn wait_load(&mut self, group: GroupId) -> PyResult<()> {
        Engine::wait_load(self, group).map_err(raise)
    }

    fn need(&mut self, group: GroupId) -> PyResult<()> {
        Engine::need(self, group).map_err(raise)
    }

    fn prefetch(&mut self, group: GroupId) {
        Engine::prefetch(self, group);
    }

    fn close(&mut self, group: GroupId) {
        Engine::close(self, group);
    }

    fn phase(&self, group: GroupId) -> Option<&'static str> {
        self.phase_name(group)
    }

    fn state(&self, tensor: TensorId) -> PyResult<&'static str> {
        Engine::state(self, tensor).map_err(raise)
    }

    fn describe(&self, tensor: TensorId) -> PyResult<String> {
        Engine::describe(self, tensor).map_err(raise)
    }

    fn finish_backward(&mut self) {
        Engine::finish_backward(self);
    }

    fn abandon_backward(&mut self) {
        Engine::abandon_backward(self);
    }

    fn note_producer(&mut self, py: Python<'_>) {
        self.mover_mut().note_producer(py);
    }

    fn shrink(&mut self) -> u64 {
        self.mover_mut().shrink()
    }

    fn add_pool(&mut self, budget: &Budget) -> Option<PoolId> {
        self.mover_mut().add_pool(budget)
    }

    fn shrink_pool(&mut self, pool: PoolId) -> u64 {
        self.mover_mut().shrink_pool(pool)
    }

    fn counters(&self) -> (Counters, StoreStats, (u64, u64)) {
        (Engine::counters(self), self.store_stats(), self.mover().host_bytes())
    }
}
