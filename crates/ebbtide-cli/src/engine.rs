//! The run's engine: none at all, or ebbtide. The only module that calls `ebbtide_candle`.

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{Result as CandleResult, Tensor, Var};
use ebbtide_candle::{Step, Swap, Tier, Timeline};
use ebbtide_core::{Policies, Policy};
use serde::{Deserialize, Serialize};

use crate::args::TierKind;
use crate::config::{Mode, Setup};
use crate::data::Batch;
use crate::failure::Failure;
use crate::layers::{Layers, Plain};
use crate::model::Model;
use crate::planned::Planner;

/// Totals over a run. All are zero without ebbtide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) probe_ms: f64,
    pub(crate) moved_out_bytes: u64,
    pub(crate) moved_in_bytes: u64,
    pub(crate) dropped_bytes: u64,
    pub(crate) recompute_ms: f64,
    pub(crate) wait_ms: f64,
    pub(crate) missed_prefetches: u64,
}

/// Runs forward and backward.
pub(crate) enum Engine {
    Plain,
    Ebbtide(Box<Swap>, Option<Box<Planner>>),
}

impl Engine {
    /// What runs when is written into `timeline`, if there is one.
    pub(crate) fn new(setup: &Setup, timeline: Option<&Timeline>) -> Result<Self, Failure> {
        let layers = setup.config.shape.layers;
        let policies = match &setup.mode {
            Mode::Plain => return Ok(Self::Plain),
            Mode::Policy(text) => Policies::parse(text, layers)?,
            // While steps are traced everything moves; then the plan decides.
            Mode::Auto(_) | Mode::Only { .. } | Mode::Plan(_) => {
                Policies::uniform(Policy::Swap, layers)
            }
        };
        let swaps = policies.iter().any(|policy| policy == Policy::Swap);
        let mut builder = Swap::builder(policies).tier(match setup.tier.kind {
            TierKind::File if swaps => Tier::File { dir: setup.tier.dir.clone() },
            // Without a swapped layer no file is opened: nothing would ever go there.
            TierKind::File | TierKind::Host => Tier::Host,
        });
        if let Some(timeline) = timeline {
            builder = builder.timeline(timeline);
        }
        if let Some(bytes) = setup.tier.host_bytes.filter(|_| swaps) {
            builder = builder.host_bytes(bytes);
        }
        if let Some(layers) = setup.tier.prefetch.filter(|_| swaps) {
            builder = builder.prefetch(layers);
        }
        if let Some((out, back)) = setup.tier.throttle {
            builder = builder.throttle_gbps(out, back);
        }
        let swap = Box::new(builder.build()?);
        let planner = Planner::new(setup, &swap)?.map(Box::new);
        Ok(Self::Ebbtide(swap, planner))
    }

    /// Loss and gradients of one batch. The graph is gone when this returns.
    pub(crate) fn gradients(
        &self,
        model: &Model,
        batch: &Batch,
    ) -> Result<(f32, GradStore), Failure> {
        match self {
            Self::Plain => {
                let loss = model.loss(&mut Plain, batch)?;
                Ok((loss.to_scalar()?, loss.backward()?))
            }
            Self::Ebbtide(swap, _) => {
                let mut step = swap.step();
                let loss = model.loss(&mut Segments(&mut step), batch)?;
                Ok((loss.to_scalar()?, step.backward(&loss)?))
            }
        }
    }

    /// A step is over, optimizer included: it took so long and needed so many bytes.
    pub(crate) fn after_step(&mut self, took: Duration, peak_bytes: u64) -> Result<(), Failure> {
        match self {
            Self::Ebbtide(swap, Some(planner)) => planner.after_step(swap, took, peak_bytes),
            _ => Ok(()),
        }
    }

    pub(crate) fn planner(&self) -> Option<&Planner> {
        match self {
            Self::Ebbtide(_, planner) => planner.as_deref(),
            Self::Plain => None,
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        let Self::Ebbtide(swap, _) = self else {
            return Totals::default();
        };
        let report = swap.report();
        Totals {
            probe_ms: report.probe_ms,
            moved_out_bytes: report.moved_out_bytes,
            moved_in_bytes: report.moved_in_bytes,
            dropped_bytes: report.dropped_bytes,
            recompute_ms: report.recompute_ms,
            wait_ms: report.wait_ms,
            missed_prefetches: report.missed_prefetches,
        }
    }

    /// What the user should know, such as a spill folder that is RAM.
    pub(crate) fn notices(&self) -> Vec<String> {
        match self {
            Self::Plain => Vec::new(),
            Self::Ebbtide(swap, planner) => {
                let mut all = swap.notices();
                all.extend(planner.iter().flat_map(|planner| planner.notices()).cloned());
                all
            }
        }
    }
}

/// Runs the layers as segments of one ebbtide step.
struct Segments<'s, 'a>(&'s mut Step<'a>);

impl<'a> Layers<'a> for Segments<'_, 'a> {
    fn layer<F>(
        &mut self,
        name: &str,
        params: &[(String, Var)],
        input: &Tensor,
        f: F,
    ) -> Result<Tensor, Failure>
    where
        F: Fn(&Tensor) -> CandleResult<Tensor> + 'a,
    {
        Ok(self.0.layer(name, params, input, f)?)
    }
}
