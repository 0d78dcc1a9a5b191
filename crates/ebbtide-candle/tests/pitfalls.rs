//! Everything in Candle that could silently give another gradient is an error or is reported.

mod common;

use candle_core::{D, Device, Tensor, Var};
use common::{Model, assert_same, bits, file_tier, numbers, swap, var};
use ebbtide_candle::{Error, Policies, Policy, Swap};

use candle_core::DType::F32;

fn message(error: &Error) -> String {
    use std::error::Error as _;
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// `loss.backward()` would lose the gradients of everything before the last layer.
#[test]
fn backward_called_directly_is_an_error() {
    let model = Model::new(2, F32);
    let swap = swap("swap", 2);
    let mut step = swap.step();
    let x = model.embed(&model.ids(2, 3, 0)).unwrap();
    let y = step.layer("h.0", &model.blocks[0].params, &x, |x| model.blocks[0].forward(x)).unwrap();
    let error = y.sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(error.contains("layer `h.0`") && error.contains("Step::backward"), "{error}");
}

/// A second backward of the same step, a layer after backward, and a loss of another step.
#[test]
fn a_second_backward_is_an_error() {
    let w = var(&[4, 4], 1, F32);
    let params = [("w".to_string(), w.clone())];
    let swap = swap("keep", 1);
    let x = numbers(&[2, 4], 2, F32);
    let mut step = swap.step();
    let loss = step.layer("a", &params, &x, |x| x.matmul(&w)).unwrap().sum_all().unwrap();
    step.backward(&loss).unwrap();
    for error in [
        step.backward(&loss).unwrap_err(),
        step.layer("a", &params, &x, |x| x.matmul(&w)).unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "this step's backward has already run");
        assert!(error.hint().is_some());
    }
    let error = swap.step().backward(&loss).unwrap_err();
    assert!(message(&error).contains("belongs to an ebbtide step"), "{}", message(&error));
}

/// An operation of candle-nn without backward: its weight and its input get no gradient.
#[test]
fn a_segment_without_gradient_is_reported_by_name() {
    let norm = var(&[8], 1, F32);
    let w = var(&[8, 8], 2, F32);
    let params = [("norm".to_string(), norm.clone()), ("w".to_string(), w.clone())];
    let swap = swap("swap", 2);
    let mut step = swap.step();
    let x = var(&[3, 8], 3, F32).affine(1.0, 0.0).unwrap();
    let y = step
        .layer("fast", &params, &x, |x| candle_nn::ops::rms_norm(x, &norm, 1e-5)?.matmul(&w))
        .unwrap();
    let z = step.layer("next", &params[1..], &y, |y| y.matmul(&w)).unwrap();
    let gradients = step.backward(&z.sum_all().unwrap()).unwrap();
    assert!(gradients.get(&norm).is_none() && gradients.get(&w).is_some());
    let why = "gets no gradient (an operation without backward, or not used)";
    assert_eq!(
        swap.notices(),
        [format!("layer `fast`: parameter `norm` {why}"), format!("layer `fast`: input 0 {why}"),]
    );
}

/// C8: recompute of a layer that draws random numbers is refused, also where zero weights hide the
/// mask from every value of the forward.
#[test]
fn c8_recompute_of_random_numbers_is_refused() {
    let zero = Var::from_tensor(&Tensor::zeros((8, 8), F32, &Device::Cpu).unwrap()).unwrap();
    let w = var(&[8, 8], 2, F32);
    for (hidden, weight) in [(false, &w), (true, &zero)] {
        let params = [("w".to_string(), weight.clone())];
        let swap = Swap::builder(Policies::uniform(Policy::Recompute, 1))
            .tier(file_tier())
            .build()
            .unwrap();
        let mut step = swap.step();
        let x = numbers(&[4, 8], 1, F32);
        let dropout = |x: &Tensor| candle_nn::ops::dropout(&x.matmul(weight)?, 0.5);
        let error = step.layer("drop", &params, &x, dropout).unwrap_err();
        assert!(error.is_recompute_refused(), "hidden {hidden}: {error}");
        assert!(error.to_string().contains("layer `drop` draws random numbers"));
        assert_eq!(swap.active_groups(), 0);
    }
}

