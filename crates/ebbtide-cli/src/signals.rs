//! Ctrl-C and SIGTERM: the first one ends the run after its step, a second one ends it at once.
//! A limit on the size of files ends nothing: the write fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use crate::failure::Failure;

/// Tells whether the user wants the run to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals(Arc<AtomicUsize>);

impl Signals {
    /// Catches both signals from here on.
    pub(crate) fn catch() -> Result<Self, Failure> {
        let signals = Self::default();
        let again = Arc::new(AtomicBool::new(false));
        for (signal, value) in [(SIGINT, 2), (SIGTERM, 15)] {
            // In this order: the first signal arms what ends the process at the second one.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))
                .and_then(|_| flag::register(signal, Arc::clone(&again)))
                .and_then(|_| flag::register_usize(signal, Arc::clone(&signals.0), value))
                .map_err(failed)?;
        }
        Ok(signals)
    }

    /// Ignores both from here on. A worker does: Ctrl-C reaches the whole process group, and the
    /// parent ends its workers in order.
    pub(crate) fn ignore() -> Result<(), Failure> {
        for signal in [SIGINT, SIGTERM] {
            flag::register(signal, Arc::default()).map_err(failed)?;
        }
        Ok(())
    }

    /// The exit status that a caught signal asks for.
    pub(crate) fn caught(&self) -> Option<u8> {
        match self.0.load(Ordering::SeqCst) {
            0 => None,
            signal => u8::try_from(128 + signal).ok(),
        }
    }
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) an error that can be told,
/// where the system would end the process without a word.
pub(crate) fn outlive_file_limit() -> Result<(), Failure> {
    flag::register(SIGXFSZ, Arc::default()).map(drop).map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::run_time(format!("can't catch signals: {error}"), "please report this")
}
