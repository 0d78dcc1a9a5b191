//! A run that is saved and continued is the run that was never interrupted, to the bit.

mod common;

use common::{Place, names, numbers, text};
use insta::assert_snapshot;

fn identical_after_resuming(dtype: &str, policy: &str) {
    let place = Place::new();
    // A rate of its own, which the continued run has to take from the file.
    let start = ["--dtype", dtype, "--policy", policy, "--lr", "1e-3", "--seed", "5"];
    let whole = ["--steps", "6", "--save", "whole", "--json", "whole.json"];
    place.trained(&[&start[..], &whole].concat());
    place.trained(&[&start[..], &["--steps", "3", "--save", "half"]].concat());
    let rest = ["train", "--policy", policy, "--resume", "half", "--steps", "6"];
    let files = ["--save", "rest", "--json", "rest.json"];
    let output = place.run(&[&rest[..], &files].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));

    assert!(place.bytes("whole") == place.bytes("rest"), "{dtype} {policy}: states differ");
    assert!(place.bytes("whole") != place.bytes("half"), "three steps changed nothing");
    let losses = |name: &str| {
        let report = place.json(name);
        numbers(&report["runs"].as_array().unwrap().last().unwrap()["loss"])
    };
    assert_eq!(losses("whole.json")[3..], losses("rest.json")[..]);
}

#[test]
fn resuming_is_exact_in_f32() {
    identical_after_resuming("f32", "plain");
    identical_after_resuming("f32", "swap");
}

#[test]
fn resuming_is_exact_in_bf16() {
    identical_after_resuming("bf16", "swap");
    identical_after_resuming("bf16", "recompute");
}

/// The state says nothing of the policy: a run may be continued under another one.
#[test]
fn every_policy_saves_the_same_state() {
    let place = Place::new();
    for policy in ["plain", "keep", "swap", "recompute"] {
        place.trained(&["--steps", "3", "--policy", policy, "--save", policy]);
        assert!(place.bytes(policy) == place.bytes("plain"), "{policy}");
    }
}

#[test]
fn what_contradicts_the_file_is_refused_by_name() {
    let place = Place::new();
    place.trained(&["--steps", "3", "--policy", "plain", "--save", "state"]);
    let refused = |args: &[&str]| {
        let output = place.run(&[&["train", "--resume", "state"], args].concat());
        assert_eq!(output.status.code(), Some(2));
        assert!(output.stdout.is_empty());
        text(&output.stderr)
    };
    assert_snapshot!(refused(&["--layers", "3"]), @r"
    error: --layers 3 contradicts the saved run, which has 2
    hint: leave out --layers to take it from the file
    ");
    assert_snapshot!(refused(&["--dtype", "bf16"]), @r"
    error: --dtype bf16 contradicts the saved run, which has f32
    hint: leave out --dtype to take it from the file
    ");
    assert_snapshot!(refused(&["--seed", "2"]), @r"
    error: --seed 2 contradicts the saved run, which has 1
    hint: leave out --seed to take it from the file
    ");
    assert_snapshot!(refused(&["--steps", "3"]), @r"
    error: --steps 3: the saved run is already at step 3
    hint: --steps is the total; give more than 3
    ");
    assert_snapshot!(refused(&["--steps", "4", "--json", "state"]), @r"
    error: --json and --resume name the same file state
    hint: name another file with --json
    ");
}

#[test]
fn another_text_is_allowed_and_said() {
    let place = Place::new();
    std::fs::write(place.path().join("text"), "the tide comes back ".repeat(20)).unwrap();
    place.trained(&["--steps", "1", "--policy", "plain", "--save", "state"]);
    let args = ["train", "--resume", "state", "--steps", "2", "--text", "text"];
    let output = place.run(&args);
    assert!(output.status.success());
    let said = text(&output.stderr);
    assert!(said.contains("note: the text is not the one"), "{said}");
}

#[test]
fn saving_over_the_resumed_file_goes_on_with_it() {
    let place = Place::new();
    place.trained(&["--steps", "1", "--policy", "plain", "--save", "state"]);
    for steps in ["2", "3"] {
        let args = ["train", "--resume", "state", "--save", "state", "--steps", steps];
        assert!(place.run(&args).status.success());
    }
    place.trained(&["--steps", "3", "--policy", "plain", "--save", "whole"]);
    assert!(place.bytes("whole") == place.bytes("state"));
}

/// One bit, in the tensors or in the header.
#[test]
fn a_saved_run_that_was_damaged_is_refused() {
    let place = Place::new();
    place.trained(&["--steps", "3", "--policy", "plain", "--save", "whole"]);
    let whole = place.bytes("whole");
    let step = whole.windows(8).position(|w| w == b"step\\\":3").unwrap() + 7;
    let refused = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(place.path().join("damaged"), bytes).unwrap();
        let output = place.run(&["train", "--resume", "damaged"]);
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    assert_snapshot!(refused(step), @r"
    error: can't resume from damaged: it has changed since it was written: its checksum differs
    hint: resume from another copy of it; some of this one's bits are wrong
    ");
    assert_eq!(refused(whole.len() - 1), refused(step));
}

/// A process that is killed while it saves leaves a part of a file; the next save takes it away.
#[test]
fn a_save_keeps_the_mode_and_leaves_one_file() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let state = place.path().join("state");
    std::fs::write(place.path().join(".state.4000000.tmp"), "half").unwrap();
    std::fs::write(&state, "old").unwrap();
    std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o640)).unwrap();
    place.trained(&["--steps", "1", "--policy", "plain", "--save", "state"]);
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o640);
    assert_eq!(names(place.path()), ["state"]);
}

/// Files of the first versions go on, and the user hears what they lack.
#[test]
fn a_saved_run_without_a_checksum_is_resumed_with_a_notice() {
    let place = Place::new();
    place.trained(&["--steps", "1", "--policy", "plain", "--save", "state"]);
    let mut bytes = place.bytes("state");
    let mark = b",\\\"checksum\\\":\\\"";
    let start = bytes.windows(mark.len()).position(|w| w == mark).unwrap();
    let length = mark.len() + 16 + 2;
    bytes.drain(start..start + length);
    // The header keeps its length: spaces after it are allowed, and keep the tensors aligned.
    let header = usize::from_le_bytes(bytes[..8].try_into().unwrap());
    let end = 8 + header - length;
    bytes.splice(end..end, vec![b' '; length]);
    std::fs::write(place.path().join("old"), bytes).unwrap();
    let output = place.run(&["train", "--resume", "old", "--steps", "2", "--save", "next"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("note: the saved run has no checksum"));
    place.trained(&["--steps", "2", "--policy", "plain", "--save", "whole"]);
    assert!(place.bytes("next") == place.bytes("whole"));
}

/// Rates of many digits: JSON carries them to workers and into the file.
#[test]
fn any_rate_arrives_to_the_bit() {
    let place = Place::new();
    let rate = ["--lr", "0.0038106145162599358"];
    let output = place.trained(&[&rate[..], &["--steps", "3", "--save", "half"]].concat());
    assert!(text(&output.stdout).contains("bit-identical to plain"));
    place.trained(&[&rate[..], &["--steps", "5", "--save", "whole"]].concat());
    let rest = ["train", "--resume", "half", "--steps", "5", "--save", "rest"];
    assert!(place.run(&rest).status.success());
    assert!(place.bytes("whole") == place.bytes("rest"));
}
