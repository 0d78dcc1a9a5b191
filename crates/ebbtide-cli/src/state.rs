//! Saved runs: a safetensors file with weights, moments and everything that makes the continued
//! run bit-identical to one that was never interrupted.

use std::collections::HashMap;
use std::path::Path;

use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use crate::config::Shape;
use crate::failure::Failure;
use crate::files;
use crate::optim::{AdamW, Slot};
use crate::params;

/// The metadata key. All of the header is one value under it, because safetensors writes keys in
/// random order and equal states have to give equal files.
const KEY: &str = "ebbtide";
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
}

impl Header {
    pub(crate) fn new(shape: Shape, seed: u64, lr: f64, text: String) -> Self {
        Self { format: FORMAT, shape, seed, lr, step: 0, position: 0, text }
    }

    pub(crate) fn at(&self, step: u64, position: u128) -> Self {
        Self { step, position, ..self.clone() }
    }

    pub(crate) fn position(&self) -> u128 {
        self.position
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

/// The tensors of one parameter with their names in the file.
fn tensors(slot: &Slot) -> [(String, Tensor); 3] {
    let Slot { name, var, first, second } = slot;
    [
        (format!("model.{name}"), var.as_detached_tensor()),
        (format!("adamw.first.{name}"), first.clone()),
        (format!("adamw.second.{name}"), second.clone()),
    ]
}

/// Writes the state, all of it or nothing.
pub(crate) fn save(path: &Path, header: &Header, adamw: &AdamW) -> Result<(), Failure> {
    let text = serde_json::to_string(header).map_err(|e| {
        Failure::run_time(format!("can't write the state: {e}"), "please report this")
    })?;
    let metadata = HashMap::from([(KEY.to_owned(), text)]);
    let all: Vec<_> = adamw.slots().iter().flat_map(tensors).collect();
    files::replace(path, |temporary| {
        safetensors::serialize_to_file(all, Some(metadata), temporary)
            .map_err(std::io::Error::other)
    })
}

/// A saved run that has been checked whole: header, names, types and shapes.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) header: Header,
    bytes: Vec<u8>,
}

impl Saved {
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let wrong = |why: &str| {
            Failure::bad_input(
                format!("can't resume from {}: {why}", path.display()),
                "name a file that `ebbtide train --save` has written",
            )
        };
        let bytes = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes)
            .map_err(|_| wrong("it is no safetensors file, or not all of one"))?;
        let header = read_header(&metadata).ok_or_else(|| wrong("ebbtide did not write it"))?;
        if header.format != FORMAT {
            let why = format!("its format is {}, this ebbtide reads {FORMAT}", header.format);
            return Err(wrong(&why));
        }
        // Sizes in a foreign header may be anything; more parameters than tensors can't be right.
        let plausible = header.shape.layers <= metadata.tensors().len();
        if !plausible || !fits(&header.shape, &metadata) {
            return Err(wrong("its tensors are not those of the model it names"));
        }
        Ok(Self { header, bytes })
    }

    /// Fills weights and moments.
    pub(crate) fn restore(&self, adamw: &AdamW, device: &Device) -> Result<(), Failure> {
        let file = SafeTensors::deserialize(&self.bytes).map_err(candle_core::Error::from)?;
        let load =
            |name: String| file.tensor(&name).map_err(candle_core::Error::from)?.load(device);
        for slot in adamw.slots() {
            let [var, first, second] = tensors(slot).map(|(name, _)| load(name));
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

fn read_header(metadata: &Metadata) -> Option<Header> {
    serde_json::from_str(metadata.metadata().as_ref()?.get(KEY)?).ok()
}

/// Whether the file holds exactly the tensors of this model.
fn fits(shape: &Shape, metadata: &Metadata) -> bool {
    let found = metadata.tensors();
    let has = |name: String, dims: &[usize], dtype: DType| {
        found.get(&name).is_some_and(|info| {
            info.shape == dims && DType::try_from(info.dtype).is_ok_and(|d| d == dtype)
        })
    };
    let specs = params::specs(shape);
    specs.len() * 3 == found.len()
        && specs.iter().all(|params::Spec { name, dims, .. }| {
            has(format!("model.{name}"), dims, shape.candle_dtype())
                && has(format!("adamw.first.{name}"), dims, DType::F32)
                && has(format!("adamw.second.{name}"), dims, DType::F32)
        })
}
