//! The `ebbtide` command: trains a byte-level language model inside less memory, and says what
//! that cost.
//!
//! | module | what is there |
//! | --- | --- |
//! | [`args`], [`check`], [`check_files`] | the command line, and what is refused before any work |
//! | [`train`] | the course of `ebbtide train` |
//! | [`doctor`] | `ebbtide doctor`: what this machine can do |
//! | [`mod@bench`] | `ebbtide bench`: what the engine and its tiers reach |
//! | [`trace`], [`mod@plan`], [`simulate`] | `ebbtide trace`, `plan` and `simulate`: plans, from files to files |
//! | [`planner_args`] | their command lines |
//! | [`trainer`] | one run in one mode |
//! | [`worker`] | a run in a process of its own: both sides |
//! | [`engine`], [`layers`] | where ebbtide meets the model |
//! | [`planned`], [`figures`], [`wish`] | a run inside a budget: planner, what it says, its settings |
//! | [`record`] | a trace of the model |
//! | [`model`], [`ops`], [`params`], [`optim`] | the model and its optimizer |
//! | [`data`], [`documents`], [`sample`] | text in, text out |
//! | [`state`], [`tensors`], [`files`] | saved runs; files that are written whole or not at all |
//! | [`memory`], [`curve`], [`signals`] | what the system tells |
//! | [`compare`], [`table`], [`columns`], [`json`], [`output`] | what the user gets to see |
//! | [`fuzz`] | what the fuzz targets call |
//!
//! A command is a variant of [`args::Command`] and a function `run` in the module of its name. This
//! library is for the binary and the fuzz targets; its only promise is the command.
#![forbid(unsafe_code)]
// The map above is for those who read the code; nothing but `main` is public.
#![allow(rustdoc::private_intra_doc_links)]

mod args;
mod bench;
mod check;
mod check_files;
mod columns;
mod compare;
mod config;
mod curve;
mod data;
mod doctor;
mod documents;
mod engine;
mod failure;
mod figures;
mod files;
#[doc(hidden)]
pub mod fuzz;
mod json;
mod layers;
mod memory;
mod model;
mod ops;
mod optim;
mod output;
mod params;
mod plan;
mod planned;
mod planner_args;
mod record;
mod sample;
mod signals;
mod simulate;
mod state;
mod table;
mod tensors;
mod trace;
mod train;
mod trainer;
mod usage;
mod wish;
mod worker;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::Failure;

/// Runs the command line of this process and returns its exit status.
pub fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(cli) => run(cli.command),
        Err(error) => usage::answer(&error),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            output::failure(&failure);
            ExitCode::from(failure.exit_status())
        }
    }
}

fn run(command: Command) -> Result<u8, Failure> {
    signals::outlive_file_limit()?;
    match command {
        Command::Train(args) => train::run(*args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Worker { parent } => worker::serve(parent).map(|()| 0),
    }
}
