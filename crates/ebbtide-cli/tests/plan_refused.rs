//! What `plan` and `simulate` refuse: two lines, status 2, and nothing written.

mod common;

use std::fs;

use common::planned::{EQUAL, FIXED, edit, planned, refused, traced};
use insta::assert_snapshot;

#[test]
fn settings_that_make_no_sense_together() {
    let place = planned(&EQUAL, "60%");
    assert_snapshot!(refused(&place, &["plan"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--memory", "50%"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "-o", "q"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--solver", "fast"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--memory", "50%", "--svg", "s"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "--diff", "p"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--diff", "p", "p"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "--diff", "p", "p", "--tier", "host"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--memory", "50%", "--solver", "best"]), @"TODO");
    assert_snapshot!(refused(&place, &["simulate", "t"]), @"TODO");
    assert_snapshot!(refused(&place, &["simulate", "t", "p", "--memory", "50%"]), @"TODO");
}

#[test]
fn budgets_that_are_none() {
    let place = traced(&EQUAL);
    let of = |memory: &str| refused(&place, &["plan", "t", "--memory", memory]);
    assert_snapshot!(of("much"), @"TODO");
    assert_snapshot!(of("-5MiB"), @"TODO");
    assert_snapshot!(of("40 parrots"), @"TODO");
    assert_snapshot!(of("%"), @"TODO");
    assert_snapshot!(of("-40%"), @"TODO");
    assert_snapshot!(of("140%"), @"TODO");
    // Told before a file is looked at.
    let said = refused(&place, &["plan", "missing", "--memory", "140%"]);
    assert!(said.starts_with("error: memory `140%`"), "{said}");
}

#[test]
fn machines_that_there_are_not() {
    let place = planned(&EQUAL, "60%");
    let of = |what_if: &[&str]| refused(&place, &[&["simulate", "t", "p"], what_if].concat());
    assert_snapshot!(of(&["--d2h-gbps", "0"]), @"TODO");
    assert_snapshot!(of(&["--h2d-gbps", "-1"]), @"TODO");
    assert_snapshot!(of(&["--compute-scale", "nan"]), @"TODO");
    assert_snapshot!(of(&["--compute-scale", "fast"]), @"TODO");
    assert_snapshot!(of(&["--tier", "tape"]), @"TODO");
    // Without a tier nothing moves, and its speed changes nothing.
    let trace = String::from_utf8(place.bytes("t")).unwrap();
    let (before, rest) = trace.split_once("\"tiers\":[").unwrap();
    let behind = rest.split_once("\n ],").unwrap().1;
    fs::write(place.path().join("t"), format!("{before}\"tiers\":[],{behind}")).unwrap();
    let args = ["plan", "t", "--memory", "90%", "--h2d-gbps", "5"];
    assert_snapshot!(refused(&place, &args), @"TODO");
}

#[test]
fn files_that_are_no_traces() {
    let place = planned(&EQUAL, "60%");
    let file = |name: &str, bytes: &[u8]| fs::write(place.path().join(name), bytes).unwrap();
    let of = |name: &str| refused(&place, &["plan", name, "--memory", "50%"]);
    assert_snapshot!(of("missing"), @"TODO");
    assert_snapshot!(of("."), @"TODO");
    assert_snapshot!(of("p"), @"TODO");
    file("bytes", &[0xff, 0xfe, 0]);
    assert_snapshot!(of("bytes"), @"TODO");
    file("empty", b"");
    assert_snapshot!(of("empty"), @"TODO");
    file("cut", &place.bytes("t")[..700]);
    assert_snapshot!(of("cut"), @"TODO");
    file("long", &vec![b' '; (64 << 20) + 1]);
    assert_snapshot!(of("long"), @"TODO");
    fs::remove_file(place.path().join("long")).unwrap();
    file("key", format!("{{\"format\":\"{}\",\"version\":1}}", "x".repeat(5000)).as_bytes());
    assert!(of("key").len() < 600);
    edit(&place, "t", "\"version\":1", "\"version\":2");
    assert_snapshot!(of("t"), @"TODO");
    edit(&place, "t", "\"version\":2", "\"version\":1,\"colour\":3");
    assert_snapshot!(of("t"), @"TODO");
    edit(&place, "t", ",\"colour\":3", "");
    edit(&place, "t", "\"last_forward\":1", "\"last_forward\":7");
    assert_snapshot!(of("t"), @"TODO");
}

#[test]
fn plans_that_do_not_fit_the_trace() {
    let place = planned(&FIXED, "35%");
    let of = |from: &str, to: &str| {
        fs::copy(place.path().join("p"), place.path().join("q")).unwrap();
        edit(&place, "q", from, to);
        refused(&place, &["simulate", "t", "q"])
    };
    refused(&place, &["simulate", "t", "missing"]);
    assert_snapshot!(refused(&place, &["simulate", "t", "t"]), @"TODO");
    assert_snapshot!(of("\"name\":\"h.1\"", "\"name\":\"x\\u001b\""), @"TODO");
    assert_snapshot!(of("\"swap\":[\"", "\"swap\":[\"ghost\",\""), @"TODO");
    assert_snapshot!(of("\"tier\":\"host\"", "\"tier\":\"tape\""), @"TODO");
    assert_snapshot!(of("\"memory_bytes\":", "\"memory_bytes\":1,\"was\":"), @"TODO");
    let budget = place.json("p")["memory_bytes"].to_string();
    let (from, to) = (format!("\"memory_bytes\":{budget}"), "\"memory_bytes\":1000000");
    assert_snapshot!(of(&from, to), @"TODO");
    // A plan of another model.
    let other = planned(&["--synthetic", "5", "--storages", "4", "--seed", "4"], "60%");
    fs::write(place.path().join("other"), other.bytes("p")).unwrap();
    assert_snapshot!(refused(&place, &["simulate", "t", "other"]), @"TODO");
}

#[test]
fn more_than_a_tier_holds() {
    let place = planned(&EQUAL, "60%");
    edit(&place, "t", "\"capacity_bytes\":0", "\"capacity_bytes\":4096");
    assert_snapshot!(refused(&place, &["simulate", "t", "p"]), @"TODO");
}

#[test]
fn files_that_can_not_be_written() {
    let place = planned(&EQUAL, "60%");
    let of = |flags: &[&str]| refused(&place, &[&["plan", "t", "--memory", "60%"], flags].concat());
    assert_snapshot!(of(&["-o", "missing/p"]), @"TODO");
    assert_snapshot!(of(&["-o", "./t"]), @"TODO");
    assert_snapshot!(of(&["--json", "x", "-o", "x"]), @"TODO");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--svg", "."]), @"TODO");
    assert_snapshot!(refused(&place, &["simulate", "t", "p", "--json", "p"]), @"TODO");
}
