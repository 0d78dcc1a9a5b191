//! `ebbtide plan`: the table, the files, budgets that can and can't be met.

mod common;

use std::fs;
use std::process::Stdio;

use common::planned::{EQUAL, FIXED, decide, edit, planned, refused, traced, well, whole};
use common::{Place, keys, names, text};
use insta::assert_snapshot;

/// What the table looks like is in the tests of `simulate`: there it does not depend on a search.
#[test]
fn a_plan_is_a_table_and_what_it_comes_to() {
    let place = traced(&EQUAL);
    let printed = well(&place, &["plan", "t", "--memory", "40%"]);
    assert_eq!(names(place.path()), ["t"]);
    let (table, summary) = printed.split_once("\n\n").unwrap();
    let head = table.lines().next().unwrap().split("  ").map(str::trim);
    let head: Vec<_> = head.filter(|word| !word.is_empty()).collect();
    assert_eq!(
        head,
        ["layer", "name", "does", "keeps", "swaps", "recomputes", "drops", "loads start"]
    );
    assert!(table.lines().last().unwrap().starts_with("all "), "{table}");
    let labels = summary.lines().map(|line| line.get(..12).unwrap().trim());
    assert_eq!(
        labels.collect::<Vec<_>>(),
        ["step", "peak", "waits", "host out", "host in", "budgets", "search"]
    );
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
    search       1 plan played; none takes less than 72.0 ms; proved to be within 0.2 % of the best
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
    let place = planned(&EQUAL, "100%");
    assert_eq!(well(&place, &["plan", "--diff", "p", "p"]), "");
    fs::copy(place.path().join("p"), place.path().join("q")).unwrap();
    decide(&place, "q", 5, "\"recompute\":true");
    decide(&place, "q", 0, "\"swap\":[\"s.3\",\"out\"],\"load_at\":{\"op\":\"B\",\"layer\":3}");
    assert_snapshot!(well(&place, &["plan", "--diff", "p", "q"]), @r"
    layer 0 `h.0`: keep -> swap s.3, out until B3
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
