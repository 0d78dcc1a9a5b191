//! AdamW whose state can be saved.
//!
//! Moments are f32 and the arithmetic is f32 for bf16 weights too. Everything is updated in place,
//! one parameter at a time, and each gradient is given back as soon as it has been used, so that
//! the optimizer never adds to a step's peak.

use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, DType, Error, InplaceOp2, InplaceOp3, Layout, Result as CandleResult, Tensor, Var,
};
use half::bf16;

use crate::failure::Failure;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.95;
const EPSILON: f32 = 1e-8;
const WEIGHT_DECAY: f32 = 0.1;

/// One parameter with its moments.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) name: String,
    pub(crate) var: Var,
    /// Running mean of the gradient.
    pub(crate) first: Tensor,
    /// Running mean of the gradient's square.
    pub(crate) second: Tensor,
}

/// The optimizer: parameters in order of name.
#[derive(Debug)]
pub(crate) struct AdamW {
    slots: Vec<Slot>,
}

impl AdamW {
    pub(crate) fn new(params: &[(String, Var)]) -> Result<Self, Failure> {
        let slot = |(name, var): &(String, Var)| {
            let zeros = || Tensor::zeros(var.shape(), DType::F32, var.device());
            let (first, second) = (zeros()?, zeros()?);
            Ok(Slot { name: name.clone(), var: var.clone(), first, second })
        };
        let mut slots = params.iter().map(slot).collect::<Result<Vec<_>, Failure>>()?;
        slots.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { slots })
    }

    /// Parameters and moments, to be saved or filled.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Makes update number `step`, counted from one, at the rate `lr`. `seen` gets each gradient in order of name
    /// before it is given back.
    pub(crate) fn update(
        &self,
        step: u64,
        lr: f64,
        mut grads: GradStore,
        mut seen: impl FnMut(&Tensor) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let power = i32::try_from(step).unwrap_or(i32::MAX);
        let correct = |beta: f32| 1. / (1. - f64::from(beta).powi(power));
        // Before anything changes, so that a step that fails here leaves the last one's state.
        let missing = |slot: &&Slot| grads.get(&slot.var).is_none();
        if let Some(slot) = self.slots.iter().find(missing) {
            return Err(no_gradient(slot));
        }
        for slot in &self.slots {
            let grad = grads.remove(&slot.var).ok_or_else(|| no_gradient(slot))?;
            let grad = grad.contiguous()?;
            seen(&grad)?;
            slot.first.inplace_op2(&grad, &Moment { beta: BETA1, square: false })?;
            slot.second.inplace_op2(&grad, &Moment { beta: BETA2, square: true })?;
            drop(grad);
            // Norms and biases have a right scale of their own; decay is for matrices.
            let decay = if slot.var.rank() > 1 { WEIGHT_DECAY } else { 0. };
            let apply = Apply {
                keep: narrow(1. - lr * f64::from(decay)),
                rate: narrow(lr * correct(BETA1)),
                correct: narrow(correct(BETA2)),
            };
            slot.var.as_tensor().inplace_op3(&slot.first, &slot.second, &apply)?;
        }
        Ok(())
    }
}

fn no_gradient(slot: &Slot) -> Failure {
    let message = format!("the parameter {} got no gradient", slot.name);
    Failure::run_time(message, "please report this with the command")
}

#[expect(clippy::cast_possible_truncation, reason = "the arithmetic is f32 by design")]
fn narrow(x: f64) -> f32 {
    x as f32
}

/// moment = beta * moment + (1 - beta) * gradient (or its square)
struct Moment {
    beta: f32,
    square: bool,
}

impl InplaceOp2 for Moment {
    fn name(&self) -> &'static str {
        "adamw-moment"
    }

    fn cpu_fwd(
        &self,
        moment: &mut CpuStorage,
        moment_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> CandleResult<()> {
        let moment = f32_mut(moment, moment_layout)?;
        let mix = |moment: &mut f32, grad: f32| {
            let grad = if self.square { grad * grad } else { grad };
            *moment = self.beta * *moment + (1. - self.beta) * grad;
        };
        match grad {
            CpuStorage::F32(grad) => {
                let grad = slice(grad, grad_layout)?;
                moment.iter_mut().zip(grad).for_each(|(m, &g)| mix(m, g));
            }
            CpuStorage::BF16(grad) => {
                let grad = slice(grad, grad_layout)?;
                moment.iter_mut().zip(grad).for_each(|(m, &g)| mix(m, g.to_f32()));
            }
            _ => return Err(unsupported()),
        }
        Ok(())
    }
}

/// weight = keep * weight - rate * first / (sqrt(correct * second) + epsilon)
struct Apply {
    keep: f32,
    rate: f32,
    correct: f32,
}

impl Apply {
    fn one(&self, weight: f32, first: f32, second: f32) -> f32 {
        self.keep * weight - self.rate * first / ((self.correct * second).sqrt() + EPSILON)
    }
}

