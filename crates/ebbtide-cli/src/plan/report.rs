//! The files that `plan --json` and `simulate --json` write.

use ebbtide_core::Op;
use ebbtide_plan::{Model, Planned, Prediction, Range};
use ebbtide_sim::predict::{Held, LinkUse, Waits, Why};
use serde::Serialize;

use super::fates::LayerFate;

/// Version of the layout; it changes when a field changes its meaning or goes.
pub(crate) const SCHEMA: u32 = 1;

/// Of `ebbtide plan`.
#[derive(Debug, Serialize)]
pub(crate) struct PlanReport {
    schema: u32,
    command: &'static str,
    trace_sha256: String,
    memory_bytes: u64,
    /// Which budgets make a difference.
    range: Bounds,
    solver: &'static str,
    plays: u64,
    /// No plan is faster, as far as was proved.
    bound_ns: u64,
    /// Within 0.2 % of the best.
    proven: bool,
    predicted: Predicted,
    layers: Vec<Line>,
}

/// Of `ebbtide simulate`.
#[derive(Debug, Serialize)]
pub(crate) struct SimulateReport {
    schema: u32,
    command: &'static str,
    trace_sha256: String,
    /// The trace that the plan was made from.
    plan_trace_sha256: String,
    memory_bytes: u64,
    predicted: Predicted,
    layers: Vec<Line>,
}

/// The budgets of a model.
#[derive(Clone, Copy, Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "fields are the keys of the file")]
pub(crate) struct Bounds {
    base_bytes: u64,
    least_bytes: u64,
    most_bytes: u64,
    plain_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Predicted {
    step_ns: u64,
    compute_ns: u64,
    recompute_ns: u64,
    wait_load_ns: u64,
    wait_memory_ns: u64,
    peak_bytes: u64,
    peak: Peak,
    tiers: Vec<Tier>,
}

#[derive(Debug, Serialize)]
struct Peak {
    at: Place,
    static_bytes: u64,
    workspace_bytes: u64,
    storages: Vec<Storage>,
}

#[derive(Debug, Serialize)]
struct Place {
    op: char,
    layer: usize,
}

#[derive(Debug, Serialize)]
struct Storage {
    layer: usize,
    name: String,
    bytes: u64,
    why: &'static str,
}

#[derive(Debug, Serialize)]
struct Tier {
    name: String,
    out: Link,
    #[serde(rename = "in")]
    back: Link,
}

#[derive(Debug, Serialize)]
struct Link {
    bytes: u64,
    busy_ns: u64,
    hidden_ns: u64,
    exposed_ns: u64,
}

#[derive(Debug, Serialize)]
struct Line {
    name: String,
    recompute: bool,
    swap: Vec<String>,
    tier: Option<String>,
    load_at: Option<Place>,
    kept_bytes: u64,
    swapped_bytes: u64,
    recomputed_bytes: u64,
    dropped_bytes: u64,
    wait_load_ns: u64,
    wait_memory_ns: u64,
}

impl PlanReport {
    pub(crate) fn new(
        (model, trace_sha256): (&Model, &str),
        range: &Range,
        solver: &'static str,
        planned: &Planned,
        layers: &[LayerFate],
    ) -> Self {
        Self {
            schema: SCHEMA,
            command: "plan",
            trace_sha256: trace_sha256.to_owned(),
            memory_bytes: planned.budget,
            range: range.into(),
            solver,
            plays: planned.plays,
            bound_ns: planned.bound_ns,
            proven: planned.proven,
            predicted: Predicted::new(model, &planned.prediction),
            layers: layers.iter().map(Line::from).collect(),
        }
    }
}

impl SimulateReport {
    pub(crate) fn new(
        (model, trace_sha256): (&Model, &str),
        plan_trace_sha256: &str,
        prediction: &Prediction,
        layers: &[LayerFate],
    ) -> Self {
        Self {
            schema: SCHEMA,
            command: "simulate",
            trace_sha256: trace_sha256.to_owned(),
            plan_trace_sha256: plan_trace_sha256.to_owned(),
            memory_bytes: prediction.schedule.budget,
            predicted: Predicted::new(model, prediction),
            layers: layers.iter().map(Line::from).collect(),
        }
    }
}

impl From<&Range> for Bounds {
    fn from(range: &Range) -> Self {
        Self {
            base_bytes: range.base,
            least_bytes: range.least,
            most_bytes: range.most,
            plain_bytes: range.plain,
        }
    }
}

impl Predicted {
    fn new(model: &Model, prediction: &Prediction) -> Self {
        let Waits { load_ns, memory_ns } = prediction.waits_in_all();
        let need = &prediction.peak;
        let storage = |held: &Held| Storage {
            layer: held.layer,
            name: model.layers[held.layer].storages[held.storage].name.clone(),
            bytes: held.bytes,
            why: match held.why {
                Why::Resident => "resident",
                Why::Leaving => "leaving",
                Why::Prefetched => "prefetched",
            },
        };
        let tiers = model.tiers.iter().zip(&prediction.tiers);
        let tiers = tiers.map(|(tier, used)| Tier {
            name: tier.name.clone(),
            out: used.out.into(),
            back: used.back.into(),
        });
        Self {
            step_ns: prediction.step_ns,
            compute_ns: prediction.compute_ns,
            recompute_ns: prediction.recompute_ns,
            wait_load_ns: load_ns,
            wait_memory_ns: memory_ns,
            peak_bytes: prediction.peak_bytes,
            peak: Peak {
                at: need.op.into(),
                static_bytes: need.static_bytes,
                workspace_bytes: need.workspace,
                storages: need.storages.iter().map(storage).collect(),
            },
            tiers: tiers.collect(),
        }
    }
}

impl From<Op> for Place {
    fn from(op: Op) -> Self {
        Self { op: op.phase.letter(), layer: op.layer }
    }
}

impl From<LinkUse> for Link {
    fn from(link: LinkUse) -> Self {
        let LinkUse { bytes, busy_ns, hidden_ns, exposed_ns } = link;
        Self { bytes, busy_ns, hidden_ns, exposed_ns }
    }
}

impl From<&LayerFate> for Line {
    fn from(layer: &LayerFate) -> Self {
        Self {
            name: layer.name.clone(),
            recompute: layer.recompute,
            swap: layer.swap.clone(),
            tier: layer.tier.clone(),
            load_at: layer.load_at.map(Place::from),
            kept_bytes: layer.kept,
            swapped_bytes: layer.swapped,
            recomputed_bytes: layer.recomputed,
            dropped_bytes: layer.dropped,
            wait_load_ns: layer.waits.load_ns,
            wait_memory_ns: layer.waits.memory_ns,
        }
    }
}
