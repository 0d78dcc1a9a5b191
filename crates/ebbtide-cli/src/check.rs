//! Everything that is refused before any work: a run that starts has settings that make sense and
//! that have an effect.

use std::path::PathBuf;

use ebbtide_core::{Policies, Policy, size};
use ebbtide_plan::PlanFile;

use crate::args::{MemoryArgs, ModelArgs, Precision, TierKind, TrainArgs};
use crate::check_files;
use crate::config::{Config, Mode, Setup, Shape, Tier};
use crate::data::Corpus;
use crate::failure::Failure;
use crate::params;
use crate::state::{Header, Saved};
use crate::wish;

/// What is to be done. All of it has been checked.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) setup: Setup,
    pub(crate) compare: bool,
    /// Steps to run now; those before a resumed state are not among them.
    pub(crate) steps: u64,
    pub(crate) sample: Option<usize>,
    pub(crate) save: Option<PathBuf>,
    pub(crate) json: Option<PathBuf>,
    pub(crate) timeline: Option<PathBuf>,
    pub(crate) quiet: bool,
    /// What the user should know before it starts.
    pub(crate) notes: Vec<String>,
}

/// Turns the command line into a plan or says what is wrong with it.
pub(crate) fn plan(args: TrainArgs) -> Result<Plan, Failure> {
    conflicts(&args)?;
    let TrainArgs { model, training, memory, output } = args;
    let saved = match &training.resume {
        Some(path) => Some(Saved::open(path)?.header),
        None => None,
    };
    let shape = shape(&model, saved.as_ref())?;
    let lr = rate(training.lr.or(saved.as_ref().map(|s| s.lr)).unwrap_or(3e-4))?;
    let seed = agreed("--seed", training.seed, saved.as_ref().map(|s| s.seed), 1)?;
    let steps = remaining(training.steps, saved.as_ref())?;
    if output.sample == Some(0) {
        return Err(without_effect("--sample 0 prints nothing"));
    }
    let mode = mode(&memory, &shape)?;
    utf8("--plan", memory.plan.iter())?;
    utf8("--text", training.text.iter())?;
    utf8("--spill-dir", memory.spill_dir.iter())?;
    let tier = tier(&memory, &mode, &shape, output.timeline.is_some())?;
    check_files::inputs(&training.text)?;
    check_files::outputs(&training, &output)?;
    if swaps(&mode, &shape) && tier.kind == TierKind::File {
        check_files::spill_folder("--spill-dir", &tier.dir)?;
    }
    let corpus = Corpus::load(&training.text, shape.seq)?;
    let notes = notes(saved.as_ref(), &corpus, tier.kind);
    let config = Config { shape, seed, lr, text: training.text, resume: training.resume };
    Ok(Plan {
        setup: Setup { config, mode, tier },
        compare: memory.compare,
        steps,
        sample: output.sample,
        save: training.save,
        json: output.json,
        timeline: output.timeline,
        quiet: output.quiet,
        notes,
    })
}

/// `--compare` runs five trainings of its own; what belongs to a single one has no place there.
fn conflicts(args: &TrainArgs) -> Result<(), Failure> {
    if !args.memory.compare {
        return Ok(());
    }
    let given = [
        ("--policy", args.memory.policy.is_some()),
        ("--plan", args.memory.plan.is_some()),
        ("--save", args.training.save.is_some()),
        ("--resume", args.training.resume.is_some()),
        ("--sample", args.output.sample.is_some()),
        ("--timeline", args.output.timeline.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(Failure::bad_input(
            format!(
                "{flag} can't be used with --compare, which runs five trainings from the start"
            ),
            format!("leave out {flag} or --compare"),
        )),
        None => Ok(()),
    }
}

/// These paths travel to other processes as text.
fn utf8<'p>(flag: &str, paths: impl Iterator<Item = &'p PathBuf>) -> Result<(), Failure> {
    match paths.into_iter().find(|path| path.to_str().is_none()) {
        Some(path) => Err(Failure::bad_input(
            format!("{flag} {}: the path is not UTF-8", path.display()),
            "rename it, or reach it through a link with another name",
        )),
        None => Ok(()),
    }
}

fn without_effect(message: &str) -> Failure {
    Failure::bad_input(message, "leave it out, or change what it depends on")
}

