//! The curve as a picture for documents. Nothing in it comes from a file: there is nothing to escape.

use std::fmt::Write;

use ebbtide_core::size;
use ebbtide_plan::Point;

use super::curve::{Curve, SERIES, Series};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
/// The edges of what is inside of the axes.
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 30.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = HEIGHT - 80.0;

/// Where a budget and a time are.
#[derive(Debug)]
struct Scale {
    budgets: (f64, f64),
    /// In nanoseconds, both of them marked.
    times: (f64, f64),
    /// From one mark to the next.
    step: f64,
}

impl Scale {
    fn new(curve: &Curve) -> Option<Self> {
        let (low, high) = curve.times()?;
        let (low, high) = (low as f64, high as f64);
        // The axis does not begin at 0: what the lines are about is how far they are apart.
        let step = round_step((high - low).max(high * 0.02) / 5.0);
        let times = ((low / step).floor() * step, (high / step).ceil() * step);
        let first = curve.points.first()?.budget as f64;
        let last = curve.points.last()?.budget as f64;
        Some(Self { budgets: (first, last.max(first + 1.0)), times, step })
    }

    fn x(&self, budget: f64) -> f64 {
        let (first, last) = self.budgets;
        LEFT + (budget - first) / (last - first) * (RIGHT - LEFT)
    }

    fn y(&self, ns: f64) -> f64 {
        let (low, high) = self.times;
        BOTTOM - (ns - low) / (high - low).max(1.0) * (BOTTOM - TOP)
    }
}

/// 1, 2 or 5 times a power of ten, at least as much.
fn round_step(least: f64) -> f64 {
    let least = least.max(1.0);
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    steps.into_iter().find(|step| *step >= least * 0.999_999).unwrap_or(10.0 * power)
}

/// The whole file.
pub(crate) fn render(curve: &Curve) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <clipPath id=\"inside\"><rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{}\" height=\"{}\"/>\
         </clipPath>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">time of a step over the budget of device \
         memory</text>\n",
        RIGHT - LEFT,
        BOTTOM - TOP + 2.0,
    );
    if let Some(scale) = Scale::new(curve) {
        axes(&mut out, curve, &scale);
        for (at, line) in SERIES.iter().enumerate() {
            draw(&mut out, curve, &scale, line);
            legend(&mut out, SERIES.len() - 1 - at, line);
        }
    }
    out + "</svg>\n"
}

fn axes(out: &mut String, curve: &Curve, scale: &Scale) {
    let mut ns = scale.times.0;
    while ns <= scale.times.1 + scale.step / 2.0 {
        let y = scale.y(ns);
        line(out, "#ddd", &format!("M{LEFT},{y:.1} H{RIGHT}"));
        text(out, LEFT - 8.0, y + 4.0, "end", &milliseconds(ns, scale.step));
        ns += scale.step;
    }
    let (base, plain) = (curve.range.base as f64, curve.range.plain as f64);
    for percent in (0..=100).step_by(20) {
        let budget = base + (plain - base) * f64::from(percent) / 100.0;
        if budget < scale.budgets.0 {
            continue;
        }
        let x = scale.x(budget);
        line(out, "#888", &format!("M{x:.1},{BOTTOM} v5"));
        text(out, x, BOTTOM + 18.0, "middle", &format!("{percent} %"));
    }
    let (first, last) = (curve.range.least.min(curve.range.plain), curve.range.plain);
    text(out, LEFT, BOTTOM + 34.0, "start", &format!("{}: the least", size::format_up(first)));
    text(out, RIGHT, BOTTOM + 34.0, "end", &format!("{}: plain training", size::format_up(last)));
    line(out, "#888", &format!("M{LEFT},{TOP} V{BOTTOM} H{RIGHT}"));
}

fn milliseconds(ns: f64, step: f64) -> String {
    let digits = if step >= 1e6 { 0 } else { 3 };
    format!("{:.digits$} ms", ns / 1e6)
}

/// One line; broken where no plan fits.
fn draw(out: &mut String, curve: &Curve, scale: &Scale, series: &Series) {
    let place = |point: &Point, ns: u64| {
        format!("{:.1},{:.1}", scale.x(point.budget as f64), scale.y(ns as f64))
    };
    let mut path = String::new();
    let mut drawn = false;
    for point in &curve.points {
        let Some(ns) = (series.of)(point) else {
            drawn = false;
            continue;
        };
        let _ = write!(path, "{}{} ", if drawn { 'L' } else { 'M' }, place(point, ns));
        drawn = true;
    }
    let (colour, path) = (series.colour, path.trim_end());
    let _ = writeln!(
        out,
        "<path d=\"{path}\" clip-path=\"url(#inside)\" fill=\"none\" stroke=\"{colour}\" \
         stroke-width=\"2\"/>"
    );
}

