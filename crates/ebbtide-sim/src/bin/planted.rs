//! Plants known mistakes into a copy of the engine, one at a time, and checks that each is found.
//!
//! A test that has never failed proves little. The lists in `planted/` change a few lines of the engine
//! each, and say what has to find it: the simulator, by a report on every one of 20 seeds, or a test of
//! the catalogue. The sources themselves carry no switches for this.
//!
//! ```text
//! == name of the mistake
//! by sim [OPTIONS]            or: by test TEST_FILE TEST_NAME
//! in crates/ebbtide-core/src/departure.rs
//! - lines as they are (compared without indentation)
//! + lines as they are to be
//! ```

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Seeds on which the simulator has to report each mistake.
const SEEDS: usize = 20;
/// A mistake may make a run hang.
const LIMIT: Duration = Duration::from_mins(2);

type Failure = Box<dyn std::error::Error>;

struct Mistake {
    name: String,
    by: Vec<String>,
    file: String,
    before: Vec<String>,
    after: Vec<String>,
}

fn parse(text: &str) -> Result<Vec<Mistake>, Failure> {
    let mut mistakes: Vec<Mistake> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("== ") {
            let (by, file, before, after) = (Vec::new(), String::new(), Vec::new(), Vec::new());
            mistakes.push(Mistake { name: name.into(), by, file, before, after });
            continue;
        }
        let Some(mistake) = mistakes.last_mut() else { continue };
        match line.split_once(' ').unwrap_or((line, "")) {
            ("by", by) => mistake.by = by.split_whitespace().map(str::to_string).collect(),
            ("in", file) => mistake.file = file.trim().into(),
            ("-", before) => mistake.before.push(before.trim().into()),
            ("+", after) => mistake.after.push(after.into()),
            ("" | "#", _) => {}
            _ => return Err(format!("`{}`: what is `{line}`?", mistake.name).into()),
        }
    }
    Ok(mistakes)
}

/// The text with the mistake in it.
fn plant(text: &str, mistake: &Mistake) -> Result<String, Failure> {
    let lines: Vec<&str> = text.lines().collect();
    let length = mistake.before.len();
    let fits = |start: &usize| {
        lines[*start..*start + length].iter().zip(&mistake.before).all(|(line, b)| line.trim() == b)
    };
    let starts: Vec<usize> = (0..=lines.len().saturating_sub(length)).filter(fits).collect();
    let [start] = starts[..] else {
        let (name, file) = (&mistake.name, &mistake.file);
        let count = starts.len();
        return Err(format!("`{name}`: its lines are in {file} {count} times, not once").into());
    };
    let mut planted: Vec<&str> = lines[..start].to_vec();
    planted.extend(mistake.after.iter().map(String::as_str));
    planted.extend(&lines[start + length..]);
    Ok(planted.join("\n") + "\n")
}

/// A copy of the crates that take part, which keeps the times of files that did not change.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let (source, target) = {
            let entry = entry?;
            (entry.path(), to.join(entry.file_name()))
        };
        if source.is_dir() {
            copy_tree(&source, &target)?;
        } else {
            write_changed(&target, &fs::read(&source)?)?;
        }
    }
    Ok(())
}

fn write_changed(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    fs::write(path, content)
}

fn prepare(root: &Path, work: &Path) -> Result<(), Failure> {
    for name in ["ebbtide-core", "ebbtide-sim"] {
        copy_tree(&root.join("crates").join(name), &work.join("crates").join(name))?;
    }
    let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
    let members = |line: &&str| !line.starts_with("default-members");
    let manifest: Vec<&str> = manifest.lines().filter(members).collect();
    write_changed(&work.join("Cargo.toml"), manifest.join("\n").as_bytes())?;
    if !work.join("Cargo.lock").exists() {
        fs::copy(root.join("Cargo.lock"), work.join("Cargo.lock"))?;
    }
    Ok(())
}

