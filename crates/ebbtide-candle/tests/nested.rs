//! Row W7 in Candle: a layer called inside another one. Within one step the borrow checker refuses it;
//! a step of its own inside a layer is an error, never another gradient.

use std::cell::RefCell;

use candle_core::{Device, Tensor, Var};
use ebbtide_candle::Swap;
use ebbtide_core::{Policies, Policy};

fn swap(policy: Policy) -> Swap {
    Swap::builder(Policies::uniform(policy, 1)).build().unwrap()
}

fn two(w: &Var, x: &Tensor) -> candle_core::Result<Tensor> {
    x.matmul(w)?.tanh()
}

/// W7: whatever the policies, the answer is an error that says what to do.
#[test]
fn w7_a_layer_within_a_layer_is_refused() {
    let w = Var::randn(0f32, 1., (8, 8), &Device::Cpu).unwrap();
    let x = Tensor::randn(0f32, 1., (4, 8), &Device::Cpu).unwrap();
    let named = [("w".to_string(), w.clone())];
    for outer in [Policy::Keep, Policy::Swap, Policy::Recompute] {
        for inner in [Policy::Keep, Policy::Swap, Policy::Recompute] {
            let (outer_swap, inner_swap) = (swap(outer), swap(inner));
            let within = RefCell::new(inner_swap.step());
            let mut step = outer_swap.step();
            let result = step
                .layer("outer", &named, &x, |x| {
                    let h = two(&w, x)?;
                    let w = w.clone();
                    let inner = within.borrow_mut().layer("inner", &named, &h, move |h| two(&w, h));
                    inner.map_err(candle_core::Error::wrap)
                })
                .and_then(|y| step.backward(&y.sqr()?.sum_all()?));
            let error = result.unwrap_err();
            assert!(error.to_string().starts_with("layer `outer` uses a variable"), "{error}");
            assert!(error.hint().unwrap().contains("inside another"), "{outer} around {inner}");
        }
    }
}
