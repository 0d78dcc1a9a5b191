//! The command that plays seeds.

use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sim")).args(arguments).output().unwrap()
}

#[test]
fn the_last_line_counts_and_the_status_is_zero_without_reports() {
    let output = sim(&["--seeds", "5", "--first", "7", "--with", "tables", "--verbose"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().last(), Some("5 seeds, 0 reports"), "{text}");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn features_are_listed_by_the_names_that_the_command_takes() {
    let text = String::from_utf8(sim(&["--list"]).stdout).unwrap();
    let names: Vec<_> = text.lines().collect();
    assert!(names.contains(&"fail-burst") && names.len() > 40, "{names:?}");
}

#[test]
fn a_wrong_argument_is_status_two() {
    for arguments in [&["--with", "nothing"][..], &["--seeds"], &["--seeds", "x"], &["--what"]] {
        let output = sim(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}