/// C8: the same with a scalar output, whose gradient is a single number, and without a probe.
#[test]
fn c8_hidden_random_numbers_behind_a_scalar() {
    let zero = Var::from_tensor(&Tensor::zeros((8, 8), F32, &Device::Cpu).unwrap()).unwrap();
    let params = [("w".to_string(), zero.clone())];
    for probe in [true, false] {
        let builder = Swap::builder(Policies::uniform(Policy::Recompute, 1)).probe(probe);
        let swap = builder.tier(file_tier()).build().unwrap();
        let mut step = swap.step();
        let dropout = |x: &Tensor| candle_nn::ops::dropout(&x.matmul(&zero)?, 0.5)?.sum_all();
        let error = step.layer("drop", &params, &numbers(&[4, 8], 1, F32), dropout).unwrap_err();
        assert!(error.is_recompute_refused(), "probe {probe}: {error}");
    }
}

/// Where the order of a sum can't be Candle's, a notice says so; where it can, there is none. In
/// `a.matmul(w) + y` Candle finishes what is behind `y` before it goes into the product.
#[test]
fn sums_in_another_order_are_reported() {
    let w = var(&[6, 6], 1, F32);
    let params = [("w".to_string(), w.clone())];
    for (left, reported) in [(true, true), (false, false)] {
        let swap = Swap::builder(Policies::uniform(Policy::Keep, 2)).tier(file_tier());
        let swap = swap.build().unwrap();
        let mut step = swap.step();
        let a = numbers(&[4, 6], 2, F32).matmul(&var(&[6, 6], 3, F32)).unwrap();
        let y = step.layer("first", &params, &a, |a| a.matmul(&w)?.tanh()).unwrap();
        let join = |i: &[Tensor]| {
            let product = i[0].matmul(&w)?;
            Ok(vec![if left { (product + &i[1])? } else { (&i[1] + product)? }])
        };
        let z = step.layer_many("second", &params, &[&a, &y], join).unwrap();
        step.backward(&z[0].matmul(&w).unwrap().sum_all().unwrap()).unwrap();
        let notices = swap.notices();
        assert_eq!(!notices.is_empty(), reported, "{notices:?}");
        assert!(notices.iter().all(|n| n.contains("layer `second`") && n.contains("last bits")));
    }
}

/// A layer whose graph changes from step to step is probed again, and right each time.
#[test]
fn a_layer_that_changes_its_form() {
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    let x = numbers(&[4, 8], 1, F32);
    let swap = Swap::builder(Policies::uniform(Policy::Swap, 1)).tier(file_tier()).build().unwrap();
    for round in [0, 1, 2, 1, 0, 2] {
        let layer = |x: &Tensor| {
            let mut h = x.matmul(&w)?;
            for i in 0..round {
                h = if i % 2 == 0 { h.exp()? } else { (h.relu()? * 0.5)?.sqr()? };
            }
            h.gelu()
        };
        let expected = layer(&x).unwrap().sum_all().unwrap().backward().unwrap();
        let mut step = swap.step();
        let y = step.layer("a", &params, &x, layer).unwrap();
        let found = step.backward(&y.sum_all().unwrap()).unwrap();
        assert_eq!(bits(found.get(&w).unwrap()), bits(expected.get(&w).unwrap()), "{round}");
    }
}

/// A tensor that a closure puts aside can't be part of the loss: its gradient would end there.
#[test]
fn a_loss_with_a_tensor_put_aside_is_an_error() {
    let w = var(&[6, 6], 1, F32);
    let params = [("w".to_string(), w.clone())];
    let x = numbers(&[4, 6], 2, F32).matmul(&w).unwrap();
    for policy in [Policy::Keep, Policy::Recompute] {
        let aside = std::cell::RefCell::new(Vec::new());
        let swap = Swap::builder(Policies::uniform(policy, 1)).tier(file_tier()).build().unwrap();
        let mut step = swap.step();
        let layer = |x: &Tensor| {
            let e = x.exp()?;
            aside.borrow_mut().push(e.clone());
            e.matmul(&w)
        };
        let y = step.layer("a", &params, &x, layer).unwrap().sum_all().unwrap();
        let loss = (y + aside.borrow()[0].sum_all().unwrap_or(x.sum_all().unwrap())).unwrap();
        let error = step.backward(&loss).unwrap_err();
        assert_eq!(error.to_string(), "the loss uses a tensor that layer `a` put aside");
    }
}

