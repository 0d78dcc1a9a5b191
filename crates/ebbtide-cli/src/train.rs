//! The course of `ebbtide train`: check, run, report.

use crate::args::TrainArgs;
use crate::check::{self, Plan};
use crate::config::{Mode, Setup};
use crate::failure::Failure;
use crate::files;
use crate::json::{self, Report};
use crate::output::Printer;
use crate::sample;
use crate::signals::Signals;
use crate::table;
use crate::trainer::{Outcome, Trainer};
use crate::worker::Worker;
use crate::{compare, output};

/// Steps of the plain run that a single mode is measured against.
const REFERENCE_STEPS: u64 = 3;

/// Returns the exit status.
pub(crate) fn run(args: TrainArgs) -> Result<u8, Failure> {
    let plan = check::plan(args)?;
    let signals = Signals::catch()?;
    let mut printer = Printer::new(plan.quiet);
    for note in &plan.notes {
        printer.note(note);
    }
    if plan.compare {
        turns(&plan, &signals, &mut printer)
    } else {
        single(&plan, &signals, &mut printer)
    }
}

/// All modes in turns, each in a process of its own.
fn turns(plan: &Plan, signals: &Signals, printer: &mut Printer) -> Result<u8, Failure> {
    let mut workers = Vec::new();
    let policies = ["keep", "swap", "recompute"].map(|policy| Mode::Policy(policy.to_owned()));
    let all = [Mode::Plain].into_iter().chain(policies).chain([plan.setup.mode.clone()]);
    for mode in all {
        workers.push(Worker::start(plan.setup.with_mode(mode))?);
    }
    printer.begin(plan.steps.saturating_mul(workers.len() as u64));
    'steps: for round in 1..=plan.steps {
        for worker in &mut workers {
            // Between any two steps: the modes' counts may then differ by one.
            if signals.caught().is_some() {
                break 'steps;
            }
            step(worker, round, plan.steps, printer).inspect_err(|_| printer.end())?;
        }
    }
    printer.end();
    let outcomes = workers.into_iter().map(Worker::finish).collect::<Result<Vec<_>, _>>()?;
    write_json(plan, &outcomes)?;
    print_table(&outcomes)?;
    Ok(signals.caught().unwrap_or(0))
}

/// One step of a worker.
fn step(worker: &mut Worker, done: u64, total: u64, printer: &mut Printer) -> Result<(), Failure> {
    let (record, notices) = worker.step()?;
    for notice in notices {
        printer.note(&format!("{}: {notice}", worker.mode()));
    }
    printer.step(worker.mode(), done, total, &record);
    Ok(())
}

/// One mode in this process, after a few plain steps in another to measure it against.
fn single(plan: &Plan, signals: &Signals, printer: &mut Printer) -> Result<u8, Failure> {
    // Before the plain steps, so that a tier that can't be opened is found before any work.
    let mut trainer = Trainer::new(plan.setup.clone())?;
    let mut outcomes = Vec::new();
    if plan.setup.mode != Mode::Plain {
        // A model that does not fit without ebbtide is what ebbtide is for.
        match reference(&plan.setup, plan.steps, signals, printer) {
            Ok(outcome) => outcomes.push(outcome),
            Err(failure) => printer.note(&format!(
                "no plain steps to compare with, going on without them: {}",
                failure.message
            )),
        }
        printer.end();
    }
    let ended = train(&mut trainer, plan.steps, signals, printer);
    printer.end();
    if let Err(failure) = ended {
        // What was learnt up to the failed step is worth keeping.
        save(plan, &trainer, printer).unwrap_or_else(|second| output::failure(&second));
        return Err(failure);
    }
    if !trainer.records().is_empty() {
        outcomes.push(trainer.outcome());
    }
    // Every file is tried and the table printed before a failure to write one of them ends it.
    let written = [
        save(plan, &trainer, printer),
        write_json(plan, &outcomes),
        write_timeline(plan, &mut trainer),
    ];
    print_table(&outcomes)?;
    written.into_iter().collect::<Result<(), Failure>>()?;
    if let Some(count) = plan.sample {
        let bytes = sample::generate(trainer.model(), &plan.setup.config, count, signals)?;
        Printer::bytes(&bytes)?;
    }
    Ok(signals.caught().unwrap_or(0))
}

/// A few plain steps on the same data in a process of their own.
fn reference(
    setup: &Setup,
    steps: u64,
    signals: &Signals,
    printer: &mut Printer,
) -> Result<Outcome, Failure> {
    let mut worker = Worker::start(setup.with_mode(Mode::Plain))?;
    let total = steps.min(REFERENCE_STEPS);
    printer.begin(total);
    for done in 1..=total {
        if signals.caught().is_some() {
            break;
        }
        step(&mut worker, done, total, printer)?;
    }
    worker.finish()
}

fn train(
    trainer: &mut Trainer,
    steps: u64,
    signals: &Signals,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let mode = trainer.mode_name().to_owned();
    printer.begin(steps);
    for done in 1..=steps {
        if signals.caught().is_some() {
            break;
        }
        let record = trainer.step().map_err(|failure| failure.within(&mode))?;
        for notice in trainer.notices() {
            printer.note(&notice);
        }
        printer.step(&mode, done, steps, &record);
    }
    Ok(())
}

fn save(plan: &Plan, trainer: &Trainer, printer: &mut Printer) -> Result<(), Failure> {
    let Some(path) = &plan.save else {
        return Ok(());
    };
    if trainer.records().is_empty() {
        printer.note("nothing is saved, since no step was complete");
        return Ok(());
    }
    trainer.save(path)
}

fn write_json(plan: &Plan, outcomes: &[Outcome]) -> Result<(), Failure> {
    let Some(path) = &plan.json else {
        return Ok(());
    };
    let report = Report::new(&plan.setup.config.shape, plan.compare, outcomes);
    files::write(path, &json::text(&report)?)
}

fn write_timeline(plan: &Plan, trainer: &mut Trainer) -> Result<(), Failure> {
    let Some(path) = &plan.timeline else {
        return Ok(());
    };
    let mut text = Vec::new();
    trainer.write_timeline(&mut text).map_err(|error| {
        Failure::run_time(format!("can't write the timeline: {error}"), "please report this")
    })?;
    files::write(path, &text)
}

fn print_table(outcomes: &[Outcome]) -> Result<(), Failure> {
    Printer::data(&format!("{}{}", table::render(outcomes), compare::sentence(outcomes)))
}
