//! Runs the targets on their corpus and on mutants of it, on any toolchain.
//!
//! A run is a function of the seed, the target and its number alone, so each can be repeated.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ebbtide_fuzz::corpus;
use ebbtide_fuzz::mutate::mutant;
use ebbtide_fuzz::random::Random;
use ebbtide_fuzz::targets::{ALL, Target};

const USAGE: &str = "usage: smoke [--runs N] [--seed S] [--seconds T] [--target NAME] [--only RUN]
  --runs N       mutants for each target [default: as many as the time allows]
  --seed S       decides them [default: 1]
  --seconds T    time for all targets together [default: 10; none with --runs]
  --target NAME  one target instead of all: policy, size, resume, trace, plan
  --only RUN     repeats one run of one target";

/// No input of this length should take longer.
const SLOW: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Options {
    runs: Option<u64>,
    seed: u64,
    seconds: Option<u64>,
    target: Option<String>,
    only: Option<u64>,
}

fn main() -> ExitCode {
    let Some(options) = options(std::env::args().skip(1)) else {
        let _ = writeln!(io::stderr(), "{USAGE}");
        return ExitCode::from(2);
    };
    match all(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::from(2)
        }
    }
}

fn options(mut words: impl Iterator<Item = String>) -> Option<Options> {
    let mut options = Options { runs: None, seed: 1, seconds: None, target: None, only: None };
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--runs" => options.runs = Some(value.parse().ok()?),
            "--seed" => options.seed = value.parse().ok()?,
            "--seconds" => options.seconds = Some(value.parse().ok()?),
            "--target" => options.target = Some(value),
            "--only" => options.only = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    let known = |name: &String| ALL.iter().any(|target| target.name == name);
    let repeatable = options.only.is_none() || options.target.is_some();
    (options.target.iter().all(known) && repeatable).then_some(options)
}

/// Whether all is well.
fn all(options: &Options) -> io::Result<bool> {
    let wanted = |target: &&Target| options.target.iter().all(|name| target.name == name);
    let targets: Vec<_> = ALL.iter().filter(wanted).collect();
    let seconds = options.seconds.or(options.runs.is_none().then_some(10));
    let time =
        seconds.map(|all| Duration::from_secs(all) / u32::try_from(targets.len()).unwrap_or(1));
    let mut well = true;
    for target in targets {
        well &= Trial::start(target, options.seed)?.run(options, time)?;
    }
    Ok(well)
}

/// One target under one seed.
struct Trial<'t> {
    target: &'t Target,
    seed: u64,
    seeds: Vec<Vec<u8>>,
    folder: PathBuf,
    /// Says which run goes on, for a process that ends in the middle of one.
    running: File,
}

impl<'t> Trial<'t> {
    fn start(target: &'t Target, seed: u64) -> io::Result<Self> {
        let build = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let folder = build.unwrap_or_else(|| "target".into()).join("fuzz");
        fs::create_dir_all(&folder)?;
        let running = File::create(folder.join("running"))?;
        Ok(Self { target, seed, seeds: corpus::load(target.name)?, folder, running })
    }

    fn run(&self, options: &Options, time: Option<Duration>) -> io::Result<bool> {
        let begin = Instant::now();
        let numbers = match options.only {
            Some(only) => only..only.saturating_add(1),
            None => 0..options.runs.unwrap_or(u64::MAX),
        };
        if options.only.is_none() && !self.corpus()? {
            return Ok(false);
        }
        let mut done = 0;
        for number in numbers {
            if time.is_some_and(|time| begin.elapsed() >= time) {
                break;
            }
            let repeat =
                format!("--target {} --seed {} --only {number}", self.target.name, self.seed);
            self.running.write_all_at(format!("{repeat:<80}").as_bytes(), 0)?;
            let mut random = Random::of(self.seed, number);
            if !self.one(&mutant(&self.seeds, self.target.framed, &mut random), &repeat)? {
                return Ok(false);
            }
            done += 1;
        }
        let (name, files, seed) = (self.target.name, self.seeds.len(), self.seed);
        let seconds = begin.elapsed().as_secs_f64();
        writeln!(
            io::stdout(),
            "{name}: {files} files and {done} mutants, seed {seed}, {seconds:.1} s"
        )?;
        Ok(true)
    }

    /// The files themselves.
    fn corpus(&self) -> io::Result<bool> {
        let repeat = format!("--target {} --runs 0", self.target.name);
        self.running.write_all_at(format!("{repeat:<80}").as_bytes(), 0)?;
        for bytes in &self.seeds {
            if !self.one(bytes, &repeat)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs the target on one input; says how to repeat it if it fails.
    fn one(&self, bytes: &[u8], repeat: &str) -> io::Result<bool> {
        let begin = Instant::now();
        // The message of a panic is on standard error already.
        let ended = catch_unwind(|| (self.target.run)(bytes));
        let why = match ended {
            Err(_) => "panicked",
            Ok(()) if begin.elapsed() > SLOW => "took too long",
            Ok(()) => return Ok(true),
        };
        let file = self.keep(bytes)?;
        let name = self.target.name;
        writeln!(
            io::stderr(),
            "{name} {why} on {}\nrepeat: scripts/fuzz {repeat}",
            file.display()
        )?;
        Ok(false)
    }

    fn keep(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let file = self.folder.join(format!("{}-failed", self.target.name));
        fs::write(&file, bytes)?;
        Ok(Path::new(&file).canonicalize().unwrap_or(file))
    }
}
