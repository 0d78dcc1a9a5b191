//! `ebbtide simulate`: what a plan comes to, as it was made and changed by hand.

mod common;

use common::planned::{EQUAL, edit, planned, well, whole};
use common::{keys, text};
use insta::assert_snapshot;

#[test]
fn a_plan_comes_to_what_was_promised() {
    let place = planned(&EQUAL, "40%");
    let table = well(&place, &["simulate", "t", "p", "--json", "j"]);
    assert_snapshot!(table, @r"
    layer   name        does                            keeps     swaps  recomputes  drops  loads start  waits for loads  for memory
    0       h.0         swap s.0 s.1 s.3 and 1 more   6.6 MiB  17.4 MiB           -      -           F5                -           -
    1 .. 4  h.1 .. h.4  recompute                     8.0 MiB         -    88.0 MiB      -                             -           -
    5       h.5         keep                         24.0 MiB         -           -      -                             -           -
    all                                              38.6 MiB  17.4 MiB    88.0 MiB      -                             -           -

    step         88.0 ms: 88.0 ms of computing (16.0 ms of it a second time), 0 ms of waiting
    peak         88.0 MiB of 91.2 MiB in backward of h.4 (B4): static 32.0 MiB, workspace 4.0 MiB, h.0/s.3 8.8 MiB loaded ahead, h.4/s.3 8.8 MiB, h.0/s.2 6.6 MiB, h.4/s.2 6.6 MiB, h.0/s.1 4.4 MiB loaded ahead, 7 more 16.8 MiB
    waits        0 ms for loads, 0 ms for bytes to leave
    host out     17.4 MiB in 26.5 ms: 26.5 ms hidden behind computing, 0 ms exposed
    host in      17.4 MiB in 23.6 ms: 23.6 ms hidden behind computing, 0 ms exposed
    ");
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

/// A layer that is kept after all needs more, and the file's promise is shown beside it.
#[test]
fn a_plan_that_was_changed_by_hand_is_played_as_it_is() {
    let place = planned(&EQUAL, "100%");
    edit(
        &place,
        "p",
        "{\"name\":\"h.0\",\"recompute\":false,\"swap\":[]}",
        "{\"name\":\"h.0\",\"swap\":[\"s.3\"],\"load_at\":{\"op\":\"B\",\"layer\":1}}",
    );
    let table = well(&place, &["simulate", "t", "p", "--json", "j"]);
    assert_snapshot!(table, @r"
    layer   name        does          keeps    swaps  recomputes  drops  loads start  waits for loads  for memory
    0       h.0         swap s.3   15.2 MiB  8.8 MiB           -      -           B1          3.92 ms           -
    1 .. 5  h.1 .. h.5  keep      120.0 MiB        -           -      -                             -           -
    all                           135.2 MiB  8.8 MiB           -      -                       3.92 ms           -

    step         75.9 ms: 72.0 ms of computing, 3.92 ms of waiting
    peak         171.2 MiB of 180.0 MiB in backward of h.5 (B5): static 32.0 MiB, workspace 4.0 MiB, h.1/s.3 8.8 MiB, h.2/s.3 8.8 MiB, h.3/s.3 8.8 MiB, h.4/s.3 8.8 MiB, h.5/s.3 8.8 MiB, 24 more 91.2 MiB
    waits        3.92 ms for loads, 0 ms for bytes to leave; longest at h.0: 3.92 ms
    host out     8.8 MiB in 13.4 ms: 13.4 ms hidden behind computing, 0 ms exposed
    host in      8.8 MiB in 11.9 ms: 8.00 ms hidden behind computing, 3.92 ms exposed
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
