//! `ebbtide bench`: what it measures, and that what needs no quiet machine is met.

mod common;

use common::{Place, keys, names, text};

/// P1, C13: the figures that don't depend on the machine are met; every row is there, in the table and
/// in the file.
#[test]
fn c13_c16_every_figure_is_measured() {
    let place = Place::new();
    let output = place.run(&["bench", "--quick", "--json", "figures"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(names(place.spill.path()), [""; 0], "left in the folder");
    let report = place.json("figures");
    assert_eq!(keys(&report), ["command", "rows", "schema"]);
    let rows = report["rows"].as_array().unwrap();
    let table = text(&output.stdout);
    for (row, line) in rows.iter().zip(table.lines()) {
        assert_eq!(keys(row), ["bound", "detail", "met", "unit", "value", "what"]);
        assert!(line.starts_with(row["what"].as_str().unwrap()), "{line}");
        assert!(row["value"].as_f64().unwrap() >= 0.0);
    }
    assert_eq!((rows.len(), table.lines().count()), (6, 6));
    for exact in ["memory allocated after the first step", "host memory held, of 1.1 GiB asked for"]
    {
        let row = rows.iter().find(|row| row["what"] == exact).unwrap();
        assert_eq!(row["met"], true, "{row}");
    }
}

#[test]
fn folders_that_can_not_be_used_are_refused() {
    let place = Place::new();
    let output = place.run(&["bench", "--dir", "nowhere"]);
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.starts_with("error: can't spill to the folder nowhere"), "{message}");
    assert!(output.stdout.is_empty());
}
