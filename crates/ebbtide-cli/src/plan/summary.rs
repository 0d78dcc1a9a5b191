//! What a plan comes to, for people.

use std::fmt::Write;

use ebbtide_core::{Op, Phase, size};
use ebbtide_plan::{Model, Prediction};
use ebbtide_sim::predict::{Held, LinkUse, Why};

use crate::columns::{shown, time};

/// How many storages of the peak are named.
const NAMED: usize = 5;

/// Step time, peak, waits, and each direction of each tier, a line each.
pub(crate) fn render(model: &Model, prediction: &Prediction) -> String {
    let mut text = step(prediction);
    text += &peak(model, prediction);
    text += &waits(model, prediction);
    for (tier, used) in model.tiers.iter().zip(&prediction.tiers) {
        for (way, link) in [("out", &used.out), ("in", &used.back)] {
            text += &row(&format!("{} {way}", shown(&tier.name)), &copies(link));
        }
    }
    text
}

/// A line with its name at the left.
pub(crate) fn row(name: &str, what: &str) -> String {
    format!("{name:<12} {what}\n")
}

fn step(prediction: &Prediction) -> String {
    let waits = prediction.waits_in_all();
    let mut text =
        format!("{}: {} of computing", time(prediction.step_ns), { time(prediction.compute_ns) });
    if prediction.recompute_ns > 0 {
        let _ = write!(text, " ({} of it a second time)", time(prediction.recompute_ns));
    }
    let waited = waits.load_ns.saturating_add(waits.memory_ns);
    let _ = write!(text, ", {} of waiting", time(waited));
    let rest = prediction.step_ns.saturating_sub(prediction.compute_ns.saturating_add(waited));
    // Times are rounded one by one.
    if rest > prediction.step_ns / 10_000 {
        let _ = write!(text, ", {} more outside of layers or because copies slow it", time(rest));
    }
    row("step", &text)
}

fn peak(model: &Model, prediction: &Prediction) -> String {
    let need = &prediction.peak;
    let (peak, budget) = (prediction.peak_bytes, prediction.schedule.budget);
    let mut text = format!("{} of {}", size::format(peak), size::format(budget));
    let _ =
        write!(text, " in {}: static {}", place(model, need.op), size::format(need.static_bytes));
    if need.workspace > 0 {
        let _ = write!(text, ", workspace {}", size::format(need.workspace));
    }
    for held in need.storages.iter().take(NAMED) {
        let _ = write!(text, ", {}", storage(model, held));
    }
    let rest: u64 = need.storages.iter().skip(NAMED).map(|held| held.bytes).sum();
    if rest > 0 {
        let _ = write!(text, ", {} more {}", need.storages.len() - NAMED, size::format(rest));
    }
    row("peak", &text)
}

fn storage(model: &Model, held: &Held) -> String {
    let layer = &model.layers[held.layer];
    let name = format!("{}/{}", layer.name, layer.storages[held.storage].name);
    let why = match held.why {
        Why::Resident => "",
        Why::Leaving => " on its way out",
        Why::Prefetched => " loaded ahead",
    };
    format!("{} {}{why}", shown(&name), size::format(held.bytes))
}

/// An operation in words, and as the table calls it.
pub(crate) fn place(model: &Model, op: Op) -> String {
    let what = match op.phase {
        Phase::Forward => "forward",
        Phase::Recompute => "recompute",
        Phase::Backward => "backward",
    };
    format!("{what} of {} ({op})", shown(&model.layers[op.layer].name))
}

fn waits(model: &Model, prediction: &Prediction) -> String {
    let all = prediction.waits_in_all();
    let (load, memory) = (time(all.load_ns), time(all.memory_ns));
    let mut text = format!("{load} for loads, {memory} for bytes to leave");
    let each = prediction.waits.iter();
    let each = each.map(|waits| waits.load_ns.saturating_add(waits.memory_ns)).enumerate();
    // The first of equals.
    let most = each.max_by_key(|&(at, ns)| (ns, std::cmp::Reverse(at)));
    if let Some((at, ns)) = most.filter(|&(_, ns)| ns > 0) {
        let _ = write!(text, "; longest at {}: {}", shown(&model.layers[at].name), time(ns));
    }
    row("waits", &text)
}

fn copies(link: &LinkUse) -> String {
    if link.bytes == 0 {
        return "nothing".to_owned();
    }
    let (bytes, busy) = (size::format(link.bytes), time(link.busy_ns));
    let (hidden, exposed) = (time(link.hidden_ns), time(link.exposed_ns));
    format!("{bytes} in {busy}: {hidden} hidden behind computing, {exposed} exposed")
}
