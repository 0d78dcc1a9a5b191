//! Writing a safetensors file into one that is open already.
//!
//! The crate's own function writes to a path through a temporary file of its own, whose name and
//! permissions nobody chooses and which a killed process leaves behind.

use std::collections::HashMap;
use std::io::{self, Write};

use candle_core::Tensor;
use safetensors::View;
use safetensors::tensor::{Metadata, TensorInfo};

/// What the length of the header is a multiple of, so that the tensors are aligned.
const ALIGN: usize = 8;

/// Writes all of it. The same tensors give the same bytes, in whatever order they come.
pub(crate) fn write(
    out: &mut impl Write,
    metadata: HashMap<String, String>,
    mut tensors: Vec<(String, Tensor)>,
) -> io::Result<()> {
    // As the format's own crate does it: wide types first keep every tensor aligned.
    tensors.sort_by(|(a, left), (b, right)| {
        View::dtype(right).cmp(&View::dtype(left)).then_with(|| a.cmp(b))
    });
    let mut end = 0;
    let infos = tensors.iter().map(|(name, tensor)| {
        let start = end;
        end += View::data_len(tensor);
        let (dtype, shape) = (View::dtype(tensor), View::shape(tensor).to_vec());
        (name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    let metadata = Metadata::new(Some(metadata), infos.collect()).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&metadata)?;
    header.resize(header.len().next_multiple_of(ALIGN), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    // A copy of one tensor at a time.
    tensors.iter().try_for_each(|(_, tensor)| out.write_all(&View::data(tensor)))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Files of earlier versions and other programs stay readable, to the bit.
    #[test]
    fn the_bytes_are_those_of_the_formats_own_crate() {
        let tensor = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let narrow = tensor(&[1., 2., 3.]).to_dtype(DType::BF16).unwrap();
        let all = vec![
            ("b".to_owned(), narrow),
            ("c".to_owned(), tensor(&[4.])),
            ("a".to_owned(), tensor(&[5., 6.])),
        ];
        let metadata = HashMap::from([("key".to_owned(), "value \"x\"".to_owned())]);
        let expected = safetensors::serialize(all.clone(), Some(metadata.clone())).unwrap();
        let mut bytes = Vec::new();
        write(&mut bytes, metadata, all).unwrap();
        assert_eq!(bytes, expected);
    }
}
