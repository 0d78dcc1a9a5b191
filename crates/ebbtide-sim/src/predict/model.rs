//! What the predictor knows of a model and of the machine that it runs on.

/// Nanoseconds of a forward, a recompute and a backward, or bytes of their workspaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Each {
    /// For the forward.
    pub forward: u64,
    /// For the second forward of a recomputed layer.
    pub recompute: u64,
    /// For the backward.
    pub backward: u64,
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layer {
    /// For people.
    pub name: String,
    /// How long its operations take alone, in nanoseconds.
    pub ns: Each,
    /// What its operations need beside storages, in bytes.
    pub workspace: Each,
    /// Why it can't be recomputed, if it can't.
    pub not_recomputable: Option<String>,
    /// What it makes that lives on after its forward.
    pub storages: Vec<Storage>,
}

/// One storage. Layers are counted from 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage {
    /// Unique within its layer.
    pub name: String,
    /// As the allocator rounds them.
    pub bytes: u64,
    /// How many transfers it takes to move it: one, or more for a bundle of several.
    pub pieces: u32,
    /// The last layer whose forward reads it; the layer that makes it, or a later one.
    pub last_forward: usize,
    /// The layers whose backwards read it first and last in time, so the first is not below the
    /// last. `None` if no backward reads it.
    pub backward: Option<(usize, usize)>,
    /// Whether running its layer again makes it anew.
    pub recomputable: bool,
    /// The later layers whose forward reads it, and who need it again when they are recomputed.
    pub read_by: Vec<usize>,
}

/// One direction of a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// While nothing is computed.
    pub bytes_per_s: f64,
    /// While something is.
    pub bytes_per_s_busy: f64,
    /// What every transfer costs besides.
    pub latency_ns: f64,
}

impl Link {
    /// How long a transfer takes while nothing is computed, in nanoseconds.
    pub fn alone_ns(&self, bytes: u64, pieces: u32) -> f64 {
        self.latency_ns * f64::from(pieces) + bytes as f64 * 1e9 / self.bytes_per_s
    }

    /// How long a transfer takes while something is, in nanoseconds.
    pub fn busy_ns(&self, bytes: u64, pieces: u32) -> f64 {
        self.latency_ns * f64::from(pieces) + bytes as f64 * 1e9 / self.bytes_per_s_busy
    }
}

/// Where bytes can go.
#[derive(Clone, Debug, PartialEq)]
pub struct Tier {
    /// For people and files.
    pub name: String,
    /// All that is swapped to it must fit; `None` is no bound.
    pub capacity: Option<u64>,
    /// From the device.
    pub out: Link,
    /// To the device.
    pub back: Link,
    /// How long 1,000 ns of computing take while it copies.
    pub slowdown_permille: u32,
    /// Both directions share one link: only one copies at a time, offloads first.
    pub shared_duplex: bool,
}

/// A model on a machine.
///
/// Not in it: cancelled offloads, recompute of several layers as one segment or of parts of a layer,
/// and copies from one tier to another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// In the order of forward.
    pub layers: Vec<Layer>,
    /// The fastest first. At most [`MAX_CHANNELS`](ebbtide_core::gate::MAX_CHANNELS).
    pub tiers: Vec<Tier>,
    /// What is on the device all the time, in bytes.
    pub static_bytes: u64,
    /// What a step takes besides its layers, in nanoseconds.
    pub fixed_ns: u64,
    /// The peak without ebbtide in bytes, where more is known of it than storages tell. `None`: it is
    /// theirs.
    pub plain_bytes: Option<u64>,
}

impl Model {
    /// Number of storages of all layers.
    pub fn storages(&self) -> usize {
        self.layers.iter().map(|layer| layer.storages.len()).sum()
    }

    /// The same model on a machine where computing and copying, and copies of both directions,
    /// don't slow each other down. For bounds: no plan takes longer there.
    #[must_use]
    pub fn at_best(&self) -> Self {
        let mut best = self.clone();
        for tier in &mut best.tiers {
            (tier.slowdown_permille, tier.shared_duplex) = (1000, false);
            for link in [&mut tier.out, &mut tier.back] {
                let most = link.bytes_per_s.max(link.bytes_per_s_busy);
                (link.bytes_per_s, link.bytes_per_s_busy) = (most, most);
            }
        }
        best
    }

    /// The operations alone: no waits, nothing recomputed. In nanoseconds.
    pub fn compute_ns(&self) -> u64 {
        let each = self.layers.iter().map(|layer| layer.ns.forward + layer.ns.backward);
        self.fixed_ns + each.sum::<u64>()
    }
}
