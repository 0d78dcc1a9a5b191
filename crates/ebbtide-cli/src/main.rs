//! The `ebbtide` command. All of it is in the library, so that fuzzing can reach the parsers.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ebbtide_cli::main()
}
