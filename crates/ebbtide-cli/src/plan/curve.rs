//! `ebbtide plan --curve`: the time of a step over the budget, best, swapping only and recomputing
//! only.

use std::path::Path;

use ebbtide_core::size;
use ebbtide_plan::{Point, Range};
use serde::Serialize;

use crate::columns::{align, time};
use crate::failure::Failure;
use crate::files;
use crate::json;
use crate::output::Printer;

use super::inputs::Subject;
use super::report::{Bounds, SCHEMA};
use super::{picture, svg};

/// Budgets, in equal steps from the least that was found to what plain training needs.
const POINTS: usize = 21;

/// What is drawn: the points, and between which budgets.
#[derive(Debug)]
pub(crate) struct Curve {
    pub(crate) points: Vec<Point>,
    pub(crate) range: Range,
}

/// One of the three lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    /// Its character in a terminal.
    pub(crate) mark: char,
    pub(crate) colour: &'static str,
    pub(crate) of: fn(&Point) -> Option<u64>,
}

/// The best one is last, which puts it on top.
pub(crate) const SERIES: [Series; 3] = [
    Series {
        name: "recompute only",
        mark: 'r',
        colour: "#e0a030",
        of: |point: &Point| point.recompute_ns,
    },
    Series { name: "swap only", mark: 's', colour: "#c0392b", of: |point: &Point| point.swap_ns },
    Series { name: "best", mark: 'o', colour: "#1f6f8b", of: |point: &Point| point.auto_ns },
];

impl Curve {
    fn new(subject: &Subject) -> Self {
        let range = ebbtide_plan::range(&subject.model);
        let span = u128::from(range.plain.saturating_sub(range.least));
        let budgets: Vec<u64> = (0..POINTS as u128)
            .map(|at| range.least + small(span * at / (POINTS as u128 - 1)))
            .collect();
        Self { points: ebbtide_plan::curve(&subject.model, &budgets), range }
    }

    /// The shortest and the longest step that a picture shows; none if no plan fits anywhere. On a
    /// slow link swapping alone would press the other lines together: where it goes beyond, the
    /// table says how far.
    pub(crate) fn times(&self) -> Option<(u64, u64)> {
        let times = || SERIES.iter().flat_map(|line| self.points.iter().filter_map(line.of));
        let best = self.points.iter().filter_map(|point| point.auto_ns).max()?;
        Some((times().min()?, times().max()?.min(best.saturating_add(best / 2))))
    }

    /// A budget in percent of what plain training needs beyond the base.
    pub(crate) fn percent(&self, budget: u64) -> f64 {
        let over = |bytes: u64| bytes.saturating_sub(self.range.base) as f64;
        let all = over(self.range.plain);
        if all > 0.0 { over(budget) / all * 100.0 } else { 100.0 }
    }
}

fn small(bytes: u128) -> u64 {
    u64::try_from(bytes).expect("a part of a u64")
}

pub(crate) fn run(
    subject: &Subject,
    json: Option<&Path>,
    svg: Option<&Path>,
) -> Result<(), Failure> {
    let curve = Curve::new(subject);
    if let Some(path) = json {
        files::write(path, &json::text(&Report::new(&subject.sha256, &curve))?)?;
    }
    if let Some(path) = svg {
        files::write(path, svg::render(&curve).as_bytes())?;
    }
    Printer::data(&format!("{}\n{}", table(&curve), picture::render(&curve)))
}

fn table(curve: &Curve) -> String {
    let head = ["budget", "of plain", "best", "swap only", "recompute only"];
    let mut rows = vec![head.map(str::to_owned)];
    for point in &curve.points {
        let step = |ns: Option<u64>| ns.map_or("-".to_owned(), time);
        rows.push([
            // Rounded up, so that it can be given as it is printed.
            size::format_up(point.budget),
            format!("{:.1} %", curve.percent(point.budget)),
            step(point.auto_ns),
            step(point.swap_ns),
            step(point.recompute_ns),
        ]);
    }
    align(&rows, 0)
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    schema: u32,
    command: &'static str,
    trace_sha256: &'a str,
    range: Bounds,
    points: Vec<Row>,
}

/// Null where no plan fits.
#[derive(Debug, Serialize)]
struct Row {
    memory_bytes: u64,
    percent: f64,
    best_ns: Option<u64>,
    swap_only_ns: Option<u64>,
    recompute_only_ns: Option<u64>,
}

impl<'a> Report<'a> {
    fn new(trace_sha256: &'a str, curve: &Curve) -> Self {
        let row = |point: &Point| Row {
            memory_bytes: point.budget,
            percent: curve.percent(point.budget),
            best_ns: point.auto_ns,
            swap_only_ns: point.swap_ns,
            recompute_only_ns: point.recompute_ns,
        };
        Self {
            schema: SCHEMA,
            command: "curve",
            trace_sha256,
            range: (&curve.range).into(),
            points: curve.points.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Five budgets, none of them planned for.
    pub(crate) fn handmade() -> Curve {
        let ms = |ms: u64| Some(ms * 1_000_000);
        let steps = [
            (ms(20), ms(90), None),
            (ms(16), ms(28), ms(20)),
            (ms(14), ms(20), ms(18)),
            (ms(11), ms(12), ms(16)),
            (ms(10), ms(10), ms(10)),
        ];
        let points = steps.iter().zip(1..).map(|(&(auto_ns, swap_ns, recompute_ns), at)| Point {
            budget: (100 * at) << 20,
            auto_ns,
            swap_ns,
            recompute_ns,
        });
        let range = Range { base: 50 << 20, least: 100 << 20, most: 450 << 20, plain: 500 << 20 };
        Curve { points: points.collect(), range }
    }

    #[test]
    fn a_row_for_each_budget() {
        insta::assert_snapshot!(table(&handmade()), @r"
           budget  of plain     best  swap only  recompute only
        100.0 MiB    11.1 %  20.0 ms    90.0 ms               -
        200.0 MiB    33.3 %  16.0 ms    28.0 ms         20.0 ms
        300.0 MiB    55.6 %  14.0 ms    20.0 ms         18.0 ms
        400.0 MiB    77.8 %  11.0 ms    12.0 ms         16.0 ms
        500.0 MiB   100.0 %  10.0 ms    10.0 ms         10.0 ms
        ");
    }
}
