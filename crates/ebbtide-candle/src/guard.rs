//! The two operations that ebbtide puts into Candle's graph.
//!
//! [`Guard`] is what a layer's output looks like from outside: a tracked tensor whose gradient goes
//! to the step's own books. [`deliver`] is the way back in: it hands given gradients to tensors, so
//! that Candle's backward can be run over one piece of the graph and continue sums that other
//! pieces have begun.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Device, Layout, Result, Shape, Tensor};

/// Shared between a layer's output in Candle's graph and the step that owns the layer.
///
/// | field | written by | read by |
/// | --- | --- | --- |
/// | `memory` | the step, once, before the guard is applied | the guard's forward, once |
/// | `open` | the step, true for the time of its backward | the guard's backward |
/// | `gradient` | the guard's backward | the step, which takes it |
#[derive(Debug)]
pub(crate) struct GuardCell {
    layer: String,
    memory: Mutex<Option<(CpuStorage, Shape)>>,
    open: AtomicBool,
    gradient: Mutex<Option<Tensor>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section is one assignment; a panic can't leave it half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GuardCell {
    pub(crate) fn new(layer: &str, memory: CpuStorage, shape: Shape) -> Arc<Self> {
        Arc::new(Self {
            layer: layer.to_string(),
            memory: Mutex::new(Some((memory, shape))),
            open: AtomicBool::new(false),
            gradient: Mutex::new(None),
        })
    }

    pub(crate) fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    pub(crate) fn take_gradient(&self) -> Option<Tensor> {
        lock(&self.gradient).take()
    }
}

struct Guard(Arc<GuardCell>);

/// The outside of a layer's output. `anchor` is a variable that only makes Candle record the
/// operation, whatever the layer's inputs are.
pub(crate) fn guard(anchor: &Tensor, cell: &Arc<GuardCell>) -> Result<Tensor> {
    anchor.apply_op1(Guard(Arc::clone(cell)))
}

impl CustomOp1 for Guard {
    fn name(&self) -> &'static str {
        "ebbtide-layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match lock(&self.0.memory).take() {
            Some(memory) => Ok(memory),
            None => candle_core::bail!("ebbtide: the output of `{}` exists already", self.0.layer),
        }
    }

    /// A plain `loss.backward()` would end here and silently lose the gradients of everything
    /// before, so it is an error unless the step itself is running it.
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        if !self.0.open.load(Ordering::Relaxed) {
            candle_core::bail!(
                "layer `{}` belongs to an ebbtide step whose backward is not running: call \
                 Step::backward(&loss) of that step, once, instead of loss.backward()",
                self.0.layer
            );
        }
        *lock(&self.0.gradient) = Some(gradient.clone());
        Ok(None)
    }
}

struct Deliver(Tensor);

impl CustomOp2 for Deliver {
    fn name(&self) -> &'static str {
        "ebbtide-deliver"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(self.0.clone()), Some(gradient.clone())))
    }
}

/// A gradient to be handed to a tensor.
pub(crate) struct Given {
    pub(crate) to: Tensor,
    pub(crate) gradient: Tensor,
}

/// Runs Candle's backward over what lies behind `roots`, starting from their given gradients, with
/// the sums in `begun` continued: the result for a tensor in `begun` is its given gradient plus, one
/// after the other, the contributions found, which is the order of one backward over everything.
///
/// Among several roots, the one whose nodes Candle's own walk would visit first comes first.
///
/// Adding to zeros first, as Candle does for every sum, changes no bit: a sum that began that way is
/// never a negative zero.
pub(crate) fn deliver(roots: Vec<Given>, begun: Vec<Given>) -> Result<GradStore> {
    let mut chain = Tensor::new(0f32, &Device::Cpu)?;
    for given in roots.into_iter().chain(begun).rev() {
        chain = given.to.apply_op2(&chain, Deliver(given.gradient))?;
    }
    chain.backward()
}
