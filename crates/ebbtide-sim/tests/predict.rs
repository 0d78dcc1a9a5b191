//! The predictor against a second way to count, on random models and plans.

use ebbtide_core::{Op, Plan};
use ebbtide_sim::predict::recount::recount;
use ebbtide_sim::predict::{
    Choice, Each, Layer, Link, Model, Optimist, Simulator, Storage, Tier, need, predict,
};
use ebbtide_sim::{Random, Ratio};

fn between(random: &mut Random, low: u64, high: u64) -> u64 {
    low + random.below(high - low + 1)
}

fn index(random: &mut Random, low: usize, high: usize) -> usize {
    usize::try_from(between(random, low as u64, high as u64)).unwrap()
}

fn storage(random: &mut Random, name: usize, at: usize, layers: usize) -> Storage {
    let last_forward = index(random, at, layers.min(at + 3) - 1);
    let mut read_by: Vec<usize> =
        (at + 1..=last_forward).filter(|_| random.chance(Ratio(2, 3))).collect();
    read_by.dedup();
    let first = index(random, at, last_forward);
    let last = index(random, at, first);
    Storage {
        name: name.to_string(),
        bytes: between(random, 0, 100),
        pieces: 1,
        last_forward,
        backward: random.chance(Ratio(4, 5)).then_some((first, last)),
        recomputable: random.chance(Ratio(3, 4)),
        read_by,
    }
}

fn link(random: &mut Random) -> Link {
    let per_s = 1e9 * between(random, 1, 30) as f64 / 10.0;
    let busy = per_s * between(random, 5, 10) as f64 / 10.0;
    let latency_ns = between(random, 0, 5) as f64;
    Link { bytes_per_s: per_s, bytes_per_s_busy: busy, latency_ns }
}

fn tier(random: &mut Random, name: usize) -> Tier {
    Tier {
        name: name.to_string(),
        capacity: random.chance(Ratio(1, 4)).then(|| between(random, 100, 1000)),
        out: link(random),
        back: link(random),
        slowdown_permille: if random.chance(Ratio(1, 2)) { 1000 } else { 1300 },
        shared_duplex: random.chance(Ratio(1, 4)),
    }
}

fn each(random: &mut Random, most: u64) -> Each {
    let mut draw = || between(random, 0, most);
    Each { forward: draw(), recompute: draw(), backward: draw() }
}

fn model(random: &mut Random) -> Model {
    let layers = index(random, 1, 9);
    let tiers = index(random, 1, 2);
    let layer = |random: &mut Random, at: usize| Layer {
        name: format!("h.{at}"),
        ns: each(random, 200),
        workspace: each(random, 30),
        not_recomputable: random.chance(Ratio(1, 5)).then(|| "dice".to_owned()),
        storages: (0..index(random, 0, 4)).map(|s| storage(random, s, at, layers)).collect(),
    };
    Model {
        layers: (0..layers).map(|at| layer(random, at)).collect(),
        tiers: (0..tiers).map(|at| tier(random, at)).collect(),
        static_bytes: between(random, 0, 50),
        fixed_ns: between(random, 0, 50),
        plain_bytes: None,
    }
}

fn plan(random: &mut Random, model: &Model) -> Plan {
    let mut plan = Plan::keep(model.layers.len());
    let eager = Ratio(u32::try_from(random.below(5)).unwrap(), 4);
    let again = Ratio(u32::try_from(random.below(4)).unwrap(), 4);
    for (layer, decided) in model.layers.iter().zip(&mut plan.layers) {
        decided.recompute = layer.not_recomputable.is_none() && random.chance(again);
        decided.swap = (0..layer.storages.len()).filter(|_| random.chance(eager)).collect();
        decided.tier = index(random, 0, model.tiers.len() - 1);
        if random.chance(Ratio(1, 4)) {
            let at = index(random, 0, 3 * model.layers.len() - 1);
            decided.load_at = Some(Op::at(at, model.layers.len()));
        }
    }
    plan
}

/// `compute` is in percent.
fn with_speeds(model: &Model, links: f64, compute: u64) -> Model {
    let mut other = model.clone();
    for tier in &mut other.tiers {
        for link in [&mut tier.out, &mut tier.back] {
            link.bytes_per_s *= links;
            link.bytes_per_s_busy *= links;
        }
    }
    for layer in &mut other.layers {
        for ns in [&mut layer.ns.forward, &mut layer.ns.recompute, &mut layer.ns.backward] {
            *ns = *ns * compute / 100;
        }
    }
    other
}

