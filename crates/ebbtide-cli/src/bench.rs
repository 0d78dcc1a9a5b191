//! `ebbtide bench`: what the engine and its tiers reach on this machine, beside what they should.
//!
//! What is compared takes turns within one run, and figures are medians; an absolute bandwidth says
//! more about the machine at that moment than about ebbtide.

mod measure;
mod noop;
mod ram;

use std::path::Path;

use ebbtide_store::measure::{TierReport, file_tier};
use serde::Serialize;

use crate::args::MachineArgs;
use crate::check_files;
use crate::failure::Failure;
use crate::files;
use crate::json;
use crate::output::Printer;

/// Of one small storage.
const STORAGE_BYTES: u64 = 4096;
/// Small storages of one step.
const STORAGES: usize = 10_000;
/// Version of the JSON.
const SCHEMA: u32 = 1;

/// One figure and what it should be.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    value: f64,
    unit: &'static str,
    /// At most or at least, and how much.
    bound: Bound,
    met: bool,
    /// The figures behind it.
    detail: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    fn new(what: &str, value: f64, unit: &'static str, bound: Bound, detail: String) -> Self {
        let met = match bound {
            Bound::AtMost(most) => value <= most,
            Bound::AtLeast(least) => value >= least,
        };
        Self { what: what.into(), value, unit, bound, met, detail }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    command: &'static str,
    rows: Vec<Row>,
}

/// Measures everything. Returns the exit status: success if it could measure, whatever it found.
pub(crate) fn run(args: MachineArgs) -> Result<u8, Failure> {
    let dir = args.dir.unwrap_or_else(ebbtide_store::spill_dir);
    check_files::spill_folder("--dir", &dir)?;
    if let Some(path) = &args.json {
        check_files::target("--json", path)?;
    }
    let rounds = if args.quick { 5 } else { 31 };
    let mut rows = engine_rows(rounds)?;
    rows.extend(tier_rows(&dir, args.quick)?);
    let report = Report { schema: SCHEMA, command: "bench", rows };
    if let Some(path) = &args.json {
        files::write(path, &json::text(&report)?)?;
    }
    Printer::data(&table(&report.rows))?;
    Ok(0)
}

fn engine_rows(rounds: usize) -> Result<Vec<Row>, Failure> {
    let books = measure::bookkeeping(rounds)?;
    let packed = measure::packed(rounds)?;
    let pool = measure::pool()?;
    let ratio = packed.packed_gbps / packed.large_gbps;
    let detail = format!("{:.2} of {:.2} GB/s", packed.packed_gbps, packed.large_gbps);
    Ok(vec![
        Row::new(
            "bookkeeping of a storage and step",
            books.ns,
            "ns",
            Bound::AtMost(400.0),
            format!("{STORAGES} storages of 4 KiB, out and home"),
        ),
        Row::new(
            "memory allocated after the first step",
            books.allocated as f64,
            "bytes",
            Bound::AtMost(0.0),
            "at any moment of a step, over what was there before".into(),
        ),
        Row::new("packed out and home, of one large copy", ratio, "x", Bound::AtLeast(0.9), detail),
        Row::new(
            "host memory held, of 1.1 GiB asked for",
            pool.held / pool.asked,
            "x",
            Bound::AtMost(1.125),
            format!("{:.0} of {:.0} bytes", pool.held, pool.asked),
        ),
    ])
}

fn tier_rows(dir: &Path, quick: bool) -> Result<Vec<Row>, Failure> {
    let (bytes, rounds) = if quick { (64 << 20, 3) } else { (512 << 20, 7) };
    Ok(of_plain(&file_tier(dir, bytes, 8 << 20, rounds)?))
}

/// The better way of doing I/O counts: it is the one that the tier chooses.
fn of_plain(report: &TierReport) -> Vec<Row> {
    let worse =
        |tier: &ebbtide_store::measure::TierRates| tier.of_plain.write.min(tier.of_plain.read);
    let best = report.tiers.iter().max_by(|a, b| worse(a).total_cmp(&worse(b)));
    let Some(best) = best else { return Vec::new() };
    let row = |what: &str, ratio, tier: f64, plain: f64| {
        let detail = format!("{tier:.2} of {plain:.2} GB/s, blocks of 8 MiB, {:?}", best.kind);
        Row::new(what, ratio, "x", Bound::AtLeast(0.95), detail)
    };
    let (plain, gbps, of) = (report.plain_gbps, best.gbps, best.of_plain);
    vec![
        row("file tier writes, of a plain direct loop", of.write, gbps.write, plain.write),
        row("file tier reads, of a plain direct loop", of.read, gbps.read, plain.read),
    ]
}

fn table(rows: &[Row]) -> String {
    let line = |row: &Row| {
        let bound = match row.bound {
            Bound::AtMost(most) => format!("at most {most}"),
            Bound::AtLeast(least) => format!("at least {least}"),
        };
        let (what, unit, detail) = (&row.what, row.unit, &row.detail);
        let met = if row.met { "met" } else { "NOT MET" };
        let digits = if unit == "x" { 3 } else { 0 };
        let value = format!("{:.digits$} {unit}", row.value);
        format!("{what:<42} {value:>11}   {bound:<14} {met:<8} {detail}\n")
    };
    rows.iter().map(line).collect()
}
