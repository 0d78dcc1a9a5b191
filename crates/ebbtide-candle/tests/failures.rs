//! A step that fails leaves nothing behind, and the next one is right.

mod common;

use candle_core::DType::F32;
use candle_core::Tensor;
use common::{Model, assert_same, swap};
use ebbtide_candle::{Policies, Policy, Swap, Tier};

fn assert_next_step_works(model: &Model, swap: &Swap) {
    assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
    let ids = model.ids(2, 4, 7);
    let (_, expected) = model.plain(&ids);
    let (_, found) = model.swapped(swap, &ids).unwrap();
    assert_same(&model.vars(), &expected, &found);
    assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
}

/// C10: given up after each number of layers, and after the whole forward.
#[test]
fn c10_m7_a_step_abandoned_half_way() {
    let model = Model::new(4, F32);
    let swap = swap("0:swap,1:recompute,2:swap", 4);
    for layers in 0..=4 {
        let mut step = swap.step();
        let mut h = model.embed(&model.ids(2, 4, 0)).unwrap();
        for (i, block) in model.blocks.iter().enumerate().take(layers) {
            h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h)).unwrap();
        }
        drop(step);
        assert_next_step_works(&model, &swap);
    }
}

/// C10: an error in the third layer's forward, and a panic there.
#[test]
fn c10_an_error_or_a_panic_in_a_forward() {
    let model = Model::new(4, F32);
    let swap = swap("swap", 4);
    for panics in [false, true] {
        let attempt = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut step = swap.step();
            let mut h = model.embed(&model.ids(2, 4, 0)).unwrap();
            for (i, block) in model.blocks.iter().enumerate() {
                h = step.layer(&format!("h.{i}"), &block.params, &h, move |h| {
                    if i == 2 {
                        assert!(!panics, "planned");
                        candle_core::bail!("planned");
                    }
                    block.forward(h)
                })?;
            }
            Ok::<_, ebbtide_candle::Error>(h)
        }));
        match attempt {
            Ok(result) => assert_eq!(result.unwrap_err().to_string(), "layer `h.2` failed"),
            Err(_) => assert!(panics),
        }
        assert_next_step_works(&model, &swap);
    }
}

/// C10: an error in backward: the loss has an operation whose backward Candle does not have.
#[test]
fn c10_an_error_in_backward() {
    let model = Model::new(3, F32);
    for policy in ["swap", "recompute", "keep"] {
        let swap = swap(policy, 3);
        for inside in [false, true] {
            let mut step = swap.step();
            let mut h = model.embed(&model.ids(2, 4, 0)).unwrap();
            for (i, block) in model.blocks.iter().enumerate() {
                h = step
                    .layer(&format!("h.{i}"), &block.params, &h, move |h: &Tensor| {
                        let h = block.forward(h)?;
                        if inside && i == 1 { no_backward(&h) } else { Ok(h) }
                    })
                    .unwrap();
            }
            let loss = if inside { h } else { no_backward(&h).unwrap() };
            let error = step.backward(&loss.sum_all().unwrap()).unwrap_err();
            assert!(std::error::Error::source(&error).is_some(), "{error}");
            drop(step);
            assert_next_step_works(&model, &swap);
        }
    }
}

/// Average pooling with a stride of its own has a forward and no backward in Candle.
fn no_backward(x: &Tensor) -> candle_core::Result<Tensor> {
    let pooled = x.unsqueeze(1)?.avg_pool2d_with_stride((2, 2), (1, 1))?;
    pooled.squeeze(1)?.pad_with_zeros(1, 0, 1)?.pad_with_zeros(2, 0, 1)
}

/// C10, C21: the tier runs out of room in the middle of a step.
#[test]
fn c10_c21_out_of_host_memory() {
    let model = Model::new(4, F32);
    for bytes in [0, 10_000, 40_000] {
        let policies = Policies::uniform(Policy::Swap, 4);
        let swap = Swap::builder(policies).tier(Tier::Host).host_bytes(bytes).build().unwrap();
        for _ in 0..2 {
            let error = model.swapped(&swap, &model.ids(2, 4, 0)).unwrap_err();
            assert!(error.is_copy(), "{error}");
            assert!(error.hint().unwrap().contains("--host-bytes"), "{:?}", error.hint());
            assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
        }
        swap.set_policies(Policies::uniform(Policy::Recompute, 4)).unwrap();
        assert_next_step_works(&model, &swap);
    }
}

/// C21: the folder of the spill file.
#[test]
fn c21_spill_folder_missing() {
    let dir = tempfile::tempdir().unwrap();
    let tier = Tier::File { dir: dir.path().join("missing") };
    let error = Swap::builder(Policies::uniform(Policy::Swap, 1)).tier(tier).build().unwrap_err();
    assert!(error.to_string().contains("missing"), "{error}");
    assert!(error.hint().is_some());
}

/// C9: a hundred steps, every seventh given up: memory and tier stay flat.
#[test]
fn c9_a_hundred_steps_stay_flat() {
    let model = Model::new(3, F32);
    let swap = swap("swap", 3);
    for round in 0..100 {
        if round % 7 == 6 {
            let mut step = swap.step();
            let x = model.embed(&model.ids(2, 4, 0)).unwrap();
            let block = &model.blocks[0];
            step.layer("h.0", &block.params, &x, |x| block.forward(x)).unwrap();
        } else {
            model.swapped(&swap, &model.ids(2, 4, round)).unwrap();
        }
        assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0), "step {round}");
    }
}
