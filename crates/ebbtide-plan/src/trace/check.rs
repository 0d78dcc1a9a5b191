//! What a trace must be for a model to be made of it. A hostile file is an error, and a small file
//! can't become a large model.

use std::collections::HashMap;
use std::fmt;

use super::{LayerLine, LinkRecord, Shape, StorageRecord, Trace};
use crate::file::FileError;

/// Longest name, in bytes.
const MAX_NAME: usize = 200;
/// Most layers, and most storages of all layers together.
const MAX_LAYERS: usize = 100_000;
const MAX_STORAGES: usize = 1 << 20;
/// Most entries of all `read_by` together.
const MAX_READS: usize = 1 << 22;
/// All bytes of a trace together, and all its nanoseconds.
const MAX_SUM: u64 = 1 << 60;
const MAX_TIERS: usize = ebbtide_core::gate::MAX_CHANNELS;

/// A trace that can't be used.
#[derive(Debug)]
pub enum TraceError {
    /// It is no trace at all.
    File(FileError),
    /// Something in it makes no sense.
    Wrong {
        /// Where: a tier, a shape, a layer, a storage.
        at: String,
        /// What.
        fault: Fault,
    },
}

/// What can be wrong at one place of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is none, and there must be one.
    Empty,
    /// There are more than are taken.
    TooMany {
        /// How many are taken.
        most: usize,
    },
    /// A name is used twice, is empty, or is longer than 200 bytes.
    Name(String),
    /// A layer names a shape that is not there.
    UnknownShape(String),
    /// A link that moves nothing.
    ZeroBandwidth,
    /// Less than 1,000: copies would make computing faster.
    Slowdown(u32),
    /// It is used by a layer that is not there.
    Offset {
        /// The key.
        key: &'static str,
        /// How many layers behind the one that makes it.
        offset: usize,
        /// How many there are.
        behind: usize,
    },
    /// Two keys contradict each other.
    Order {
        /// What must not be larger.
        less: &'static str,
        /// Than what.
        more: &'static str,
    },
    /// `read_by` names the layer that makes it.
    OwnReader,
    /// Only one of `backward_first` and `backward_last` is there.
    HalfBackward,
    /// `recomputable` is false and `why_not` is not there.
    WhyNot,
    /// All bytes or all times together are more than 2^60.
    Overflow,
}

impl TraceError {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::File(error) => error.hint(),
            Self::Wrong { fault: Fault::ZeroBandwidth, .. } => {
                "measure the tier again, or take it out of the trace"
            }
            Self::Wrong { fault: Fault::Overflow, .. } => "sizes are bytes, times are nanoseconds",
            Self::Wrong { .. } => "trace the model again, or correct the file at this place",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "there is none"),
            Self::TooMany { most } => write!(f, "there are more than {most}"),
            Self::Name(name) => {
                let short: String = name.chars().take(40).collect();
                write!(f, "the name `{short}` is used twice, empty or too long")
            }
            Self::UnknownShape(name) => {
                let short: String = name.chars().take(40).collect();
                write!(f, "there is no shape `{short}`")
            }
            Self::ZeroBandwidth => write!(f, "bytes_per_s is 0"),
            Self::Slowdown(found) => {
                write!(f, "compute_slowdown_permille is {found}, and 1000 is no slowdown")
            }
            Self::Offset { key, offset, behind } => {
                write!(f, "{key} is {offset} layers behind, and there are {behind}")
            }
            Self::Order { less, more } => write!(f, "{less} is larger than {more}"),
            Self::OwnReader => write!(f, "read_by has a 0, the layer that makes it"),
            Self::HalfBackward => {
                write!(f, "backward_first and backward_last are not both there or both null")
            }
            Self::WhyNot => write!(f, "recomputable is false and why_not does not say why"),
            Self::Overflow => write!(f, "all bytes or all times together are more than 2^60"),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => error.fmt(f),
            Self::Wrong { at, fault } => write!(f, "trace, {at}: {fault}"),
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File(error) => Some(error),
            Self::Wrong { .. } => None,
        }
    }
}

impl From<FileError> for TraceError {
    fn from(error: FileError) -> Self {
        Self::File(error)
    }
}

fn wrong(at: impl Into<String>, fault: Fault) -> TraceError {
    TraceError::Wrong { at: at.into(), fault }
}

/// Adds up what a trace comes to when every layer is written out.
#[derive(Default)]
struct Totals {
    storages: usize,
    reads: usize,
    /// Bytes or nanoseconds: both have the same bound.
    bytes: u64,
    ns: u64,
}

impl Totals {
    fn add(&mut self, layer: &LayerLine, shape: &Shape) -> Option<()> {
        let storages = layer.storages.as_ref().unwrap_or(&shape.storages);
        self.storages += storages.len();
        self.reads += storages.iter().map(|storage| storage.read_by.len()).sum::<usize>();
        let temps = [
            layer.forward_temp_bytes.unwrap_or(shape.forward_temp_bytes),
            layer.backward_temp_bytes.unwrap_or(shape.backward_temp_bytes),
            layer.recompute_temp_bytes.unwrap_or(shape.recompute_temp_bytes),
        ];
        for bytes in storages.iter().map(|storage| storage.bytes).chain(temps) {
            self.bytes = self.bytes.checked_add(bytes)?;
        }
        let times = [
            layer.forward_ns.unwrap_or(shape.forward_ns),
            layer.backward_ns.unwrap_or(shape.backward_ns),
            layer.recompute_ns.unwrap_or(shape.recompute_ns),
        ];
        for ns in times {
            self.ns = self.ns.checked_add(ns)?;
        }
        (self.bytes <= MAX_SUM && self.ns <= MAX_SUM).then_some(())
    }
}

