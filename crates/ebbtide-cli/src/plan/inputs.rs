//! What the commands that plan are given: traces, plans, another machine, files to write.

use std::path::{Path, PathBuf};

use ebbtide_plan::{FileError, Model, PlanError, PlanFile, Trace, TraceError, WhatIf};

use crate::check_files;
use crate::failure::Failure;
use crate::files;
use crate::planner_args::WhatIfArgs;

/// A trace on the machine that was asked for.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) model: Model,
    /// Of the trace, whatever the machine.
    pub(crate) sha256: String,
}

impl Subject {
    pub(crate) fn read(path: &Path, args: &WhatIfArgs) -> Result<Self, Failure> {
        let trace = Trace::read(path).map_err(|error| bad_trace(path, &error))?;
        let traced = trace.model();
        let speed = args.d2h_gbps.map(|_| "--d2h-gbps").or(args.h2d_gbps.map(|_| "--h2d-gbps"));
        if let (Some(flag), true) = (speed, traced.tiers.is_empty()) {
            let message = format!("{flag} has no effect: the trace has no tier");
            return Err(Failure::bad_input(message, format!("leave out {flag}")));
        }
        let what_if = WhatIf {
            d2h_gbps: args.d2h_gbps,
            h2d_gbps: args.h2d_gbps,
            compute_scale: args.compute_scale,
            tier: args.tier.clone(),
        };
        let model = what_if.apply(&traced);
        let model = model.map_err(|error| Failure::bad_input(error.to_string(), error.hint()))?;
        Ok(Self { model, sha256: trace.sha256() })
    }
}

pub(crate) fn read_plan(path: &Path) -> Result<PlanFile, Failure> {
    PlanFile::read(path).map_err(|error| bad_plan(path, &error))
}

fn bad_trace(path: &Path, error: &TraceError) -> Failure {
    let message = match error {
        TraceError::File(file) => unreadable("trace", path, file),
        TraceError::Wrong { .. } => format!("{}: {error}", path.display()),
    };
    Failure::bad_input(short(&message), error.hint())
}

pub(crate) fn bad_plan(path: &Path, error: &PlanError) -> Failure {
    let message = match error {
        PlanError::File(file) => unreadable("plan", path, file),
        PlanError::Bad(_) => format!("{}: {error}", path.display()),
    };
    Failure::bad_input(short(&message), error.hint())
}

fn unreadable(what: &str, path: &Path, error: &FileError) -> String {
    match error {
        // These name the file themselves.
        FileError::Io { .. } | FileError::TooLong { .. } => {
            format!("can't read the {what}: {error}")
        }
        _ => format!("{}: {error}", path.display()),
    }
}

/// A message that quotes a file may be as long as the file.
fn short(message: &str) -> String {
    const LONGEST: usize = 400;
    match message.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} …", &message[..end]),
        None => message.to_owned(),
    }
}

/// The files that are written have to be writable, and apart from one another and from those that
/// are read.
pub(crate) fn apart(
    read: &[(&str, &Path)],
    written: &[(&str, Option<&Path>)],
) -> Result<(), Failure> {
    let mut taken: Vec<(&str, PathBuf)> =
        read.iter().map(|&(name, path)| (name, files::resolved(path))).collect();
    for &(flag, path) in written {
        let Some(path) = path else { continue };
        check_files::target(flag, path)?;
        let file = files::resolved(path);
        if let Some((other, _)) = taken.iter().find(|(_, other)| *other == file) {
            return Err(Failure::bad_input(
                format!("{flag} and {other} name the same file {}", path.display()),
                format!("name another file with {flag}"),
            ));
        }
        taken.push((flag, file));
    }
    Ok(())
}
