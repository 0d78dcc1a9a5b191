//! One run in a process of its own: both sides of the protocol.
//!
//! The parent writes one JSON value a line to the worker's standard input and gets one line back
//! for each; nothing runs in the worker between an answer and the next question, which is what
//! lets modes take turns without disturbing one another.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::config::Setup;
use crate::failure::Failure;
use crate::signals::Signals;
use crate::trainer::{Outcome, Record, Trainer};

#[derive(Debug, Serialize, Deserialize)]
enum Question {
    /// Always the first one.
    Start(Box<Setup>),
    Step,
    /// Always the last one.
    Finish,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    Started,
    Stepped { record: Record, notices: Vec<String> },
    Finished(Box<Outcome>),
    Failed(Failure),
}

/// The parent's side. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Worker {
    mode: String,
    process: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a process and has it make the model.
    pub(crate) fn start(setup: Setup) -> Result<Self, Failure> {
        let mode = setup.mode.name().to_owned();
        let failed = |error: io::Error| {
            let hint = "--policy plain runs without a second process";
            Failure::run_time(format!("can't start a process for {mode}: {error}"), hint)
        };
        let mut process = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["worker", "--parent", &std::process::id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let (Some(questions), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(failed(io::Error::other("no pipes")));
        };
        let answers = BufReader::new(answers);
        let mut worker = Self { mode, process, questions, answers };
        match worker.ask(&Question::Start(Box::new(setup)))? {
            Answer::Started => Ok(worker),
            other => Err(worker.unexpected(&other)),
        }
    }

    /// Runs one step in the worker and waits for it.
    pub(crate) fn step(&mut self) -> Result<(Record, Vec<String>), Failure> {
        match self.ask(&Question::Step)? {
            Answer::Stepped { record, notices } => Ok((record, notices)),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Ends the worker and returns the figures of its run.
    pub(crate) fn finish(mut self) -> Result<Outcome, Failure> {
        match self.ask(&Question::Finish)? {
            Answer::Finished(outcome) => Ok(*outcome),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn mode(&self) -> &str {
        &self.mode
    }

    fn ask(&mut self, question: &Question) -> Result<Answer, Failure> {
        let mut line = String::new();
        let asked = write_line(&mut self.questions, question)
            .and_then(|()| self.answers.read_line(&mut line));
        match (asked, serde_json::from_str(&line)) {
            (Ok(_), Ok(Answer::Failed(failure))) => Err(failure.within(&self.mode)),
            (Ok(_), Ok(answer)) => Ok(answer),
            _ => Err(self.ended()),
        }
    }

    /// The worker has gone without an answer.
    fn ended(&mut self) -> Failure {
        let _ = self.process.kill();
        let status =
            self.process.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        Failure::run_time(
            format!("the process of {} ended in mid-run ({status})", self.mode),
            "the system may have run out of memory: try a smaller model or batch",
        )
    }

    fn unexpected(&self, answer: &Answer) -> Failure {
        let message = format!("the process of {} answered out of turn: {answer:?}", self.mode);
        Failure::run_time(message, "please report this")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a finished run this is a no-op on a process that is ending anyway.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The worker's side: answers until the parent finishes, closes the pipe or dies.
pub(crate) fn serve(parent: i32) -> Result<(), Failure> {
    if !tie_to(parent) {
        return Ok(());
    }
    Signals::ignore()?;
    let mut trainer = None;
    let mut output = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let answer = answer(&line, &mut trainer).unwrap_or_else(Answer::Failed);
        let last = matches!(answer, Answer::Finished(_) | Answer::Failed(_));
        if write_line(&mut output, &answer).is_err() || last {
            break;
        }
    }
    Ok(())
}

/// Makes this process end with its parent, even when that is killed. False if the parent has
/// already gone, in which case the system has nothing left to tell.
fn tie_to(parent: i32) -> bool {
    // Where the system can't do it, the closed pipe still ends the worker after its step.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    getppid() == Pid::from_raw(parent)
}

fn answer(line: &str, trainer: &mut Option<Trainer>) -> Result<Answer, Failure> {
    let question = serde_json::from_str(line)
        .map_err(|e| Failure::run_time(format!("no such question: {e}"), "please report this"))?;
    let running = |trainer| {
        Option::ok_or_else(trainer, || Failure::run_time("nothing runs yet", "please report this"))
    };
    match question {
        Question::Start(setup) => {
            *trainer = Some(Trainer::new(*setup)?);
            Ok(Answer::Started)
        }
        Question::Step => {
            let trainer = running(trainer.as_mut())?;
            let record = trainer.step()?;
            Ok(Answer::Stepped { record, notices: trainer.notices() })
        }
        Question::Finish => {
            let trainer = running(trainer.as_mut())?;
            Ok(Answer::Finished(Box::new(trainer.outcome())))
        }
    }
}

fn write_line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    out.write_all(line.as_bytes())?;
    out.flush()
}