/// A closure that panics on a batch of one, a view of a variable as an input, and an empty batch.
#[test]
fn odd_layers_work_under_every_policy() {
    type Layer<'a> = &'a dyn Fn(&Tensor) -> candle_core::Result<Tensor>;
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    let pairs = |x: &Tensor| {
        let halves = x.matmul(&w)?.chunk(2, 0)?;
        (&halves[0] - &halves[1])?.sqr()
    };
    let product = |p: &Tensor| p.squeeze(0)?.matmul(&w);
    let empty = |x: &Tensor| x.matmul(&w)?.sqr();
    let view = w.unsqueeze(0).unwrap();
    let inputs = [numbers(&[4, 8], 1, F32), view, numbers(&[0, 8], 1, F32)];
    let layers: [Layer<'_>; 3] = [&pairs, &product, &empty];
    for policy in [Policy::Keep, Policy::Swap, Policy::Recompute] {
        for (input, layer) in inputs.iter().zip(layers) {
            let expected = layer(input).unwrap().sum_all().unwrap().backward().unwrap();
            let swap = Swap::builder(Policies::uniform(policy, 1)).tier(file_tier());
            let swap = swap.build().unwrap();
            let mut step = swap.step();
            let y = step.layer("a", &params, input, layer).unwrap();
            let found = step.backward(&y.sum_all().unwrap()).unwrap();
            assert_same(&params, &expected, &found);
            drop(step);
            assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
        }
    }
}

/// A layer may get an untracked alias of its tracked input.
#[test]
fn an_untracked_alias_of_an_input() {
    let w = var(&[6, 6], 1, F32);
    let params = [("w".to_string(), w.clone())];
    let x = numbers(&[4, 6], 2, F32).matmul(&w).unwrap();
    let expected = (x.matmul(&w).unwrap() * x.detach()).unwrap().sum_all().unwrap();
    let expected = expected.backward().unwrap();
    let swap = Swap::builder(Policies::uniform(Policy::Swap, 1)).tier(file_tier()).build().unwrap();
    let mut step = swap.step();
    let layer = |i: &[Tensor]| Ok(vec![(i[0].matmul(&w)? * &i[1])?]);
    let y = step.layer_many("a", &params, &[&x, &x.detach()], layer).unwrap();
    let found = step.backward(&y[0].sum_all().unwrap()).unwrap();
    assert_eq!(bits(found.get(&w).unwrap()), bits(expected.get(&w).unwrap()));
}

/// C8: under keep and swap a layer with dropout works: the mask that forward drew is the one that
/// backward uses.
#[test]
fn c8_dropout_under_keep_and_swap() {
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    for policy in [Policy::Keep, Policy::Swap] {
        let swap = Swap::builder(Policies::uniform(policy, 1)).tier(file_tier()).build().unwrap();
        let mut step = swap.step();
        let x = numbers(&[4, 8], 1, F32);
        let drop = |x: &Tensor| candle_nn::ops::dropout(&x.matmul(&w)?.exp()?, 0.5);
        let y = step.layer("drop", &params, &x, drop).unwrap();
        let gradients = step.backward(&y.sum_all().unwrap()).unwrap();
        // y = mask * exp(x w) with mask 0 or 2, so d/dw = xᵀ y wherever the same mask is used.
        let expected = x.t().unwrap().matmul(&y).unwrap();
        let error = (gradients.get(&w).unwrap() - expected).unwrap().abs().unwrap();
        assert!(error.max_all().unwrap().to_scalar::<f32>().unwrap() < 1e-5);
    }
}

/// C8: a closure that only starts to differ after it was probed is caught by its fingerprint.
#[test]
fn c8_recompute_that_differs_is_an_error() {
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    let swap =
        Swap::builder(Policies::uniform(Policy::Recompute, 1)).tier(file_tier()).build().unwrap();
    let x = numbers(&[4, 8], 1, F32);
    let layer = |x: &Tensor| x.matmul(&w)?.tanh();
    let mut step = swap.step();
    let y = step.layer("a", &params, &x, layer).unwrap();
    // An optimizer step between forward and backward.
    w.set(&numbers(&[8, 8], 9, F32)).unwrap();
    let error = step.backward(&y.sum_all().unwrap()).unwrap_err();
    assert!(error.is_recompute_refused());
    assert_eq!(error.to_string(), "layer `a`, recomputed, differs from its forward");
    drop(step);
    let mut step = swap.step();
    let y = step.layer("a", &params, &x, layer).unwrap();
    step.backward(&y.sum_all().unwrap()).unwrap();
}

/// A tracked capture that is not listed: a variable, and a tensor that depends on one.
#[test]
fn an_unlisted_capture_is_an_error() {
    let (w, bias) = (var(&[4, 4], 1, F32), var(&[4], 2, F32));
    let params = [("w".to_string(), w.clone())];
    let swap = swap("swap", 1);
    let x = numbers(&[2, 4], 3, F32);
    let derived = w.sqr().unwrap();
    let mut step = swap.step();
    let error = step.layer("a", &params, &x, |x| x.matmul(&w)?.broadcast_add(&bias)).unwrap_err();
    let wanted = "layer `a` uses a variable of shape [4] that it does not list";
    assert_eq!(error.to_string(), wanted);
    // Depends on a listed variable only, but was computed outside.
    let error = step.layer("a", &params, &x, |x| x.matmul(&w)?.matmul(&derived)).unwrap_err();
    let wanted = "layer `a` uses a tracked tensor of shape [4, 4] that it does not list";
    assert_eq!(error.to_string(), wanted);
    // The output of an earlier layer.
    let y = step.layer("a", &params, &x, |x| x.matmul(&w)).unwrap();
    let earlier = y.clone();
    let add = |x: &Tensor| x.matmul(&w)? + &earlier;
    let error = swap.step().layer("a", &params, &x, add).unwrap_err();
    assert!(error.to_string().contains("a tracked tensor of shape [2, 4]"), "{error}");
}

/// What is left of a dropped or moved storage answers every read with an error, never with a value.
#[test]
fn poison_is_a_clean_error() {
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    let stash = std::cell::RefCell::new(Vec::new());
    let swap = Swap::builder(Policies::uniform(Policy::Swap, 1)).tier(file_tier()).build().unwrap();
    let mut step = swap.step();
    let layer = |x: &Tensor| {
        let h = x.matmul(&w)?;
        let e = h.exp()?;
        // The first run is the real one, later ones are the probe's.
        if stash.borrow().is_empty() {
            stash.borrow_mut().extend([h, e.clone()]);
        }
        (e + 1.0)?.sqr()
    };
    let y = step.layer("a", &params, &numbers(&[4, 8], 1, F32), layer).unwrap();
    for (i, t) in stash.borrow().iter().enumerate() {
        let reads: Vec<(&str, candle_core::Result<Tensor>)> = vec![
            ("add", t + t),
            ("exp", t.exp()),
            ("matmul", t.matmul(&w)),
            ("sum", t.sum_all()),
            ("max", t.max(D::Minus1)),
            ("cast", t.to_dtype(candle_core::DType::F64)),
            ("contiguous", t.t().and_then(|t| t.contiguous())),
            ("compare", t.gt(t)),
            ("affine", t.affine(2.0, 1.0)),
            ("cat", Tensor::cat(&[t, t], 0)),
            (
                "where",
                t.ones_like().unwrap().to_dtype(candle_core::DType::U8).unwrap().where_cond(t, t),
            ),
            ("index", t.index_select(&Tensor::new(&[0u32], &Device::Cpu).unwrap(), 0)),
            ("power", t.powf(2.0)),
            ("elu", t.elu(1.0)),
        ];
        for (name, read) in reads {
            assert!(read.is_err(), "{name} of storage {i} read something");
        }
        assert!(t.flatten_all().unwrap().to_vec1::<f32>().is_err(), "to_vec of storage {i}");
    }
    step.backward(&y.sum_all().unwrap()).unwrap();
}

/// C17: policies for layers that the model does not call, and layers that no policy names.
#[test]
fn c17_policies_and_layers_must_match() {
    let model = Model::new(3, F32);
    let ids = model.ids(1, 3, 0);
    let error = model.swapped(&swap("swap", 4), &ids).unwrap_err();
    assert_eq!(error.to_string(), "the policies name 4 layers, the step ran 3");
    let error = model.swapped(&swap("swap", 2), &ids).unwrap_err();
    assert_eq!(error.to_string(), "layer `h.2` is one more than the 2 that the policies name");
    let empty =
        Swap::builder(Policies::uniform(Policy::Keep, 0)).tier(file_tier()).build().unwrap_err();
    assert!(empty.is_setting() && empty.hint().is_some());
}

/// A loss without anything to differentiate, and a closure without outputs.
#[test]
fn nothing_to_do_is_an_error() {
    let swap = swap("keep", 1);
    let error = swap.step().backward(&numbers(&[2], 1, F32)).unwrap_err();
    assert_eq!(error.to_string(), "the loss depends on nothing that tracks gradients");
    let x = numbers(&[2], 1, F32);
    let error = swap.step().layer_many("a", &[], &[&x], |_| Ok(vec![])).unwrap_err();
    assert_eq!(error.to_string(), "layer `a` returned no tensor");
    let error = swap.step().layer("a", &[], &x, |x| x.matmul(x)).unwrap_err();
    assert!(message(&error).starts_with("layer `a` failed: "), "{}", message(&error));
}

/// A tensor computed outside that reaches two roots can't be completed in time: an error that says
/// what to do, and the remedy gives the bits of plain.
#[test]
fn a_split_gradient_is_an_error_with_a_remedy() {
    let model = Model::new(2, F32);
    let ids = model.ids(2, 3, 0);
    let skip = |h: &Tensor, x: &Tensor| model.loss(&(h + x).unwrap()).unwrap();
    let plain = {
        let x = model.embed(&ids).unwrap();
        let h = model.blocks[0].forward(&x).unwrap();
        skip(&model.blocks[1].forward(&h).unwrap(), &x).backward().unwrap()
    };
    let run = |inside: bool, layers: usize| {
        let swap = Swap::builder(Policies::uniform(Policy::Swap, layers))
            .tier(file_tier())
            .build()
            .unwrap();
        let mut step = swap.step();
        let params = [("embed".to_string(), model.embed.clone())];
        let x = if inside {
            step.layer("embed", &params, &ids, |ids| model.embed(ids)).unwrap()
        } else {
            model.embed(&ids).unwrap()
        };
        let mut h = x.clone();
        for (i, block) in model.blocks.iter().enumerate() {
            h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h)).unwrap();
        }
        step.backward(&skip(&h, &x))
    };
    let error = run(false, 2).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the loss") && text.contains("input 0 of layer `h.0`"), "{text}");
    assert!(error.hint().unwrap().contains("inside a layer"));
    assert_same(&model.vars(), &plain, &run(true, 3).unwrap());
}

