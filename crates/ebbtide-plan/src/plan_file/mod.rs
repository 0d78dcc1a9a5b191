//! A plan as a file: `ebbtide.plan` 1.
//!
//! JSON, a layer a line, so that two plans can be compared line by line and one can be changed by
//! hand. Everything that a layer does not name is kept.

mod diff;
mod error;
mod resolve;

pub use diff::diff;
pub use error::{BadPlan, PlanError};

use std::path::Path;

use ebbtide_core::{Op, Phase};
use ebbtide_sim::predict::{Model, Prediction};
use serde::{Deserialize, Serialize};

use crate::file;
use crate::planner::Planned;

/// The format's name.
pub const FORMAT: &str = "ebbtide.plan";

/// A plan with what it was made for and what was expected of it.
///
/// ```
/// use ebbtide_plan::{PlanFile, Solver, plan, synthetic};
///
/// let trace = synthetic::trace(12, 4, 3)?;
/// let model = trace.model();
/// let budget = ebbtide_plan::range(&model).at(0.5);
/// let planned = plan(&model, budget, Solver::Fast)?;
/// let file = PlanFile::new(&model, trace.sha256(), &planned);
/// let again = PlanFile::parse(&file.to_json())?;
/// assert_eq!(again.plan(&model)?, planned.plan);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    format: String,
    version: u32,
    trace_sha256: String,
    memory_bytes: u64,
    predicted: Predicted,
    layers: Vec<PlanLine>,
}

/// What was predicted when the plan was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// The most bytes in use at one moment.
    pub peak_bytes: u64,
    /// The operation that runs then.
    pub peak_at: OpRecord,
    /// The whole step.
    pub step_ns: u64,
    /// What operations wait for loads.
    pub wait_load_ns: u64,
    /// What operations wait for bytes to leave.
    pub wait_memory_ns: u64,
}

/// An operation in a file: `{"op":"B","layer":7}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpRecord {
    /// The letter.
    pub op: OpLetter,
    /// The layer, from 0.
    pub layer: usize,
}

/// `F`, `R` or `B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpLetter {
    /// The forward of a layer.
    F,
    /// Its second forward.
    R,
    /// Its backward.
    B,
}

impl From<Op> for OpRecord {
    fn from(op: Op) -> Self {
        let letter = match op.phase {
            Phase::Forward => OpLetter::F,
            Phase::Recompute => OpLetter::R,
            Phase::Backward => OpLetter::B,
        };
        Self { op: letter, layer: op.layer }
    }
}

impl From<OpRecord> for Op {
    fn from(record: OpRecord) -> Self {
        let phase = match record.op {
            OpLetter::F => Phase::Forward,
            OpLetter::R => Phase::Recompute,
            OpLetter::B => Phase::Backward,
        };
        Self::new(phase, record.layer)
    }
}

/// A layer in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlanLine {
    name: String,
    #[serde(default)]
    recompute: bool,
    #[serde(default)]
    swap: Vec<String>,
    /// The first tier, if storages are swapped and none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tier: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load_at: Option<OpRecord>,
}

impl PlanFile {
    /// The file of a plan that was made for this model. `trace_sha256` is that of its
    /// [trace](crate::trace::Trace::sha256).
    pub fn new(model: &Model, trace_sha256: String, planned: &Planned) -> Self {
        let layers = planned.plan.layers.iter().zip(&model.layers);
        let layers = layers.map(|(plan, layer)| PlanLine {
            name: layer.name.clone(),
            recompute: plan.recompute,
            swap: plan.swap.iter().map(|&at| layer.storages[at].name.clone()).collect(),
            tier: (!plan.swap.is_empty()).then(|| model.tiers[plan.tier].name.clone()),
            load_at: plan.load_at.map(OpRecord::from),
        });
        Self {
            format: FORMAT.to_owned(),
            version: file::VERSION,
            trace_sha256,
            memory_bytes: planned.budget,
            predicted: Predicted::of(&planned.prediction),
            layers: layers.collect(),
        }
    }

    /// Reads a file of up to 64 MiB.
    ///
    /// # Errors
    /// It can't be read, or is no plan of version 1.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        Self::parse(&file::read(path)?)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// It is no plan of version 1.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        Ok(file::parse(text, FORMAT)?)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It can't be written.
    pub fn write(&self, path: &Path) -> Result<(), PlanError> {
        Ok(file::write(path, &self.to_json())?)
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        let head = [
            format!("{{\"format\":\"{FORMAT}\",\"version\":{}", self.version),
            format!(" \"trace_sha256\":{}", file::line(&self.trace_sha256)),
            format!(" \"memory_bytes\":{}", self.memory_bytes),
            format!(" \"predicted\":{}", file::line(&self.predicted)),
            file::lines("layers", &self.layers),
        ];
        head.join(",\n") + "}\n"
    }

    /// The trace that it was made from. Another one of the same model is no reason to refuse it.
    pub fn trace_sha256(&self) -> &str {
        &self.trace_sha256
    }

    /// The budget that it was made for.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// What was expected of it.
    pub fn predicted(&self) -> &Predicted {
        &self.predicted
    }
}

impl Predicted {
    fn of(prediction: &Prediction) -> Self {
        let waits = prediction.waits_in_all();
        Self {
            peak_bytes: prediction.peak_bytes,
            peak_at: prediction.peak.op.into(),
            step_ns: prediction.step_ns,
            wait_load_ns: waits.load_ns,
            wait_memory_ns: waits.memory_ns,
        }
    }
}
