//! The file that `train --json` writes, and the text of every such file.

use serde::Serialize;

use crate::compare;
use crate::config::{Shape, VOCAB};
use crate::failure::Failure;
use crate::figures::{Overlap, PlanFigures};
use crate::params;
use crate::trainer::{Outcome, Record};

/// Version of the layout; it changes when a field changes its meaning or goes.
const SCHEMA: u32 = 1;

/// A report as the bytes of its file.
pub(crate) fn text(report: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let mut text = serde_json::to_vec_pretty(report).map_err(|error| {
        Failure::run_time(format!("can't write the figures: {error}"), "please report this")
    })?;
    text.push(b'\n');
    Ok(text)
}

#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    schema: u32,
    command: &'static str,
    device: &'static str,
    model: Model<'a>,
    /// Null unless modes were compared.
    identical: Option<bool>,
    /// What was planned and predicted, if a run was planned.
    plan: Option<&'a PlanFigures>,
    /// What the copies of its planned steps took, in all.
    overlap: Option<Overlap>,
    runs: Vec<Run<'a>>,
}

#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "fields are the keys of the file")]
struct Model<'a> {
    layers: usize,
    d_model: usize,
    heads: usize,
    seq: usize,
    batch: usize,
    vocab: usize,
    parameters: usize,
    dtype: &'a str,
}

#[derive(Debug, Serialize)]
struct Run<'a> {
    mode: &'a str,
    tier: Option<&'a str>,
    steps: usize,
    /// Not a number is null: JSON has no word for it.
    loss: Vec<f32>,
    gradients_xxh3: Option<String>,
    gradients_tensors: u64,
    gradients_bytes: u64,
    base_bytes: u64,
    peak_bytes: u64,
    peak_rss_bytes: Option<u64>,
    step_ms: Vec<f64>,
    /// Of each step by itself.
    step_peak_bytes: Vec<u64>,
    probe_ms: f64,
    moved_out_bytes: u64,
    moved_in_bytes: u64,
    dropped_bytes: u64,
    recompute_ms: f64,
    wait_ms: f64,
    missed_prefetches: u64,
}

impl<'a> Report<'a> {
    pub(crate) fn new(shape: &'a Shape, compared: bool, outcomes: &'a [Outcome]) -> Self {
        let model = Model {
            layers: shape.layers,
            d_model: shape.d_model,
            heads: shape.heads,
            seq: shape.seq,
            batch: shape.batch,
            vocab: VOCAB,
            parameters: params::count(shape).unwrap_or(0),
            dtype: shape.dtype.name(),
        };
        Self {
            schema: SCHEMA,
            command: "train",
            device: "cpu",
            model,
            identical: compared.then(|| compare::identical(outcomes)).flatten(),
            plan: outcomes.iter().find_map(|outcome| outcome.plan.as_ref()),
            overlap: outcomes.iter().find_map(|outcome| outcome.overlap),
            runs: outcomes.iter().map(run).collect(),
        }
    }
}

fn run(outcome: &Outcome) -> Run<'_> {
    let last = outcome.records.last().map(|record| record.gradients);
    let totals = outcome.totals;
    Run {
        mode: outcome.mode.name(),
        tier: outcome.tier.as_deref(),
        steps: outcome.records.len(),
        loss: outcome.records.iter().map(Record::loss).collect(),
        gradients_xxh3: last.map(|gradients| format!("{:016x}", gradients.xxh3)),
        gradients_tensors: last.map_or(0, |gradients| gradients.tensors),
        gradients_bytes: last.map_or(0, |gradients| gradients.bytes),
        base_bytes: outcome.base_bytes,
        peak_bytes: outcome.peak_bytes,
        peak_rss_bytes: outcome.peak_rss_bytes,
        step_ms: outcome.records.iter().map(|record| record.ms).collect(),
        step_peak_bytes: outcome.records.iter().map(|record| record.step_peak_bytes).collect(),
        probe_ms: totals.probe_ms,
        moved_out_bytes: totals.moved_out_bytes,
        moved_in_bytes: totals.moved_in_bytes,
        dropped_bytes: totals.dropped_bytes,
        recompute_ms: totals.recompute_ms,
        wait_ms: totals.wait_ms,
        missed_prefetches: totals.missed_prefetches,
    }
}
