//! Traces of models that do not exist, to try planners on.
//!
//! Everything is drawn from a seed, the same on every machine.

use ebbtide_sim::Random;

use crate::trace::{
    LayerRecord, LinkRecord, StorageRecord, TierRecord, Trace, TraceBuilder, TraceError,
};

/// What is odd about a made-up model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Nothing: a transformer of equal layers.
    Equal,
    /// Times and bytes differ from layer to layer by up to four.
    Unequal,
    /// One layer, in the middle or the last, has half of all bytes.
    Giant,
    /// Many outputs are read again by a layer far behind.
    Skips,
    /// A third of the storages and a fifth of the layers can't be recomputed.
    Fixed,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Equal, Self::Unequal, Self::Giant, Self::Skips, Self::Fixed];
}

/// A made-up model of `layers` layers with `storages` storages each and an output. The seed also
/// chooses the kind.
///
/// # Errors
/// There is no layer, or there are more than a trace may have.
pub fn trace(layers: usize, storages: usize, seed: u64) -> Result<Trace, TraceError> {
    let kind = Kind::ALL[(seed % 5) as usize];
    let mut draw = Draw(Random::new(seed));
    let ratio = draw.log_uniform(0.1, 10.0);
    of_kind(kind, layers, storages, ratio, seed)
}

/// A made-up model of this kind. `ratio` is how long it takes to copy all live bytes out, divided
/// by the time of all forwards.
///
/// # Errors
/// As for [`trace`].
pub fn of_kind(
    kind: Kind,
    layers: usize,
    storages: usize,
    ratio: f64,
    seed: u64,
) -> Result<Trace, TraceError> {
    let mut draw = Draw(Random::new(seed ^ 0x5EED));
    let mut records = Vec::new();
    let has_dead = draw.chance(0.5);
    for at in 0..layers.min(200_000) {
        records.push(layer(&mut draw, kind, (at, layers), storages, has_dead));
    }
    if kind == Kind::Skips {
        skips(&mut draw, &mut records);
    }
    let live = |layer: &LayerRecord| -> u64 {
        let alive = layer.storages.iter().filter(|storage| storage.backward_first.is_some());
        alive.map(|storage| storage.bytes).sum()
    };
    let bytes: u64 = records.iter().map(live).sum();
    let forward: u64 = records.iter().map(|layer| layer.forward_ns).sum();
    let mut builder = TraceBuilder::new(format!("made up, seed {seed}"));
    builder.static_bytes(16 * UNIT).tier(tier(&mut draw, bytes, forward, ratio));
    for record in records {
        builder.layer(record);
    }
    builder.build()
}

/// The bytes of an output.
const UNIT: u64 = 2 << 20;
/// A layer's forward.
const FORWARD_NS: f64 = 4e6;

struct Draw(Random);

impl Draw {
    /// In `[0, 1)`.
    fn unit(&mut self) -> f64 {
        (self.0.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.0.below(limit as u64)).expect("below a usize")
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    fn log_uniform(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.unit())
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
fn whole(number: f64) -> u64 {
    number.max(1.0) as u64
}

/// Allocators round; so does this.
fn rounded(bytes: f64) -> u64 {
    whole(bytes).next_multiple_of(512)
}

fn layer(
    draw: &mut Draw,
    kind: Kind,
    (at, layers): (usize, usize),
    storages: usize,
    has_dead: bool,
) -> LayerRecord {
    let (mut time, mut size) = (1.0, 1.0);
    if kind == Kind::Unequal {
        (time, size) = (draw.log_uniform(0.5, 2.0), draw.log_uniform(0.5, 2.0));
    }
    let giant = if layers % 2 == 0 { layers - 1 } else { layers / 2 };
    if kind == Kind::Giant && at == giant {
        (time, size) = (2.0, (layers as f64 / 2.0).max(1.0));
    }
    let forward = FORWARD_NS * time;
    let inner = 11.0 * UNIT as f64 * size;
    let mut list: Vec<StorageRecord> = Vec::new();
    for number in 0..storages {
        // Equal layers have storages of different sizes, too, the same ones in each layer.
        let share = 2.0 * (number + 1) as f64 / (storages * (storages + 1)) as f64;
        let mut storage = StorageRecord::inner(format!("s.{number}"), rounded(inner * share));
        storage.recomputable = !(kind == Kind::Fixed && draw.chance(0.3));
        list.push(storage);
    }
    if at + 1 == layers {
        list.push(StorageRecord::inner("out", UNIT));
    } else {
        list.push(StorageRecord::output("out", rounded(UNIT as f64 * size), true));
    }
    if has_dead {
        let dead = StorageRecord::inner("dead", rounded(4.0 * UNIT as f64 * size));
        list.push(StorageRecord { backward_first: None, backward_last: None, ..dead });
    }
    let fixed = kind == Kind::Fixed && draw.chance(0.2);
    LayerRecord {
        name: format!("h.{at}"),
        forward_ns: whole(forward),
        backward_ns: whole(2.0 * forward),
        recompute_ns: whole(forward),
        forward_temp_bytes: UNIT,
        backward_temp_bytes: 2 * UNIT,
        recompute_temp_bytes: UNIT,
        why_not: fixed.then(|| "it draws random numbers".to_owned()),
        storages: list,
    }
}

/// Outputs that are read far behind: mirrored as in a U-net, or anywhere.
fn skips(draw: &mut Draw, records: &mut [LayerRecord]) {
    let layers = records.len();
    let mirrored = draw.chance(0.5);
    for (at, record) in records.iter_mut().enumerate().take(layers.saturating_sub(2)) {
        let behind = layers - 1 - at;
        let mirror = (layers - 1).saturating_sub(2 * at);
        let anywhere = 2 + draw.below(behind - 1);
        let offset = if mirrored { mirror } else { anywhere };
        if offset < 2 || offset > behind || !draw.chance(0.4) {
            continue;
        }
        let out = record.storages.iter_mut().find(|storage| storage.name == "out");
        let out = out.expect("every layer has an output");
        out.last_forward = offset;
        out.backward_first = Some(offset);
        out.read_by = vec![1, offset];
    }
}

fn tier(draw: &mut Draw, bytes: u64, forward_ns: u64, ratio: f64) -> TierRecord {
    let per_s = bytes as f64 * 1e9 / (ratio * forward_ns.max(1) as f64);
    let latency_ns = 8_000;
    let back = per_s * draw.log_uniform(0.8, 1.25);
    let link =
        |per_s: f64| LinkRecord { bytes_per_s: whole(per_s), bytes_per_s_busy: 0, latency_ns };
    TierRecord {
        name: "host".to_owned(),
        capacity_bytes: 0,
        out: link(per_s),
        back: link(back),
        compute_slowdown_permille: 1000,
        shared_duplex: false,
    }
}
