//! From a trace to the model that is planned on.

use std::collections::HashMap;

use ebbtide_sim::predict::{Each, Layer, Link, Model, Storage, Tier};

use super::{LayerLine, LinkRecord, Shape, StorageRecord, TierRecord, Trace};

impl Trace {
    /// The model, with every layer written out.
    pub fn model(&self) -> Model {
        let shapes: HashMap<&str, &Shape> =
            self.shapes.iter().map(|shape| (shape.id.as_str(), shape)).collect();
        let layers = self.layers.iter().enumerate();
        Model {
            layers: layers.map(|(at, line)| layer(at, line, shapes[line.shape.as_str()])).collect(),
            tiers: self.tiers.iter().map(tier).collect(),
            static_bytes: self.static_bytes,
            fixed_ns: self.step_fixed_ns,
            plain_bytes: (self.plain_peak_bytes > 0).then_some(self.plain_peak_bytes),
        }
    }
}

fn layer(at: usize, line: &LayerLine, shape: &Shape) -> Layer {
    let recomputable = line.recomputable.unwrap_or(shape.recomputable);
    let why_not = line.why_not.as_ref().or(shape.why_not.as_ref());
    let storages = line.storages.as_ref().unwrap_or(&shape.storages);
    Layer {
        name: line.name.clone(),
        ns: Each {
            forward: line.forward_ns.unwrap_or(shape.forward_ns),
            recompute: line.recompute_ns.unwrap_or(shape.recompute_ns),
            backward: line.backward_ns.unwrap_or(shape.backward_ns),
        },
        workspace: Each {
            forward: line.forward_temp_bytes.unwrap_or(shape.forward_temp_bytes),
            recompute: line.recompute_temp_bytes.unwrap_or(shape.recompute_temp_bytes),
            backward: line.backward_temp_bytes.unwrap_or(shape.backward_temp_bytes),
        },
        not_recomputable: if recomputable { None } else { why_not.cloned() },
        storages: storages.iter().map(|record| storage(at, record)).collect(),
    }
}

fn storage(at: usize, record: &StorageRecord) -> Storage {
    Storage {
        name: record.name.clone(),
        bytes: record.bytes,
        pieces: 1,
        last_forward: at + record.last_forward,
        backward: record.backward_first.zip(record.backward_last).map(|(a, b)| (at + a, at + b)),
        recomputable: record.recomputable,
        read_by: record.read_by.iter().map(|reader| at + reader).collect(),
    }
}

fn tier(record: &TierRecord) -> Tier {
    Tier {
        name: record.name.clone(),
        capacity: (record.capacity_bytes > 0).then_some(record.capacity_bytes),
        out: link(record.out),
        back: link(record.back),
        slowdown_permille: record.compute_slowdown_permille,
        shared_duplex: record.shared_duplex,
    }
}

fn link(record: LinkRecord) -> Link {
    let busy =
        if record.bytes_per_s_busy == 0 { record.bytes_per_s } else { record.bytes_per_s_busy };
    Link {
        bytes_per_s: record.bytes_per_s as f64,
        bytes_per_s_busy: busy as f64,
        latency_ns: record.latency_ns as f64,
    }
}
