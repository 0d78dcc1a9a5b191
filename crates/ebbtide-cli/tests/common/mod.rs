//! Runs the real binary on models that take milliseconds.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod planned;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A model of two layers that still has every part of a real one.
pub(crate) const TINY: [&str; 10] =
    ["--layers", "2", "--d-model", "16", "--heads", "2", "--seq", "16", "--batch", "2"];

/// A folder to run in, and one for temporary files, both watched for what is left in them.
pub(crate) struct Place {
    pub(crate) work: TempDir,
    pub(crate) spill: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { work: tempfile::tempdir().unwrap(), spill: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.work.path()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
        command.args(args).current_dir(self.work.path()).env("TMPDIR", self.spill.path());
        command.stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// `ebbtide train` on the tiny model.
    pub(crate) fn train(&self, args: &[&str]) -> Output {
        self.run(&[&["train"], &TINY[..], args].concat())
    }

    /// The same, when it has to go well.
    pub(crate) fn trained(&self, args: &[&str]) -> Output {
        let output = self.train(args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(names(self.spill.path()), [""; 0], "left in the spill folder");
        output
    }

    /// The tiny model with output to read while it runs.
    pub(crate) fn spawn(&self, args: &[&str]) -> Child {
        self.command(&[&["train"], &TINY[..], args].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.bytes(name)).unwrap()
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path().join(name)).unwrap()
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What is in a folder, in order.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Keys of an object, in order: they are sorted when the text is read.
pub(crate) fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Numbers of an array of the report.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}
