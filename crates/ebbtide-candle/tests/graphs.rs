//! Graphs that are no plain chain: any inputs and outputs, shared weights, skips, passes in flight.

// The usual letters of small models; test numbers are small.
#![allow(clippy::many_single_char_names, clippy::cast_possible_truncation)]

mod common;

use candle_core::DType::F32;
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var};
use common::{Model, assert_same, file_tier, numbers, swap, var};
use ebbtide_candle::{Policies, Policy, Step, Swap};

const ALL: [Policy; 3] = [Policy::Keep, Policy::Swap, Policy::Recompute];

fn named(vars: &[&Var]) -> Vec<(String, Var)> {
    vars.iter().enumerate().map(|(i, v)| (format!("v{i}"), (*v).clone())).collect()
}

/// Runs a model with ebbtide under every policy, twice, and compares with plain Candle.
fn check<'a>(
    layers: usize,
    vars: &[&Var],
    plain: &dyn Fn() -> Result<Tensor>,
    swapped: &dyn Fn(&mut Step<'a>) -> std::result::Result<Tensor, ebbtide_candle::Error>,
    swaps: &'a [Swap],
) {
    let expected = plain().unwrap().backward().unwrap();
    for (swap, policy) in swaps.iter().zip(ALL) {
        for round in 0..2 {
            let mut step = swap.step();
            let loss = swapped(&mut step).unwrap();
            let gradients = step.backward(&loss).unwrap();
            assert_same(&named(vars), &expected, &gradients);
            assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0), "{policy} {round}");
        }
        // What might differ is told of; in these small models it changes no bit.
        let might = ["strided view", "makes an output from another output"];
        let mut notices = swap.notices();
        notices.retain(|notice| !might.iter().any(|what| notice.contains(what)));
        assert_eq!(notices, Vec::<String>::new(), "{layers} layers, {policy}");
    }
}

fn swaps(layers: usize) -> Vec<Swap> {
    ALL.iter()
        .map(|p| Swap::builder(Policies::uniform(*p, layers)).tier(file_tier()).build().unwrap())
        .collect()
}

/// Several tracked inputs and outputs; an untracked input and an untracked output; the same tensor
/// passed twice; an input that is a view; outputs that are views of one storage, and an input handed
/// through.
#[test]
fn any_number_of_inputs_and_outputs() {
    let (w, v) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32));
    let mask = numbers(&[4, 6], 3, F32);
    let x = numbers(&[4, 6], 4, F32);
    let first = |w: &Var, x: &Tensor| -> Result<Vec<Tensor>> {
        let h = x.matmul(w)?;
        Ok(vec![h.narrow(1, 0, 3)?, h.narrow(1, 3, 3)?, h.exp()?, h.argmax(1)?, x.clone()])
    };
    let second = |v: &Var, i: &[Tensor]| -> Result<Vec<Tensor>> {
        let both = Tensor::cat(&[&i[0], &i[1]], 1)?;
        let h = (both.matmul(v)? * &i[3])?;
        Ok(vec![(h + (&i[2] * &i[2])?)?, i[2].tanh()?])
    };
    let outer = |a: &Tensor, b: &Tensor, n: &Tensor| -> Result<Tensor> {
        let n = n.to_dtype(F32)?.unsqueeze(1)?;
        (a.broadcast_mul(&n)? * b)?.sum_all()
    };
    let swaps = swaps(3);
    check(
        3,
        &[&w, &v],
        &|| {
            let f = first(&w, &x.matmul(&v)?)?;
            let s = second(&v, &[f[0].clone(), f[1].clone(), f[2].clone(), mask.clone()])?;
            let last = (s[0].t()?.t()?.matmul(&w)? + s[0].t()?.t()?)?;
            outer(&last, &(&s[1] + &f[4])?, &f[3])
        },
        &|step| {
            let start = x.matmul(&v)?;
            let w_in = w.clone();
            let f = step.layer_many("a", &named(&[&w]), &[&start], move |i| first(&w_in, &i[0]))?;
            let v_in = v.clone();
            let s =
                step.layer_many("b", &named(&[&v]), &[&f[0], &f[1], &f[2], &mask], move |i| {
                    second(&v_in, i)
                })?;
            let view = s[0].t()?;
            let w_in = w.clone();
            let last = step.layer_many("c", &named(&[&w]), &[&view, &view], move |i| {
                Ok(vec![(i[0].t()?.matmul(&w_in)? + i[1].t()?)?])
            })?;
            Ok(outer(&last[0], &(&s[1] + &f[4])?, &f[3])?)
        },
        &swaps,
    );
}

