//! C21: a disk that fills up in the middle of a step.

mod common;

use std::process::Command;

use common::{Place, names, text};

/// A limit on the size of files stands in for a full disk: it needs no file system of its own.
#[test]
fn c21_a_spill_that_can_not_be_written_is_an_error_that_names_the_folder() {
    let place = Place::new();
    let spill = place.spill.path().to_str().unwrap();
    // Room for what is tried at opening, not for one activation of 128 KiB.
    let sizes = ["--layers", "3", "--d-model", "32", "--heads", "2", "--seq", "64"];
    // The signal is ignored so that the write itself fails, as it does on a full disk.
    let limited = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", limited, "sh", env!("CARGO_BIN_EXE_ebbtide"), "train"])
        .args(sizes)
        .args(["--steps", "3", "--spill-dir", spill])
        .current_dir(place.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "", "a failed run has no figures");
    let said = text(&output.stderr);
    let lines: Vec<_> = said.lines().rev().take(2).collect();
    assert!(lines[0].starts_with("hint: "), "{said}");
    assert!(lines[1].starts_with("error: swap: ") && lines[1].contains(spill), "{said}");
    assert_eq!(names(place.spill.path()), [""; 0], "a spill file was left");
}
