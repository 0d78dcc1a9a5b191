//! `ebbtide trace`: what one step of a model takes, as a file that plans are made from.

use ebbtide_plan::{Trace, synthetic};

use crate::args::MemoryArgs;
use crate::check_files;
use crate::failure::Failure;
use crate::files;
use crate::output::Printer;
use crate::planner_args::TraceArgs;
use crate::record::record;

/// Most storages of all layers: more is no model, and would take memory that nobody meant.
const MOST: usize = 1 << 20;

/// Returns the exit status.
pub(crate) fn run(args: TraceArgs) -> Result<u8, Failure> {
    if let Some(path) = &args.output {
        check_files::target("-o", path)?;
    }
    let output = args.output.clone();
    let trace = match args.synthetic {
        Some(layers) => made_up(layers, args.storages.unwrap_or(8), args.seed.unwrap_or(1))?,
        None => recorded(args)?,
    };
    match &output {
        Some(path) => files::write(path, trace.to_json().as_bytes())?,
        None => Printer::data(&trace.to_json())?,
    }
    Ok(0)
}

fn recorded(args: TraceArgs) -> Result<Trace, Failure> {
    let TraceArgs { model, tier, spill_dir, throttle_gbps, .. } = args;
    record(model, MemoryArgs { tier, spill_dir, throttle_gbps, ..MemoryArgs::default() })
}

fn made_up(layers: usize, storages: usize, seed: u64) -> Result<Trace, Failure> {
    if layers == 0 {
        let message = "--synthetic 0: there has to be at least one layer";
        return Err(Failure::bad_input(message, "write it like --synthetic 12"));
    }
    let hint = "give a smaller --synthetic or --storages";
    // An output and a dead storage come on top.
    if storages.saturating_add(2).saturating_mul(layers) > MOST {
        let message = format!("{layers} layers of {storages} storages are more than {MOST} in all");
        return Err(Failure::bad_input(message, hint));
    }
    synthetic::trace(layers, storages, seed)
        .map_err(|error| Failure::bad_input(format!("no such model: {error}"), hint))
}
