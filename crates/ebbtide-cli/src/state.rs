//! Saved runs: a safetensors file with weights, moments and everything that makes the continued
//! run bit-identical to one that was never interrupted.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::Path;

use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use ebbtide_core::size;
use safetensors::tensor::Metadata;
use safetensors::{SafeTensors, View};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::config::Shape;
use crate::failure::Failure;
use crate::files;
use crate::optim::{AdamW, Slot};
use crate::params;
use crate::tensors;

/// The metadata key. All of the header is one value under it, because safetensors writes keys in
/// random order and equal states have to give equal files.
const KEY: &str = "ebbtide";
/// Changes whenever the header does: its checksum covers every field that this version knows.
const FORMAT: u32 = 1;

/// What a saved run is, apart from its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    format: u32,
    pub(crate) shape: Shape,
    pub(crate) seed: u64,
    pub(crate) lr: f64,
    /// Complete steps.
    pub(crate) step: u64,
    /// Position of the random numbers that draw the batches. Written as text, since JSON numbers are
    /// not 128 bits wide.
    #[serde(with = "as_text")]
    position: u128,
    /// Tells whether the text is the same.
    pub(crate) text: String,
    /// Of the header without this field, and of all tensors. Files of the first versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
}

impl Header {
    pub(crate) fn new(shape: Shape, seed: u64, lr: f64, text: String) -> Self {
        Self { format: FORMAT, shape, seed, lr, step: 0, position: 0, text, checksum: None }
    }

    pub(crate) fn at(&self, step: u64, position: u128) -> Self {
        Self { step, position, ..self.clone() }
    }

    pub(crate) fn position(&self) -> u128 {
        self.position
    }

    /// Whether damage to the file would have been seen.
    pub(crate) fn is_checked(&self) -> bool {
        self.checksum.is_some()
    }

    fn to_text(&self) -> Result<String, Failure> {
        serde_json::to_string(self).map_err(|error| {
            Failure::run_time(format!("can't write the state: {error}"), "please report this")
        })
    }

    /// The checksum of this header with these tensors, which are in the order of [`names`].
    fn checksum<'t>(
        &self,
        tensors: impl Iterator<Item = Cow<'t, [u8]>>,
    ) -> Result<String, Failure> {
        let bare = Self { checksum: None, ..self.clone() };
        let mut state = Xxh3::new();
        state.update(bare.to_text()?.as_bytes());
        tensors.for_each(|bytes| state.update(&bytes));
        Ok(format!("{:016x}", state.digest()))
    }
}

mod as_text {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &u128, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u128, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The names in the file of one parameter and its moments.
fn names(parameter: &str) -> [String; 3] {
    ["model", "adamw.first", "adamw.second"].map(|part| format!("{part}.{parameter}"))
}

/// The tensors of one parameter with their names in the file.
fn tensors_of(slot: &Slot) -> impl Iterator<Item = (String, Tensor)> {
    let all = [slot.var.as_detached_tensor(), slot.first.clone(), slot.second.clone()];
    names(&slot.name).into_iter().zip(all)
}

/// Writes the state, all of it or nothing.
pub(crate) fn save(path: &Path, header: &Header, adamw: &AdamW) -> Result<(), Failure> {
    let all: Vec<_> = adamw.slots().iter().flat_map(tensors_of).collect();
    let mut header = header.clone();
    // A copy of one tensor at a time: the peak of the run is not touched.
    let bytes = all.iter().map(|(_, tensor)| Cow::Owned(View::data(tensor).into_owned()));
    header.checksum = Some(header.checksum(bytes)?);
    let metadata = HashMap::from([(KEY.to_owned(), header.to_text()?)]);
    files::replace(path, |file| tensors::write(file, metadata, all))
}

/// Why a file can't be resumed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// It can't be read at all.
    Unread(String),
    NoSafetensors,
    Foreign,
    Format(u32),
    /// Not those of the model that the header names.
    Tensors,
    /// The checksum is another one.
    Damaged,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(why) => f.write_str(why),
            Self::NoSafetensors => f.write_str("it is no safetensors file, or not all of one"),
            Self::Foreign => f.write_str("ebbtide did not write it"),
            Self::Format(format) => {
                write!(f, "its format is {format}, this ebbtide reads {FORMAT}")
            }
            Self::Tensors => f.write_str("its tensors are not those of the model it names"),
            Self::Damaged => {
                f.write_str("it has changed since it was written: its checksum differs")
            }
        }
    }
}

