//! The planner: from a traced step and a byte budget to the fastest plan that fits.
//!
//! A [`Trace`] says what a step of a model takes on a machine. Its [`Model`] is what plans are made
//! for and played on. [`plan`] searches, [`PlanFile`] keeps the result, [`predict`] tells what any
//! plan comes to, and [`curve()`] how the time of a step depends on the budget.
//!
//! ```
//! use ebbtide_plan::{Solver, plan, range, synthetic};
//!
//! let model = synthetic::trace(12, 4, 3)?.model();
//! let budget = range(&model).percent(60.0);
//! let planned = plan(&model, budget, Solver::Fast)?;
//! assert!(planned.prediction.peak_bytes <= budget);
//! let all = plan(&model, range(&model).most, Solver::Fast)?;
//! assert!(all.prediction.step_ns <= planned.prediction.step_ns);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | what is there |
//! | --- | --- |
//! | [`trace`] | `ebbtide.trace` 1: reading, checking, writing, and a builder for front ends |
//! | [`plan_file`] | `ebbtide.plan` 1: the same, against a model; differences for people |
//! | [`synthetic`] | made-up traces by seed |
//! | `planner` | fast and exact search, pure policies, what no budget can meet |
//! | `curve` | step time over budget |
//! | `what_if` | the same model on another machine |
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod curve;
mod file;
pub mod plan_file;
mod planner;
pub mod synthetic;
pub mod trace;
mod what_if;

pub use curve::{Point, curve};
pub use ebbtide_core::{LayerPlan, MemoryBudget, Plan, Schedule};
pub use ebbtide_sim::predict::{Misfit, Model, Prediction, predict, schedule};
pub use file::{FileError, MAX_FILE_BYTES};
pub use plan_file::{PlanError, PlanFile, diff};
pub use planner::{NoPlan, Planned, Pure, Range, Solver, plan, plan_pure, range};
pub use trace::{Trace, TraceError};
pub use what_if::{WhatIf, WhatIfError};
