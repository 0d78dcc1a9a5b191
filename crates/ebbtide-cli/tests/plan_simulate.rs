//! `ebbtide simulate`: what a plan comes to, as it was made and changed by hand.

mod common;

use common::planned::{EQUAL, decide, edit, planned, well, whole};
use common::{keys, text};
use insta::assert_snapshot;

#[test]
fn a_plan_comes_to_what_was_promised() {
    let place = planned(&EQUAL, "40%");
    let table = well(&place, &["simulate", "t", "p", "--json", "j"]);
    assert!(!table.contains("in the file"), "{table}");
    let report = place.json("j");
    let all = "command layers memory_bytes plan_trace_sha256 predicted schema trace_sha256";
    assert_eq!(keys(&report).join(" "), all);
    assert_eq!(report["trace_sha256"], report["plan_trace_sha256"]);
    let (found, promised) = (&report["predicted"], &place.json("p")["predicted"]);
    for figure in ["step_ns", "peak_bytes", "wait_load_ns", "wait_memory_ns"] {
        assert_eq!(found[figure], promised[figure], "{figure}");
    }
    // Waits by layer make all waits, but for rounding.
    for figure in ["wait_load_ns", "wait_memory_ns"] {
        let layers = report["layers"].as_array().unwrap();
        let sum: u64 = layers.iter().map(|layer| whole(&layer[figure])).sum();
        assert_eq!(sum, whole(&found[figure]), "{figure}");
    }
    for way in ["out", "in"] {
        let link = &found["tiers"][0][way];
        assert_eq!(whole(&link["hidden_ns"]) + whole(&link["exposed_ns"]), whole(&link["busy_ns"]));
    }
}

/// A row for each run of layers that are treated alike and wait alike; what the file promised is
/// shown beside what was found.
#[test]
fn a_plan_that_was_changed_by_hand_is_played_as_it_is() {
    let place = planned(&EQUAL, "100%");
    decide(&place, "p", 0, "\"swap\":[\"s.3\"],\"load_at\":{\"op\":\"B\",\"layer\":1}");
    let all = "\"swap\":[\"s.0\",\"s.1\",\"s.2\",\"s.3\",\"out\"]";
    decide(&place, "p", 1, all);
    decide(&place, "p", 2, &format!("{all},\"tier\":\"host\""));
    decide(&place, "p", 3, "\"recompute\":true,\"swap\":[\"out\"]");
    let table = well(&place, &["simulate", "t", "p", "--json", "j"]);
    assert_snapshot!(table, @r"
    layer  name  does                keeps     swaps  recomputes  drops  loads start  waits for loads  for memory
    0      h.0   swap s.3         15.2 MiB   8.8 MiB           -      -           B1          3.92 ms           -
    1      h.1   swap                    -  24.0 MiB           -      -           F5          21.8 ms           -
    2      h.2   swap                    -  24.0 MiB           -      -           F5          15.3 ms           -
    3      h.3   recompute, swap         -   2.0 MiB    22.0 MiB      -           F5                -           -
    4      h.4   keep             24.0 MiB         -           -      -                       64.1 ms           -
    5      h.5   keep             24.0 MiB         -           -      -                             -           -
    all                           63.2 MiB  58.8 MiB    22.0 MiB      -                      105.1 ms           -

    step         181.1 ms: 76.0 ms of computing (4.00 ms of it a second time), 105.1 ms of waiting
    peak         147.2 MiB of 180.0 MiB in forward of h.5 (F5): static 32.0 MiB, workspace 2.0 MiB, h.1/s.3 8.8 MiB on its way out, h.2/s.3 8.8 MiB on its way out, h.4/s.3 8.8 MiB, h.5/s.3 8.8 MiB, h.0/s.2 6.6 MiB, 20 more 71.4 MiB
    waits        105.1 ms for loads, 0 ms for bytes to leave; longest at h.4: 64.1 ms
    host out     58.8 MiB in 89.4 ms: 28.0 ms hidden behind computing, 61.4 ms exposed
    host in      58.8 MiB in 79.7 ms: 36.0 ms hidden behind computing, 43.7 ms exposed
    in the file  step 72.0 ms, peak 180.0 MiB: as predicted when it was made
    ");
    let layer = &place.json("j")["layers"][0];
    assert_eq!(layer["swap"], serde_json::json!(["s.3"]));
    assert_eq!(layer["load_at"], serde_json::json!({"op": "B", "layer": 1}));
}

#[test]
fn another_machine_takes_another_time() {
    let place = planned(&EQUAL, "50%");
    let step = |what_if: &[&str]| {
        well(&place, &[&["simulate", "t", "p", "--json", "j"], what_if].concat());
        let report = place.json("j");
        let predicted = &report["predicted"];
        assert!(whole(&predicted["peak_bytes"]) <= whole(&report["memory_bytes"]));
        whole(&predicted["step_ns"])
    };
    let traced = step(&[]);
    assert!(step(&["--compute-scale", "2"]) > traced);
    assert!(step(&["--compute-scale", "0.5"]) < traced);
    assert!(step(&["--d2h-gbps", "0.01", "--h2d-gbps", "0.01"]) >= traced);
}

/// The same model traced again: the plan fits, and what is shown is of the new trace.
#[test]
fn a_plan_of_another_trace_is_said_to_be() {
    let place = planned(&EQUAL, "50%");
    edit(&place, "t", "\"created_unix_s\":0", "\"created_unix_s\":1");
    let output = place.run(&["simulate", "t", "p"]);
    assert!(output.status.success());
    assert_snapshot!(text(&output.stderr), @r"
    note: the plan was made from another trace; these figures are for this one
    ");
}

/// Times that no number holds are as long as can be told, not short by chance.
#[test]
fn a_hopeless_link_takes_as_long_as_can_be_told() {
    let place = planned(&EQUAL, "100%");
    for layer in 0..4 {
        decide(&place, "p", layer, "\"swap\":[\"s.3\"]");
    }
    let trace = String::from_utf8(place.bytes("t")).unwrap();
    let (before, link) = trace.split_once("\"bytes_per_s\":").unwrap();
    let behind = link.split_once(',').unwrap().1;
    let slow = format!("{before}\"bytes_per_s\":1,{behind}");
    let slow = slow.replace("\"latency_ns\":8000", "\"latency_ns\":1152921504606846976");
    std::fs::write(place.path().join("t"), slow).unwrap();
    let output = place.run(&["simulate", "t", "p", "--json", "j", "--compute-scale", "1000000"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(whole(&place.json("j")["predicted"]["step_ns"]) > 1 << 62);
}
