//! How good the planner is, on made-up models: writes the figures as JSON.
//!
//! `cargo run --release -p ebbtide-plan --example quality -- [cases|large|plays|pure|all] [FILE]`

use std::io::Write;
use std::time::Instant;

use ebbtide_plan::synthetic::{Kind, of_kind};
use ebbtide_plan::{
    Model, Planned, Pure, Range, Solver, WhatIf, plan, plan_pure, predict, range, synthetic,
};
use ebbtide_sim::Random;
use ebbtide_sim::predict::{Choice, Simulator};
use serde_json::{Value, json};

/// Non-trivial cases of the comparison with the exact search.
const CASES: usize = 110;
/// Where between the least and the most a budget lies.
const PARTS: [f64; 8] = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9];
/// A plan this near to the operations alone is no test of a search.
const TRIVIAL: f64 = 1.000_1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_else(|| "all".to_owned());
    let mut report = serde_json::Map::new();
    if what == "all" || what == "pure" {
        report.insert("pure".to_owned(), against_pure()?);
    }
    if what == "all" || what == "plays" {
        report.insert("plays".to_owned(), plays()?);
    }
    if what == "all" || what == "large" {
        report.insert("large".to_owned(), large()?);
    }
    if what == "all" || what == "cases" {
        report.insert("cases".to_owned(), against_exact()?);
    }
    let text = serde_json::to_string_pretty(&Value::Object(report))?;
    match arguments.next() {
        Some(file) => std::fs::write(file, text + "\n")?,
        None => writeln!(std::io::stdout(), "{text}")?,
    }
    Ok(())
}

struct Case {
    name: String,
    model: Model,
    budget: u64,
}

/// Small models of every kind, links from a tenth of what compute needs to ten times as much.
fn case(seed: u64) -> Case {
    let mut random = Random::new(seed);
    let kind = Kind::ALL[(seed % 5) as usize];
    let mut draw = |limit: u64| usize::try_from(random.below(limit)).expect("small");
    let (layers, storages, part) = (4 + draw(9), 1 + draw(3), draw(8));
    let ratio = 0.1 * 100f64.powf(draw(1001) as f64 / 1000.0);
    let trace = of_kind(kind, layers, storages, ratio, seed).expect("it is a trace");
    let model = trace.model();
    let budget = range(&model).at(PARTS[part]);
    let name = format!("seed {seed}: {kind:?}, {layers} x {storages}, ratio {ratio:.2}");
    Case { name: format!("{name}, budget {}", PARTS[part]), model, budget }
}

fn is_over(model: &Model, planned: &Planned) -> bool {
    let speeds = [0.5, 1.0, 1.5];
    speeds.iter().any(|speed| {
        let mut other = model.clone();
        for tier in &mut other.tiers {
            for link in [&mut tier.out, &mut tier.back] {
                link.bytes_per_s *= speed;
                link.bytes_per_s_busy *= speed;
            }
        }
        let played = predict(&other, &planned.plan, planned.budget).expect("it fits at any speed");
        played.peak_bytes > planned.budget
    })
}

/// Processor time of this thread in milliseconds, which does not depend on what else runs; the
/// time on the clock where the system does not tell.
struct Stopwatch(Instant, Option<f64>);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now(), Self::processor_ms())
    }

    fn processor_ms() -> Option<f64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        let ns: f64 = text.split_whitespace().next()?.parse().ok()?;
        Some(ns / 1e6)
    }

    fn ms(&self) -> f64 {
        let processor = self.1.zip(Self::processor_ms()).map(|(begun, now)| now - begun);
        processor.unwrap_or_else(|| self.0.elapsed().as_secs_f64() * 1e3)
    }
}

fn share(ratios: &[f64], most: f64) -> f64 {
    ratios.iter().filter(|ratio| **ratio <= most + 1e-9).count() as f64 / ratios.len() as f64
}

fn against_exact() -> Result<Value, Box<dyn std::error::Error>> {
    let (mut ratios, mut times, mut over, mut seen) = (Vec::new(), Vec::new(), 0, 0);
    let (mut small, mut middle) = ((0, 0), (0, 0));
    let (mut worst, mut longest) = ((0.0, String::new()), (0.0f64, String::new()));
    for seed in 0.. {
        if ratios.len() == CASES {
            break;
        }
        let case = case(seed);
        seen += 1;
        let begun = Stopwatch::start();
        let fast = plan(&case.model, case.budget, Solver::Fast)?;
        let ms = begun.ms();
        times.push(ms);
        over += usize::from(is_over(&case.model, &fast));
        let fast_ns = fast.prediction.step_ns as f64;
        if fast_ns <= case.model.compute_ns() as f64 * TRIVIAL {
            continue;
        }
        let begun = Stopwatch::start();
        let exact = plan(&case.model, case.budget, Solver::Exact)?;
        let seconds = begun.ms() / 1e3;
        let mut best = exact.prediction.step_ns as f64;
        if !exact.proven {
            let longer = plan(&case.model, case.budget, Solver::Longer(20))?;
            best = best.min(longer.prediction.step_ns as f64);
        }
        let count = if case.model.layers.len() <= 8 { &mut small } else { &mut middle };
        count.0 += usize::from(exact.proven);
        count.1 += 1;
        let ratio = fast_ns / best;
        if ratio > worst.0 {
            worst = (ratio, case.name.clone());
        }
        if seconds > longest.0 {
            longest = (seconds, case.name.clone());
        }
        let line = format!("{}: {ratio:.5} {ms:.0} ms, exact {seconds:.1} s", case.name);
        writeln!(std::io::stderr(), "{line} {}", if exact.proven { "" } else { "open" })?;
        ratios.push(ratio);
    }
    times.sort_by(f64::total_cmp);
    Ok(json!({
        "cases": ratios.len(), "drawn": seen,
        "within_1.01": share(&ratios, 1.01), "within_1.02": share(&ratios, 1.02),
        "within_1.05": share(&ratios, 1.05), "worst": worst.0, "worst_case": worst.1,
        "median_ms": times[times.len() / 2], "slowest_ms": times.last(), "over_budget": over,
        "proven_up_to_8_layers": format!("{} of {}", small.0, small.1),
        "proven_9_to_12_layers": format!("{} of {}", middle.0, middle.1),
        "longest_exact_s": longest.0, "longest_case": longest.1,
    }))
}

