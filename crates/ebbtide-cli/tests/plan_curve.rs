//! `ebbtide plan --curve`: the table, the picture in the terminal, and the one in a file.

mod common;

use common::keys;
use common::planned::{EQUAL, traced, well, whole};

#[test]
fn a_curve_is_a_table_and_a_picture() {
    let place = traced(&EQUAL);
    let shown = well(&place, &["plan", "t", "--curve", "--d2h-gbps", "2.5", "--h2d-gbps", "2.5"]);
    let (table, picture) = shown.split_once("\n\n").unwrap();
    assert_eq!(table.lines().count(), 22, "{shown}");
    let head = table.lines().next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(head, "budget of plain best swap only recompute only");
    assert!(table.lines().last().unwrap().contains("100.0 %"), "{shown}");
    assert_eq!(picture.lines().count(), 18, "{shown}");
    assert!(picture.ends_with("o best   s swap only   r recompute only\n"), "{shown}");
}

/// From the least to plain training; more memory never costs time; neither means alone is better.
#[test]
fn the_best_line_is_below_the_others() {
    let place = traced(&EQUAL);
    well(&place, &["plan", "t", "--curve", "--json", "j"]);
    let report = place.json("j");
    assert_eq!(keys(&report), ["command", "points", "range", "schema", "trace_sha256"]);
    let range = &report["range"];
    assert_eq!(keys(range), ["base_bytes", "least_bytes", "most_bytes", "plain_bytes"]);
    let points = report["points"].as_array().unwrap();
    assert_eq!(points.first().unwrap()["memory_bytes"], range["least_bytes"]);
    assert_eq!(points.last().unwrap()["memory_bytes"], range["plain_bytes"]);
    assert_eq!(points.last().unwrap()["percent"], 100.0);
    let mut before = u64::MAX;
    for point in points {
        let best = whole(&point["best_ns"]);
        assert!(best <= before, "{point}");
        for alone in ["swap_only_ns", "recompute_only_ns"] {
            assert!(point[alone].as_u64().is_none_or(|alone| best <= alone), "{point}");
        }
        before = best;
    }
    // The first budget can be given as it is.
    let least = range["least_bytes"].to_string();
    well(&place, &["plan", "t", "--memory", &least]);
}

#[test]
fn a_picture_has_three_lines_axes_and_a_legend() {
    let place = traced(&EQUAL);
    well(&place, &["plan", "t", "--curve", "--svg", "c.svg"]);
    let svg = String::from_utf8(place.bytes("c.svg")).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"), "{svg}");
    for name in [">best<", ">swap only<", ">recompute only<", ">100 %<", " ms<", ": the least<"] {
        assert!(svg.contains(name), "{name} is not in {svg}");
    }
    assert_eq!(svg.matches("stroke-width=\"2\"").count(), 3, "{svg}");
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

/// A model where the budget changes nothing has a picture all the same.
#[test]
fn one_layer_is_a_curve_too() {
    let place = traced(&["--synthetic", "1", "--storages", "0"]);
    let shown = well(&place, &["plan", "t", "--curve", "--svg", "c.svg"]);
    assert!(shown.contains("o best"), "{shown}");
    let svg = String::from_utf8(place.bytes("c.svg")).unwrap();
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}