impl Trace {
    /// Whether a model can be made of it.
    pub(super) fn check(&self) -> Result<(), TraceError> {
        if self.layers.is_empty() {
            return Err(wrong("layers", Fault::Empty));
        }
        if self.layers.len() > MAX_LAYERS {
            return Err(wrong("layers", Fault::TooMany { most: MAX_LAYERS }));
        }
        if [self.static_bytes, self.plain_peak_bytes, self.step_fixed_ns].into_iter().max()
            > Some(MAX_SUM)
        {
            return Err(wrong("static_bytes, plain_peak_bytes and step_fixed_ns", Fault::Overflow));
        }
        self.check_tiers()?;
        let shapes = self.check_shapes()?;
        self.check_layers(&shapes)
    }

    fn check_tiers(&self) -> Result<(), TraceError> {
        if self.tiers.len() > MAX_TIERS {
            return Err(wrong("tiers", Fault::TooMany { most: MAX_TIERS }));
        }
        unique("tiers", self.tiers.iter().map(|tier| tier.name.as_str()))?;
        for tier in &self.tiers {
            let at = format!("tier `{}`", tier.name);
            let still = |link: &LinkRecord| link.bytes_per_s == 0;
            if still(&tier.out) || still(&tier.back) {
                return Err(wrong(at, Fault::ZeroBandwidth));
            }
            if tier.compute_slowdown_permille < 1000 {
                return Err(wrong(at, Fault::Slowdown(tier.compute_slowdown_permille)));
            }
            if tier.out.latency_ns.max(tier.back.latency_ns) > MAX_SUM {
                return Err(wrong(at, Fault::Overflow));
            }
        }
        Ok(())
    }

    fn check_shapes(&self) -> Result<HashMap<&str, &Shape>, TraceError> {
        unique("shapes", self.shapes.iter().map(|shape| shape.id.as_str()))?;
        for shape in &self.shapes {
            check_storages(&format!("shape `{}`", shape.id), &shape.storages)?;
        }
        Ok(self.shapes.iter().map(|shape| (shape.id.as_str(), shape)).collect())
    }

    fn check_layers(&self, shapes: &HashMap<&str, &Shape>) -> Result<(), TraceError> {
        unique("layers", self.layers.iter().map(|layer| layer.name.as_str()))?;
        let mut totals = Totals { bytes: self.static_bytes, ..Totals::default() };
        for (number, layer) in self.layers.iter().enumerate() {
            let at = format!("layer {number} `{}`", layer.name);
            let shape = shapes.get(layer.shape.as_str());
            let shape =
                shape.ok_or_else(|| wrong(&*at, Fault::UnknownShape(layer.shape.clone())))?;
            totals.add(layer, shape).ok_or_else(|| wrong(&*at, Fault::Overflow))?;
            if totals.storages > MAX_STORAGES {
                return Err(wrong("storages", Fault::TooMany { most: MAX_STORAGES }));
            }
            if totals.reads > MAX_READS {
                return Err(wrong("read_by", Fault::TooMany { most: MAX_READS }));
            }
            if let Some(storages) = &layer.storages {
                check_storages(&at, storages)?;
            }
            let storages = layer.storages.as_ref().unwrap_or(&shape.storages);
            check_offsets(&at, storages, self.layers.len() - 1 - number)?;
            let recomputable = layer.recomputable.unwrap_or(shape.recomputable);
            let why = layer.why_not.as_ref().or(shape.why_not.as_ref());
            if !recomputable && why.is_none() {
                return Err(wrong(at, Fault::WhyNot));
            }
        }
        Ok(())
    }
}

fn unique<'a>(at: &str, names: impl Iterator<Item = &'a str>) -> Result<(), TraceError> {
    let mut seen = std::collections::HashSet::new();
    for name in names {
        if name.is_empty() || name.len() > MAX_NAME || !seen.insert(name) {
            return Err(wrong(at, Fault::Name(name.to_owned())));
        }
    }
    Ok(())
}

fn check_storages(at: &str, storages: &[StorageRecord]) -> Result<(), TraceError> {
    unique(at, storages.iter().map(|storage| storage.name.as_str()))?;
    for storage in storages {
        let at = format!("{at}, storage `{}`", storage.name);
        match (storage.backward_first, storage.backward_last) {
            (Some(first), Some(last)) if last > first => {
                let fault = Fault::Order { less: "backward_last", more: "backward_first" };
                return Err(wrong(at, fault));
            }
            (Some(_), Some(_)) | (None, None) => {}
            _ => return Err(wrong(at, Fault::HalfBackward)),
        }
        if storage.read_by.iter().any(|&reader| reader > storage.last_forward) {
            return Err(wrong(at, Fault::Order { less: "read_by", more: "last_forward" }));
        }
        if storage.read_by.contains(&0) {
            return Err(wrong(at, Fault::OwnReader));
        }
    }
    Ok(())
}

/// `behind`: how many layers come after this one.
fn check_offsets(at: &str, storages: &[StorageRecord], behind: usize) -> Result<(), TraceError> {
    for storage in storages {
        let first = storage.backward_first.unwrap_or(0);
        for (key, offset) in [("last_forward", storage.last_forward), ("backward_first", first)] {
            if offset > behind {
                let at = format!("{at}, storage `{}`", storage.name);
                return Err(wrong(at, Fault::Offset { key, offset, behind }));
            }
        }
    }
    Ok(())
}
