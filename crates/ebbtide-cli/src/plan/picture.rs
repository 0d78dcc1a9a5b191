//! The curve in a terminal.

use ebbtide_core::size;
use ebbtide_plan::Point;

use crate::columns::time;

use super::curve::{Curve, SERIES};

/// Characters of the picture inside its axes.
const WIDTH: usize = 61;
const HEIGHT: usize = 15;

/// Three lines over one another, with the shortest and the longest step shown at the left, and the
/// smallest and the largest budget below.
pub(crate) fn render(curve: &Curve) -> String {
    let Some((low, high)) = curve.times() else { return String::new() };
    let mut cells = vec![[' '; WIDTH]; HEIGHT];
    for line in &SERIES {
        let at = |column| {
            let ns = between(&curve.points, line.of, column)?;
            (ns <= high as f64).then(|| (row(ns, low, high), column))
        };
        for (row, column) in (0..WIDTH).filter_map(at) {
            cells[row][column] = line.mark;
        }
    }
    let labels = [(0, time(high)), (HEIGHT - 1, time(low))];
    let margin = labels.iter().map(|(_, label)| label.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (at, line) in cells.iter().enumerate() {
        let label = labels.iter().find(|(row, _)| *row == at).map_or("", |(_, label)| label);
        let line: String = line.iter().collect();
        text += format!("{label:>margin$} |{line}").trim_end();
        text.push('\n');
    }
    text + &below(curve, margin)
}

/// Between two points a line is straight; where one of them is not there, there is none.
fn between(points: &[Point], of: fn(&Point) -> Option<u64>, column: usize) -> Option<f64> {
    let scaled = column * (points.len() - 1);
    let (at, rest) = (scaled / (WIDTH - 1), scaled % (WIDTH - 1));
    let here = of(&points[at])? as f64;
    if rest == 0 {
        return Some(here);
    }
    let next = of(points.get(at + 1)?)? as f64;
    Some(here + (next - here) * rest as f64 / (WIDTH - 1) as f64)
}

/// The longest time is at the top.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rows of a picture")]
fn row(ns: f64, low: u64, high: u64) -> usize {
    let (low, high) = (low as f64, high as f64);
    let part = if high > low { (high - ns) / (high - low) } else { 1.0 };
    ((part * (HEIGHT - 1) as f64).round() as usize).min(HEIGHT - 1)
}

fn below(curve: &Curve, margin: usize) -> String {
    let end = |at: Option<&Point>| at.map_or(String::new(), |point| size::format_up(point.budget));
    let (first, last) = (end(curve.points.first()), end(curve.points.last()));
    let gap = WIDTH.saturating_sub(first.len());
    let names = SERIES.iter().rev().map(|line| format!("{} {}", line.mark, line.name));
    let names = names.collect::<Vec<_>>().join("   ");
    let axis = "-".repeat(WIDTH);
    let blank = " ".repeat(margin);
    format!("{blank} +{axis}\n{blank}  {first}{last:>gap$}\n{blank}  {names}\n")
}

#[cfg(test)]
mod tests {
    use super::super::curve::tests::handmade;

    #[test]
    fn lines_go_from_point_to_point_and_end_where_no_plan_fits() {
        insta::assert_snapshot!(super::render(&handmade()), @r"
        30.0 ms |
                |               s
                |                ss
                |                  sss
                |                     sss
                |                        ss
                |                          sss
                |ooo            rrrrrr        sss
                |   oooooo            rrrrrrrrrrrsss
                |         ooooo                  rrrssrrrrr
                |              ooooooooo              sss  rrrrrr
                |                       oooooooooo       sss     rrrr
                |                                 ooooooo   ss       rrr
                |                                        oooooooooosssssrrrr
        10.0 ms |                                                  ooooooooooo
                +-------------------------------------------------------------
                 100.0 MiB                                           500.0 MiB
                 o best   s swap only   r recompute only
        ");
    }
}
