//! How a front end that has recorded a step makes a trace of it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{FORMAT, LayerLine, Shape, TierRecord, Trace, TraceError};
use crate::file::VERSION;

/// A storage as a layer saves it. Layers are counted from the one that makes it, which is 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageRecord {
    /// Unique within its layer.
    pub name: String,
    /// As the allocator rounds them.
    pub bytes: u64,
    /// The last layer whose forward reads it.
    pub last_forward: usize,
    /// The layer whose backward reads it first in time; `None` if no backward does.
    pub backward_first: Option<usize>,
    /// The layer whose backward reads it last; not above `backward_first`.
    pub backward_last: Option<usize>,
    /// The later layers whose forward reads it: they need it again when they are recomputed.
    pub read_by: Vec<usize>,
    /// Whether running its layer again makes it anew.
    pub recomputable: bool,
}

impl StorageRecord {
    /// A storage that its own layer alone uses, and can make anew.
    pub fn inner(name: impl Into<String>, bytes: u64) -> Self {
        Self {
            name: name.into(),
            bytes,
            last_forward: 0,
            backward_first: Some(0),
            backward_last: Some(0),
            read_by: Vec::new(),
            recomputable: true,
        }
    }

    /// An output that the next layer's forward reads, and its backward if `saved`.
    pub fn output(name: impl Into<String>, bytes: u64, saved: bool) -> Self {
        let backward = saved.then_some(1);
        Self {
            last_forward: 1,
            backward_first: backward,
            backward_last: backward,
            read_by: vec![1],
            recomputable: false,
            ..Self::inner(name, bytes)
        }
    }
}

/// A layer as it was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerRecord {
    /// Unique within the model.
    pub name: String,
    /// Nanoseconds of its forward.
    pub forward_ns: u64,
    /// Nanoseconds of its backward.
    pub backward_ns: u64,
    /// Nanoseconds of its second forward.
    pub recompute_ns: u64,
    /// What its forward needs beside storages: the most of at least two steps.
    pub forward_temp_bytes: u64,
    /// What its backward needs beside storages.
    pub backward_temp_bytes: u64,
    /// What its second forward needs beside storages.
    pub recompute_temp_bytes: u64,
    /// Why it can't be recomputed, if it can't.
    pub why_not: Option<String>,
    /// What it saves.
    pub storages: Vec<StorageRecord>,
}

/// Collects a step. Layers that save the same storages become one shape; what else differs is
/// written with the layer.
///
/// ```
/// use ebbtide_plan::trace::{LayerRecord, StorageRecord, TraceBuilder};
///
/// let mut builder = TraceBuilder::new("a program of mine");
/// for at in 0..3 {
///     builder.layer(LayerRecord {
///         name: format!("h.{at}"),
///         forward_ns: 1_000_000 + at,
///         backward_ns: 2_000_000,
///         recompute_ns: 1_000_000,
///         storages: vec![StorageRecord::inner("attn.q", 1 << 20)],
///         ..LayerRecord::default()
///     });
/// }
/// let trace = builder.build()?;
/// assert_eq!((trace.layers(), trace.shapes()), (3, 1));
/// # Ok::<(), ebbtide_plan::trace::TraceError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TraceBuilder {
    trace: Trace,
    /// What makes a shape → its place.
    shapes: HashMap<(Option<String>, Vec<StorageRecord>), usize>,
}

impl TraceBuilder {
    /// A step without layers and tiers. `source` names the front end and its version.
    pub fn new(source: impl Into<String>) -> Self {
        let trace = Trace {
            format: FORMAT.to_owned(),
            version: VERSION,
            source: source.into(),
            created_unix_s: 0,
            static_bytes: 0,
            plain_peak_bytes: 0,
            step_fixed_ns: 0,
            tiers: Vec::new(),
            shapes: Vec::new(),
            layers: Vec::new(),
        };
        Self { trace, shapes: HashMap::new() }
    }

    /// When it was recorded, in seconds since 1970.
    pub fn created(&mut self, unix_s: u64) -> &mut Self {
        self.trace.created_unix_s = unix_s;
        self
    }

    /// What is on the device all the time, in bytes.
    pub fn static_bytes(&mut self, bytes: u64) -> &mut Self {
        self.trace.static_bytes = bytes;
        self
    }

    /// The peak of a step without ebbtide, in bytes, where more is known of it than storages tell.
    pub fn plain_peak_bytes(&mut self, bytes: u64) -> &mut Self {
        self.trace.plain_peak_bytes = bytes;
        self
    }

    /// What a step takes besides its layers, in nanoseconds.
    pub fn step_fixed_ns(&mut self, ns: u64) -> &mut Self {
        self.trace.step_fixed_ns = ns;
        self
    }

    /// Adds a tier; the fastest comes first.
    pub fn tier(&mut self, tier: TierRecord) -> &mut Self {
        self.trace.tiers.push(tier);
        self
    }

    /// Adds the next layer in the order of forward.
    pub fn layer(&mut self, layer: LayerRecord) -> &mut Self {
        let key = (layer.why_not.clone(), layer.storages.clone());
        let count = self.trace.shapes.len();
        let at = *self.shapes.entry(key).or_insert(count);
        if at == count {
            self.trace.shapes.push(shape(format!("shape.{at}"), &layer));
        }
        let shape = &self.trace.shapes[at];
        let other = |value: u64, usual: u64| (value != usual).then_some(value);
        self.trace.layers.push(LayerLine {
            shape: shape.id.clone(),
            forward_ns: other(layer.forward_ns, shape.forward_ns),
            backward_ns: other(layer.backward_ns, shape.backward_ns),
            recompute_ns: other(layer.recompute_ns, shape.recompute_ns),
            forward_temp_bytes: other(layer.forward_temp_bytes, shape.forward_temp_bytes),
            backward_temp_bytes: other(layer.backward_temp_bytes, shape.backward_temp_bytes),
            recompute_temp_bytes: other(layer.recompute_temp_bytes, shape.recompute_temp_bytes),
            name: layer.name,
            ..LayerLine::default()
        });
        self
    }

    /// The trace.
    ///
    /// # Errors
    /// What was recorded makes no sense; the error names the place.
    pub fn build(self) -> Result<Trace, TraceError> {
        self.trace.check()?;
        Ok(self.trace)
    }
}

fn shape(id: String, layer: &LayerRecord) -> Shape {
    Shape {
        id,
        forward_ns: layer.forward_ns,
        backward_ns: layer.backward_ns,
        recompute_ns: layer.recompute_ns,
        forward_temp_bytes: layer.forward_temp_bytes,
        backward_temp_bytes: layer.backward_temp_bytes,
        recompute_temp_bytes: layer.recompute_temp_bytes,
        recomputable: layer.why_not.is_none(),
        why_not: layer.why_not.clone(),
        storages: layer.storages.clone(),
    }
}
