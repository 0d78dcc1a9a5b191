//! What `plan` and `simulate` refuse: two lines, status 2, and nothing written.

mod common;

use std::fs;

use common::planned::{EQUAL, FIXED, decide, edit, planned, refused, traced};
use insta::assert_snapshot;

#[test]
fn settings_that_make_no_sense_together() {
    let place = planned(&EQUAL, "60%");
    assert_snapshot!(refused(&place, &["plan"]), @r"
    error: the following required arguments were not provided: --memory <SIZE|PERCENT> <TRACE>
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t"]), @r"
    error: the following required arguments were not provided: --memory <SIZE|PERCENT>
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--memory", "50%"]), @r"
    error: the argument '--curve' cannot be used with '--memory <SIZE|PERCENT>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "-o", "q"]), @r"
    error: the argument '--curve' cannot be used with '--output <FILE>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--solver", "fast"]), @r"
    error: the argument '--curve' cannot be used with '--solver <SOLVER>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--memory", "50%", "--svg", "s"]), @r"
    error: the argument '--memory <SIZE|PERCENT>' cannot be used with '--svg <FILE>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "--diff", "p"]), @r"
    error: 2 values required for '--diff <A> <B>' but 1 was provided
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--diff", "p", "p"]), @r"
    error: the argument '[TRACE]' cannot be used with '--diff <A> <B>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "--diff", "p", "p", "--tier", "host"]), @r"
    error: the argument '--diff <A> <B>' cannot be used with '--tier <NAME>'
    hint: `ebbtide plan --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--memory", "50%", "--solver", "best"]), @r"
    error: invalid value 'best' for '--solver <SOLVER>'
    hint: it is one of fast, exact
    ");
    assert_snapshot!(refused(&place, &["simulate", "t"]), @r"
    error: the following required arguments were not provided: <PLAN>
    hint: `ebbtide simulate --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["simulate", "t", "p", "--memory", "50%"]), @r"
    error: unexpected argument '--memory' found
    hint: `ebbtide simulate --help` lists what can be given
    ");
}

