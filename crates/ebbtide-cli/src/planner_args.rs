//! The command line of what plans: `trace`, `plan` and `simulate`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::args::{ModelArgs, TierKind};

pub(crate) const TRACE_EXAMPLES: &str = "Examples:
  ebbtide trace -o model.trace                                        what `train` trains
  ebbtide trace --layers 24 --d-model 512 -o large.trace
  ebbtide trace --synthetic 24 --storages 20 --seed 5 | ebbtide plan /dev/stdin --memory 30%";

pub(crate) const PLAN_EXAMPLES: &str = "Examples:
  ebbtide plan model.trace --memory 40% -o model.plan
  ebbtide plan model.trace --memory 1.5GiB --solver exact
  ebbtide plan model.trace --memory 40% --d2h-gbps 6 --h2d-gbps 6     on a slower link
  ebbtide plan model.trace --curve --svg curve.svg
  ebbtide plan --diff before.plan after.plan";

pub(crate) const SIMULATE_EXAMPLES: &str = "Examples:
  ebbtide simulate model.trace model.plan
  ebbtide simulate model.trace model.plan --compute-scale 0.5         computing twice as fast";

/// Of `ebbtide trace`.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Make up a model of so many layers, to try plans on, instead of recording one
    #[arg(long, value_name = "LAYERS", allow_negative_numbers = true)]
    #[arg(conflicts_with_all = ["ModelArgs", "tier", "spill_dir", "throttle_gbps"])]
    pub(crate) synthetic: Option<usize>,
    /// Storages of each made-up layer, beside its output [default: 8]
    #[arg(long, value_name = "N", requires = "synthetic", allow_negative_numbers = true)]
    pub(crate) storages: Option<usize>,
    /// Decides sizes, times, speeds and what is odd about a made-up model [default: 1]
    #[arg(long, value_name = "N", requires = "synthetic", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    /// Write the trace to a file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Where swapped bytes go [default: file]
    #[arg(long, value_name = "TIER", help_heading = "Memory")]
    pub(crate) tier: Option<TierKind>,
    /// Folder of the spill file [default: the one that train spills to]
    #[arg(long, value_name = "FOLDER", help_heading = "Memory")]
    pub(crate) spill_dir: Option<PathBuf>,
    /// Hold the tier to so many gigabytes a second, such as 0.5,0.5
    #[arg(long, value_name = "OUT,IN", allow_hyphen_values = true, help_heading = "Memory")]
    pub(crate) throttle_gbps: Option<String>,
}

/// Of `ebbtide plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// What `ebbtide trace` wrote
    #[arg(value_name = "TRACE", required_unless_present = "diff")]
    pub(crate) trace: Option<PathBuf>,
    /// Device memory that a step may use in all, such as 1.5GiB, or a part of what plain training
    /// needs beyond what is always there, such as 40%
    #[arg(
        long,
        value_name = "SIZE|PERCENT",
        allow_hyphen_values = true,
        required_unless_present_any = ["diff", "curve"]
    )]
    pub(crate) memory: Option<String>,
    /// How to search
    #[arg(long, value_name = "SOLVER", default_value = "fast")]
    pub(crate) solver: SolverKind,
    /// Write the plan to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Show how the time of a step depends on the budget, instead of one plan
    #[arg(long, conflicts_with_all = ["memory", "solver", "output"])]
    pub(crate) curve: bool,
    /// Draw the curve into an SVG file
    // The conflicts are those of the curve: clap asks for nothing that what is given excludes.
    #[arg(
        long,
        value_name = "FILE",
        requires = "curve",
        conflicts_with_all = ["memory", "solver", "output"]
    )]
    pub(crate) svg: Option<PathBuf>,
    /// Show what is different between two plans, instead of making one
    #[arg(
        long,
        value_names = ["A", "B"],
        num_args = 2,
        conflicts_with_all = [
            "trace", "memory", "solver", "output", "json", "curve", "svg", "d2h_gbps", "h2d_gbps",
            "compute_scale", "tier",
        ]
    )]
    pub(crate) diff: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) what_if: WhatIfArgs,
}

/// Of `ebbtide simulate`.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// What `ebbtide trace` wrote
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,
    /// What `ebbtide plan` wrote, changed by hand or not
    #[arg(value_name = "PLAN")]
    pub(crate) plan: PathBuf,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) what_if: WhatIfArgs,
}

/// The same model on another machine.
#[derive(Debug, Args)]
#[command(next_help_heading = "What if")]
pub(crate) struct WhatIfArgs {
    /// Bandwidth from the device to the tier, in 10^9 bytes a second [default: as traced]
    #[arg(long, value_name = "GBPS", allow_negative_numbers = true)]
    pub(crate) d2h_gbps: Option<f64>,
    /// Bandwidth from the tier to the device, in 10^9 bytes a second [default: as traced]
    #[arg(long, value_name = "GBPS", allow_negative_numbers = true)]
    pub(crate) h2d_gbps: Option<f64>,
    /// All computing takes so many times as long [default: 1]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub(crate) compute_scale: Option<f64>,
    /// Use this tier alone [default: all of the trace]
    #[arg(long, value_name = "NAME")]
    pub(crate) tier: Option<String>,
}

/// How to search for a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SolverKind {
    /// Within about one percent of the best, in milliseconds
    Fast,
    /// Within 0.2 % of the best, proved where the proof ends in time: up to about 12 layers, and
    /// up to a minute
    Exact,
}

impl SolverKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Exact => "exact",
        }
    }
}
