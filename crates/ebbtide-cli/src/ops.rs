//! Layer norm, softmax, linear and cross-entropy from basic Candle operations.
//!
//! candle-nn has faster versions of the first two without a backward: gradients would be lost in
//! silence. Candle has no bf16 matrix product on a CPU, so bf16 is widened around it.

use candle_core::{D, DType, Result, Tensor};

const NORM_EPSILON: f64 = 1e-5;

/// Normalises the last dimension in f32, then scales and shifts it.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let dtype = x.dtype();
    let x = x.to_dtype(DType::F32)?;
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centred.broadcast_div(&(variance + NORM_EPSILON)?.sqrt()?)?.to_dtype(dtype)?;
    normal.broadcast_mul(weight)?.broadcast_add(bias)
}

/// Softmax over the last dimension; the maximum is subtracted so that no exponential overflows.
pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    // The maximum cancels out of the result, so it needs no gradient.
    let max = x.max_keepdim(D::Minus1)?.detach();
    let exp = x.broadcast_sub(&max)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// Matrix product in f32, returned in the type of `a`.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(a.dtype())
}

/// Mean negative log-likelihood in f32 of `targets`, shape (n, 1), under `logits`, shape (n, v).
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.to_dtype(DType::F32)?;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum - shifted.gather(targets, 1)?)?.mean_all()
}

/// What is added to scores of shape (.., seq, seq) so that a byte sees only those before it.
pub(crate) fn causal_mask(seq: usize, device: &candle_core::Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..seq)
        .flat_map(|row| (0..seq).map(move |col| if col > row { f32::NEG_INFINITY } else { 0. }))
        .collect();
    Tensor::from_vec(values, (1, 1, seq, seq), device)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    const ROW: [f32; 5] = [0.5, -1.25, 3., 2.75, -0.125];

    fn close(found: &[f32], expected: &[f64], tolerance: f64) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f64::from(*f) - e).abs() <= tolerance, "{found:?} is not {expected:?}");
        }
    }

    fn row64() -> Vec<f64> {
        ROW.iter().map(|&x| f64::from(x)).collect()
    }

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::from_slice(values, (1, values.len()), &Device::Cpu).unwrap()
    }

    #[test]
    fn layer_norm_matches_a_reference_in_f64() {
        let (weight, bias) = ([1f32, 2., -1., 0.5, 3.], [0.1f32, 0., -0.5, 1., 0.]);
        let x = row64();
        let mean = x.iter().sum::<f64>() / 5.;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 5.;
        let expected: Vec<f64> = (0..5)
            .map(|i| {
                (x[i] - mean) / (variance + NORM_EPSILON).sqrt() * f64::from(weight[i])
                    + f64::from(bias[i])
            })
            .collect();
        let w = Tensor::new(&weight, &Device::Cpu).unwrap();
        let b = Tensor::new(&bias, &Device::Cpu).unwrap();
        let y = layer_norm(&tensor(&ROW), &w, &b).unwrap().flatten_all().unwrap();
        close(&y.to_vec1().unwrap(), &expected, 1e-6);
    }

    #[test]
    fn softmax_matches_a_reference_in_f64_and_does_not_overflow() {
        let sum: f64 = row64().iter().map(|x| x.exp()).sum();
        let expected: Vec<f64> = row64().iter().map(|x| x.exp() / sum).collect();
        let y = softmax(&tensor(&ROW)).unwrap().flatten_all().unwrap();
        close(&y.to_vec1().unwrap(), &expected, 1e-7);
        let large = softmax(&tensor(&[1e30, 1e30, 0.])).unwrap().flatten_all().unwrap();
        close(&large.to_vec1().unwrap(), &[0.5, 0.5, 0.], 0.);
    }

    #[test]
    fn gradients_match_finite_differences_in_f64() {
        // Central differences of the reference; 1e-3 covers what f32 loses in it.
        let loss = |x: &[f64]| {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            sum.ln() - x[2]
        };
        let expected: Vec<f64> = (0..5)
            .map(|i| {
                let (mut up, mut down) = (row64(), row64());
                up[i] += 1e-5;
                down[i] -= 1e-5;
                (loss(&up) - loss(&down)) / 2e-5
            })
            .collect();
        let x = Var::from_tensor(&tensor(&ROW)).unwrap();
        let target = Tensor::new(&[[2u32]], &Device::Cpu).unwrap();
        let found = cross_entropy(x.as_tensor(), &target).unwrap();
        let value = found.to_scalar::<f32>().unwrap();
        assert!((f64::from(value) - loss(&row64())).abs() < 1e-6);
        let grads = found.backward().unwrap();
        let grad = grads.get(&x).unwrap().flatten_all().unwrap();
        close(&grad.to_vec1().unwrap(), &expected, 1e-6);
    }

    #[test]
    fn bf16_products_are_those_of_f32_rounded_once() {
        let a = tensor(&ROW).to_dtype(DType::BF16).unwrap();
        let b = a.t().unwrap();
        let y = matmul(&a, &b).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let y = y.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        // 18.390625 in f32; steps of bf16 there are 0.125.
        assert_eq!(y, [18.375]);
    }

    #[test]
    fn the_mask_hides_what_comes_later() {
        let mask = causal_mask(2, &Device::Cpu).unwrap().flatten_all().unwrap();
        assert_eq!(mask.to_vec1::<f32>().unwrap(), [0., f32::NEG_INFINITY, 0., 0.]);
    }
}
