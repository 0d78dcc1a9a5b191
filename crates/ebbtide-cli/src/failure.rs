//! What can go wrong, as the user sees it: one line that says what, one that says what to do.

use std::error::Error as StdError;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::columns::shown;

/// Who has to act, which decides the exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The command line or a file it names; nothing has been done yet.
    BadInput,
    /// Something failed while the work was going on.
    RunTime,
}

/// An error with its hint. It travels between processes, so causes are flattened into the text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl Failure {
    pub(crate) fn bad_input(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind: Kind::BadInput, message: message.into(), hint: hint.into() }
    }

    pub(crate) fn run_time(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { kind: Kind::RunTime, message: message.into(), hint: hint.into() }
    }

    /// The same failure with the part of the work it happened in written before it.
    pub(crate) fn within(mut self, place: &str) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    pub(crate) fn exit_status(&self) -> u8 {
        match self.kind {
            Kind::BadInput => 2,
            Kind::RunTime => 1,
        }
    }
}

impl fmt::Display for Failure {
    /// Always two lines, whatever line breaks the parts contain: scripts read them by position. Names
    /// from a file can't steer the terminal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flat = |text: &str| shown(&text.split_whitespace().collect::<Vec<_>>().join(" "));
        write!(f, "error: {}\nhint: {}", flat(&self.message), flat(&self.hint))
    }
}

impl StdError for Failure {}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        // Candle appends a backtrace below the message when RUST_BACKTRACE is set.
        let text = error.to_string();
        let message = text.lines().next().unwrap_or("unknown").to_owned();
        Self::run_time(
            format!("Candle: {message}"),
            "a smaller model or batch may get through; if not, please report it with this command",
        )
    }
}

impl From<ebbtide_candle::Error> for Failure {
    fn from(error: ebbtide_candle::Error) -> Self {
        let hint = error.hint().unwrap_or("`--policy plain` trains the same model without ebbtide");
        let message = with_causes(&error);
        if error.is_setting() {
            Self::bad_input(message, hint)
        } else {
            Self::run_time(message, hint)
        }
    }
}

impl From<ebbtide_core::Error> for Failure {
    fn from(error: ebbtide_core::Error) -> Self {
        let hint = error.hint().unwrap_or("`ebbtide train --help` lists what can be given");
        Self::bad_input(with_causes(&error), hint)
    }
}

impl From<ebbtide_core::BackendError> for Failure {
    fn from(error: ebbtide_core::BackendError) -> Self {
        let hint = error.hint().unwrap_or("free some space there, or name another folder");
        Self::run_time(with_causes(&error), hint)
    }
}

/// The message followed by those causes that it does not already quote.
pub(crate) fn with_causes(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_two_lines_whatever_it_quotes() {
        let failure = Failure::bad_input("first\nsecond", "do\n  this").within("swap");
        assert_eq!(failure.to_string(), "error: swap: first second\nhint: do this");
        assert_eq!(failure.exit_status(), 2);
    }
}
