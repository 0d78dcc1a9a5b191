//! Text from the trained model.

use candle_core::{DType, Device, Tensor};

use crate::config::Config;
use crate::data::{Stream, random};
use crate::failure::Failure;
use crate::layers::Untracked;
use crate::model::Model;
use crate::ops::softmax;
use crate::params::unit;
use crate::signals::Signals;

/// Below one: likely bytes become likelier.
const TEMPERATURE: f64 = 0.8;

/// Draws `count` bytes, one after the other, from the model; fewer if a signal comes. Its random
/// numbers are its own, so a run that samples trains like one that does not.
pub(crate) fn generate(
    model: &Model,
    config: &Config,
    count: usize,
    signals: &Signals,
) -> Result<Vec<u8>, Failure> {
    let mut rng = random(config.seed, Stream::Sample);
    // A line break is the natural thing to stand before a beginning.
    let mut context = vec![u32::from(b'\n')];
    let mut bytes = Vec::with_capacity(count);
    while bytes.len() < count && signals.caught().is_none() {
        let start = context.len().saturating_sub(config.shape.seq);
        let tokens =
            Tensor::from_slice(&context[start..], (1, context.len() - start), &Device::Cpu)?;
        let scores = model.next(&mut Untracked, &tokens)?.detach().to_dtype(DType::F32)?;
        let chances = softmax(&(scores / TEMPERATURE)?)?.flatten_all()?.to_vec1::<f32>()?;
        let byte = pick(&chances, unit(&mut rng));
        bytes.push(byte);
        context.push(u32::from(byte));
    }
    Ok(bytes)
}

/// The first byte at which the running sum of chances passes `at`.
fn pick(chances: &[f32], at: f64) -> u8 {
    let mut sum = 0.;
    for (byte, chance) in (0..=u8::MAX).zip(chances) {
        sum += f64::from(*chance);
        if at < sum {
            return byte;
        }
    }
    // Rounding may leave the sum a little short of one.
    u8::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_picked_by_their_share() {
        let chances = [0.25, 0., 0.5, 0.25];
        assert_eq!([0., 0.24, 0.25, 0.74, 0.75].map(|at| pick(&chances, at)), [0, 0, 2, 2, 3]);
        assert_eq!(pick(&[0.5], 0.75), 255);
    }
}
