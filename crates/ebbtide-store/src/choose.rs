//! Which way of asking for I/O a store uses, and why.

use std::fmt;
use std::io;

use ebbtide_core::BackendError;

use crate::compare::{Comparison, compare};
use crate::config::{FileConfig, IoChoice};
use crate::ring::Ring;
use crate::transfer::Io;

/// By how much the ring must be faster to be chosen: less than that is noise.
const MARGIN: f64 = 1.03;

/// A way of asking the kernel for I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// One call of `pread` or `pwrite` after the other in each thread.
    Threads,
    /// A ring (`io_uring`) for each thread.
    Uring,
}

impl fmt::Display for IoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads with pread and pwrite",
            Self::Uring => "io_uring",
        })
    }
}

/// Why a way was chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum IoReason {
    /// The settings name it.
    Asked,
    /// The kernel has no ring for this process. What it answered.
    Refused(String),
    /// Both were measured: 10⁹ bytes a second, written and read back.
    Measured {
        /// With `pread` and `pwrite`.
        threads_gbps: f64,
        /// With the ring.
        uring_gbps: f64,
    },
    /// They were not compared, and why.
    NotMeasured(String),
}

/// Which way a store uses, and why not the other. Displayed as half a sentence, such as
/// `threads with pread and pwrite (io_uring is refused: Operation not permitted (os error 1))`.
#[derive(Clone, Debug, PartialEq)]
pub struct IoReport {
    /// The way in use.
    pub kind: IoKind,
    /// Why.
    pub reason: IoReason,
}

impl fmt::Display for IoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.kind)?;
        match &self.reason {
            IoReason::Asked => write!(f, "as asked for"),
            IoReason::Refused(why) => write!(f, "io_uring is refused: {why}"),
            IoReason::Measured { threads_gbps, uring_gbps } => {
                write!(f, "measured: threads {threads_gbps:.2} GB/s, io_uring {uring_gbps:.2} GB/s")
            }
            IoReason::NotMeasured(why) => write!(f, "not measured: {why}"),
        }?;
        f.write_str(")")
    }
}

/// The way, and a ring for each worker if it is that one.
pub(crate) struct Chosen {
    pub(crate) report: IoReport,
    pub(crate) rings: Vec<Ring>,
}

impl Chosen {
    fn threads(reason: IoReason) -> Self {
        Self { report: IoReport { kind: IoKind::Threads, reason }, rings: Vec::new() }
    }

    fn uring(reason: IoReason, rings: Vec<Ring>) -> Self {
        Self { report: IoReport { kind: IoKind::Uring, reason }, rings }
    }
}

/// Decides for a spill file that was just opened and is empty; it is empty afterwards, too.
///
/// # Errors
/// The ring is asked for and refused, or the file can't be emptied.
pub(crate) fn choose(config: &FileConfig, io: &Io) -> Result<Chosen, BackendError> {
    if config.io == IoChoice::Threads {
        return Ok(Chosen::threads(IoReason::Asked));
    }
    let rings: io::Result<Vec<_>> = (0..config.workers).map(|_| Ring::new()).collect();
    match (config.io, rings) {
        (IoChoice::Uring, Ok(rings)) => Ok(Chosen::uring(IoReason::Asked, rings)),
        (IoChoice::Uring, Err(e)) => Err(refused(e)),
        (_, Err(e)) => Ok(Chosen::threads(IoReason::Refused(e.to_string()))),
        (_, Ok(rings)) => by_measurement(config, io, rings),
    }
}

fn by_measurement(
    config: &FileConfig,
    io: &Io,
    mut rings: Vec<Ring>,
) -> Result<Chosen, BackendError> {
    let compared = compare(io, &mut rings, config.capacity_bytes);
    io.file.set_len(0).map_err(|e| {
        let message = format!("can't empty the spill file in {}", config.dir.display());
        BackendError::new(message).with_source(e)
    })?;
    Ok(match compared {
        Ok(Comparison { threads_gbps, uring_gbps }) => {
            let reason = IoReason::Measured { threads_gbps, uring_gbps };
            if uring_gbps > threads_gbps * MARGIN {
                Chosen::uring(reason, rings)
            } else {
                Chosen::threads(reason)
            }
        }
        Err(why) => Chosen::threads(IoReason::NotMeasured(why)),
    })
}

/// Whether this process may use `io_uring`, and what the kernel answered if not.
///
/// # Errors
/// The kernel has none (before 5.6), or refuses it: `kernel.io_uring_disabled`, a seccomp filter of
/// the container, or a limit on locked memory.
///
/// ```
/// match ebbtide_store::uring_available() {
///     Ok(()) => println!("io_uring: available"),
///     Err(why) => println!("io_uring: {why}"),
/// }
/// ```
pub fn uring_available() -> io::Result<()> {
    Ring::new().map(drop)
}

fn refused(error: io::Error) -> BackendError {
    let hint = match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::PERM) => {
            "it is switched off (sysctl kernel.io_uring_disabled) or filtered by the container \
             (seccomp): allow it there, or let the choice of I/O be `auto` or `threads`"
        }
        Some(rustix::io::Errno::NOMEM) => {
            "raise the limit on locked memory (ulimit -l), or let the choice of I/O be `auto` or \
             `threads`"
        }
        _ => "the kernel has to be 5.6 or later; let the choice of I/O be `auto` or `threads`",
    };
    BackendError::new("the kernel refuses io_uring, which the settings ask for")
        .with_hint(hint)
        .with_source(error)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let cases = [
            (Errno::PERM, "io_uring_disabled"),
            (Errno::NOMEM, "ulimit -l"),
            (Errno::NOSYS, "5.6 or later"),
        ];
        for (errno, hint) in cases {
            let error = refused(errno.into());
            assert!(error.hint().unwrap().contains(hint), "{error:?}");
            assert!(std::error::Error::source(&error).is_some());
        }
    }

    #[test]
    fn a_report_names_both() {
        let report = |kind, reason| IoReport { kind, reason }.to_string();
        let measured = IoReason::Measured { threads_gbps: 2.0, uring_gbps: 2.25 };
        assert_eq!(
            report(IoKind::Uring, measured),
            "io_uring (measured: threads 2.00 GB/s, io_uring 2.25 GB/s)"
        );
        assert_eq!(
            report(IoKind::Threads, IoReason::Refused("no".into())),
            "threads with pread and pwrite (io_uring is refused: no)"
        );
        assert_eq!(report(IoKind::Uring, IoReason::Asked), "io_uring (as asked for)");
    }
}
