//! From what was written down of a step to a trace that plans are made from.

use std::time::{SystemTime, UNIX_EPOCH};

use ebbtide_plan::Trace;
use ebbtide_plan::trace::{LayerRecord, StorageRecord, TierRecord, TraceBuilder, TraceError};

use crate::record::{LayerNotes, Recording};

/// Where a trace comes from.
const SOURCE: &str = "candle cpu 0.11";
/// What the books of a planned step take beside those of a traced one, in bytes: a fixed part, and
/// one for each storage that may move by itself.
const BOOKS: u64 = 16 << 10;
const BOOKS_OF_STORAGE: u64 = 1 << 10;

/// The trace of a recording, on a machine with one tier.
///
/// Outputs of layers and gradients are moved by no plan: they are part of what operations need.
pub(crate) fn trace(recording: &Recording, tier: TierRecord) -> Result<Trace, TraceError> {
    let mut builder = TraceBuilder::new(SOURCE);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    builder.created(now);
    builder.static_bytes(recording.static_bytes + books(recording));
    builder.plain_peak_bytes(plain_peak(recording));
    builder.step_fixed_ns(recording.fixed_ns);
    builder.tier(tier);
    for (at, layer) in recording.layers.iter().enumerate() {
        let known = recording.layers[..at].iter().filter(|other| other.name == layer.name).count();
        builder.layer(record(layer, known));
    }
    builder.build()
}

fn books(recording: &Recording) -> u64 {
    let storages = recording.layers.iter().map(|layer| layer.storages.len() as u64);
    BOOKS + BOOKS_OF_STORAGE * storages.sum::<u64>()
}

/// `earlier` calls of the same layer were recorded in the same step.
fn record(layer: &LayerNotes, earlier: usize) -> LayerRecord {
    let name = match earlier {
        0 => layer.name.clone(),
        _ => format!("{} call {}", layer.name, earlier + 1),
    };
    let storages = layer.storages.iter().map(|note| {
        let mut record = StorageRecord::inner(note.name.clone(), note.bytes);
        if note.dead {
            (record.backward_first, record.backward_last) = (None, None);
        }
        record
    });
    LayerRecord {
        name,
        forward_ns: layer.forward_ns,
        backward_ns: layer.backward_ns,
        recompute_ns: layer.forward_ns + 2 * layer.hash_ns,
        forward_temp_bytes: layer.forward_temp(),
        backward_temp_bytes: layer.backward_temp(),
        recompute_temp_bytes: layer.recompute_temp(),
        why_not: layer.why_not.clone(),
        storages: storages.collect(),
    }
}

/// The peak of a step without ebbtide, in bytes: everything that any layer made is there until the
/// whole backward is over, and what gradients were added up from, too.
pub(crate) fn plain_peak(recording: &Recording) -> u64 {
    let made = recording.layers.iter().enumerate().map(|(at, layer)| {
        let storages = layer.storages.iter().map(|note| note.bytes).sum::<u64>();
        // What the first layer's own backward leaves is part of what it needs.
        storages + layer.output_bytes + if at == 0 { 0 } else { layer.left_bytes }
    });
    let last = recording.layers.first().map_or(0, LayerNotes::backward_temp);
    recording.static_bytes + made.sum::<u64>() + last
}
