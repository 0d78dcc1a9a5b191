//! Shapes of model in which Candle interleaves what ebbtide runs piece by piece: a difference in the
//! last bits never goes unreported.

// The usual letters of small models.
#![allow(clippy::many_single_char_names)]

mod common;

use candle_core::DType::F32;
use candle_core::{Result, Tensor, Var};
use common::{bits, file_tier, numbers, var};
use ebbtide_candle::{Policies, Policy, Swap};

type Layer<'a> = Box<dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a>;

/// Runs layers either plainly or through a step.
type Runner<'r, 'a> = &'r mut dyn FnMut(&str, &[&Tensor], Layer<'a>) -> Result<Vec<Tensor>>;

type Model<'a> = dyn Fn(Runner<'_, 'a>) -> Result<Tensor> + 'a;

fn check<'a>(name: &str, layers: usize, vars: &'a [Var], model: &Model<'a>) {
    let plain = model(&mut |_, inputs, layer| {
        let inputs: Vec<Tensor> = inputs.iter().map(|&t| t.clone()).collect();
        layer(&inputs)
    });
    let plain = plain.unwrap().backward().unwrap();
    let params: Vec<(String, Var)> = vars.iter().map(|v| ("v".into(), v.clone())).collect();
    for policy in [Policy::Keep, Policy::Swap, Policy::Recompute] {
        let swap = Swap::builder(Policies::uniform(policy, layers)).tier(file_tier());
        let swap = swap.build().unwrap();
        let mut step = swap.step();
        let loss =
            model(&mut |name, inputs, layer| Ok(step.layer_many(name, &params, inputs, layer)?));
        let found = step.backward(&loss.unwrap()).unwrap();
        drop(step);
        let same = vars.iter().all(|v| match (plain.get(v), found.get(v)) {
            (Some(a), Some(b)) => bits(a) == bits(b),
            (a, b) => a.is_none() && b.is_none(),
        });
        let told = swap.notices().iter().any(|notice| notice.contains("last bits"));
        assert!(same || told, "{name}, {policy}: differs and says nothing: {:?}", swap.notices());
    }
}

#[test]
fn a_difference_in_the_last_bits_is_always_reported() {
    let vars = [var(&[16, 16], 1, F32), var(&[16, 16], 2, F32), var(&[16, 16], 3, F32)];
    let (x, [w, u, v]) = (&numbers(&[8, 16], 4, F32), &vars);
    check("a skip around a layer outside", 2, &vars, &|run| {
        let h = run("a", &[x], Box::new(move |i| Ok(vec![i[0].matmul(w)?])))?.remove(0);
        let k = run("b", &[&h], Box::new(move |i| Ok(vec![i[0].tanh()?.matmul(u)?])))?.remove(0);
        ((h.exp()? + k)? + h.sqr()?)?.sqr()?.sum_all()
    });
    check("a shared weight outside", 2, &vars, &|run| {
        let h = run("a", &[x], Box::new(move |i| Ok(vec![i[0].matmul(w)?])))?.remove(0);
        let k = run("b", &[&h], Box::new(move |i| Ok(vec![i[0].tanh()?.matmul(u)?])))?.remove(0);
        ((h.matmul(u)? + k)? + h.matmul(u)?.sqr()?)?.sqr()?.sum_all()
    });
    check("dense", 2, &vars, &|run| {
        let h0 = x.matmul(w)?;
        let h1 = run("a", &[&h0], Box::new(move |i| Ok(vec![i[0].matmul(v)?.tanh()?])))?.remove(0);
        let join = move |i: &[Tensor]| Ok(vec![((i[0].matmul(u)? + &i[1])? + i[0].tanh()?)?]);
        run("b", &[&h0, &h1], Box::new(join))?.remove(0).sqr()?.sum_all()
    });
    check("a skip into a product", 2, &vars, &|run| {
        let h0 = x.matmul(w)?;
        let h1 = run("a", &[&h0], Box::new(move |i| Ok(vec![i[0].matmul(u)?.tanh()?])))?.remove(0);
        let join = move |i: &[Tensor]| Ok(vec![((i[0].tanh()? * &i[1])? + &i[0])?]);
        run("b", &[&h0, &h1], Box::new(join))?.remove(0).sqr()?.sum_all()
    });
    check("one weight in three places", 3, &vars, &|run| {
        let tower = move |i: &[Tensor]| Ok(vec![i[0].matmul(w)?.tanh()?]);
        let p = run("a", &[x], Box::new(tower))?.remove(0);
        let q = run("b", &[&(x * 2.0)?], Box::new(tower))?.remove(0);
        let join = move |i: &[Tensor]| Ok(vec![(i[0].matmul(w)? + i[1].matmul(w)?)?]);
        run("c", &[&p, &q], Box::new(join))?.remove(0).sqr()?.sum_all()
    });
    check("two towers", 3, &vars, &|run| {
        let tower = move |i: &[Tensor]| Ok(vec![i[0].matmul(w)?.tanh()?]);
        let p = run("a", &[x], Box::new(tower))?.remove(0);
        let q = run("b", &[&(x * 2.0)?], Box::new(tower))?.remove(0);
        let both = |i: &[Tensor]| Ok(vec![i[0].sqr()?, i[1].exp()?]);
        let o = run("c", &[&p, &q], Box::new(both))?;
        (o[0].matmul(w)? + &o[1])?.sqr()?.sum_all()
    });
    check("an output made from another", 1, &vars, &|run| {
        let both = move |i: &[Tensor]| {
            let h = i[0].matmul(w)?;
            Ok(vec![h.tanh()?, h])
        };
        let o = run("a", &[x], Box::new(both))?;
        ((o[1].exp()? + &o[0])? + o[1].sqr()?)?.sqr()?.sum_all()
    });
}
