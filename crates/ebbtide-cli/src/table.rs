//! The table at the end of a run.

use ebbtide_core::size;

use crate::columns::align;
use crate::trainer::Outcome;

const HEAD: [&str; 10] = [
    "mode",
    "peak over base",
    "peak",
    "RSS peak",
    "step (median)",
    "moved out",
    "moved in",
    "dropped",
    "missed",
    "waited",
];

/// One row a run; ratios are to the first run if that is plain and another.
pub(crate) fn render(outcomes: &[Outcome]) -> String {
    let plain = match outcomes {
        [first, _, ..] => Some(first),
        _ => None,
    };
    let mut rows = vec![HEAD.map(str::to_owned)];
    for (i, outcome) in outcomes.iter().enumerate() {
        rows.push(row(outcome, plain.filter(|_| i > 0)));
    }
    align(&rows, 1)
}

fn row(outcome: &Outcome, plain: Option<&Outcome>) -> [String; 10] {
    let totals = &outcome.totals;
    let over = |o: &Outcome| o.peak_bytes.saturating_sub(o.base_bytes);
    let against = |value: f64, of: fn(&Outcome) -> f64| {
        let base = plain.map(of).filter(|base| *base > 0.);
        base.map_or(String::new(), |base| format!(" ({:.2}x)", value / base))
    };
    let memory_ratio =
        against(over(outcome) as f64, |o| o.peak_bytes.saturating_sub(o.base_bytes) as f64);
    let step = median_ms(outcome);
    let steps_ratio = against(step.unwrap_or(0.), |o| median_ms(o).unwrap_or(0.));
    [
        outcome.mode.name().to_owned(),
        size::format(over(outcome)) + &memory_ratio,
        size::format(outcome.peak_bytes),
        outcome.peak_rss_bytes.map_or("-".to_owned(), size::format),
        step.map_or("-".to_owned(), milliseconds) + &steps_ratio,
        size::format(totals.moved_out_bytes),
        size::format(totals.moved_in_bytes),
        size::format(totals.dropped_bytes),
        totals.missed_prefetches.to_string(),
        milliseconds(totals.wait_ms),
    ]
}

fn milliseconds(ms: f64) -> String {
    if ms < 1e4 { format!("{ms:.0} ms") } else { format!("{:.1} s", ms / 1e3) }
}

/// The median time of a step.
fn median_ms(outcome: &Outcome) -> Option<f64> {
    let mut all: Vec<f64> = outcome.records.iter().map(|record| record.ms).collect();
    all.sort_by(f64::total_cmp);
    let upper = *all.get(all.len() / 2)?;
    let lower = all[(all.len() - 1) / 2];
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::outcome;
    use crate::config::Mode;

    #[test]
    fn rows_line_up_and_ratios_are_to_plain() {
        let runs = [
            outcome(&Mode::Plain, &[3., 2., 1.]),
            outcome(&Mode::Policy("swap".into()), &[3., 2., 1., 0.]),
        ];
        insta::assert_snapshot!(render(&runs), @r"
        mode    peak over base     peak  RSS peak  step (median)  moved out  moved in  dropped  missed   waited
        plain          2.0 MiB  3.0 MiB   9.0 MiB          20 ms    2.0 KiB   2.0 KiB  4.0 KiB       2  1500 ms
        swap   2.0 MiB (1.00x)  3.0 MiB   9.0 MiB  25 ms (1.25x)    2.0 KiB   2.0 KiB  4.0 KiB       2  1500 ms
        ");
    }

    #[test]
    fn a_run_without_a_step_has_no_median() {
        let runs = [outcome(&Mode::Plain, &[])];
        assert!(render(&runs).lines().nth(1).unwrap().contains("  -  "));
    }
}
