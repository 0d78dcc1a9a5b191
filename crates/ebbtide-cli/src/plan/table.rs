//! A plan for people: a row for each run of layers that are treated alike.

use ebbtide_core::size;

use crate::columns::{align, shown, time};

use super::fates::LayerFate;

/// How many storages a row names.
const NAMED: usize = 3;

/// Whether what a layer waits for is told, which sets those that wait apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waits {
    Shown,
    Left,
}

/// The table, with a row of sums below it. `tiers`: how many there are; one needs no name.
pub(crate) fn render(layers: &[LayerFate], tiers: usize, waits: Waits) -> String {
    let does: Vec<String> = layers.iter().map(|layer| does(layer, tiers)).collect();
    let alike = |a: usize, b: usize| {
        let bytes =
            |layer: &LayerFate| [layer.kept, layer.swapped, layer.recomputed, layer.dropped];
        let (one, other) = (&layers[a], &layers[b]);
        let same = does[a] == does[b] && bytes(one) == bytes(other);
        same && (waits == Waits::Left || one.waits == other.waits)
    };
    let mut rows = vec![head()];
    let mut first = 0;
    for at in 0..layers.len() {
        if at + 1 == layers.len() || !alike(first, at + 1) {
            rows.push(row(layers, first, at, &does[first]));
            first = at + 1;
        }
    }
    rows.push(sums(layers));
    match waits {
        Waits::Shown => align(&rows, 3),
        Waits::Left => {
            let rows: Vec<[String; 8]> =
                rows.into_iter().map(|row| std::array::from_fn(|at| row[at].clone())).collect();
            align(&rows, 3)
        }
    }
}

fn head() -> [String; 10] {
    let waits = ["waits for loads", "for memory"];
    let names = ["layer", "name", "does", "keeps", "swaps", "recomputes", "drops", "loads start"];
    let all: Vec<&str> = names.into_iter().chain(waits).collect();
    std::array::from_fn(|at| all[at].to_owned())
}

/// What becomes of a layer's storages. `swap` alone means all that anybody needs later.
fn does(layer: &LayerFate, tiers: usize) -> String {
    let mut words = Vec::new();
    if layer.recompute {
        words.push("recompute".to_owned());
    }
    if !layer.swap.is_empty() {
        let mut word = "swap".to_owned();
        if layer.kept > 0 {
            let named: Vec<String> =
                layer.swap.iter().take(NAMED).map(|name| shown(name)).collect();
            word = format!("{word} {}", named.join(" "));
            if layer.swap.len() > NAMED {
                word = format!("{word} and {} more", layer.swap.len() - NAMED);
            }
        }
        if let Some(tier) = layer.tier.as_ref().filter(|_| tiers > 1) {
            word = format!("{word} to {}", shown(tier));
        }
        words.push(word);
    }
    if words.is_empty() { "keep".to_owned() } else { words.join(", ") }
}

fn row(layers: &[LayerFate], first: usize, last: usize, does: &str) -> [String; 10] {
    let span =
        |from: String, to: String| if first == last { from } else { format!("{from} .. {to}") };
    // Layers come home in the order of backward: the last one first.
    let start = |layer: &LayerFate| layer.load_at.map_or(String::new(), |op| op.to_string());
    let (early, late) = (start(&layers[last]), start(&layers[first]));
    let run = &layers[first..=last];
    let sum = |part: fn(&LayerFate) -> u64| run.iter().map(part).fold(0, u64::saturating_add);
    [
        span(first.to_string(), last.to_string()),
        span(shown(&layers[first].name), shown(&layers[last].name)),
        does.to_owned(),
        bytes(sum(|layer| layer.kept)),
        bytes(sum(|layer| layer.swapped)),
        bytes(sum(|layer| layer.recomputed)),
        bytes(sum(|layer| layer.dropped)),
        if early == late { early } else { format!("{early} .. {late}") },
        wait(sum(|layer| layer.waits.load_ns)),
        wait(sum(|layer| layer.waits.memory_ns)),
    ]
}

fn sums(layers: &[LayerFate]) -> [String; 10] {
    let mut row = row(layers, 0, layers.len() - 1, "");
    (row[0], row[1], row[7]) = ("all".to_owned(), String::new(), String::new());
    row
}

fn bytes(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { size::format(bytes) }
}

fn wait(ns: u64) -> String {
    if ns == 0 { "-".to_owned() } else { time(ns) }
}
