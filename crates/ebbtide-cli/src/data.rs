//! The text, and the batches drawn from it.

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use xxhash_rust::xxh3::xxh3_64;

use crate::documents::DOCUMENTS;
use crate::failure::Failure;

/// Streams of the one seed. They are apart, so that drawing from one never shifts another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Weights = 0,
    Batches = 1,
    Sample = 2,
}

/// The random numbers that `seed` gives for one purpose.
pub(crate) fn random(seed: u64, stream: Stream) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream as u64);
    rng
}

/// The text as bytes, which are the tokens.
#[derive(Debug)]
pub(crate) struct Corpus(Vec<u8>);

impl Corpus {
    /// Reads `files`, joined in order, or ebbtide's own documents when there are none.
    pub(crate) fn load(files: &[PathBuf], seq: usize) -> Result<Self, Failure> {
        let mut bytes = Vec::new();
        for file in files {
            let part = std::fs::read(file).map_err(|error| {
                let message = format!("can't read the text {}: {error}", file.display());
                Failure::bad_input(message, "name a readable file with --text")
            })?;
            bytes.extend(part);
        }
        if files.is_empty() {
            bytes = DOCUMENTS.concat().into_bytes();
        }
        if bytes.len() <= seq {
            let has = bytes.len();
            return Err(Failure::bad_input(
                format!("the text has {has} bytes, a sequence of {seq} needs at least {}", seq + 1),
                "name more text with --text, or make sequences shorter with --seq",
            ));
        }
        Ok(Self(bytes))
    }

    /// Tells one text from another.
    pub(crate) fn fingerprint(&self) -> String {
        format!("{:016x}", xxh3_64(&self.0))
    }
}

/// Draws windows of the text at random places.
#[derive(Debug)]
pub(crate) struct Batches {
    rng: ChaCha8Rng,
    batch: usize,
    seq: usize,
}

/// One batch: the bytes and, for each, the byte that follows it.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Shape (batch, seq).
    pub(crate) inputs: Tensor,
    /// Shape (batch * seq, 1).
    pub(crate) targets: Tensor,
}

impl Batches {
    pub(crate) fn new(seed: u64, batch: usize, seq: usize) -> Self {
        Self { rng: random(seed, Stream::Batches), batch, seq }
    }

    /// How many random words have been drawn: the whole position in the data, since every window
    /// depends on the random state alone.
    pub(crate) fn position(&self) -> u128 {
        self.rng.get_word_pos()
    }

    pub(crate) fn seek(&mut self, position: u128) {
        self.rng.set_word_pos(position);
    }

    pub(crate) fn draw(&mut self, corpus: &Corpus, device: &Device) -> Result<Batch, Failure> {
        let (batch, seq) = (self.batch, self.seq);
        let places = (corpus.0.len() - seq) as u64;
        let mut inputs = Vec::with_capacity(batch * seq);
        let mut targets = Vec::with_capacity(batch * seq);
        for _ in 0..batch {
            // The high half of the product is uniform to within 2^-64 times the text's length.
            let scaled = (u128::from(self.rng.next_u64()) * u128::from(places)) >> 64;
            let start = usize::try_from(scaled).unwrap_or(0);
            let window = &corpus.0[start..=start + seq];
            inputs.extend(window[..seq].iter().map(|&b| u32::from(b)));
            targets.extend(window[1..].iter().map(|&b| u32::from(b)));
        }
        Ok(Batch {
            inputs: Tensor::from_vec(inputs, (batch, seq), device)?,
            targets: Tensor::from_vec(targets, (batch * seq, 1), device)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_bytes_that_follow_and_a_position_can_be_resumed() {
        let corpus = Corpus((0..=255).collect());
        let mut batches = Batches::new(7, 3, 5);
        let first = batches.draw(&corpus, &Device::Cpu).unwrap();
        let inputs = first.inputs.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        let targets = first.targets.flatten_all().unwrap().to_vec1::<u32>().unwrap();
        assert!(inputs.iter().zip(&targets).all(|(i, t)| i + 1 == *t));

        let position = batches.position();
        let draw = |batches: &mut Batches| {
            let batch = batches.draw(&corpus, &Device::Cpu).unwrap();
            batch.inputs.to_vec2::<u32>().unwrap()
        };
        let expected = draw(&mut batches);
        let mut resumed = Batches::new(7, 3, 5);
        resumed.seek(position);
        assert_eq!(draw(&mut resumed), expected);
    }

    #[test]
    fn the_shortest_text_that_works_has_one_window() {
        let corpus = Corpus(vec![1, 2, 3, 4, 5, 6]);
        let mut batches = Batches::new(1, 4, 5);
        let batch = batches.draw(&corpus, &Device::Cpu).unwrap();
        assert_eq!(batch.inputs.to_vec2::<u32>().unwrap(), vec![vec![1, 2, 3, 4, 5]; 4]);
    }
}
