//! What a planned run was expected to come to, and what its copies came to.

use ebbtide_candle::{Settled, StepTimes};
use ebbtide_core::size;
use serde::{Deserialize, Serialize};

/// A plan and what was predicted of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PlanFigures {
    pub(crate) memory_bytes: u64,
    pub(crate) predicted_peak_bytes: u64,
    pub(crate) predicted_step_ms: f64,
    /// In the order of forward.
    pub(crate) layers: Vec<LayerFigures>,
}

/// What becomes of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerFigures {
    pub(crate) name: String,
    pub(crate) recompute: bool,
    /// Bytes that move out and back in.
    pub(crate) swapped_bytes: u64,
    /// Bytes that stay for backward.
    pub(crate) kept_bytes: u64,
}

/// Copies of one direction over all planned steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LinkFigures {
    /// While something was computed.
    pub(crate) hidden_ms: f64,
    /// While the training thread waited.
    pub(crate) exposed_ms: f64,
}

/// Copies of both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overlap {
    pub(crate) out: LinkFigures,
    #[serde(rename = "in")]
    pub(crate) back: LinkFigures,
}

impl Overlap {
    pub(crate) fn add(&mut self, times: &StepTimes) {
        for (sum, link) in [(&mut self.out, times.out), (&mut self.back, times.back)] {
            sum.hidden_ms += link.hidden_ns as f64 / 1e6;
            sum.exposed_ms += link.exposed_ns as f64 / 1e6;
        }
    }
}

impl PlanFigures {
    pub(crate) fn of(settled: &Settled) -> Self {
        let model = settled.trace.model();
        let mut layers = Vec::new();
        for (at, (plan, layer)) in settled.plan.layers.iter().zip(&model.layers).enumerate() {
            let moves = settled.prediction.schedule.moves.iter().filter(|m| m.layer == at);
            let swapped_bytes = moves.map(|m| m.load.bytes).sum();
            let alive = layer.storages.iter().filter(|storage| storage.backward.is_some());
            let alive: u64 = alive.map(|storage| storage.bytes).sum();
            let kept_bytes = if plan.recompute { 0 } else { alive - swapped_bytes };
            let (name, recompute) = (layer.name.clone(), plan.recompute);
            layers.push(LayerFigures { name, recompute, swapped_bytes, kept_bytes });
        }
        Self {
            memory_bytes: settled.memory_bytes,
            predicted_peak_bytes: settled.prediction.peak_bytes,
            predicted_step_ms: settled.prediction.step_ns as f64 / 1e6,
            layers,
        }
    }

    /// The plan in one sentence.
    pub(crate) fn sentence(&self) -> String {
        let sum = |part: fn(&LayerFigures) -> u64| self.layers.iter().map(part).sum();
        let again = self.layers.iter().filter(|layer| layer.recompute).count();
        format!(
            "the plan for {}: {} swapped, {} kept, {again} of {} layers recomputed; predicted peak \
             {}, step {:.0} ms",
            size::format(self.memory_bytes),
            size::format(sum(|layer| layer.swapped_bytes)),
            size::format(sum(|layer| layer.kept_bytes)),
            self.layers.len(),
            size::format_up(self.predicted_peak_bytes),
            self.predicted_step_ms,
        )
    }
}
