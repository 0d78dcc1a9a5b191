//! `ebbtide simulate`: what a plan, changed by hand or not, comes to on a trace.

use ebbtide_core::size;
use ebbtide_plan::{PlanFile, Prediction, predict};

use crate::columns::time;
use crate::failure::Failure;
use crate::files;
use crate::json;
use crate::output::{self, Printer};
use crate::plan::fates;
use crate::plan::inputs::{self, Subject};
use crate::plan::report::SimulateReport;
use crate::plan::summary::{self, row};
use crate::plan::table::{self, Waits};
use crate::planner_args::SimulateArgs;

/// Returns the exit status.
pub(crate) fn run(args: &SimulateArgs) -> Result<u8, Failure> {
    let read = [("the trace", args.trace.as_path()), ("the plan", args.plan.as_path())];
    inputs::apart(&read, &[("--json", args.json.as_deref())])?;
    let subject = Subject::read(&args.trace, &args.what_if)?;
    let model = &subject.model;
    let file = inputs::read_plan(&args.plan)?;
    let plan = file.plan(model).map_err(|error| inputs::bad_plan(&args.plan, &error))?;
    let misfit = |error: &ebbtide_plan::Misfit| {
        Failure::bad_input(format!("{}: {error}", args.plan.display()), error.hint())
    };
    let prediction = predict(model, &plan, file.memory_bytes()).map_err(|error| misfit(&error))?;
    let layers = fates::of(model, &plan, &prediction).map_err(|error| misfit(&error))?;
    if let Some(path) = &args.json {
        let of = (model, subject.sha256.as_str());
        let report = SimulateReport::new(of, file.trace_sha256(), &prediction, &layers);
        files::write(path, &json::text(&report)?)?;
    }
    if file.trace_sha256() != subject.sha256 {
        output::note("the plan was made from another trace; these figures are for this one");
    }
    let table = table::render(&layers, model.tiers.len(), Waits::Shown);
    let summary = summary::render(model, &prediction);
    Printer::data(&format!("{table}\n{summary}{}", expected(&file, &prediction)))?;
    Ok(0)
}

/// What the file says was predicted, where that is not what was found.
fn expected(file: &PlanFile, found: &Prediction) -> String {
    let was = file.predicted();
    if (was.step_ns, was.peak_bytes) == (found.step_ns, found.peak_bytes) {
        return String::new();
    }
    let (step, peak) = (time(was.step_ns), size::format(was.peak_bytes));
    row("in the file", &format!("step {step}, peak {peak}: as predicted when it was made"))
}
