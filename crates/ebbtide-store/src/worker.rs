//! What a thread of the file tier does.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ebbtide_core::{BackendError, Bytes, Done, Failed, Timing};

use crate::GRAIN;
use crate::checksum::{Mismatch, checksum};
use crate::clock::nanos;
use crate::extent::Extent;
use crate::file::FileSlot;
use crate::queue::{Job, Outcome, Queue, Task, Way};
use crate::spill::LIMITED;
use crate::throttle::{Pace, sleep_until};
use crate::transfer::{Io, Lane};

pub(crate) struct Worker<B> {
    pub(crate) queue: Arc<Queue<B>>,
    pub(crate) io: Arc<Io>,
    pub(crate) lane: Lane,
    /// Whether blocks get a checksum.
    pub(crate) checksums: bool,
    pub(crate) number: u32,
    pub(crate) origin: Instant,
    /// Named in errors.
    pub(crate) dir: PathBuf,
    /// Range of the last write: its cached pages were dirty then and may be clean by now.
    pub(crate) dirty: (u64, u64),
    /// What this worker is held to: it is there for one direction only then.
    pub(crate) pace: Option<(Way, Pace)>,
}

impl<B: Bytes> Worker<B> {
    /// Runs jobs until the queue is closed.
    pub(crate) fn run(mut self) {
        while let Some(Job { ticket, task, block, bytes }) =
            self.queue.pop(self.pace.as_ref().map(|(way, _)| *way))
        {
            let end = self.pace.as_ref().map(|(_, pace)| pace.end(bytes));
            let (outcome, extent) = match task {
                Task::Write(extent) => self.write(block, bytes, extent, end),
                Task::Read { offset, sum } => (self.read(block, bytes, (offset, sum), end), None),
            };
            self.queue.finish(ticket, bytes, outcome, extent);
        }
    }

    fn write(
        &mut self,
        block: B,
        bytes: u64,
        extent: Extent,
        end: Option<Instant>,
    ) -> (Outcome<B>, Option<Extent>) {
        let started_ns = nanos(self.origin);
        let offset = extent.offset();
        let written = unwound(|| {
            let content = block.bytes();
            let sum = self.checksums.then(|| checksum(content));
            self.io.write(content, offset, &mut self.lane)?;
            end.into_iter().for_each(sleep_until);
            Ok(sum)
        });
        let sum = match written {
            Ok(sum) => sum,
            Err(error) => {
                let error = failed("write", "to", bytes, self, error);
                return (Err(Failed { error, block }), Some(extent));
            }
        };
        let timing = self.timing(started_ns);
        // Here device memory is freed, before anyone hears that the job is done. The bytes are
        // safe: a destructor that panics changes nothing about that.
        let mut kept = None;
        let _ = unwound(|| {
            kept = block.release();
            Ok(())
        });
        let (before, len) = std::mem::replace(&mut self.dirty, (offset, extent.len()));
        self.io.drop_cache(before, len);
        self.io.drop_cache(offset, extent.len());
        (Ok((Done::Stored(FileSlot { extent, bytes, sum }, kept), timing)), None)
    }

    fn read(
        &mut self,
        mut block: B,
        bytes: u64,
        (offset, sum): (u64, Option<u64>),
        end: Option<Instant>,
    ) -> Outcome<B> {
        let started_ns = nanos(self.origin);
        let read = unwound(|| {
            let content = block.bytes_mut();
            self.io.read(content, offset, &mut self.lane)?;
            end.into_iter().for_each(sleep_until);
            match sum.map(|written| (written, checksum(content))) {
                Some((written, read)) if read != written => {
                    Err(io::Error::other(Mismatch { offset, bytes, written, read }))
                }
                _ => Ok(()),
            }
        });
        match read {
            Ok(()) => {
                self.io.drop_cache(offset, bytes.next_multiple_of(GRAIN as u64));
                Ok((Done::Loaded(block), self.timing(started_ns)))
            }
            Err(error) => Err(Failed { error: failed("read", "from", bytes, self, error), block }),
        }
    }

    fn timing(&self, started_ns: u64) -> Timing {
        Timing { started_ns, finished_ns: nanos(self.origin), worker: self.number }
    }
}

/// A panic becomes an error: the caller waits for an answer, and a thread that is gone gives none.
/// A half-filled block or staging buffer is the worst that is left, and nobody reads those.
fn unwound<T>(job: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|payload| {
        let message = payload_message(&*payload);
        // A payload can panic in its own destructor.
        std::mem::forget(payload);
        Err(io::Error::other(format!("a worker panicked: {message}")))
    })
}

fn payload_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").into()
}

fn failed<B>(
    verb: &str,
    preposition: &str,
    bytes: u64,
    worker: &Worker<B>,
    error: io::Error,
) -> BackendError {
    let dir = worker.dir.display();
    let message = format!("can't {verb} {bytes} bytes {preposition} the spill file in {dir}");
    let message = BackendError::new(message);
    match error.downcast::<Mismatch>() {
        Ok(mismatch) => message.with_hint(Mismatch::HINT).with_source(mismatch),
        Err(error) => match hint(&error) {
            // Something smaller, or another tier, may still do.
            Some(hint) if error.kind() == io::ErrorKind::StorageFull => {
                message.no_room().with_hint(hint).with_source(error)
            }
            Some(hint) => message.with_hint(hint).with_source(error),
            None => message.with_source(error),
        },
    }
}

fn hint(error: &io::Error) -> Option<&'static str> {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Some("free space there or name another folder")
        }
        io::ErrorKind::FileTooLarge => Some(LIMITED),
        _ if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => {
            Some("the disk reported an error: see the kernel log (dmesg)")
        }
        _ => None,
    }
}
