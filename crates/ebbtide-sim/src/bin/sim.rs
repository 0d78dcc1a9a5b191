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
    let not_text = |word: OsString| format!("not UTF-8: {}", word.display());
    let words: Result<Vec<_>, _> = words.map(OsString::into_string).collect();
    let mut words = words.map_err(not_text)?.into_iter();
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

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn parsed(words: &[&str]) -> Result<Request, String> {
        parse(words.iter().map(OsString::from))
    }

    #[test]
    fn a_range_ends_at_the_last_seed() {
        let last = (SEEDS - 10).to_string();
        assert!(matches!(parsed(&["--first", &last, "--seeds", "10"]), Ok(Request::Play(_))));
        let most = u64::MAX.to_string();
        for (first, seeds) in [(last.as_str(), "11"), (&most, "10"), ("0", &most)] {
            let refused = parsed(&["--first", first, "--seeds", seeds]);
            assert!(refused.is_err_and(|message| message.contains("1099511627776")), "{first}");
        }
    }

    #[test]
    fn words_that_are_no_text_are_refused_and_help_is_not() {
        let word = OsString::from_vec(vec![0xFF]);
        assert!(parse(["--seeds".into(), word].into_iter()).is_err());
        assert!(matches!(parsed(&["--help"]), Ok(Request::Help)));
    }
}