impl InplaceOp3 for Apply {
    fn name(&self) -> &'static str {
        "adamw-apply"
    }

    fn cpu_fwd(
        &self,
        weight: &mut CpuStorage,
        weight_layout: &Layout,
        first: &CpuStorage,
        first_layout: &Layout,
        second: &CpuStorage,
        second_layout: &Layout,
    ) -> CandleResult<()> {
        let (CpuStorage::F32(first), CpuStorage::F32(second)) = (first, second) else {
            return Err(unsupported());
        };
        let moments = slice(first, first_layout)?.iter().zip(slice(second, second_layout)?);
        match weight {
            CpuStorage::F32(weight) => {
                let weight = slice_mut(weight, weight_layout)?;
                for (w, (&m, &v)) in weight.iter_mut().zip(moments) {
                    *w = self.one(*w, m, v);
                }
            }
            CpuStorage::BF16(weight) => {
                let weight = slice_mut(weight, weight_layout)?;
                for (w, (&m, &v)) in weight.iter_mut().zip(moments) {
                    *w = bf16::from_f32(self.one(w.to_f32(), m, v));
                }
            }
            _ => return Err(unsupported()),
        }
        Ok(())
    }
}

fn unsupported() -> Error {
    Error::Msg("AdamW runs on f32 and bf16 weights with f32 moments".to_owned())
}

fn f32_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> CandleResult<&'a mut [f32]> {
    match storage {
        CpuStorage::F32(values) => slice_mut(values, layout),
        _ => Err(unsupported()),
    }
}

fn slice<'a, T>(values: &'a [T], layout: &Layout) -> CandleResult<&'a [T]> {
    let (start, end) = layout.contiguous_offsets().ok_or_else(unsupported)?;
    Ok(&values[start..end])
}

fn slice_mut<'a, T>(values: &'a mut [T], layout: &Layout) -> CandleResult<&'a mut [T]> {
    let (start, end) = layout.contiguous_offsets().ok_or_else(unsupported)?;
    Ok(&mut values[start..end])
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn grads_of(var: &Var, factors: &Tensor) -> GradStore {
        // d/dw sum(w * factors) = factors
        let product = (var.as_tensor() * factors).unwrap();
        product.to_dtype(DType::F32).unwrap().sum_all().unwrap().backward().unwrap()
    }

    /// Two updates with lr 0.1 of a matrix [2, -4] under the gradients [1, 0.5] and [0.5, 0.5],
    /// worked out by hand.
    #[test]
    fn two_updates_match_values_worked_out_by_hand() {
        let var = Var::new(&[[2f32, -4.]], &Device::Cpu).unwrap();
        let adam = AdamW::new(&[("w".into(), var.clone())]).unwrap();
        let mut seen = Vec::new();
        for (step, grad) in [(1, [[1f32, 0.5]]), (2, [[0.5, 0.5]])] {
            let factors = Tensor::new(&grad, &Device::Cpu).unwrap();
            adam.update(step, 0.1, grads_of(&var, &factors), |g| {
                seen.push(g.to_vec2::<f32>()?);
                Ok(())
            })
            .unwrap();
            if step == 1 {
                // Corrected moments are g and g^2, so the step is lr * sign(g):
                // 2 * 0.99 - 0.1 and -4 * 0.99 - 0.1.
                close(&var, [1.88, -4.06]);
            }
        }
        assert_eq!(seen, [vec![vec![1., 0.5]], vec![vec![0.5, 0.5]]]);
        // m = [0.14, 0.095] / 0.19, v = [0.06, 0.024375] / 0.0975: the steps are
        // 0.1 * 0.736842 / 0.784465 and 0.1 * 0.5 / 0.5.
        close(&var, [1.88 * 0.99 - 0.093_929_3, -4.06 * 0.99 - 0.1]);
    }

    fn close(var: &Var, expected: [f32; 2]) {
        let found = var.to_vec2::<f32>().unwrap();
        for (f, e) in found[0].iter().zip(expected) {
            assert!((f - e).abs() < 2e-6, "{found:?} is not {expected:?}");
        }
    }

    #[test]
    fn vectors_do_not_decay_and_bf16_weights_keep_f32_moments() {
        let var = Var::new(&[8f32, 8.], &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let var = Var::from_tensor(&var).unwrap();
        let adam = AdamW::new(&[("b".into(), var.clone())]).unwrap();
        let factors = Tensor::new(&[0f32, 1.], &Device::Cpu).unwrap();
        let grads = grads_of(&var, &factors.to_dtype(DType::BF16).unwrap());
        adam.update(1, 0.5, grads, |_| Ok(())).unwrap();
        let found = var.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(found, [8., 7.5]);
        assert_eq!(adam.slots()[0].first.dtype(), DType::F32);
    }

    #[test]
    fn a_parameter_without_a_gradient_is_an_error_that_names_it() {
        let var = Var::new(&[1f32], &Device::Cpu).unwrap();
        let other = Var::new(&[1f32], &Device::Cpu).unwrap();
        let adam = AdamW::new(&[("w".into(), var)]).unwrap();
        let grads = grads_of(&other, &Tensor::new(&[1f32], &Device::Cpu).unwrap());
        let failure = adam.update(1, 0.1, grads, |_| Ok(())).unwrap_err();
        assert_eq!(failure.message, "the parameter w got no gradient");
    }
}
