//! What is different between two plans, for people.

use ebbtide_core::size;

use super::{OpLetter, PlanFile, PlanLine};

/// One line for each difference; none if there is none. Layers are compared by their number.
pub fn diff(a: &PlanFile, b: &PlanFile) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = |what: &str, a: String, b: String| {
        if a != b {
            lines.push(format!("{what}: {a} -> {b}"));
        }
    };
    line("trace", short(&a.trace_sha256), short(&b.trace_sha256));
    line("memory", size::format(a.memory_bytes), size::format(b.memory_bytes));
    let (was, is) = (&a.predicted, &b.predicted);
    line("predicted peak", size::format(was.peak_bytes), size::format(is.peak_bytes));
    line("predicted step", ms(was.step_ns), ms(is.step_ns));
    line("predicted wait for loads", ms(was.wait_load_ns), ms(is.wait_load_ns));
    line("predicted wait for memory", ms(was.wait_memory_ns), ms(is.wait_memory_ns));
    for at in 0..a.layers.len().max(b.layers.len()) {
        let (was, is) = (a.layers.get(at), b.layers.get(at));
        let name = was.or(is).map_or("", |line| line.name.as_str());
        line(&format!("layer {at} `{name}`"), words(was), words(is));
    }
    lines
}

fn short(sha: &str) -> String {
    sha.chars().take(12).collect()
}

fn ms(ns: u64) -> String {
    format!("{:.3} ms", ns as f64 / 1e6)
}

fn words(line: Option<&PlanLine>) -> String {
    let Some(line) = line else { return "not there".to_owned() };
    let mut words = Vec::new();
    if line.recompute {
        words.push("recompute".to_owned());
    }
    if !line.swap.is_empty() {
        let tier = line.tier.as_ref().map(|tier| format!(" to {tier}")).unwrap_or_default();
        let from = line.load_at.map(|at| {
            let letter = match at.op {
                OpLetter::F => 'F',
                OpLetter::R => 'R',
                OpLetter::B => 'B',
            };
            format!(" until {letter}{}", at.layer)
        });
        words.push(format!("swap {}{tier}{}", line.swap.join(", "), from.unwrap_or_default()));
    }
    if words.is_empty() { "keep".to_owned() } else { words.join(", ") }
}