fn cargo(work: &Path, arguments: &[&str], log: &Path) -> Result<bool, Failure> {
    let out = fs::File::create(log)?;
    let mut child = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()))
        .args(arguments)
        .current_dir(work)
        .env("CARGO_TARGET_DIR", work.with_file_name("target"))
        .env("CARGO_PROFILE_DEV_DEBUG", "false")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .spawn()?;
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if begun.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Builds what looks for the mistake, and runs it. Returns how many seeds or tests reported.
fn reports(work: &Path, by: &[String]) -> Result<usize, Failure> {
    let log = work.with_file_name("log");
    let by: Vec<&str> = by.iter().map(String::as_str).collect();
    let (build, run): (Vec<&str>, Vec<&str>) = match by[..] {
        ["sim", ref options @ ..] => {
            let build = ["build", "--offline", "-q", "-p", "ebbtide-sim", "--bin", "sim"];
            let mut run = vec!["run", "--offline", "-q", "-p", "ebbtide-sim", "--bin", "sim", "--"];
            run.extend(["--seeds", "20", "--first", "1"]);
            run.extend(options);
            (build.to_vec(), run)
        }
        ["test", file, name] => {
            let test = ["test", "--offline", "-q", "-p", "ebbtide-sim", "--test", file];
            ([&test[..], &["--no-run"]].concat(), [&test[..], &[name]].concat())
        }
        _ => return Err(format!("by `{}`?", by.join(" ")).into()),
    };
    if !cargo(work, &build, &log)? {
        return Err(format!("it does not compile:\n{}", fs::read_to_string(&log)?).into());
    }
    let passed = cargo(work, &run, &log)?;
    let log = fs::read_to_string(&log)?;
    if by[0] == "test" {
        // A test that hangs or is ended has not found anything.
        return match (passed, log.contains("test result: FAILED")) {
            (true, _) if log.contains("ok. 0 passed") => Err(format!("no such test\n{log}").into()),
            (true, _) => Ok(0),
            (false, true) => Ok(1),
            (false, false) => Err(format!("the test came to no result\n{log}").into()),
        };
    }
    let last = log.lines().last().unwrap_or_default();
    let count = last.strip_prefix("20 seeds, ").and_then(|rest| rest.strip_suffix(" reports"));
    let count = count.and_then(|count| count.parse().ok());
    count.ok_or_else(|| format!("the simulator came to no result\n{log}").into())
}

fn check(work: &Path, mistake: &Mistake) -> Result<(usize, usize), Failure> {
    let file = work.join(&mistake.file);
    let text = fs::read_to_string(&file)?;
    fs::write(&file, plant(&text, mistake)?)?;
    let found = reports(work, &mistake.by);
    fs::write(&file, text)?;
    let wanted = if mistake.by.first().is_some_and(|by| by == "sim") { SEEDS } else { 1 };
    let found = found.map_err(|e| format!("`{}`: {e}", mistake.name))?;
    Ok((found, wanted))
}

fn run() -> Result<bool, Failure> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
    let work = root.join("target/planted/work");
    prepare(&root, &work)?;
    let only: Vec<String> = std::env::args().skip(1).collect();
    let mut lists: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(root.join("crates/ebbtide-sim/planted"))? {
        lists.push(entry?.path());
    }
    lists.sort();
    let (mut planted, mut caught) = (0usize, 0usize);
    let mut out = io::stdout();
    for list in lists {
        for mistake in parse(&fs::read_to_string(&list)?)? {
            if !only.iter().all(|text| mistake.name.contains(text.as_str())) {
                continue;
            }
            planted += 1;
            let (found, wanted) = match check(&work, &mistake) {
                Ok(checked) => checked,
                Err(error) => {
                    writeln!(out, "BROKEN        {error}")?;
                    continue;
                }
            };
            caught += usize::from(found == wanted);
            let verdict = if found == wanted { "caught" } else { "MISSED" };
            let (by, name) = (mistake.by.join(" "), &mistake.name);
            writeln!(out, "{verdict} {found:2}/{wanted:<2}  {name}  (by {by})")?;
        }
    }
    writeln!(out, "{planted} planted, {caught} caught")?;
    Ok(planted > 0 && planted == caught)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Nowhere is left to say it if even this fails.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
