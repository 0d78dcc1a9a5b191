//! `ebbtide plan --curve`: the table, the picture in the terminal, and the one in a file.

mod common;

use common::keys;
use common::planned::{EQUAL, traced, well, whole};
use insta::assert_snapshot;

#[test]
fn a_curve_is_a_table_and_a_picture() {
    let place = traced(&EQUAL);
    let shown = well(&place, &["plan", "t", "--curve", "--d2h-gbps", "2.5", "--h2d-gbps", "2.5"]);
    assert_snapshot!(shown, @r"
       budget  of plain     best  swap only  recompute only
     62.1 MiB    20.3 %  92.8 ms   168.8 ms               -
     68.0 MiB    24.3 %  92.0 ms   159.5 ms               -
     73.9 MiB    28.2 %  92.0 ms   130.9 ms         92.0 ms
     79.8 MiB    32.2 %  92.0 ms   115.0 ms         92.0 ms
     85.7 MiB    36.2 %  84.0 ms   104.0 ms         92.0 ms
     91.6 MiB    40.2 %  82.4 ms    98.4 ms         92.0 ms
     97.5 MiB    44.2 %  80.0 ms    92.9 ms         88.0 ms
    103.4 MiB    48.2 %  80.0 ms    88.8 ms         88.0 ms
    109.3 MiB    52.2 %  80.0 ms    85.5 ms         88.0 ms
    115.2 MiB    56.1 %  77.4 ms    82.6 ms         84.0 ms
    121.1 MiB    60.1 %  76.0 ms    80.0 ms         84.0 ms
    127.0 MiB    64.1 %  76.0 ms    78.0 ms         84.0 ms
    132.9 MiB    68.1 %  75.2 ms    75.2 ms         84.0 ms
    138.8 MiB    72.1 %  72.6 ms    72.6 ms         80.0 ms
    144.7 MiB    76.1 %  72.0 ms    72.0 ms         80.0 ms
    150.6 MiB    80.1 %  72.0 ms    72.0 ms         80.0 ms
    156.5 MiB    84.1 %  72.0 ms    72.0 ms         80.0 ms
    162.4 MiB    88.0 %  72.0 ms    72.0 ms         76.0 ms
    168.3 MiB    92.0 %  72.0 ms    72.0 ms         76.0 ms
    174.2 MiB    96.0 %  72.0 ms    72.0 ms         76.0 ms
    180.1 MiB   100.0 %  72.0 ms    72.0 ms         72.0 ms

    139.3 ms |
             |
             |      s
             |       s
             |        s
             |         s
             |          s
             |           ss
             |             sss
             |                ss
             |ooooooooooorrrrrrrssss
             |           o      rrrrssssr
             |            ooooooooooooo ssssssrrrrrrrrrrrrrrrrr
             |                         oooooooooooo            rrrrrrrrrr
     72.0 ms |                                     oooooooooooooooooooooooo
             +-------------------------------------------------------------
              62.1 MiB                                            180.1 MiB
              o best   s swap only   r recompute only
    ");
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
    let mut last = u64::MAX;
    for point in points {
        let best = whole(&point["best_ns"]);
        assert!(best <= last, "{point}");
        for alone in ["swap_only_ns", "recompute_only_ns"] {
            assert!(point[alone].as_u64().is_none_or(|alone| best <= alone), "{point}");
        }
        last = best;
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
