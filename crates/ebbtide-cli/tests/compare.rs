//! `--compare`: five modes in turns, each in a process of its own.

mod common;

use std::time::{Duration, Instant};

use common::{Place, names, numbers, text};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn five_modes_give_the_same_and_say_so() {
    for dtype in ["f32", "bf16"] {
        let place = Place::new();
        let args = ["--compare", "--steps", "3", "--dtype", dtype, "--json", "r"];
        let output = place.trained(&args);
        let report = place.json("r");
        assert_eq!(report["identical"], true);
        let runs = report["runs"].as_array().unwrap();
        let modes: Vec<_> = runs.iter().map(|run| run["mode"].as_str().unwrap()).collect();
        assert_eq!(modes, ["plain", "keep", "swap", "recompute", "auto"]);
        for run in runs {
            assert_eq!(run["steps"], 3);
            assert_eq!(run["gradients_xxh3"], runs[0]["gradients_xxh3"]);
            assert_eq!(numbers(&run["loss"]), numbers(&runs[0]["loss"]));
        }
        let said = text(&output.stdout);
        assert_eq!(said.lines().last(), Some("losses and gradients: bit-identical"));
        assert_eq!(said.lines().count(), 7, "head, five rows, one sentence:\n{said}");
    }
}

/// Processes that are alive and have `parent` as theirs.
fn children(parent: u32) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| status(*pid).is_some_and(|(_, its)| its == parent)).collect()
}

/// State and parent of a process, from `pid (name) state parent ..`.
fn status(pid: i32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what} took too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// C22: nothing outlives a parent that is killed outright, and nothing is left on the disk.
#[test]
fn c22_workers_end_with_a_killed_parent() {
    let place = Place::new();
    let mut parent = place.spawn(&["--compare", "--steps", "1000000"]);
    let mut workers = Vec::new();
    wait_until("the start of five workers", || {
        workers = children(parent.id());
        workers.len() == 5
    });
    // Into the steps.
    std::thread::sleep(Duration::from_millis(300));
    parent.kill().unwrap();
    parent.wait().unwrap();
    // A zombie has ended; who reaps orphans is not ours to decide.
    let gone = |pid: &i32| status(*pid).is_none_or(|(state, _)| state == "Z");
    wait_until("the end of the workers", || workers.iter().all(gone));
    assert_eq!(names(place.spill.path()), [""; 0], "a spill file was left");
}

/// A worker that dies takes the comparison with it, and the error says which.
#[test]
fn a_killed_worker_is_an_error_that_names_its_mode() {
    let place = Place::new();
    let parent = place.spawn(&["--compare", "--steps", "1000000", "--json", "r"]);
    let mut workers = Vec::new();
    wait_until("the start of five workers", || {
        workers = children(parent.id());
        workers.len() == 5
    });
    std::thread::sleep(Duration::from_millis(100));
    let last = workers.iter().max().copied().and_then(Pid::from_raw).unwrap();
    kill_process(last, Signal::KILL).unwrap();
    let output = parent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("\nerror: the process of ") || said.starts_with("error: the process of ")
    );
    assert!(said.contains("ended in mid-run"), "{said}");
    assert_eq!(names(place.path()), [""; 0]);
}

/// A worker serves the process that started it and nobody else.
#[test]
fn a_worker_without_its_parent_ends_at_once() {
    let place = Place::new();
    let output = place.run(&["worker", "--parent", "1"]);
    assert!(output.status.success() && output.stdout.is_empty());
}