/// C12: one layer called several times, weights tied across layers and with what is outside.
#[test]
fn c12_layers_called_several_times_and_tied_weights() {
    let (w, v) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32));
    let x = numbers(&[4, 6], 4, F32);
    let layer = |w: &Var, v: &Var, x: &Tensor| -> Result<Tensor> {
        // w is used twice inside: three and more contributions to one sum.
        (x.matmul(w)?.tanh()?.matmul(v)?.matmul(w)? + x)?.sqr()
    };
    let swaps = swaps(2);
    check(
        2,
        &[&w, &v],
        &|| {
            let mut h = x.matmul(&w)?;
            for _ in 0..3 {
                h = layer(&w, &v, &h)?;
                h = layer(&v, &w, &h)?;
            }
            (h.matmul(&w)? + h.matmul(&v)?)?.sum_all()
        },
        &|step| {
            let mut h = x.matmul(&w)?;
            for _ in 0..3 {
                for (name, a, b) in [("a", w.clone(), v.clone()), ("b", v.clone(), w.clone())] {
                    let params = named(&[&w, &v]);
                    h = step.layer(name, &params, &h, move |h| layer(&a, &b, h))?;
                }
            }
            Ok((h.matmul(&w)? + h.matmul(&v)?)?.sum_all()?)
        },
        &swaps,
    );
}

/// Skip connections over several layers, with more than one use inside and outside, parallel
/// branches in either order, and a tracked tensor that every layer gets.
#[test]
fn skips_branches_and_shared_inputs() {
    let (w, v, b) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32), var(&[6], 3, F32));
    let x = numbers(&[4, 6], 4, F32);
    let layer = |w: &Var, x: &Tensor, bias: &Tensor| -> Result<Tensor> {
        (x.matmul(w)?.broadcast_add(bias)?.tanh()? + x)?.broadcast_mul(bias)
    };
    let swaps = swaps(4);
    check(
        4,
        &[&w, &v, &b],
        &|| {
            let bias = (b.as_tensor() * 2.0)?;
            let a = layer(&w, &x.matmul(&v)?, &bias)?;
            let left = layer(&v, &a, &bias)?;
            let right = layer(&w, &a, &bias)?;
            let joined = layer(&v, &((&left * &right)? + &a)?, &bias)?;
            ((joined + &a)? * a)?.sum_all()
        },
        &|step| {
            let bias = (b.as_tensor() * 2.0)?;
            let start = x.matmul(&v)?;
            let mut run = |name: &str, var: &Var, x: &Tensor| {
                let (params, var) = (named(&[var]), var.clone());
                let mut out = step.layer_many(name, &params, &[x, &bias], move |i| {
                    Ok(vec![layer(&var, &i[0], &i[1])?])
                })?;
                Ok::<_, ebbtide_candle::Error>(out.remove(0))
            };
            let a = run("a", &w, &start)?;
            // The other way round than above: the order of execution must not matter.
            let right = run("c", &w, &a)?;
            let left = run("b", &v, &a)?;
            let joined = run("d", &v, &((&left * &right)? + &a)?)?;
            Ok(((joined + &a)? * a)?.sum_all()?)
        },
        &swaps,
    );
}

/// A variable as an input, and one that is captured as well.
#[test]
fn variables_as_inputs() {
    let (w, v) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32));
    let swaps = swaps(1);
    check(
        1,
        &[&w, &v],
        &|| (w.matmul(&v)?.exp()? * w.as_tensor())?.sum_all(),
        &|step| {
            let v_in = v.clone();
            let params = named(&[&v]);
            let y = step.layer("a", &params, &w, move |w| w.matmul(&v_in)?.exp()? * w)?;
            Ok(y.sum_all()?)
        },
        &swaps,
    );
}

/// C9: outputs that nobody uses, a layer that nobody uses, a frozen layer.
#[test]
fn c9_unused_branches_and_frozen_layers() {
    let (w, v) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32));
    let frozen = numbers(&[6, 6], 5, F32);
    let x = numbers(&[4, 6], 4, F32);
    let swaps = swaps(3);
    check(
        3,
        &[&w],
        &|| x.matmul(&w)?.tanh()?.matmul(&frozen)?.exp()?.sum_all(),
        &|step| {
            let w_in = w.clone();
            let h = step.layer_many("a", &named(&[&w]), &[&x], move |i| {
                let h = i[0].matmul(&w_in)?.tanh()?;
                Ok(vec![h.clone(), h.sqr()?])
            })?;
            let v_in = v.clone();
            let unused =
                step.layer("unused", &named(&[&v]), &h[0], move |h| h.matmul(&v_in)?.exp())?;
            drop(unused);
            let f = frozen.clone();
            let y = step.layer("frozen", &[], &h[0], move |h| h.matmul(&f)?.exp())?;
            Ok(y.sum_all()?)
        },
        &swaps,
    );
}