/// The probe's answer belongs to a layer: another layer with the same form and another operation
/// that reads something else is not fooled by it.
#[test]
fn equal_forms_with_other_operations() {
    let w = var(&[8, 8], 2, F32);
    let params = [("w".to_string(), w.clone())];
    let x = numbers(&[4, 8], 1, F32);
    let operations: [fn(&Tensor) -> candle_core::Result<Tensor>; 5] =
        [Tensor::relu, Tensor::exp, Tensor::sqr, Tensor::neg, Tensor::tanh];
    let plain = {
        let mut h = x.clone();
        for f in operations {
            h = (f(&h.matmul(&w).unwrap()).unwrap() + 1.0).unwrap();
        }
        h.sum_all().unwrap().backward().unwrap()
    };
    for policy in [Policy::Keep, Policy::Swap, Policy::Recompute] {
        let swap = Swap::builder(Policies::uniform(policy, 5)).tier(file_tier()).build().unwrap();
        for _ in 0..2 {
            let mut step = swap.step();
            let mut h = x.clone();
            for (i, f) in operations.into_iter().enumerate() {
                let w = w.clone();
                let layer = move |h: &Tensor| f(&h.matmul(&w)?)? + 1.0;
                h = step.layer(&format!("h.{i}"), &params, &h, layer).unwrap();
            }
            let gradients = step.backward(&h.sum_all().unwrap()).unwrap();
            assert_eq!(bits(gradients.get(&w).unwrap()), bits(plain.get(&w).unwrap()), "{policy}");
        }
    }
}
