//! Steps that are traced, and steps that follow a plan.

use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use ebbtide_core::Schedule;
use ebbtide_plan::Trace;
use ebbtide_plan::trace::TierRecord;

use crate::error::{Error, Kind};
use crate::heap::Heap;
use crate::record::Recording;
use crate::run::{self, StepTimes};
use crate::swap::Swap;
use crate::tracing;
use crate::traffic::Route;

impl Swap {
    /// Every step from the next one on is traced: what each layer saves is moved away at once and
    /// brought back right before its backward, the last layer's too, and what operations take in
    /// time and memory is written down. `heap` has to be the program's allocator. Policies are
    /// followed again after [`Swap::stop_planning`].
    ///
    /// What earlier traced steps wrote down is forgotten.
    pub fn start_tracing(&self, heap: &'static Heap) {
        warm_up();
        let course = &mut self.inner().course;
        course.close(None);
        (course.kind, course.recording, course.lost) = (run::Kind::Trace(heap), None, false);
    }

    /// The step whose backward ran last is over, optimizer included; `took` is its time. Without
    /// this call, a traced step lasts until the next one begins.
    pub fn end_step(&self, took: Duration) {
        self.inner().course.close(Some(took));
    }

    /// Number of steps that have been traced since [`Swap::start_tracing`].
    pub fn traced_steps(&self) -> usize {
        self.inner().course.recording.as_ref().map_or(0, |recording| recording.steps)
    }

    /// What the traced steps came to, on a machine with this tier.
    ///
    /// # Errors
    /// No step has been traced; or what was written down makes no trace.
    pub fn trace(&self, tier: TierRecord) -> Result<Trace, Error> {
        let recording = self.recording()?;
        tracing::trace(&recording, tier).map_err(|error| Error::new(Kind::Trace(error)))
    }

    /// Follows a plan from the next step on: its schedule says what moves, when, and how many bytes
    /// may be on the device at any moment.
    ///
    /// # Errors
    /// No step has been traced, or the schedule was made from a trace of another model.
    pub fn follow(&self, schedule: Schedule) -> Result<(), Error> {
        let recording = self.recording()?;
        let route = Route::new(schedule, &recording).ok_or_else(|| {
            let message = "the schedule was made for a model with other layers".to_string();
            let hint = "make it from this engine's own trace".to_string();
            Error::new(Kind::Setting { message, hint })
        })?;
        let course = &mut self.inner().course;
        (course.kind, course.lost) = (run::Kind::Plan(Arc::new(route)), false);
        Ok(())
    }

    /// Follows policies again from the next step on.
    pub fn stop_planning(&self) {
        self.inner().course.kind = run::Kind::Policies;
    }

    /// Whether a step under the plan met layers that the plan was not made for. What they saved was
    /// moved away at once.
    pub fn has_departed(&self) -> bool {
        self.inner().course.lost
    }

    /// What the last complete step spent on copies and layers.
    pub fn last_step(&self) -> StepTimes {
        self.inner().course.last
    }

    /// Layers take so many times as long as was traced, and the rest of a step takes that long.
    pub(crate) fn correct_times(&self, factor: f64, beside: Duration) {
        if let Some(recording) = &mut self.inner().course.recording {
            recording.correct_times(factor, beside);
        }
    }

    pub(crate) fn recording(&self) -> Result<Recording, Error> {
        let mut inner = self.inner();
        inner.course.close(None);
        inner.course.recording.clone().ok_or_else(|| Error::new(Kind::NotTraced))
    }
}

/// Has every thread that multiplies matrices take what it keeps for good (2 MiB on many machines,
/// at its first product): otherwise that happens in whichever step gives it work first, and the step
/// needs more than was traced.
fn warm_up() {
    let product = || -> candle_core::Result<()> {
        let (tall, small) = (Tensor::ones((4096, 64), DType::F32, &Device::Cpu)?, (64, 64));
        let small = Tensor::ones(small, DType::F32, &Device::Cpu)?;
        tall.matmul(&small)?;
        small.matmul(&tall.t()?)?;
        Ok(())
    };
    // Without memory for it, a step will say so.
    let _ = rayon::broadcast(|_| product().is_ok());
    let _ = product();
}
