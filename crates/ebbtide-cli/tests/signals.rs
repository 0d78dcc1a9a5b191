//! C26: Ctrl-C and SIGTERM end the step, print the table and leave nothing behind.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ExitStatus};
use std::time::Duration;

use common::{Place, names, numbers, text};
use rustix::process::{Pid, Signal, kill_process};

fn send(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Waits for the first line on standard error, then a little, then signals. Returns the status
/// and standard output.
fn interrupt(mut child: Child, signals: &[Signal]) -> (ExitStatus, String) {
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    errors.read_line(&mut String::new()).unwrap();
    // Read on, so that the pipe never fills.
    let reader = std::thread::spawn(move || errors.read_to_end(&mut Vec::new()));
    std::thread::sleep(Duration::from_millis(300));
    for signal in signals {
        send(&child, *signal);
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = child.wait_with_output().unwrap();
    reader.join().unwrap().unwrap();
    (output.status, text(&output.stdout))
}

#[test]
fn c26_a_signal_ends_the_run_with_its_table_and_files() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        let args = ["--steps", "1000000", "--json", "r", "--save", "s", "--timeline", "t"];
        let (status, said) = interrupt(place.spawn(&args), &[signal]);
        assert_eq!(status.code(), Some(code));
        assert!(said.starts_with("mode ") && said.contains("\nauto "), "{said}");
        assert_eq!(names(place.path()), ["r", "s", "t"]);
        assert_eq!(names(place.spill.path()), [""; 0]);

        // What was saved is the state after the last complete step.
        let report = place.json("r");
        let steps = numbers(&report["runs"][1]["loss"]).len();
        let total = (steps + 1).to_string();
        let resume = ["train", "--resume", "s", "--steps", &total, "--save", "more", "--quiet"];
        assert!(place.run(&resume).status.success());
        place.trained(&["--policy", "plain", "--steps", &total, "--save", "whole", "--quiet"]);
        assert!(place.bytes("more") == place.bytes("whole"), "after {steps} steps");
    }
}

#[test]
fn c26_a_comparison_is_interrupted_in_order() {
    let place = Place::new();
    // Large enough for the chatter of the first tenth to come within a second.
    let child = place.spawn(&["--compare", "--steps", "3000", "--json", "r"]);
    let (status, said) = interrupt(child, &[Signal::INT]);
    assert_eq!(status.code(), Some(130));
    assert!(said.lines().count() >= 5, "{said}");
    assert_eq!(place.json("r")["identical"], true);
}

/// Steps of this model take far longer than the pause between the signals.
#[test]
fn c26_a_second_signal_ends_it_at_once() {
    let place = Place::new();
    let large = ["train", "--layers", "8", "--d-model", "256", "--policy", "plain"];
    let mut command = place.command(&large);
    let child = command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .args(["--steps", "100"])
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(500));
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(20));
    send(&child, Signal::TERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    assert!(output.stdout.is_empty(), "it ended at once, without a table");
}
