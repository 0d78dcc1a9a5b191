//! Names, shapes and first values of the parameters.

use candle_core::{Device, Tensor, Var};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;

use crate::config::{Shape, VOCAB};
use crate::data::{Stream, random};
use crate::failure::Failure;

/// Standard deviation of the first weights, as in GPT-2.
const SPREAD: f64 = 0.02;

/// What a parameter holds before the first step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum First {
    Zeros,
    Ones,
    /// Normal, with this standard deviation.
    Normal(f64),
}

/// A parameter before it exists.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    pub(crate) first: First,
}

/// All parameters of a model in the order in which their first values are drawn. Saved files rely
/// on the names, seeds on the order.
pub(crate) fn specs(shape: &Shape) -> Vec<Spec> {
    let d = shape.d_model;
    let spec = |name: &str, dims: &[usize], first| Spec {
        name: name.to_owned(),
        dims: dims.to_vec(),
        first,
    };
    let mut all = vec![
        spec("wte", &[VOCAB, d], First::Normal(SPREAD)),
        spec("wpe", &[shape.seq, d], First::Normal(SPREAD)),
    ];
    // Each block adds twice to the residual stream; smaller first sums keep its variance at one.
    let out = First::Normal(SPREAD / (2. * shape.layers as f64).sqrt());
    for i in 0..shape.layers {
        let block = [
            ("ln1.weight", vec![d], First::Ones),
            ("ln1.bias", vec![d], First::Zeros),
            ("attn.q", vec![d, d], First::Normal(SPREAD)),
            ("attn.k", vec![d, d], First::Normal(SPREAD)),
            ("attn.v", vec![d, d], First::Normal(SPREAD)),
            ("attn.out", vec![d, d], out),
            ("ln2.weight", vec![d], First::Ones),
            ("ln2.bias", vec![d], First::Zeros),
            ("mlp.up", vec![d, 4 * d], First::Normal(SPREAD)),
            ("mlp.down", vec![4 * d, d], out),
        ];
        let named = block.into_iter().map(|(name, dims, first)| Spec {
            name: format!("h.{i}.{name}"),
            dims,
            first,
        });
        all.extend(named);
    }
    all.push(spec("ln_f.weight", &[d], First::Ones));
    all.push(spec("ln_f.bias", &[d], First::Zeros));
    all
}

/// Number of weights, or `None` when it does not fit a machine word.
pub(crate) fn count(shape: &Shape) -> Option<usize> {
    let d = shape.d_model;
    let square = d.checked_mul(d)?;
    let block = square.checked_mul(12)?.checked_add(d.checked_mul(4)?)?;
    let blocks = block.checked_mul(shape.layers)?;
    let rows = VOCAB.checked_add(shape.seq)?.checked_add(2)?;
    blocks.checked_add(rows.checked_mul(d)?)
}

/// The parameters with their first values, which depend on `seed` alone.
pub(crate) fn create(
    shape: &Shape,
    seed: u64,
    device: &Device,
) -> Result<Vec<(String, Var)>, Failure> {
    let mut rng = random(seed, Stream::Weights);
    let mut create_one = |spec: Spec| {
        let size = spec.dims.iter().product();
        let values = match spec.first {
            First::Zeros => vec![0f32; size],
            First::Ones => vec![1f32; size],
            First::Normal(spread) => normal(&mut rng, size, spread),
        };
        let tensor = Tensor::from_vec(values, spec.dims, device)?;
        let var = Var::from_tensor(&tensor.to_dtype(shape.candle_dtype())?)?;
        Ok((spec.name, var))
    };
    specs(shape).into_iter().map(&mut create_one).collect()
}

/// Normal numbers by the Box-Muller transform, two at a time.
fn normal(rng: &mut ChaCha8Rng, size: usize, spread: f64) -> Vec<f32> {
    let mut values = Vec::with_capacity(size + 1);
    while values.len() < size {
        // In (0, 1], so that the logarithm is finite.
        let radius = (-2. * (1. - unit(rng)).ln()).sqrt() * spread;
        let (sin, cos) = (std::f64::consts::TAU * unit(rng)).sin_cos();
        values.push(narrow(radius * cos));
        values.push(narrow(radius * sin));
    }
    values.truncate(size);
    values
}

/// Uniform in [0, 1).
pub(crate) fn unit(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * (-53f64).exp2()
}

/// Rounds to f32, which is what weights are drawn in.
#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
fn narrow(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Precision;

    fn shape() -> Shape {
        Shape { layers: 3, d_model: 8, heads: 2, seq: 5, batch: 1, dtype: Precision::F32 }
    }

    #[test]
    fn the_count_is_that_of_the_specs() {
        let listed: usize = specs(&shape()).iter().map(|s| s.dims.iter().product::<usize>()).sum();
        assert_eq!(count(&shape()), Some(listed));
        assert_eq!(count(&Shape { layers: usize::MAX, ..shape() }), None);
    }

    #[test]
    fn first_values_depend_on_the_seed_alone() {
        let values = |seed| {
            let all = create(&shape(), seed, &Device::Cpu).unwrap();
            all[0].1.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        assert_eq!(values(1), values(1));
        assert_ne!(values(1), values(2));
    }

    #[test]
    fn normal_numbers_have_the_spread_asked_for() {
        let values = normal(&mut random(3, Stream::Weights), 20_001, 0.02);
        assert_eq!(values.len(), 20_001);
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 1e-3 && (variance.sqrt() - 0.02).abs() < 1e-3);
    }
}
