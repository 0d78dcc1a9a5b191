//! A run under a plan: ebbtide's own planner, and what the user gets to see of it.

use std::time::Duration;

use ebbtide_candle::{Auto, Outcome, Swap};
use ebbtide_core::size;
use ebbtide_plan::{PlanFile, Pure};

use crate::config::{Mode, Setup};
use crate::failure::Failure;
use crate::figures::{Overlap, PlanFigures};
use crate::memory;
use crate::wish;

/// A measured step is worth a word if it takes longer than predicted by this factor.
const SLOW: f64 = 1.3;

/// The planner of a run and what it has said.
#[derive(Debug)]
pub(crate) struct Planner {
    auto: Auto,
    plan: Option<PlanFigures>,
    overlap: Overlap,
    said: Vec<String>,
    /// The step time that was last said, in milliseconds.
    said_ms: f64,
}

impl Planner {
    /// `None` for a run without a plan.
    pub(crate) fn new(setup: &Setup, swap: &Swap) -> Result<Option<Self>, Failure> {
        let (heap, tier) = (memory::heap(), setup.tier.kind.name());
        let auto = match &setup.mode {
            Mode::Auto(text) => Auto::start(swap, heap, tier, wish::memory(text.as_deref())?),
            Mode::Plan(path) => {
                let file = PlanFile::read(path).map_err(|error| {
                    Failure::bad_input(error.to_string(), error.hint().to_owned())
                })?;
                Auto::with_plan(swap, heap, tier, file)
            }
            Mode::Only { means, memory } => {
                let pure = if means == "swap" { Pure::Swap } else { Pure::Recompute };
                Auto::start(swap, heap, tier, wish::memory(Some(memory))?).only(pure)
            }
            Mode::Plain | Mode::Policy(_) => return Ok(None),
        };
        let (plan, overlap, said) = (None, Overlap::default(), Vec::new());
        Ok(Some(Self { auto, plan, overlap, said, said_ms: 0. }))
    }

    /// A step is over; it took so long and needed so many bytes.
    pub(crate) fn after_step(
        &mut self,
        swap: &Swap,
        took: Duration,
        peak_bytes: u64,
    ) -> Result<(), Failure> {
        let expected = self.plan.clone();
        let outcome = self.auto.after_step(swap, took)?;
        if let (Some(plan), false) = (expected, outcome == Outcome::Departed) {
            self.overlap.add(&swap.last_step());
            self.compare(&plan, took, peak_bytes);
        }
        self.plan = self.auto.settled().map(PlanFigures::of);
        self.tell(outcome);
        Ok(())
    }

    /// A new plan is worth a word if it makes steps take another time.
    fn tell(&mut self, outcome: Outcome) {
        if outcome == Outcome::Departed {
            self.said.push("layers save other bytes than before: tracing them again".to_owned());
        }
        let Some(plan) = &self.plan else { return };
        let ratio = plan.predicted_step_ms / self.said_ms;
        let why = match outcome {
            Outcome::Planned => "",
            Outcome::Replanned if !(1. / SLOW..=SLOW).contains(&ratio) => {
                "tier or computing have become faster or slower; "
            }
            _ => return,
        };
        self.said.push(format!("{why}{}", plan.sentence()));
        self.said_ms = plan.predicted_step_ms;
    }

    fn compare(&mut self, plan: &PlanFigures, took: Duration, peak_bytes: u64) {
        if peak_bytes > plan.predicted_peak_bytes {
            self.said.push(format!(
                "a step needed {}, predicted were {}",
                size::format_up(peak_bytes),
                size::format(plan.predicted_peak_bytes)
            ));
        }
        let ms = took.as_secs_f64() * 1e3;
        if ms > SLOW * plan.predicted_step_ms {
            self.said.push("steps take longer than the plan predicts".to_owned());
        }
    }

    pub(crate) fn notices(&self) -> &[String] {
        &self.said
    }

    pub(crate) fn plan(&self) -> Option<&PlanFigures> {
        self.plan.as_ref()
    }

    pub(crate) fn overlap(&self) -> Overlap {
        self.overlap
    }

    pub(crate) fn auto(&self) -> &Auto {
        &self.auto
    }
}
