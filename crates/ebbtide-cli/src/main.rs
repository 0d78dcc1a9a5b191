//! The `ebbtide` command: trains a byte-level language model inside less memory, and says what
//! that cost.
//!
//! | module | what is there |
//! | --- | --- |
//! | [`args`], [`check`], [`check_files`] | the command line, and what is refused before any work |
//! | [`train`] | the course of `ebbtide train` |
//! | [`trainer`] | one run in one mode |
//! | [`worker`] | a run in a process of its own |
//! | [`engine`], [`layers`] | where ebbtide meets the model |
//! | [`model`], [`ops`], [`params`], [`optim`] | the model and its optimizer |
//! | [`data`], [`documents`], [`sample`] | text in, text out |
//! | [`state`], [`files`] | saved runs; files that are written whole or not at all |
//! | [`memory`], [`curve`], [`signals`] | what the system tells |
//! | [`compare`], [`table`], [`json`], [`output`] | what the user gets to see |
#![forbid(unsafe_code)]

mod args;
mod check;
mod check_files;
mod compare;
mod config;
mod curve;
mod data;
mod documents;
mod engine;
mod failure;
mod files;
mod json;
mod layers;
mod memory;
mod model;
mod ops;
mod optim;
mod output;
mod params;
mod sample;
mod signals;
mod state;
mod table;
mod train;
mod trainer;
mod usage;
mod worker;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
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
    match command {
        Command::Train(args) => train::run(*args),
        Command::Worker { parent } => worker::serve(parent).map(|()| 0),
    }
}
