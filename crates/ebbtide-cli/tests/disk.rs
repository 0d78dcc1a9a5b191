//! C21: a disk that fills up in the middle of a step.

mod common;

use std::process::{Command, Output};

use common::{Place, names, text};
use insta::assert_snapshot;

/// Runs the command where no file may grow beyond 64 KiB or less.
fn limited(place: &Place, args: &[&str]) -> Output {
    Command::new("sh")
        .args(["-c", "ulimit -f 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_ebbtide")])
        .args(args)
        .current_dir(place.path())
        .output()
        .unwrap()
}

/// A limit on the size of files stands in for a full disk: it needs no file system of its own.
#[test]
fn c21_a_spill_that_can_not_be_written_is_an_error_that_names_the_folder() {
    let place = Place::new();
    let spill = place.spill.path().to_str().unwrap();
    // Room for what is tried at opening, not for one activation of 128 KiB.
    let sizes = ["--layers", "3", "--d-model", "32", "--heads", "2", "--seq", "64"];
    let args = [&["train"], &sizes[..], &["--steps", "3", "--spill-dir", spill]].concat();
    let output = limited(&place, &args);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "", "a failed run has no figures");
    let said = text(&output.stderr);
    let lines: Vec<_> = said.lines().rev().take(2).collect();
    assert!(lines[0].starts_with("hint: "), "{said}");
    assert!(lines[1].starts_with("error: auto: ") && lines[1].contains(spill), "{said}");
    assert_eq!(names(place.spill.path()), [""; 0], "a spill file was left");
}

/// The system's signal would end the process without a word.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_that_says_so() {
    let place = Place::new();
    let spill = place.spill.path().to_str().unwrap();
    let output = limited(&place, &["doctor", "--quick", "--dir", spill]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "");
    assert_snapshot!(text(&output.stderr).replace(spill, "DIR"), @r"
    error: can't make room for 8388608 bytes in DIR: File too large (os error 27)
    hint: raise the limit on the size of files (ulimit -f), or name another folder
    ");
    assert_eq!(names(place.spill.path()), [""; 0], "a file was left");
}
