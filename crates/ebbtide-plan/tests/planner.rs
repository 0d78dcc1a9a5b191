//! What the planners promise: within the budget, never worse than one means alone, the same on every
//! run, and the best there is where that can be counted.

use ebbtide_core::{LayerPlan, Plan, size};
use ebbtide_plan::synthetic::{Kind, of_kind};
use ebbtide_plan::{
    Misfit, Model, Pure, Solver, WhatIf, curve, plan, plan_pure, predict, range, synthetic,
};
use ebbtide_sim::Random;
use ebbtide_sim::predict::recount::recount;

/// A model of a kind that the seed chooses, with a link from a tenth of what compute needs to ten
/// times as much, and a budget between the least and the most.
fn case(seed: u64, layers: usize, storages: usize) -> (Model, u64) {
    let mut random = Random::new(seed);
    let ratio = 0.1 * 100f64.powf(random.below(1001) as f64 / 1000.0);
    let kind = Kind::ALL[(seed % 5) as usize];
    let mut model = of_kind(kind, layers, storages, ratio, seed).unwrap().model();
    if seed % 3 == 1 {
        // Copies and computing slow each other down.
        let tier = &mut model.tiers[0];
        tier.slowdown_permille = 1100;
        tier.out.bytes_per_s_busy *= 0.8;
        tier.shared_duplex = seed.is_multiple_of(2);
    }
    if seed % 4 == 2 {
        let mut disk = model.tiers[0].clone();
        disk.name = "disk".into();
        disk.out.bytes_per_s /= 3.0;
        disk.back.bytes_per_s_busy /= 3.0;
        model.tiers.push(disk);
    }
    let part = random.below(101) as f64 / 100.0;
    let budget = range(&model).at(part * part);
    (model, budget)
}

fn with_links(model: &Model, speed: f64) -> Model {
    let mut other = model.clone();
    for tier in &mut other.tiers {
        for link in [&mut tier.out, &mut tier.back] {
            link.bytes_per_s *= speed;
            link.bytes_per_s_busy *= speed;
        }
    }
    other
}

#[test]
fn m12_a_plan_is_within_its_budget_and_no_worse_than_one_means_alone() {
    for seed in 0..120 {
        let (model, budget) = case(seed, 3 + (seed % 9) as usize, 1 + (seed % 4) as usize);
        let planned = plan(&model, budget, Solver::Fast).unwrap();
        let counted = recount(&model, &planned.plan, budget).expect("it fits");
        let peak = planned.prediction.peak_bytes;
        assert!(counted <= peak && peak <= budget, "seed {seed}: {counted} {peak}");
        assert!(planned.bound_ns <= planned.prediction.step_ns);
        for speed in [0.5, 0.1, 1.5] {
            recount(&with_links(&model, speed), &planned.plan, budget).expect("it fits");
        }
        for pure in [Pure::Swap, Pure::Recompute] {
            let Ok(alone) = plan_pure(&model, budget, pure) else { continue };
            assert!(alone.prediction.peak_bytes <= budget);
            let layers = &alone.plan.layers;
            match pure {
                Pure::Swap => assert!(layers.iter().all(|layer| !layer.recompute)),
                Pure::Recompute => assert!(layers.iter().all(|layer| layer.swap.is_empty())),
            }
            let (auto, alone) = (planned.prediction.step_ns, alone.prediction.step_ns);
            assert!(auto <= alone, "seed {seed}: {auto} against {alone} of {pure:?}");
        }
        assert_eq!(plan(&model, budget, Solver::Fast).unwrap(), planned, "seed {seed}");
    }
}

/// Every plan of a model: which layers are recomputed, what is swapped, where to.
fn every_plan(model: &Model, layer: usize, plan: &mut Plan, see: &mut impl FnMut(&Plan)) {
    let Some(of) = model.layers.get(layer) else {
        see(plan);
        return;
    };
    let movable: Vec<usize> = (0..of.storages.len())
        .filter(|&at| of.storages[at].backward.is_some() || !of.storages[at].read_by.is_empty())
        .collect();
    for recompute in [false, true] {
        if recompute && of.not_recomputable.is_some() {
            continue;
        }
        for mask in 0..1u32 << movable.len() {
            let swap: Vec<usize> = (0..movable.len())
                .filter(|bit| mask >> bit & 1 == 1)
                .map(|bit| movable[bit])
                .collect();
            let tiers = if swap.is_empty() { 1 } else { model.tiers.len() };
            for tier in 0..tiers {
                plan.layers[layer] =
                    LayerPlan { recompute, swap: swap.clone(), tier, load_at: None };
                every_plan(model, layer + 1, plan, see);
            }
        }
    }
}

/// The exact planner against counting: as good within what it promises, and what it proves holds.
#[test]
fn m12_exact_is_the_best_of_all_plans() {
    let mut seen = 0u64;
    for seed in 0..60 {
        let (layers, storages) = [(3, 2), (4, 1), (2, 3)][(seed % 3) as usize];
        let (model, budget) = case(seed, layers, storages);
        let mut best = u64::MAX;
        every_plan(&model, 0, &mut Plan::keep(layers), &mut |plan| {
            seen += 1;
            if let Ok(played) = predict(&model, plan, budget) {
                best = best.min(played.step_ns);
            }
        });
        let exact = plan(&model, budget, Solver::Exact).unwrap();
        let found = exact.prediction.step_ns;
        assert!(exact.proven, "seed {seed}");
        assert!(found as f64 <= best as f64 * 1.002, "seed {seed}: {found} against {best}");
        assert!(exact.bound_ns <= best + 1, "seed {seed}: bound {} above {best}", exact.bound_ns);
        let fast = plan(&model, budget, Solver::Fast).unwrap().prediction.step_ns;
        assert!(fast as f64 <= best as f64 * 1.05, "seed {seed}: fast {fast} against {best}");
    }
    assert!(seen > 100_000, "{seen}");
}