/// The most memory that the process had so far, in bytes.
fn peak_rss() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn large() -> Result<Value, Box<dyn std::error::Error>> {
    let (mut times, mut ratios, mut over) = (Vec::new(), Vec::new(), 0);
    let mut before_longer = None;
    for (seed, part) in (0..).zip([0.05, 0.2, 0.35, 0.5, 0.1]) {
        for ratio in [1.0, 3.0] {
            let kind = Kind::ALL[seed];
            let model = of_kind(kind, 1000, 20, ratio, seed as u64)?.model();
            let budget = range(&model).at(part);
            let begun = Stopwatch::start();
            let fast = plan(&model, budget, Solver::Fast)?;
            times.push(begun.ms());
            over += usize::from(is_over(&model, &fast));
            before_longer = before_longer.or_else(peak_rss);
            let longer = plan(&model, budget, Solver::Longer(20))?;
            let gap = fast.prediction.step_ns as f64 / longer.prediction.step_ns as f64;
            let last = times.last().expect("one was pushed");
            let relative = fast.prediction.step_ns as f64 / model.compute_ns() as f64;
            let line = format!("{kind:?}, ratio {ratio}, budget {part}: {last:.0} ms, {gap:.5}");
            writeln!(std::io::stderr(), "{line}, {relative:.4} of compute")?;
            ratios.push(gap);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(json!({
        "models": times.len(), "median_ms": times[times.len() / 2],
        "slowest_ms": times.last(), "worst_against_20_times_longer": ratios.iter().fold(0.0, |a, b| f64::max(a, *b)),
        "peak_rss_bytes": before_longer, "over_budget": over,
    }))
}

/// How long a play takes in which everything is swapped.
fn plays() -> Result<Value, Box<dyn std::error::Error>> {
    let mut report = Vec::new();
    for (layers, storages, count) in [(16, 3, 20_000), (1000, 3, 300)] {
        let model = of_kind(Kind::Equal, layers, storages, 3.0, 1)?.model();
        let mut simulator = Simulator::new(&model);
        let mut choice = Choice::keep(&model);
        choice.swap.fill(true);
        let budget = range(&model).at(0.3);
        let begun = Stopwatch::start();
        for _ in 0..count {
            std::hint::black_box(simulator.time(&choice, budget, f64::INFINITY));
        }
        let us = begun.ms() * 1e3 / f64::from(count);
        report.push(json!({ "layers": layers, "storages": model.storages(), "play_us": us }));
    }
    Ok(Value::Array(report))
}

/// Ten budgets each; with the link as fast as compute needs, and three times slower.
fn against_pure() -> Result<Value, Box<dyn std::error::Error>> {
    let mut report = Vec::new();
    let model = synthetic::of_kind(Kind::Equal, 12, 11, 1.0, 5)?.model();
    let slow = |link: f64| (link / 3.0) / 1e9;
    let out = slow(model.tiers[0].out.bytes_per_s);
    let back = slow(model.tiers[0].back.bytes_per_s);
    let slower = WhatIf { d2h_gbps: Some(out), h2d_gbps: Some(back), ..WhatIf::default() };
    for (name, model) in
        [("link as needed", model.clone()), ("3 times slower", slower.apply(&model)?)]
    {
        let (mut wins, mut worst, mut over) = (0, 0.0f64, 0);
        let range: Range = range(&model);
        for budget in range.steps(10) {
            let auto = plan(&model, budget, Solver::Fast)?;
            over += usize::from(is_over(&model, &auto));
            let ns = |pure| {
                plan_pure(&model, budget, pure).map_or(u64::MAX, |found| found.prediction.step_ns)
            };
            let better = ns(Pure::Swap).min(ns(Pure::Recompute));
            let ratio = auto.prediction.step_ns as f64 / better as f64;
            worst = worst.max(ratio);
            wins += usize::from(ratio <= 1.0 / 1.05);
        }
        report.push(json!({
            "model": format!("12 equal layers of 11 storages, {name}"), "budgets": 10,
            "worst_against_better_pure": worst, "at_least_5_percent_faster": wins,
            "over_budget": over, "least_of_plain_above_base":
                (range.least - range.base) as f64 / (range.plain - range.base) as f64,
        }));
    }
    Ok(Value::Array(report))
}