/// A value from the command line, else from the saved run, else the default. Two that contradict
/// each other are an error.
fn agreed<T>(flag: &str, given: Option<T>, saved: Option<T>, default: T) -> Result<T, Failure>
where
    T: PartialEq + std::fmt::Display,
{
    match (given, saved) {
        (Some(given), Some(saved)) if given != saved => Err(Failure::bad_input(
            format!("{flag} {given} contradicts the saved run, which has {saved}"),
            format!("leave out {flag} to take it from the file"),
        )),
        (given, saved) => Ok(given.or(saved).unwrap_or(default)),
    }
}

fn shape(args: &ModelArgs, saved: Option<&Header>) -> Result<Shape, Failure> {
    let old = saved.map(|saved| &saved.shape);
    let number = |flag: &str, given, old: Option<usize>, default| {
        let value = agreed(flag, given, old, default)?;
        if value == 0 {
            return Err(Failure::bad_input(
                format!("{flag} 0: there has to be at least one"),
                format!("the default is {default}"),
            ));
        }
        Ok(value)
    };
    let precision = |p: Precision| p.name();
    agreed("--dtype", args.dtype.map(precision), old.map(|s| precision(s.dtype)), "")?;
    let shape = Shape {
        layers: number("--layers", args.layers, old.map(|s| s.layers), 12)?,
        d_model: number("--d-model", args.d_model, old.map(|s| s.d_model), 256)?,
        heads: number("--heads", args.heads, old.map(|s| s.heads), 8)?,
        seq: number("--seq", args.seq, old.map(|s| s.seq), 256)?,
        batch: number("--batch", args.batch, old.map(|s| s.batch), 4)?,
        dtype: args.dtype.or(old.map(|s| s.dtype)).unwrap_or(Precision::F32),
    };
    if !shape.d_model.is_multiple_of(shape.heads) {
        return Err(Failure::bad_input(
            format!("--heads {} does not divide --d-model {}", shape.heads, shape.d_model),
            "choose a width that is a multiple of the number of heads",
        ));
    }
    fits_machine(&shape)?;
    Ok(shape)
}

/// Refuses what no policy could fit: weights, gradients and moments, and the attention scores of
/// one layer, are always in memory.
fn fits_machine(shape: &Shape) -> Result<(), Failure> {
    let machine = ebbtide_store::memory_limit().unwrap_or(u64::MAX);
    let weight = shape.candle_dtype().size_in_bytes();
    let needed = params::count(shape).and_then(|count| count.checked_mul(2 * weight + 8)).and_then(
        |state| {
            let sequences = shape.batch.checked_mul(shape.heads)?.checked_mul(4)?;
            let scores = shape.seq.checked_mul(shape.seq)?.checked_mul(sequences)?;
            u64::try_from(state.checked_add(scores)?).ok()
        },
    );
    match needed {
        Some(needed) if needed <= machine => Ok(()),
        needed => Err(Failure::bad_input(
            format!(
                "a model of this size needs {}, whatever the policy, and this machine has {}",
                needed.map_or("more than can be counted".to_owned(), size::format),
                size::format(machine),
            ),
            "make --layers, --d-model, --seq or --batch smaller",
        )),
    }
}

fn rate(lr: f64) -> Result<f64, Failure> {
    if lr.is_finite() && lr > 0. {
        return Ok(lr);
    }
    let message = format!("--lr {lr}: a learning rate is finite and above zero");
    Err(Failure::bad_input(message, "the default is 3e-4"))
}

/// `--steps` counts from the start of the training.
fn remaining(steps: u64, saved: Option<&Header>) -> Result<u64, Failure> {
    if steps == 0 {
        let message = "--steps 0: there has to be at least one";
        return Err(Failure::bad_input(message, "the default is 40"));
    }
    let done = saved.map_or(0, |saved| saved.step);
    match steps.checked_sub(done) {
        Some(left) if left > 0 => Ok(left),
        _ => Err(Failure::bad_input(
            format!("--steps {steps}: the saved run is already at step {done}"),
            format!("--steps is the total; give more than {done}"),
        )),
    }
}