/// C12: four micro-batches, all forwards first, backwards in both orders, accumulated.
#[test]
fn c12_passes_in_flight() {
    let model = Model::new(3, F32);
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let swap = swap("swap", 3);
        let mut expected = GradStore::default();
        let mut found = GradStore::default();
        let mut flight = Vec::new();
        for micro in 0..4 {
            let mut step = swap.step();
            let mut h = model.embed(&model.ids(2, 4, micro)).unwrap();
            for (i, block) in model.blocks.iter().enumerate() {
                h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h)).unwrap();
            }
            flight.push((step, model.loss(&h).unwrap()));
        }
        for micro in order {
            let (step, loss) = &mut flight[micro];
            found.extend(step.backward(loss).unwrap()).unwrap();
            expected.extend(model.plain(&model.ids(2, 4, micro as u32)).1).unwrap();
        }
        assert_same(&model.vars(), &expected, &found);
        assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
    }
}

/// Several outputs in an order other than that in which they are used: what lies behind the inputs is
/// walked in the order of use, which decides the order of four contributions to one weight.
#[test]
fn outputs_are_walked_in_the_order_of_use() {
    let (w, v) = (var(&[6, 6], 1, F32), var(&[6, 6], 2, F32));
    let x = numbers(&[4, 6], 4, F32);
    let twice = |v: &Var, x: &Tensor| x.matmul(v)?.tanh()?.matmul(v);
    let two = |w: &Var, a: &Tensor, b: &Tensor| -> Result<Vec<Tensor>> {
        Ok(vec![a.matmul(w)?.sqr()?, b.matmul(w)?.tanh()?])
    };
    let swaps = swaps(3);
    check(
        3,
        &[&w, &v],
        &|| {
            let (a, b) = (twice(&v, &x)?, twice(&v, &(&x * 3.0)?)?);
            let out = two(&w, &a, &b)?;
            ((&out[1] * 2.0)? + &out[0])?.sum_all()
        },
        &|step| {
            let (v1, v2, w1) = (v.clone(), v.clone(), w.clone());
            let a = step.layer("a", &named(&[&v]), &x, move |x| twice(&v1, x))?;
            let b = step.layer("b", &named(&[&v]), &(&x * 3.0)?, move |x| twice(&v2, x))?;
            let out =
                step.layer_many("c", &named(&[&w]), &[&a, &b], move |i| two(&w1, &i[0], &i[1]))?;
            Ok(((&out[1] * 2.0)? + &out[0])?.sum_all()?)
        },
        &swaps,
    );
}

/// M4: when a layer has run, everything before it has left the device: at most two layers' bytes are
/// on it, this one's on their way out.
#[test]
fn m4_at_most_two_layers_are_on_the_device() {
    let model = Model::new(5, F32);
    // Without a probe every layer moves the same bytes.
    let swap = Swap::builder(Policies::uniform(Policy::Swap, 5)).probe(false).tier(file_tier());
    let swap = swap.build().unwrap();
    let mut step = swap.step();
    let mut h = model.embed(&model.ids(2, 4, 0)).unwrap();
    let mut gone = Vec::new();
    for (i, block) in model.blocks.iter().enumerate() {
        h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h)).unwrap();
        gone.push(swap.report().moved_out_bytes);
    }
    let one = gone[1];
    assert!(one > 0);
    assert_eq!(gone, [0, one, 2 * one, 3 * one, 4 * one]);
}

/// C11: evaluation between two steps, and between forward and backward.
#[test]
fn c11_evaluation_in_between() {
    let model = Model::new(3, F32);
    let swap = swap("swap", 3);
    let ids = model.ids(2, 4, 0);
    let (_, expected) = model.plain(&ids);
    for _ in 0..3 {
        let mut step = swap.step();
        let mut h = model.embed(&ids).unwrap();
        for (i, block) in model.blocks.iter().enumerate() {
            h = step.layer(&format!("h.{i}"), &block.params, &h, |h| block.forward(h)).unwrap();
        }
        let loss = model.loss(&h).unwrap();
        let mut evaluation = model.embed(&ids).unwrap().detach();
        for block in &model.blocks {
            evaluation = block.forward(&evaluation).unwrap().detach();
        }
        assert_eq!(common::bits(&evaluation), common::bits(&h));
        assert_same(&model.vars(), &expected, &step.backward(&loss).unwrap());
    }
}

/// C24: two models in two threads, each with its engine.
#[test]
fn c24_two_models_in_two_threads() {
    std::thread::scope(|scope| {
        for seed in 0..2 {
            scope.spawn(move || {
                let model = Model::new(3 + seed as usize, F32);
                let swap = swap("swap", 3 + seed as usize);
                for round in 0..10 {
                    let ids = model.ids(2, 4, seed * 100 + round);
                    let (_, expected) = model.plain(&ids);
                    let (_, found) = model.swapped(&swap, &ids).unwrap();
                    assert_same(&model.vars(), &expected, &found);
                }
            });
        }
    });
}
