//! `ebbtide plan`: from a trace and a budget to a plan; what is different between two of them; how
//! the time of a step depends on the budget.

mod curve;
pub(crate) mod fates;
pub(crate) mod inputs;
mod picture;
pub(crate) mod report;
pub(crate) mod summary;
mod svg;
pub(crate) mod table;

use std::path::Path;

use ebbtide_core::size;
use ebbtide_plan::{MemoryBudget, PlanFile, Planned, Range, Solver};

use crate::columns::{shown, time};
use crate::failure::Failure;
use crate::files;
use crate::json;
use crate::output::Printer;
use crate::planner_args::{PlanArgs, SolverKind};

use inputs::Subject;
use report::PlanReport;
use summary::row;
use table::Waits;

/// Returns the exit status.
pub(crate) fn run(args: &PlanArgs) -> Result<u8, Failure> {
    if let [a, b] = &args.diff[..] {
        return diff(a, b).map(|()| 0);
    }
    let Some(trace) = &args.trace else {
        return Err(Failure::bad_input("no trace was given", "`ebbtide trace` writes one"));
    };
    // A wrong budget is told before a long file is read.
    let budget = args.memory.as_deref().map(MemoryBudget::parse).transpose()?;
    let written = [
        ("-o", args.output.as_deref()),
        ("--json", args.json.as_deref()),
        ("--svg", args.svg.as_deref()),
    ];
    inputs::apart(&[("the trace", trace)], &written)?;
    let subject = Subject::read(trace, &args.what_if)?;
    match budget {
        Some(budget) => one(&subject, budget, args)?,
        None => curve::run(&subject, args.json.as_deref(), args.svg.as_deref())?,
    }
    Ok(0)
}

fn one(subject: &Subject, budget: MemoryBudget, args: &PlanArgs) -> Result<(), Failure> {
    let model = &subject.model;
    let range = ebbtide_plan::range(model);
    let solver = match args.solver {
        SolverKind::Fast => Solver::Fast,
        SolverKind::Exact => Solver::Exact,
    };
    let planned = ebbtide_plan::plan(model, range.bytes(budget), solver);
    let planned = planned.map_err(|none| Failure::bad_input(none.to_string(), none.hint()))?;
    let layers = fates::of(model, &planned.plan, &planned.prediction)
        .map_err(|error| Failure::run_time(error.to_string(), error.hint()))?;
    if let Some(path) = &args.output {
        let file = PlanFile::new(model, subject.sha256.clone(), &planned);
        files::write(path, file.to_json().as_bytes())?;
    }
    if let Some(path) = &args.json {
        let of = (model, subject.sha256.as_str());
        let report = PlanReport::new(of, &range, args.solver.name(), &planned, &layers);
        files::write(path, &json::text(&report)?)?;
    }
    let table = table::render(&layers, model.tiers.len(), Waits::Left);
    let summary = summary::render(model, &planned.prediction);
    let (budgets, search) = (budgets(&range, planned.budget), search(&planned));
    Printer::data(&format!("{table}\n{summary}{budgets}{search}"))
}

/// Where the budget lies among those that make a difference.
fn budgets(range: &Range, budget: u64) -> String {
    let mut text = format!(
        "{} is the least found, {} keep all that backward reads, plain training needs {}",
        size::format_up(range.least),
        size::format_up(range.most),
        size::format_up(range.plain),
    );
    if budget >= range.most {
        text += ": the budget needs no plan, everything is kept";
    }
    row("budgets", &text)
}

fn search(planned: &Planned) -> String {
    let plays = match planned.plays {
        1 => "1 plan".to_owned(),
        more => format!("{more} plans"),
    };
    let bound = time(planned.bound_ns);
    let proof = if planned.proven { "proved to be within 0.2 % of the best" } else { "not proved" };
    row("search", &format!("{plays} played; none takes less than {bound}; {proof}"))
}

/// Prints what is different; nothing if nothing is.
fn diff(a: &Path, b: &Path) -> Result<(), Failure> {
    let (a, b) = (inputs::read_plan(a)?, inputs::read_plan(b)?);
    let lines = ebbtide_plan::diff(&a, &b);
    Printer::data(&lines.iter().map(|line| shown(line) + "\n").collect::<String>())
}