impl Unusable {
    fn hint(&self) -> &'static str {
        match self {
            Self::Damaged => "resume from another copy of it; some of this one's bits are wrong",
            _ => "name a file that `ebbtide train --save` has written",
        }
    }
}

/// A saved run that has been checked whole: header, names, types, shapes and checksum.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) header: Header,
    bytes: Vec<u8>,
}

impl Saved {
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        read(path).and_then(Self::parse).map_err(|why| {
            let message = format!("can't resume from {}: {why}", path.display());
            Failure::bad_input(message, why.hint())
        })
    }

    /// Checks the bytes of a file. They may be anything; nothing of a size that they name is made
    /// before it is known that the file is as large.
    pub(crate) fn parse(bytes: Vec<u8>) -> Result<Self, Unusable> {
        let file = SafeTensors::deserialize(&bytes).map_err(|_| Unusable::NoSafetensors)?;
        let (_, metadata) =
            SafeTensors::read_metadata(&bytes).map_err(|_| Unusable::NoSafetensors)?;
        let header = read_header(&metadata).ok_or(Unusable::Foreign)?;
        if header.format != FORMAT {
            return Err(Unusable::Format(header.format));
        }
        if !fits(&header.shape, &metadata) {
            return Err(Unusable::Tensors);
        }
        if header.is_checked() && header.checksum != Some(checksum(&header, &file)?) {
            return Err(Unusable::Damaged);
        }
        Ok(Self { header, bytes })
    }

    /// Fills weights and moments.
    pub(crate) fn restore(&self, adamw: &AdamW, device: &Device) -> Result<(), Failure> {
        let file = SafeTensors::deserialize(&self.bytes).map_err(candle_core::Error::from)?;
        let load =
            |name: String| file.tensor(&name).map_err(candle_core::Error::from)?.load(device);
        for slot in adamw.slots() {
            let [var, first, second] = names(&slot.name).map(load);
            slot.var.set(&var?)?;
            copy_into(&slot.first, &first?)?;
            copy_into(&slot.second, &second?)?;
        }
        Ok(())
    }
}

/// Overwrites a tensor that others hold too.
fn copy_into(target: &Tensor, source: &Tensor) -> Result<(), Failure> {
    Ok(target.slice_set(source, 0, 0)?)
}

/// The bytes of a regular file that memory can hold. A device or a pipe has no end to read to, and
/// could not be read a second time.
fn read(path: &Path) -> Result<Vec<u8>, Unusable> {
    let unread = |error: std::io::Error| Unusable::Unread(error.to_string());
    let metadata = fs::metadata(path).map_err(unread)?;
    if !metadata.is_file() {
        return Err(Unusable::Unread("it is not a regular file".to_owned()));
    }
    let memory = ebbtide_store::memory_limit().unwrap_or(u64::MAX);
    if metadata.len() > memory {
        let (has, memory) = (size::format(metadata.len()), size::format(memory));
        return Err(Unusable::Unread(format!("it has {has}, and this machine {memory} of memory")));
    }
    fs::read(path).map_err(unread)
}

fn read_header(metadata: &Metadata) -> Option<Header> {
    serde_json::from_str(metadata.metadata().as_ref()?.get(KEY)?).ok()
}

/// The checksum of a file that fits its header.
fn checksum(header: &Header, file: &SafeTensors<'_>) -> Result<String, Unusable> {
    let mut specs = params::specs(&header.shape);
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    let found = specs
        .iter()
        .flat_map(|spec| names(&spec.name))
        .map(|name| file.tensor(&name).map(|tensor| Cow::Borrowed(tensor.data())))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| Unusable::Tensors)?;
    header.checksum(found.into_iter()).map_err(|_| Unusable::Foreign)
}

/// Whether the file holds exactly the tensors of this model.
fn fits(shape: &Shape, metadata: &Metadata) -> bool {
    let found = metadata.tensors();
    // Sizes in a foreign header may be anything: more layers than tensors, or a width whose fourfold
    // is no number, can't be right.
    if shape.layers > found.len() || params::count(shape).is_none() {
        return false;
    }
    let has = |name: &str, dims: &[usize], dtype: DType| {
        found.get(name).is_some_and(|info| {
            info.shape == dims && DType::try_from(info.dtype).is_ok_and(|d| d == dtype)
        })
    };
    let specs = params::specs(shape);
    specs.len() * 3 == found.len()
        && specs.iter().all(|params::Spec { name, dims, .. }| {
            let [var, first, second] = names(name);
            has(&var, dims, shape.candle_dtype())
                && has(&first, dims, DType::F32)
                && has(&second, dims, DType::F32)
        })
}
