//! What steps follow: policies, a tracing that moves everything, or a plan.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebbtide_core::Policy;

use crate::error::Error;
use crate::heap::Heap;
use crate::overlap::LinkTime;
use crate::record::{Recorder, Recording};
use crate::swap::Inner;
use crate::traffic::{Route, Traffic};

/// What the steps to come follow.
#[derive(Debug, Default)]
pub(crate) struct Course {
    pub(crate) kind: Kind,
    /// What traced steps have come to.
    pub(crate) recording: Option<Recording>,
    /// A traced step whose backward is over; the optimizer may still run.
    pub(crate) open: Option<Box<Recorder>>,
    /// A planned step met layers that it was not planned for.
    pub(crate) lost: bool,
    /// The last complete step.
    pub(crate) last: StepTimes,
}

#[derive(Debug, Default)]
pub(crate) enum Kind {
    #[default]
    Policies,
    Trace(&'static Heap),
    Plan(Arc<Route>),
}

/// What the last step spent on copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// From the device to the tier.
    pub out: LinkTime,
    /// Back.
    pub back: LinkTime,
    /// What the training thread waited for both, in nanoseconds.
    pub waited_ns: u64,
    /// What layers computed in forward, backward and recompute, in nanoseconds.
    pub compute_ns: u64,
}

impl Course {
    /// A traced step is over, optimizer included.
    pub(crate) fn close(&mut self, took: Option<Duration>) {
        if let Some(recorder) = self.open.take() {
            Recording::add(&mut self.recording, recorder.finish(took));
        }
    }
}

/// What one step follows.
#[derive(Debug)]
pub(crate) enum Run {
    Policies,
    Trace(Box<Recorder>),
    Plan(Box<Traffic>),
}

impl Run {
    pub(crate) fn begin(inner: &mut Inner) -> Self {
        inner.copies().finish();
        inner.course.close(None);
        match &inner.course.kind {
            Kind::Policies => Self::Policies,
            Kind::Trace(heap) => Self::Trace(Box::new(Recorder::begin(heap))),
            Kind::Plan(route) => Self::Plan(Box::new(Traffic::new(route))),
        }
    }

    /// What becomes of the layer at this place of the step, where `usual` is its policy.
    pub(crate) fn policy(&self, place: usize, usual: Policy) -> Policy {
        match self {
            Self::Policies => usual,
            Self::Trace(_) => Policy::Swap,
            Self::Plan(traffic) => traffic.policy(place),
        }
    }

    /// Whether bytes are bounded, so that a layer is probed before it runs and not beside it.
    pub(crate) fn is_bounded(&self) -> bool {
        !matches!(self, Self::Policies)
    }

    pub(crate) fn traffic(&mut self) -> Option<&mut Traffic> {
        match self {
            Self::Plan(traffic) => Some(traffic),
            _ => None,
        }
    }

    pub(crate) fn recorder(&mut self) -> Option<&mut Recorder> {
        match self {
            Self::Trace(recorder) => Some(recorder),
            _ => None,
        }
    }

    /// Whether what a layer saves is moved by one group, and waited for at once.
    pub(crate) fn moves_at_once(&self) -> bool {
        match self {
            Self::Policies => false,
            Self::Trace(_) => true,
            Self::Plan(traffic) => traffic.is_lost(),
        }
    }

    /// The next thing to run is the backward of the layer at this place, as far as is known.
    pub(crate) fn before_backward(&mut self, inner: &mut Inner, place: usize) -> Result<(), Error> {
        match self {
            Self::Plan(traffic) => traffic.reach_backward(inner, place),
            _ => Ok(()),
        }
    }

    /// The step's backward is over, well or not.
    pub(crate) fn finish(&mut self, inner: &mut Inner, complete: bool, compute: Duration) {
        let waited_ns = inner.copies().waited_ns();
        let (out, back) = inner.copies().finish();
        let run = std::mem::replace(self, Self::Policies);
        if let Self::Plan(mut traffic) = run {
            traffic.close_all(inner);
            inner.course.lost |= traffic.is_lost();
        } else if let (Self::Trace(recorder), true) = (run, complete) {
            inner.course.open = Some(recorder);
        }
        if complete {
            let compute_ns = u64::try_from(compute.as_nanos()).unwrap_or(u64::MAX);
            inner.course.last = StepTimes { out, back, waited_ns, compute_ns };
        }
    }

    /// A traced step did something that others don't.
    pub(crate) fn aside(&mut self, since: Instant) {
        if let Self::Trace(recorder) = self {
            recorder.aside(since);
        }
    }
}
