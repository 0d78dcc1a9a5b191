//! `ebbtide doctor`: what this machine can do for swapping. It looks and measures; nothing is
//! trained, and nothing is left behind.

mod advice;
mod cuda;
mod findings;
mod folder;
mod memory;
mod table;
mod wear;

use crate::args::MachineArgs;
use crate::check_files;
use crate::failure::Failure;
use crate::files;
use crate::json;
use crate::output::{self, Printer};
use findings::Findings;

/// Returns the exit status: success if it could look, whatever it found.
pub(crate) fn run(args: MachineArgs) -> Result<u8, Failure> {
    let dir = args.dir.unwrap_or_else(ebbtide_store::spill_dir);
    check_files::spill_folder("--dir", &dir)?;
    if let Some(path) = &args.json {
        check_files::target("--json", path)?;
    }
    let findings = Findings::gather(&dir, args.quick)?;
    let advice = advice::of(&findings);
    if let Some(path) = &args.json {
        files::write(path, &json::text(&findings.report(&advice))?)?;
    }
    Printer::data(&table::render(&findings))?;
    for line in &advice {
        output::note(line);
    }
    Ok(0)
}
