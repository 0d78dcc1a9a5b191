//! A traced step as a file: `ebbtide.trace` 1.
//!
//! The file is JSON with integers only: bytes and nanoseconds. Layers that save the same storages
//! share a *shape*; a layer may override any number of its shape. Where a storage is used is told
//! relative to the layer that makes it, so that equal layers are equal. Unknown keys are refused.

mod build;
mod check;
mod convert;

pub use build::{LayerRecord, StorageRecord, TraceBuilder};
pub use check::{Fault, TraceError};

use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::file;

/// The format's name.
pub const FORMAT: &str = "ebbtide.trace";

/// A traced step of a model on a machine, checked.
///
/// ```
/// use ebbtide_plan::synthetic;
/// use ebbtide_plan::trace::Trace;
///
/// let trace = synthetic::trace(12, 20, 7)?;
/// let again = Trace::parse(&trace.to_json())?;
/// assert_eq!(again, trace);
/// assert_eq!(again.model().layers.len(), 12);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    format: String,
    version: u32,
    source: String,
    created_unix_s: u64,
    static_bytes: u64,
    /// 0: not known.
    #[serde(default)]
    plain_peak_bytes: u64,
    step_fixed_ns: u64,
    tiers: Vec<TierRecord>,
    shapes: Vec<Shape>,
    layers: Vec<LayerLine>,
}

/// One direction of a tier, as measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRecord {
    /// While nothing is computed. Not 0.
    pub bytes_per_s: u64,
    /// While something is computed; 0 means the same.
    pub bytes_per_s_busy: u64,
    /// What each transfer costs besides.
    pub latency_ns: u64,
}

/// A tier, as measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierRecord {
    /// `host`, `disk`, …; unique.
    pub name: String,
    /// How much it holds; 0 means that no bound is known.
    pub capacity_bytes: u64,
    /// From the device.
    pub out: LinkRecord,
    /// To the device.
    #[serde(rename = "in")]
    pub back: LinkRecord,
    /// How long 1,000 ns of computing take while the tier copies; at least 1,000.
    pub compute_slowdown_permille: u32,
    /// Both directions share one link.
    pub shared_duplex: bool,
}

/// What layers have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    id: String,
    forward_ns: u64,
    backward_ns: u64,
    recompute_ns: u64,
    forward_temp_bytes: u64,
    backward_temp_bytes: u64,
    recompute_temp_bytes: u64,
    recomputable: bool,
    why_not: Option<String>,
    storages: Vec<StorageRecord>,
}

/// A layer: its shape, and what is different.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LayerLine {
    shape: String,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    forward_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recompute_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    forward_temp_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward_temp_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recompute_temp_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recomputable: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    storages: Option<Vec<StorageRecord>>,
}

impl Trace {
    /// Reads a file of up to 64 MiB.
    ///
    /// # Errors
    /// It can't be read, is no trace of version 1, or makes no sense: the error names the place.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::parse(&file::read(path)?)
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        let trace: Self = file::parse(text, FORMAT)?;
        trace.check()?;
        Ok(trace)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It can't be written.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        Ok(file::write(path, &self.to_json())?)
    }

    /// The text of the file: a tier, a storage of a shape and a layer are a line each.
    pub fn to_json(&self) -> String {
        let shapes: Vec<String> = self.shapes.iter().map(Shape::to_json).collect();
        let mut head = vec![
            format!("{{\"format\":\"{FORMAT}\",\"version\":{}", self.version),
            format!(" \"source\":{}", file::line(&self.source)),
            format!(" \"created_unix_s\":{}", self.created_unix_s),
            format!(" \"static_bytes\":{}", self.static_bytes),
            format!(" \"step_fixed_ns\":{}", self.step_fixed_ns),
            file::lines("tiers", &self.tiers),
            format!(" \"shapes\":[\n{}\n ]", shapes.join(",\n")),
            file::lines("layers", &self.layers),
        ];
        if self.plain_peak_bytes > 0 {
            head.insert(4, format!(" \"plain_peak_bytes\":{}", self.plain_peak_bytes));
        }
        head.join(",\n") + "}\n"
    }

    /// The SHA-256 of [`to_json`](Self::to_json), in hexadecimal: that of a file as it was written,
    /// and the same however it is laid out.
    pub fn sha256(&self) -> String {
        let mut text = String::new();
        for byte in Sha256::digest(self.to_json()) {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// What was traced: the front end and its version, in words.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// When it was traced, in seconds since 1970.
    pub fn created_unix_s(&self) -> u64 {
        self.created_unix_s
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Number of different shapes.
    pub fn shapes(&self) -> usize {
        self.shapes.len()
    }
}

impl Shape {
    fn to_json(&self) -> String {
        let mut alone = self.clone();
        let storages = std::mem::take(&mut alone.storages);
        let head = file::line(&alone);
        let Some(head) = head.strip_suffix("[]}").filter(|_| !storages.is_empty()) else {
            return format!("  {head}");
        };
        let storages: Vec<String> = storages.iter().map(file::line).collect();
        format!("  {head}[\n   {}]}}", storages.join(",\n   "))
    }
}
