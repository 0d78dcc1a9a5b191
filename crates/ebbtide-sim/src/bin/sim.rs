//! Plays the engine in simulated worlds: `sim --seeds N [--first SEED] [--with FEATURE]… [--verbose]`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use ebbtide_sim::play::{Feature, sweep};

struct Arguments {
    first: u64,
    seeds: u64,
    forced: Vec<Feature>,
    verbose: bool,
}

/// What is asked for.
enum Request {
    Play(Arguments),
    List,
    Help,
}

/// Seeds are below this: the bits above number the runs of one.
const SEEDS: u64 = 1 << 40;

const USAGE: &str =
    "usage: sim [--seeds N] [--first SEED] [--with FEATURE]... [--verbose] [--list] [--help]";

fn parse(words: impl Iterator<Item = OsString>) -> Result<Request, String> {
    let mut arguments = Arguments { first: 0, seeds: 500, forced: Vec::new(), verbose: false };
    let words = words.map(|word| word.into_string().map_err(|word| format!("not UTF-8: {word:?}")));
    let mut words = words.collect::<Result<Vec<_>, _>>()?.into_iter();
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
            "--list" => return Ok(Request::List),
            "--help" | "-h" => return Ok(Request::Help),
            _ => return Err(format!("unknown argument {word}\n{USAGE}")),
        }
    }
    match arguments.first.checked_add(arguments.seeds) {
        Some(end) if end <= SEEDS => Ok(Request::Play(arguments)),
        _ => Err(format!("seeds are below {SEEDS}: choose a smaller --first or fewer --seeds")),
    }
}

fn run(arguments: &Arguments, out: &mut impl Write) -> io::Result<bool> {
    let Arguments { first, seeds, forced, verbose } = arguments;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let swept = sweep(*first..first + seeds, forced, threads);
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
    let good = match parse(std::env::args_os().skip(1)) {
        Ok(Request::Play(arguments)) => run(&arguments, &mut out),
        Ok(Request::Help) => writeln!(out, "{USAGE}").map(|()| true),
        Ok(Request::List) => {
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