#[test]
fn budgets_that_are_none() {
    let place = traced(&EQUAL);
    let of = |memory: &str| refused(&place, &["plan", "t", "--memory", memory]);
    assert_snapshot!(of("much"), @r"
    error: size `much`: it does not start with a number
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(of("-5MiB"), @r"
    error: size `-5MiB`: it does not start with a number
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(of("40 parrots"), @r"
    error: size `40 parrots`: the unit is none of B, KiB, MiB, GiB, TiB
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(of("%"), @r"
    error: memory `%`: there is no number before the %
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(of("-40%"), @r"
    error: memory `-40%`: there is no number before the %
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(of("140%"), @r"
    error: memory `140%`: plain training needs no more than 100%
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    // Told before a file is looked at.
    let said = refused(&place, &["plan", "missing", "--memory", "140%"]);
    assert!(said.starts_with("error: memory `140%`"), "{said}");
}

#[test]
fn machines_that_there_are_not() {
    let place = planned(&EQUAL, "60%");
    let of = |what_if: &[&str]| refused(&place, &[&["simulate", "t", "p"], what_if].concat());
    assert_snapshot!(of(&["--d2h-gbps", "0"]), @r"
    error: a bandwidth to the tier of 0 makes no sense
    hint: give a number between 0.000001 and 1000000
    ");
    assert_snapshot!(of(&["--h2d-gbps", "-1"]), @r"
    error: a bandwidth from the tier of -1 makes no sense
    hint: give a number between 0.000001 and 1000000
    ");
    assert_snapshot!(of(&["--compute-scale", "nan"]), @r"
    error: a scale of computing of NaN makes no sense
    hint: give a number between 0.000001 and 1000000
    ");
    assert_snapshot!(of(&["--compute-scale", "fast"]), @r"
    error: invalid value 'fast' for '--compute-scale <FACTOR>': invalid float literal
    hint: `ebbtide simulate --help` lists what can be given
    ");
    assert_snapshot!(of(&["--tier", "tape"]), @r"
    error: there is no tier `tape`; there are: host
    hint: name one of the tiers of the trace
    ");
    // Without a tier nothing moves, and its speed changes nothing.
    let trace = String::from_utf8(place.bytes("t")).unwrap();
    let (before, rest) = trace.split_once("\"tiers\":[").unwrap();
    let behind = rest.split_once("\n ],").unwrap().1;
    fs::write(place.path().join("t"), format!("{before}\"tiers\":[],{behind}")).unwrap();
    let args = ["plan", "t", "--memory", "90%", "--h2d-gbps", "5"];
    assert_snapshot!(refused(&place, &args), @r"
    error: --h2d-gbps has no effect: the trace has no tier
    hint: leave out --h2d-gbps
    ");
}

#[test]
fn files_that_are_no_traces() {
    let place = planned(&EQUAL, "60%");
    let file = |name: &str, bytes: &[u8]| fs::write(place.path().join(name), bytes).unwrap();
    let of = |name: &str| refused(&place, &["plan", name, "--memory", "50%"]);
    assert_snapshot!(of("missing"), @r"
    error: can't read the trace: missing: No such file or directory (os error 2)
    hint: check the path
    ");
    assert_snapshot!(of("."), @r"
    error: can't read the trace: .: Is a directory (os error 21)
    hint: check the path
    ");
    assert_snapshot!(of("p"), @r"
    error: p: a file of format `ebbtide.plan`, not ebbtide.trace
    hint: traces come from `ebbtide trace`, plans from `ebbtide plan`
    ");
    file("bytes", &[0xff, 0xfe, 0]);
    assert_snapshot!(of("bytes"), @r"
    error: can't read the trace: bytes: stream did not contain valid UTF-8
    hint: check the path
    ");
    file("empty", b"");
    assert_snapshot!(of("empty"), @r"
    error: empty: not a file of format ebbtide.trace: EOF while parsing a value at line 1 column 0
    hint: compare it with a file that this version writes
    ");
    file("cut", &place.bytes("t")[..700]);
    assert_snapshot!(of("cut"), @r"
    error: cut: not a file of format ebbtide.trace: EOF while parsing a string at line 11 column 83
    hint: compare it with a file that this version writes
    ");
    file("long", &vec![b' '; (64 << 20) + 1]);
    assert_snapshot!(of("long"), @r"
    error: can't read the trace: long has more than 64 MiB
    hint: files of up to 64 MiB are read; is it the right one?
    ");
    fs::remove_file(place.path().join("long")).unwrap();
    file("key", format!("{{\"format\":\"{}\",\"version\":1}}", "x".repeat(5000)).as_bytes());
    assert!(of("key").len() < 600);
    edit(&place, "t", "\"version\":1", "\"version\":2");
    assert_snapshot!(of("t"), @r"
    error: t: version 2 of ebbtide.trace is not known
    hint: this program knows version 1; make the file again with it
    ");
    edit(&place, "t", "\"version\":2", "\"version\":1,\"colour\":3");
    assert_snapshot!(of("t"), @r"
    error: t: not a file of format ebbtide.trace: unknown field `colour`, expected one of `format`, `version`, `source`, `created_unix_s`, `static_bytes`, `plain_peak_bytes`, `step_fixed_ns`, `tiers`, `shapes`, `layers` at line 1 column 46
    hint: compare it with a file that this version writes
    ");
    edit(&place, "t", ",\"colour\":3", "");
    edit(&place, "t", "\"last_forward\":1", "\"last_forward\":7");
    assert_snapshot!(of("t"), @r"
    error: t: trace, layer 0 `h.0`, storage `out`: last_forward is 7 layers behind, and there are 5
    hint: trace the model again, or correct the file at this place
    ");
}

#[test]
fn plans_that_do_not_fit_the_trace() {
    let place = planned(&FIXED, "100%");
    let of = |change: &dyn Fn()| {
        fs::copy(place.path().join("p"), place.path().join("q")).unwrap();
        change();
        refused(&place, &["simulate", "t", "q"])
    };
    let change = |from: &str, to: &str| of(&|| edit(&place, "q", from, to));
    let layer = |at: usize, decided: &str| of(&|| decide(&place, "q", at, decided));
    assert_snapshot!(refused(&place, &["simulate", "t", "missing"]), @r"
    error: can't read the plan: missing: No such file or directory (os error 2)
    hint: check the path
    ");
    assert_snapshot!(refused(&place, &["simulate", "t", "t"]), @r"
    error: t: a file of format `ebbtide.trace`, not ebbtide.plan
    hint: traces come from `ebbtide trace`, plans from `ebbtide plan`
    ");
    assert_snapshot!(change("\"name\":\"h.1\"", "\"name\":\"x\\u001b\""), @r"
    error: q: the plan does not fit the model: layer 1 is `x�`, in the model it is `h.1`
    hint: this is a plan of another model: plan again with `ebbtide plan`
    ");
    assert_snapshot!(layer(0, "\"swap\":[\"ghost\"]"), @r"
    error: q: the plan does not fit the model: layer `h.0` has no storage `ghost`
    hint: the names of a layer's storages are in the trace
    ");
    assert_snapshot!(layer(0, "\"swap\":[\"s.3\",\"s.3\"]"), @r"
    error: q: the plan does not fit the model: layer `h.0` names storage `s.3` twice
    hint: correct this line of the plan
    ");
    assert_snapshot!(layer(0, "\"swap\":[\"s.3\"],\"tier\":\"tape\""), @r"
    error: q: the plan does not fit the model: layer `h.0` goes to tier `tape`; tiers there are: host
    hint: name a tier of the trace
    ");
    assert_snapshot!(layer(0, "\"tier\":\"host\""), @r"
    error: q: the plan does not fit the model: layer `h.0`: `tier` has no effect, nothing is swapped
    hint: correct this line of the plan
    ");
    assert_snapshot!(layer(0, "\"recompute\":true"), @r"
    error: q: the plan does not fit the model: layer `h.0` can't be recomputed: it draws random numbers
    hint: correct this line of the plan
    ");
    assert_snapshot!(layer(1, "\"swap\":[\"s.3\"],\"load_at\":{\"op\":\"B\",\"layer\":9}"), @r"
    error: q: the plan does not fit the model: layer `h.1` loads at layer 9, there are 6 from 0
    hint: correct this line of the plan
    ");
    assert_snapshot!(layer(0, "\"forget\":true"), @r"
    error: q: not a file of format ebbtide.plan: unknown field `forget`, expected one of `name`, `recompute`, `swap`, `tier`, `load_at` at line 6 column 24
    hint: compare it with a file that this version writes
    ");
    assert_snapshot!(layer(0, "\"swap\":[\"dead\"]"), @r"
    error: q: the plan does not fit the model: layer `h.0`: `dead` has no effect, nobody reads it after forward
    hint: correct this line of the plan
    ");
    assert_snapshot!(layer(1, "\"recompute\":true,\"swap\":[\"s.3\"]"), @r"
    error: q: the plan does not fit the model: layer `h.1`: `s.3` has no effect, it is recomputed
    hint: correct this line of the plan
    ");
    let budget = place.json("p")["memory_bytes"].to_string();
    let from = format!("\"memory_bytes\":{budget}");
    let said = change(&from, "\"memory_bytes\":1000000");
    assert!(said.starts_with("error: q: the plan needs "), "{said}");
    assert!(said.contains(", the budget is 976.6 KiB\n"), "{said}");
    // A plan of another model.
    let other = planned(&["--synthetic", "5", "--storages", "4", "--seed", "4"], "100%");
    fs::write(place.path().join("other"), other.bytes("p")).unwrap();
    assert_snapshot!(refused(&place, &["simulate", "t", "other"]), @r"
    error: other: the plan does not fit the model: 5 layers, the model has 6
    hint: this is a plan of another model: plan again with `ebbtide plan`
    ");
}

#[test]
fn more_than_a_tier_holds() {
    let place = planned(&EQUAL, "100%");
    decide(&place, "p", 0, "\"swap\":[\"s.3\"]");
    edit(&place, "t", "\"capacity_bytes\":0", "\"capacity_bytes\":4096");
    assert_snapshot!(refused(&place, &["simulate", "t", "p"]), @r"
    error: p: 8.9 MiB are swapped to tier host, which holds 4.0 KiB
    hint: swap less, or name a tier with more room
    ");
}

#[test]
fn files_that_can_not_be_written() {
    let place = planned(&EQUAL, "60%");
    let of = |flags: &[&str]| refused(&place, &[&["plan", "t", "--memory", "60%"], flags].concat());
    assert_snapshot!(of(&["-o", "missing/p"]), @r"
    error: -o can't write missing/p: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with -o
    ");
    assert_snapshot!(of(&["-o", "./t"]), @r"
    error: -o and the trace name the same file ./t
    hint: name another file with -o
    ");
    assert_snapshot!(of(&["--json", "x", "-o", "x"]), @r"
    error: --json and -o name the same file x
    hint: name another file with --json
    ");
    assert_snapshot!(refused(&place, &["plan", "t", "--curve", "--svg", "."]), @r"
    error: --svg can't write .: it is a folder
    hint: name a file in an existing, writable folder with --svg
    ");
    assert_snapshot!(refused(&place, &["simulate", "t", "p", "--json", "p"]), @r"
    error: --json and the plan name the same file p
    hint: name another file with --json
    ");
}