fn legend(out: &mut String, place: usize, series: &Series) {
    let (x, y) = (LEFT + 170.0 * place as f64, HEIGHT - 14.0);
    let colour = series.colour;
    let _ = writeln!(out, "<path d=\"M{x},{y} h24\" stroke=\"{colour}\" stroke-width=\"3\"/>");
    text(out, x + 30.0, y + 4.0, "start", series.name);
}

fn line(out: &mut String, colour: &str, path: &str) {
    let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>");
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{what}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_lines_with_axes_and_a_legend() {
        insta::assert_snapshot!(render(&super::super::curve::tests::handmade()), @r##"
        <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 360" font-family="sans-serif" font-size="12">
        <rect width="760" height="360" fill="white"/>
        <clipPath id="inside"><rect x="70" y="40" width="660" height="242"/></clipPath>
        <text x="70" y="22" font-size="14">time of a step over the budget of device memory</text>
        <path d="M70,280.0 H730" fill="none" stroke="#ddd"/>
        <text x="62.0" y="284.0" text-anchor="end">10 ms</text>
        <path d="M70,220.0 H730" fill="none" stroke="#ddd"/>
        <text x="62.0" y="224.0" text-anchor="end">15 ms</text>
        <path d="M70,160.0 H730" fill="none" stroke="#ddd"/>
        <text x="62.0" y="164.0" text-anchor="end">20 ms</text>
        <path d="M70,100.0 H730" fill="none" stroke="#ddd"/>
        <text x="62.0" y="104.0" text-anchor="end">25 ms</text>
        <path d="M70,40.0 H730" fill="none" stroke="#ddd"/>
        <text x="62.0" y="44.0" text-anchor="end">30 ms</text>
        <path d="M136.0,280 v5" fill="none" stroke="#888"/>
        <text x="136.0" y="298.0" text-anchor="middle">20 %</text>
        <path d="M284.5,280 v5" fill="none" stroke="#888"/>
        <text x="284.5" y="298.0" text-anchor="middle">40 %</text>
        <path d="M433.0,280 v5" fill="none" stroke="#888"/>
        <text x="433.0" y="298.0" text-anchor="middle">60 %</text>
        <path d="M581.5,280 v5" fill="none" stroke="#888"/>
        <text x="581.5" y="298.0" text-anchor="middle">80 %</text>
        <path d="M730.0,280 v5" fill="none" stroke="#888"/>
        <text x="730.0" y="298.0" text-anchor="middle">100 %</text>
        <text x="70.0" y="314.0" text-anchor="start">100.0 MiB: the least</text>
        <text x="730.0" y="314.0" text-anchor="end">500.0 MiB: plain training</text>
        <path d="M70,40 V280 H730" fill="none" stroke="#888"/>
        <path d="M235.0,160.0 L400.0,184.0 L565.0,208.0 L730.0,280.0" clip-path="url(#inside)" fill="none" stroke="#e0a030" stroke-width="2"/>
        <path d="M410,346 h24" stroke="#e0a030" stroke-width="3"/>
        <text x="440.0" y="350.0" text-anchor="start">recompute only</text>
        <path d="M70.0,-680.0 L235.0,64.0 L400.0,160.0 L565.0,256.0 L730.0,280.0" clip-path="url(#inside)" fill="none" stroke="#c0392b" stroke-width="2"/>
        <path d="M240,346 h24" stroke="#c0392b" stroke-width="3"/>
        <text x="270.0" y="350.0" text-anchor="start">swap only</text>
        <path d="M70.0,160.0 L235.0,208.0 L400.0,232.0 L565.0,268.0 L730.0,280.0" clip-path="url(#inside)" fill="none" stroke="#1f6f8b" stroke-width="2"/>
        <path d="M70,346 h24" stroke="#1f6f8b" stroke-width="3"/>
        <text x="100.0" y="350.0" text-anchor="start">best</text>
        </svg>
        "##);
    }

    #[test]
    fn marks_are_at_round_numbers() {
        let steps = [0.3, 1.0, 1.1, 2.0, 4.9e6, 6e6].map(round_step).map(|step| step.to_string());
        assert_eq!(steps, ["1", "1", "2", "2", "5000000", "10000000"]);
    }
}
