//! `ebbtide plan`: the table, the files, budgets that can and can't be met.

mod common;

use std::fs;
use std::process::Stdio;

use common::planned::{EQUAL, FIXED, edit, planned, refused, traced, well, whole};
use common::{Place, keys, names, text};
use insta::assert_snapshot;

#[test]
fn a_plan_is_a_row_for_each_run_of_equal_layers() {
    let place = traced(&EQUAL);
    assert_snapshot!(well(&place, &["plan", "t", "--memory", "40%"]), @r"
    layer   name        does                            keeps     swaps  recomputes  drops  loads start
    0       h.0         swap s.0 s.1 s.3 and 1 more   6.6 MiB  17.4 MiB           -      -           F5
    1 .. 4  h.1 .. h.4  recompute                     8.0 MiB         -    88.0 MiB      -
    5       h.5         keep                         24.0 MiB         -           -      -
    all                                              38.6 MiB  17.4 MiB    88.0 MiB      -

    step         88.0 ms: 88.0 ms of computing (16.0 ms of it a second time), 0 ms of waiting
    peak         88.0 MiB of 91.2 MiB in backward of h.4 (B4): static 32.0 MiB, workspace 4.0 MiB, h.0/s.3 8.8 MiB loaded ahead, h.4/s.3 8.8 MiB, h.0/s.2 6.6 MiB, h.4/s.2 6.6 MiB, h.0/s.1 4.4 MiB loaded ahead, 7 more 16.8 MiB
    waits        0 ms for loads, 0 ms for bytes to leave
    host out     17.4 MiB in 26.5 ms: 26.5 ms hidden behind computing, 0 ms exposed
    host in      17.4 MiB in 23.6 ms: 23.6 ms hidden behind computing, 0 ms exposed
    budgets      62.1 MiB is the least found, 180.1 MiB keep all that backward reads, plain training needs 180.1 MiB
    search       18881 plans played; none takes less than 87.8 ms; proved to be within 0.2 % of the best
    ");
    assert_eq!(names(place.path()), ["t"]);
}

/// C17: the report says that the budget has nothing to do.
#[test]
fn c17_a_budget_that_needs_no_plan_is_told() {
    let place = traced(&EQUAL);
    assert_snapshot!(well(&place, &["plan", "t", "--memory", "100%"]), @r"
    layer   name        does      keeps  swaps  recomputes  drops  loads start
    0 .. 5  h.0 .. h.5  keep  144.0 MiB      -           -      -
    all                       144.0 MiB      -           -      -

    step         72.0 ms: 72.0 ms of computing, 0 ms of waiting
    peak         180.0 MiB of 180.0 MiB in backward of h.5 (B5): static 32.0 MiB, workspace 4.0 MiB, h.0/s.3 8.8 MiB, h.1/s.3 8.8 MiB, h.2/s.3 8.8 MiB, h.3/s.3 8.8 MiB, h.4/s.3 8.8 MiB, 25 more 100.0 MiB
    waits        0 ms for loads, 0 ms for bytes to leave
    host out     nothing
    host in      nothing
    budgets      62.1 MiB is the least found, 180.1 MiB keep all that backward reads, plain training needs 180.1 MiB: the budget needs no plan, everything is kept
    search       1 plans played; none takes less than 72.0 ms; proved to be within 0.2 % of the best
    ");
}

/// The same figures as in the table, and a plan that keeps the budget, on every machine the same.
#[test]
fn the_files_say_what_the_table_says() {
    let place = traced(&FIXED);
    let args = ["plan", "t", "--memory", "35%", "-o", "p", "--json", "j"];
    let table = well(&place, &args);
    let report = place.json("j");
    let all = "bound_ns command layers memory_bytes plays predicted proven range schema solver \
        trace_sha256";
    assert_eq!(keys(&report).join(" "), all);
    let predicted = &report["predicted"];
    let fields =
        "compute_ns peak peak_bytes recompute_ns step_ns tiers wait_load_ns wait_memory_ns";
    assert_eq!(keys(predicted).join(" "), fields);
    assert_eq!(keys(&predicted["peak"]), ["at", "static_bytes", "storages", "workspace_bytes"]);
    let link = "busy_ns bytes exposed_ns hidden_ns";
    assert_eq!(keys(&predicted["tiers"][0]["out"]).join(" "), link);
    assert_eq!(keys(&predicted["tiers"][0]["in"]).join(" "), link);
    let fields = "dropped_bytes kept_bytes load_at name recompute recomputed_bytes swap \
        swapped_bytes tier wait_load_ns wait_memory_ns";
    assert_eq!(keys(&report["layers"][0]).join(" "), fields);
    // What is on the device at the peak makes the peak.
    let peak = &predicted["peak"];
    let storages = peak["storages"].as_array().unwrap().iter().map(|held| whole(&held["bytes"]));
    let sum = whole(&peak["static_bytes"]) + whole(&peak["workspace_bytes"]);
    assert_eq!(sum + storages.sum::<u64>(), whole(&predicted["peak_bytes"]));
    assert!(whole(&predicted["peak_bytes"]) <= whole(&report["memory_bytes"]));
    // The plan promises the same.
    let plan = place.json("p");
    assert_eq!(plan["trace_sha256"], report["trace_sha256"]);
    assert_eq!(plan["memory_bytes"], report["memory_bytes"]);
    assert_eq!(plan["predicted"]["step_ns"], predicted["step_ns"]);
    assert_eq!(plan["predicted"]["peak_at"], peak["at"]);
    let before = place.bytes("p");
    assert_eq!(well(&place, &args), table);
    assert_eq!(place.bytes("p"), before);
}

/// The least that is named is enough, as printed; a tenth of a unit less is not.
#[test]
fn the_least_budget_works_as_printed() {
    let place = traced(&EQUAL);
    let said = refused(&place, &["plan", "t", "--memory", "10MiB", "-o", "p"]);
    assert_snapshot!(said, @r"
    error: no plan fits 10.0 MiB: the least found is 62.1 MiB (backward of `h.5`: static 32.0 MiB, workspace 4.0 MiB, `h.5/s.3` 8.8 MiB, `h.5/s.2` 6.6 MiB, `h.5/s.1` 4.4 MiB, 3 more 6.2 MiB)
    hint: give at least 62.1 MiB, or make the batch smaller
    ");
    let least = said.split_once("least found is ").unwrap().1.split_once(" (").unwrap().0;
    well(&place, &["plan", "t", "--memory", least]);
    let (number, unit) = least.split_once(' ').unwrap();
    let less = format!("{:.1}{unit}", number.parse::<f64>().unwrap() - 0.1);
    refused(&place, &["plan", "t", "--memory", &less]);
    // In percent of what plain training needs, too.
    assert_snapshot!(refused(&place, &["plan", "t", "--memory", "0%"]), @r"
    error: no plan fits 32.0 MiB: the least found is 62.1 MiB (backward of `h.5`: static 32.0 MiB, workspace 4.0 MiB, `h.5/s.3` 8.8 MiB, `h.5/s.2` 6.6 MiB, `h.5/s.1` 4.4 MiB, 3 more 6.2 MiB)
    hint: give at least 62.1 MiB, or make the batch smaller
    ");
}

#[test]
fn the_exact_solver_says_what_it_proved() {
    let place = traced(&["--synthetic", "4", "--storages", "2", "--seed", "5"]);
    let args = ["plan", "t", "--memory", "50%", "--solver", "exact", "--json", "j"];
    let table = well(&place, &args);
    let report = place.json("j");
    assert_eq!((&report["solver"], &report["proven"]), (&"exact".into(), &true.into()));
    assert!(whole(&report["bound_ns"]) <= whole(&report["predicted"]["step_ns"]));
    assert!(table.contains("proved to be within 0.2 % of the best"), "{table}");
}

#[test]
fn another_machine_gets_another_plan() {
    let place = traced(&EQUAL);
    let step = |what_if: &[&str]| {
        let args = [&["plan", "t", "--memory", "50%", "--json", "j"], what_if].concat();
        well(&place, &args);
        whole(&place.json("j")["predicted"]["step_ns"])
    };
    let traced = step(&[]);
    assert!(step(&["--d2h-gbps", "50", "--h2d-gbps", "50"]) < traced);
    assert!(step(&["--d2h-gbps", "0.001"]) >= traced);
    assert!(step(&["--compute-scale", "0.5"]) < traced);
    assert_eq!(step(&["--tier", "host"]), traced);
}

#[test]
fn a_trace_may_come_through_a_pipe() {
    let place = Place::new();
    let mut trace = place.command(&[&["trace"], &EQUAL[..]].concat());
    let mut trace = trace.stdout(Stdio::piped()).spawn().unwrap();
    let mut plan = place.command(&["plan", "/dev/stdin", "--memory", "50%"]);
    let output = plan.stdin(trace.stdout.take().unwrap()).output().unwrap();
    assert!(trace.wait().unwrap().success());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("layer "));
}

#[test]
fn differences_are_a_line_each() {
    let place = planned(&EQUAL, "60%");
    assert_eq!(well(&place, &["plan", "--diff", "p", "p"]), "");
    fs::copy(place.path().join("p"), place.path().join("q")).unwrap();
    let line = "{\"name\":\"h.5\",\"recompute\":false";
    edit(&place, "q", line, "{\"name\":\"h.5\",\"recompute\":true");
    assert_snapshot!(well(&place, &["plan", "--diff", "p", "q"]), @r"
    layer 5 `h.5`: keep -> recompute
    ");
    // Of another budget: what was predicted differs as well.
    well(&place, &["plan", "t", "--memory", "45%", "-o", "q"]);
    let lines = well(&place, &["plan", "--diff", "p", "q"]);
    for what in ["memory: ", "predicted peak: ", "predicted step: "] {
        assert!(lines.lines().any(|line| line.starts_with(what)), "{lines}");
    }
}

/// Names come from a file: they are shown, and steer nothing.
#[test]
fn names_can_not_steer_a_terminal() {
    let place = traced(&EQUAL);
    edit(&place, "t", "\"name\":\"h.0\"", "\"name\":\"h\\u001b[2J\\n.0\"");
    let table = well(&place, &["plan", "t", "--memory", "60%"]);
    let small = refused(&place, &["plan", "t", "--memory", "1MiB"]);
    for shown in [table, small] {
        assert!(!shown.contains('\u{1b}'), "{shown}");
    }
}
