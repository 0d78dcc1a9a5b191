//! The command line. Only its shape: what makes sense is decided in [`crate::check`].
//!
//! Most values are optional here even where they have a default, because a resumed run takes what
//! was not given from the file, and because a setting given for nothing is an error.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::planner_args::{self, PlanArgs, SimulateArgs, TraceArgs};

#[derive(Debug, Parser)]
#[command(
    name = "ebbtide",
    version,
    about = "Train inside less memory, bit for bit the same",
    long_about = "Train inside less memory, bit for bit the same.\n\n\
        What a layer saves for backward leaves memory after its forward and comes back before its \
        backward; bytes that backward never reads are dropped."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a byte-level language model and say what it cost
    #[command(after_help = EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Say what this machine can do for swapping: memory, disk, CUDA driver, wear
    Doctor(MachineArgs),
    /// Measure what the engine and its tiers reach here, against what they should
    Bench(MachineArgs),
    /// Write down what a step of a model takes: the file that plans are made from
    #[command(after_help = planner_args::TRACE_EXAMPLES)]
    Trace(TraceArgs),
    /// Find the fastest way to run a step within a budget of device memory
    #[command(after_help = planner_args::PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Say what a plan comes to: time, peak, waits
    #[command(after_help = planner_args::SIMULATE_EXAMPLES)]
    Simulate(SimulateArgs),
    /// One run in a process of its own, driven over its standard input
    #[command(hide = true)]
    Worker {
        /// Process that drives this one; the worker ends with it
        #[arg(long)]
        parent: i32,
    },
}

const EXAMPLES: &str = "Examples:
  ebbtide train                                     on ebbtide's own documents
  ebbtide train --memory 30%                        inside less memory
  ebbtide train --compare                           plain, policies and a plan in turns
  ebbtide train --policy 0-7:swap,8-10:recompute    by layer
  ebbtide train --text book.txt --steps 500 --save book.safetensors --sample 300
  ebbtide train --text book.txt --steps 900 --resume book.safetensors";

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) training: TrainingArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Transformer blocks [default: 12]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) layers: Option<usize>,
    /// Width of the model [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) d_model: Option<usize>,
    /// Attention heads; they divide the width [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) heads: Option<usize>,
    /// Bytes of text in one sequence [default: 256]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seq: Option<usize>,
    /// Sequences in one step [default: 4]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) batch: Option<usize>,
    /// Type of weights and activations [default: f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<Precision>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Training")]
pub(crate) struct TrainingArgs {
    /// Steps in total, those before --resume included
    #[arg(long, value_name = "N", default_value_t = 40, allow_negative_numbers = true)]
    pub(crate) steps: u64,
    /// Decides the first weights, the batches and the sample [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    /// Learning rate of AdamW, reached after 20 steps [default: 3e-4]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) lr: Option<f64>,
    /// Files to train on, one after the other [default: ebbtide's own documents]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) text: Vec<PathBuf>,
    /// Continue from a file that --save wrote
    #[arg(long, value_name = "FILE")]
    pub(crate) resume: Option<PathBuf>,
    /// Write weights, moments, step, random state and data position at the end
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Memory")]
pub(crate) struct MemoryArgs {
    /// All that a step may use, such as 700MiB, or a part of what plain training needs above what
    /// is always there, such as 40%; what to keep, swap and recompute is planned [default: 40%]
    #[arg(long, value_name = "SIZE|PERCENT", allow_hyphen_values = true)]
    #[arg(conflicts_with_all = ["policy", "plan"])]
    pub(crate) memory: Option<String>,
    /// plain (no ebbtide at all), keep (dead bytes are dropped), swap or recompute (all layers but
    /// the last), or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    #[arg(long, value_name = "POLICY", allow_hyphen_values = true, conflicts_with = "plan")]
    pub(crate) policy: Option<String>,
    /// Follow a plan that `ebbtide plan` wrote
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: Option<PathBuf>,
    /// Run plain, keep, swap, recompute and auto in turns on the same data and compare them
    #[arg(long)]
    pub(crate) compare: bool,
    /// Where swapped bytes go; host is RAM, so on a CPU it saves nothing and is for tests
    /// [default: file]
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Option<TierKind>,
    /// Folder of the spill file [default: the system's folder for temporary files, or /var/tmp where
    /// that one is in RAM]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) spill_dir: Option<PathBuf>,
    /// Host memory that the tier may use, such as 512MiB or 1.5GiB [default: chosen by the tier]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) host_bytes: Option<String>,
    /// Layers that are fetched ahead in backward [default: chosen by the engine]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) prefetch: Option<usize>,
    /// Hold the tier to so many gigabytes a second, such as 0.5,0.5, to see what a slower one does
    #[arg(long, value_name = "OUT,IN", allow_hyphen_values = true)]
    pub(crate) throttle_gbps: Option<String>,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Print so many generated bytes after the table
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) sample: Option<usize>,
    /// Nothing on standard error but errors
    #[arg(long)]
    pub(crate) quiet: bool,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write a timeline of copies and waits for Perfetto or Chrome's tracing page
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
}

/// Of the commands that look at the machine.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Folder that would hold the spill file [default: the one that train spills to]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) dir: Option<PathBuf>,
    /// Write all figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Measure less; figures scatter more
    #[arg(long)]
    pub(crate) quick: bool,
}

/// Type of weights and activations. Moments and losses are f32 under both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Precision {
    F32,
    Bf16,
}

impl Precision {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Where swapped bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TierKind {
    File,
    Host,
}

impl TierKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Host => "host",
        }
    }
}
