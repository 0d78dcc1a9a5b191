//! Tables in plain text.

/// Rows as lines, cells under one another: the first `left` columns to the left, figures behind
/// them to the right.
pub(crate) fn align<const N: usize>(rows: &[[String; N]], left: usize) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, &width))| {
            if column < left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A text from a file that goes to a terminal: without what would steer it.
pub(crate) fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Nanoseconds for people.
pub(crate) fn time(ns: u64) -> String {
    let ms = ns as f64 / 1e6;
    match ms {
        0.0 => "0 ms".to_owned(),
        _ if ms < 1.0 => format!("{ms:.3} ms"),
        _ if ms < 10.0 => format!("{ms:.2} ms"),
        _ if ms < 1e3 => format!("{ms:.1} ms"),
        _ => format!("{:.2} s", ms / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_end_with_a_word() {
        let rows = [["name", "does", "n"], ["a", "keep", "100"], ["abcdef", "", ""]];
        let text = align(&rows.map(|row| row.map(str::to_owned)), 2);
        insta::assert_snapshot!(text, @r"
        name    does    n
        a       keep  100
        abcdef
        ");
    }

    #[test]
    fn times_keep_their_digits() {
        let times = [0, 1, 1_500, 2_345_678, 63_812_345, 12_345_678_901].map(time);
        assert_eq!(times, ["0 ms", "0.000 ms", "0.002 ms", "2.35 ms", "63.8 ms", "12.35 s"]);
    }

    #[test]
    fn a_name_can_not_steer_a_terminal() {
        assert_eq!(shown("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