/// C17: a budget that nothing can meet says what could be met, and that can be met as printed.
#[test]
fn c17_what_no_plan_fits_says_the_least_and_the_least_as_printed_is_enough() {
    for seed in 0..40 {
        let (model, _) = case(seed, 3 + (seed % 5) as usize, 2);
        let least = range(&model).least;
        assert!(plan(&model, least, Solver::Fast).is_ok(), "seed {seed}");
        let error = plan(&model, least - 1, Solver::Fast).unwrap_err();
        assert_eq!(error.least.bytes, least);
        let text = error.to_string();
        let printed = text.split("the least found is ").nth(1).unwrap();
        let printed = size::parse(printed.split(" (").next().unwrap()).unwrap();
        assert!(printed >= least && printed < least + least / 10);
        assert!(plan(&model, printed, Solver::Fast).is_ok());
        let held: u64 = error.least.storages.iter().map(|held| held.bytes).sum();
        assert_eq!(held + error.least.static_bytes + error.least.workspace, least);
    }
    let model = of_kind(Kind::Equal, 4, 2, 1.0, 1).unwrap().model();
    let error = plan(&model, 40 << 20, Solver::Fast).unwrap_err();
    insta::assert_snapshot!(error, @"no plan fits 40.0 MiB: the least found is 62.1 MiB (backward of `h.3`: static 32.0 MiB, workspace 4.0 MiB, `h.3/s.1` 14.7 MiB, `h.3/s.0` 7.3 MiB, `h.2/out` 2.0 MiB, 1 more 2.0 MiB)");
    insta::assert_snapshot!(error.hint(), @"give at least 62.1 MiB, or make the batch smaller");
}

/// A tier that holds little is filled no further, and what does not go there finds another way.
#[test]
fn m12_tiers_get_no_more_than_they_hold() {
    for seed in 0..40 {
        let (mut model, _) = case(seed, 6, 2);
        let all = model.layers.iter().flat_map(|layer| &layer.storages);
        let live: u64 = all.filter(|s| s.backward.is_some()).map(|s| s.bytes).sum();
        model.tiers[0].capacity = Some(live * (seed % 5) / 8);
        let range = range(&model);
        for part in [0.0, 0.3, 0.7] {
            let planned = plan(&model, range.at(part), Solver::Fast).unwrap();
            let there = planned.prediction.tiers[0].out.bytes;
            assert!(there <= model.tiers[0].capacity.unwrap(), "seed {seed}");
        }
        let mut over = Plan::keep(6);
        for (layer, decided) in model.layers.iter().zip(&mut over.layers) {
            decided.swap = (0..layer.storages.len()).collect();
        }
        let error = predict(&model, &over, u64::MAX / 2).unwrap_err();
        assert!(matches!(error, Misfit::Capacity { .. }), "{error}");
    }
}

/// Without a tier there is only recompute; where that is impossible everything is kept.
#[test]
fn m12_a_machine_without_tiers_recomputes() {
    let mut model = of_kind(Kind::Equal, 8, 3, 1.0, 1).unwrap().model();
    model.tiers.clear();
    let range = range(&model);
    assert!(range.least < range.most / 2);
    let planned = plan(&model, range.at(0.2), Solver::Fast).unwrap();
    assert!(planned.plan.layers.iter().any(|layer| layer.recompute));
    for layer in &mut model.layers {
        layer.not_recomputable = Some("it draws random numbers".into());
    }
    let range = ebbtide_plan::range(&model);
    assert_eq!(range.least, range.most);
    assert_eq!(plan(&model, range.most, Solver::Exact).unwrap().plan, Plan::keep(8));
    assert!(plan(&model, range.most - 1, Solver::Exact).is_err());
}

#[test]
fn m12_the_curve_falls_and_its_ends_are_known() {
    for seed in 0..10 {
        let model = synthetic::trace(8, 2, seed).unwrap().model();
        let range = range(&model);
        let points = curve(&model, &range.steps(8));
        assert_eq!(points[0].budget, range.least);
        assert_eq!(points[7].auto_ns, Some(model.compute_ns()));
        assert!(points.iter().all(|point| point.auto_ns.is_some()));
        assert!(points.windows(2).all(|pair| pair[1].auto_ns <= pair[0].auto_ns), "seed {seed}");
    }
}

/// Plans of a large model, in the time that the tests have.
#[test]
fn m12_a_thousand_layers() {
    for seed in 0..5 {
        let model = synthetic::trace(1000, 20, seed).unwrap().model();
        let budget = range(&model).at(0.3);
        let planned = plan(&model, budget, Solver::Fast).unwrap();
        assert!(planned.prediction.peak_bytes <= budget);
    }
}

#[test]
fn c17_what_ifs_that_make_no_sense_are_refused() {
    let model = synthetic::trace(3, 2, 0).unwrap().model();
    let what_if = WhatIf { d2h_gbps: Some(0.0), ..WhatIf::default() };
    let error = what_if.apply(&model).unwrap_err();
    assert_eq!(error.to_string(), "a bandwidth to the tier of 0 makes no sense");
    let what_if = WhatIf { compute_scale: Some(f64::NAN), ..WhatIf::default() };
    assert!(what_if.apply(&model).is_err());
    let what_if = WhatIf { tier: Some("tape".into()), ..WhatIf::default() };
    let error = what_if.apply(&model).unwrap_err();
    assert_eq!(error.to_string(), "there is no tier `tape`; there are: host");
}
