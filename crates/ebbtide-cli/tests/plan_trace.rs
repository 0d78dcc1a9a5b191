//! `ebbtide trace --synthetic`: made-up models for planners.

mod common;

use std::fs;

use common::planned::{EQUAL, FIXED, refused, well};
use common::{Place, names};
use insta::assert_snapshot;

#[test]
fn a_trace_goes_to_standard_output_or_to_a_file() {
    let place = Place::new();
    let printed = well(&place, &[&["trace"], &EQUAL[..]].concat());
    assert!(printed.starts_with("{\"format\":\"ebbtide.trace\",\"version\":1,\n"), "{printed}");
    assert_eq!(well(&place, &[&["trace"], &EQUAL[..], &["-o", "t"]].concat()), "");
    assert_eq!(String::from_utf8(place.bytes("t")).unwrap(), printed);
    assert_eq!(names(place.path()), ["t"]);
    // By its long name, over what is there.
    fs::write(place.path().join("t"), "old").unwrap();
    well(&place, &[&["trace"], &EQUAL[..], &["--output", "t"]].concat());
    assert_eq!(String::from_utf8(place.bytes("t")).unwrap(), printed);
}

#[test]
fn a_seed_is_a_model() {
    let place = Place::new();
    let of = |model: &[&str]| well(&place, &[&["trace"], model].concat());
    assert_eq!(of(&EQUAL), of(&EQUAL));
    assert_ne!(of(&EQUAL), of(&FIXED));
    // Of the defaults.
    assert_eq!(
        of(&["--synthetic", "3"]),
        of(&["--synthetic", "3", "--storages", "8", "--seed", "1"])
    );
    assert!(of(&["--synthetic", "1", "--storages", "0"]).contains("\"name\":\"h.0\""));
}

#[test]
fn a_recorded_trace_is_planned_for() {
    let place = Place::new();
    let small = ["--layers", "3", "--d-model", "32", "--heads", "2", "--seq", "32", "--batch", "2"];
    let record: Vec<&str> = ["trace", "-o", "t"].into_iter().chain(small).collect();
    well(&place, &record);
    well(&place, &["plan", "t", "--memory", "100%", "-o", "p"]);
    let train: Vec<&str> =
        ["train", "--plan", "p", "--steps", "4", "--quiet"].into_iter().chain(small).collect();
    well(&place, &train);
}

#[test]
fn models_that_can_not_be_made_up() {
    let place = Place::new();
    assert_snapshot!(refused(&place, &["trace", "--storages", "3"]), @r"
    error: the following required arguments were not provided: --synthetic <LAYERS>
    hint: `ebbtide trace --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "3", "--layers", "3"]), @r"
    error: the argument '--synthetic <LAYERS>' cannot be used with: --layers <N> --d-model <N> --heads <N> --seq <N> --batch <N> --dtype <TYPE>
    hint: `ebbtide trace --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "0"]), @r"
    error: --synthetic 0: there has to be at least one layer
    hint: write it like --synthetic 12
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "-3"]), @r"
    error: invalid value '-3' for '--synthetic <LAYERS>': invalid digit found in string
    hint: `ebbtide trace --help` lists what can be given
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "200000", "--storages", "1"]), @r"
    error: no such model: trace, layers: there are more than 100000
    hint: give a smaller --synthetic or --storages
    ");
    let all = u64::MAX.to_string();
    let huge = ["trace", "--synthetic", "2", "--storages", &all];
    assert_snapshot!(refused(&place, &huge), @r"
    error: 2 layers of 18446744073709551615 storages are more than 1048576 in all
    hint: give a smaller --synthetic or --storages
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "3", "-o", "missing/t"]), @r"
    error: -o can't write missing/t: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with -o
    ");
    assert_snapshot!(refused(&place, &["trace", "--synthetic", "3", "--memory", "1"]), @r"
    error: unexpected argument '--memory' found
    hint: `ebbtide trace --help` lists what can be given
    ");
}
