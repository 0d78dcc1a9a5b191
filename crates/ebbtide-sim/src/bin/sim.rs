//! Plays the engine in simulated worlds: `sim --seeds N [--first SEED] [--with FEATURE]… [--verbose]`.

use std::io::{self, Write};
use std::process::ExitCode;

use ebbtide_sim::play::{Feature, sweep};

struct Arguments {
    first: u64,
    seeds: u64,
    forced: Vec<Feature>,
    verbose: bool,
}

const USAGE: &str =
    "usage: sim [--seeds N] [--first SEED] [--with FEATURE]... [--verbose] [--list]";

fn parse(words: impl Iterator<Item = String>) -> Result<Option<Arguments>, String> {
    let mut arguments = Arguments { first: 0, seeds: 500, forced: Vec::new(), verbose: false };
    let mut words = words;
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("not a number: {text}"));
        match word.as_str() {
            "--seeds" => arguments.seeds = number(value()?)?,
            "--first" => arguments.first = number(value()?)?,
            "--with" => {
                let name = value()?;
                let feature = Feature::named(&name);
                let unknown = || format!("no feature is named {name}; --list lists them");
                arguments.forced.push(feature.ok_or_else(unknown)?);
            }
            "--verbose" => arguments.verbose = true,
            "--list" => return Ok(None),
            _ => return Err(format!("unknown argument {word}\n{USAGE}")),
        }
    }
    Ok(Some(arguments))
}

fn run(arguments: &Arguments, out: &mut impl Write) -> io::Result<bool> {
    let Arguments { first, seeds, forced, verbose } = arguments;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let swept = sweep(*first..first.saturating_add(*seeds), forced, threads);
    if *verbose {
        for (scenario, _) in swept.bad.values() {
            let mut scenario = scenario.clone();
            scenario.machine.trace = true;
            writeln!(out, "{scenario:#?}")?;
            for line in scenario.play().trace {
                writeln!(out, "  {line}")?;
            }
        }
        writeln!(out, "{} runs with errors to cope with", swept.with_errors)?;
    }
    write!(out, "{}", swept.describe(forced))?;
    writeln!(out, "{seeds} seeds, {} reports", swept.bad.len())?;
    Ok(swept.bad.is_empty())
}

fn main() -> ExitCode {
    let mut out = io::stdout().lock();
    let good = match parse(std::env::args().skip(1)) {
        Ok(Some(arguments)) => run(&arguments, &mut out),
        Ok(None) => {
            let mut names = Feature::ALL.iter().map(|feature| feature.name());
            names.try_for_each(|name| writeln!(out, "{name}")).map(|()| true)
        }
        Err(message) => {
            let _ = writeln!(io::stderr(), "{message}");
            return ExitCode::from(2);
        }
    };
    match good {
        Ok(true) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
