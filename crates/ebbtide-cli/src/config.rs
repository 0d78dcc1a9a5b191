//! What one run is: shape of the model, training settings, mode and tier. Workers get it as JSON.

use std::path::PathBuf;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::args::{Precision, TierKind};

/// The vocabulary is the 256 bytes.
pub(crate) const VOCAB: usize = 256;

/// Everything that decides the sizes of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) d_model: usize,
    pub(crate) heads: usize,
    pub(crate) seq: usize,
    pub(crate) batch: usize,
    pub(crate) dtype: Precision,
}

impl Shape {
    pub(crate) fn candle_dtype(&self) -> DType {
        match self.dtype {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        }
    }
}

/// A training that can be repeated exactly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Config {
    pub(crate) shape: Shape,
    pub(crate) seed: u64,
    pub(crate) lr: f64,
    /// Empty: ebbtide's own documents.
    pub(crate) text: Vec<PathBuf>,
    pub(crate) resume: Option<PathBuf>,
}

/// How a run treats what layers save for backward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mode {
    /// The same model code with no ebbtide in the call path.
    Plain,
    /// A policy as the user wrote it; it has been checked.
    Policy(String),
    /// A plan for so much memory, as the user wrote it, checked; `None` if nothing was said.
    Auto(Option<String>),
    /// The same with one means alone: `swap` or `recompute`. For comparison; workers only.
    Only { means: String, memory: String },
    /// The plan in this file.
    Plan(PathBuf),
}

impl Mode {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Plain => "plain",
            Self::Policy(text) => text,
            Self::Auto(_) => "auto",
            Self::Only { means, .. } => means,
            Self::Plan(_) => "plan",
        }
    }
}

/// Where swapped bytes go and how. `None` leaves the choice to the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tier {
    pub(crate) kind: TierKind,
    pub(crate) dir: PathBuf,
    pub(crate) host_bytes: Option<u64>,
    pub(crate) prefetch: Option<usize>,
    pub(crate) timeline: bool,
    /// Gigabytes a second, out and in, that the tier is held to.
    pub(crate) throttle: Option<(f64, f64)>,
}

/// One run in one process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) config: Config,
    pub(crate) mode: Mode,
    pub(crate) tier: Tier,
}

impl Setup {
    /// The same training in another mode.
    pub(crate) fn with_mode(&self, mode: Mode) -> Self {
        let mut other = Self { mode, ..self.clone() };
        // The timeline is this process's own.
        other.tier.timeline = false;
        other
    }
}