/// 10,000 random plans of random models at budgets from what they need at least: never over it,
/// whatever is read is there, and nothing waits for ever. Also with other speeds than were thought.
#[test]
fn m12_c18_ten_thousand_random_plans_keep_to_their_budget() {
    let mut random = Random::new(11);
    let mut played = 0;
    while played < 10_000 {
        let model = model(&mut random);
        let plan = plan(&mut random, &model);
        let least = need(&model, &plan).unwrap().bytes;
        let budget = least + random.below(120) * random.below(3);
        let Some(peak) = recount(&model, &plan, budget) else { continue };
        played += 1;
        let predicted = predict(&model, &plan, budget).unwrap();
        assert!(predicted.peak_bytes <= budget && predicted.peak_bytes >= peak);
        let held: u64 = predicted.peak.storages.iter().map(|held| held.bytes).sum();
        let parts = held + predicted.peak.static_bytes + predicted.peak.workspace;
        assert_eq!(parts, predicted.peak_bytes, "the parts of the peak");
        for (links, compute) in [(0.5, 100), (0.1, 50), (10.0, 200)] {
            recount(&with_speeds(&model, links, compute), &plan, budget).unwrap();
        }
    }
}

/// A search hears the same time as a prediction, and bounds only cut off what is slower.
#[test]
fn m12_a_bound_cuts_off_what_is_not_faster() {
    let mut random = Random::new(12);
    for _ in 0..20_000 {
        let model = model(&mut random);
        let plan = plan(&mut random, &model);
        let budget = need(&model, &plan).unwrap().bytes + random.below(100);
        let Ok(predicted) = predict(&model, &plan, budget) else { continue };
        let choice = Choice::of(&model, &plan).unwrap();
        let mut simulator = Simulator::new(&model);
        let best = model.at_best();
        let mut optimist = Optimist::new(&best);
        let ns = simulator.time(&choice, budget, f64::INFINITY).unwrap();
        assert!((ns.ceil() - predicted.step_ns as f64).abs() < 1.0);
        assert_eq!(simulator.time(&choice, budget, ns), None);
        assert_eq!(simulator.time(&choice, budget, ns * 1.001 + 1.0), Some(ns));
        // What was not decided takes no more than any way to decide it.
        for decided in 0..model.layers.len() {
            let mut part = choice.clone();
            part.recompute[decided..].fill(false);
            let bound = optimist.bound(&part, budget, f64::INFINITY, decided);
            let bound = bound.expect("one way to decide the rest fits");
            assert!(bound <= ns * (1.0 + 1e-9), "{bound} > {ns}");
        }
        // A plan as it is told to an executor is the plan that was played.
        let told = simulator.plan(&choice, budget).unwrap();
        assert_eq!(predict(&model, &told, budget).unwrap().step_ns, predicted.step_ns);
    }
}

/// The waits, what is computed and what is copied make up the step.
#[test]
fn m12_times_add_up() {
    let mut random = Random::new(13);
    for _ in 0..2_000 {
        let mut model = model(&mut random);
        model.tiers.iter_mut().for_each(|tier| tier.slowdown_permille = 1000);
        let plan = plan(&mut random, &model);
        let budget = need(&model, &plan).unwrap().bytes + random.below(100);
        let Ok(predicted) = predict(&model, &plan, budget) else { continue };
        let waits = predicted.waits_in_all();
        let sum = predicted.compute_ns + waits.load_ns + waits.memory_ns;
        let slack = 3 * model.layers.len() as u64 + 1;
        assert!(sum.abs_diff(predicted.step_ns) <= slack, "{sum} {}", predicted.step_ns);
        for tier in &predicted.tiers {
            assert_eq!(tier.out.bytes, tier.back.bytes);
            assert_eq!(tier.out.busy_ns, tier.out.hidden_ns + tier.out.exposed_ns);
        }
    }
}

#[test]
fn c17_a_plan_that_does_not_fit_says_why() {
    let mut random = Random::new(14);
    let mut model = model(&mut random);
    while model.layers.len() < 3 || model.layers[1].storages.is_empty() {
        model = self::model(&mut random);
    }
    model.layers[1].not_recomputable = Some("it draws random numbers".into());
    let mut plan = Plan::keep(model.layers.len() + 1);
    let count = model.layers.len();
    let error = predict(&model, &plan, u64::MAX / 2).unwrap_err();
    let text = format!("the plan has {} layers, the model has {count}", count + 1);
    assert_eq!(error.to_string(), text);
    plan.layers.pop();
    plan.layers[1].recompute = true;
    let error = predict(&model, &plan, u64::MAX / 2).unwrap_err();
    assert_eq!(error.to_string(), "layer 1 can't be recomputed: it draws random numbers");
    plan.layers[1].recompute = false;
    plan.layers[1].swap = vec![0];
    plan.layers[1].tier = 9;
    let error = predict(&model, &plan, u64::MAX / 2).unwrap_err();
    assert!(error.to_string().starts_with("layer 1 goes to tier 9"), "{error}");
    plan.layers[1].tier = 0;
    let least = need(&model, &plan).unwrap();
    let error = predict(&model, &plan, least.bytes - 1).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("at {}", least.op)), "{text}");
}