fn mode(args: &MemoryArgs, shape: &Shape) -> Result<Mode, Failure> {
    if let Some(path) = &args.plan {
        // Whether it fits the model is known when a step has been traced.
        PlanFile::read(path)
            .map_err(|error| Failure::bad_input(error.to_string(), error.hint().to_owned()))?;
        return Ok(Mode::Plan(path.clone()));
    }
    let Some(text) = args.policy.as_deref() else {
        wish::memory(args.memory.as_deref())?;
        return Ok(Mode::Auto(args.memory.clone()));
    };
    policy(text, shape)
}

fn policy(text: &str, shape: &Shape) -> Result<Mode, Failure> {
    if text == "plain" {
        return Ok(Mode::Plain);
    }
    let policies = Policies::parse(text, shape.layers).map_err(|error| {
        // The engine knows nothing of plain, which is the absence of an engine.
        let failure = Failure::from(error);
        Failure { hint: failure.hint.replace("write keep", "write plain, keep"), ..failure }
    })?;
    let nothing_moves = policies.iter().all(|policy| policy == Policy::Keep);
    if nothing_moves && text != "keep" && !text.contains(':') {
        return Err(Failure::bad_input(
            format!("policy `{text}` has no effect with one layer: the last layer is always kept"),
            format!("name the layer (--policy 0:{text}), or use more layers or --policy keep"),
        ));
    }
    Ok(Mode::Policy(text.to_owned()))
}

fn swaps(mode: &Mode, shape: &Shape) -> bool {
    match mode {
        Mode::Plain => false,
        Mode::Policy(text) => Policies::parse(text, shape.layers)
            .is_ok_and(|all| all.iter().any(|policy| policy == Policy::Swap)),
        Mode::Auto(_) | Mode::Only { .. } | Mode::Plan(_) => true,
    }
}

fn tier(args: &MemoryArgs, mode: &Mode, shape: &Shape, timeline: bool) -> Result<Tier, Failure> {
    let given = [
        ("--tier", args.tier.is_some()),
        ("--spill-dir", args.spill_dir.is_some()),
        ("--host-bytes", args.host_bytes.is_some()),
        ("--prefetch", args.prefetch.is_some()),
        ("--throttle-gbps", args.throttle_gbps.is_some()),
    ];
    let flag = given.into_iter().find_map(|(flag, given)| given.then_some(flag));
    if let Some(flag) = flag.filter(|_| !swaps(mode, shape)) {
        let message = format!("{flag} has no effect: policy `{}` swaps no layer", mode.name());
        return Err(without_effect(&message));
    }
    if args.prefetch.is_some() && !matches!(mode, Mode::Policy(_)) && !args.compare {
        return Err(without_effect(
            "--prefetch has no effect under a plan, which says what loads when",
        ));
    }
    let kind = args.tier.unwrap_or(TierKind::File);
    if kind == TierKind::Host && args.spill_dir.is_some() {
        return Err(without_effect("--spill-dir has no effect with --tier host"));
    }
    if kind == TierKind::Host && args.throttle_gbps.is_some() {
        return Err(without_effect("--throttle-gbps has no effect with --tier host"));
    }
    let throttle = args.throttle_gbps.as_deref().map(wish::throttle).transpose()?;
    let host_bytes = args.host_bytes.as_deref().map(size::parse).transpose()?;
    if host_bytes == Some(0) {
        let hint = "leave it out, or give a size such as 512MiB";
        return Err(Failure::bad_input("--host-bytes 0: a tier can't work without memory", hint));
    }
    let dir = args.spill_dir.clone().unwrap_or_else(ebbtide_store::spill_dir);
    Ok(Tier { kind, dir, host_bytes, prefetch: args.prefetch, timeline, throttle })
}

fn notes(saved: Option<&Header>, corpus: &Corpus, tier: TierKind) -> Vec<String> {
    let mut notes = Vec::new();
    if saved.is_some_and(|saved| saved.text != corpus.fingerprint()) {
        let note = "the text is not the one that the saved run was trained on, so this run is not \
            the one that would have followed";
        notes.push(note.to_owned());
    }
    if saved.is_some_and(|saved| !saved.is_checked()) {
        let note = "the saved run has no checksum, since an older ebbtide wrote it: damage to its \
            numbers would not be seen";
        notes.push(note.to_owned());
    }
    if tier == TierKind::Host {
        notes.push(
            "--tier host saves nothing on a CPU, where it is the same RAM; it is for tests"
                .to_owned(),
        );
    }
    notes
}
