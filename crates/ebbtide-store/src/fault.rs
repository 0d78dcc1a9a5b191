//! Failures of the disk on demand, for tests of this crate and of those above it.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::AlignedBuf;
use crate::raw::RawFile;

/// Which system calls are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A read: `pread`, or one entry of the ring.
    Read,
    /// A write: `pwrite`, or one entry of the ring.
    Write,
}

/// What happens instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `ENOSPC`: the disk is full.
    NoSpace,
    /// `EIO`: the disk is broken.
    Io,
    /// The call transfers nothing: for a read, the end of the file.
    Short,
    /// The call transfers about half of what it was asked for. Must not be noticed.
    Partial,
    /// `EINTR`: a signal came. Must not be noticed.
    Interrupted,
    /// One bit of what is transferred is another: in the file after a write, in memory after a
    /// read. The call reports success.
    Flip,
    /// The thread panics.
    Panic,
}

/// One planned failure. Blocks are moved in several calls, in an order that is the same from run
/// to run only with one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Calls of this sort are counted,
    pub call: Call,
    /// and this one fails. The first is 1.
    pub nth: u64,
    /// How it fails.
    pub kind: Kind,
    /// Whether all later calls fail, too.
    pub lasting: bool,
}

impl Fault {
    /// Call number `nth` fails, and no other.
    pub fn once(call: Call, nth: u64, kind: Kind) -> Self {
        Self { call, nth, kind, lasting: false }
    }

    /// Call number `nth` and all later ones fail.
    pub fn lasting(call: Call, nth: u64, kind: Kind) -> Self {
        Self { call, nth, kind, lasting: true }
    }
}

pub(crate) struct FaultyFile {
    file: Arc<File>,
    fault: Fault,
    calls: AtomicU64,
}

impl FaultyFile {
    pub(crate) fn new(file: Arc<File>, fault: Fault) -> Self {
        Self { file, fault, calls: AtomicU64::new(0) }
    }

    /// How this call is to fail, if it is.
    fn plan(&self, call: Call) -> Option<Kind> {
        let Fault { call: faulty, nth, kind, lasting } = self.fault;
        if call != faulty {
            return None;
        }
        let count = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let planned = count == nth || (lasting && count > nth);
        assert!(!planned || kind != Kind::Panic, "planned panic in call {count}");
        planned.then_some(kind)
    }
}

/// How much of `len` is to be transferred by a call that fails in this way.
fn grant(kind: Kind, len: usize) -> io::Result<usize> {
    match kind {
        Kind::NoSpace => Err(Errno::NOSPC.into()),
        Kind::Io => Err(Errno::IO.into()),
        Kind::Short => Ok(0),
        Kind::Partial => Ok((len / 2).next_multiple_of(crate::GRAIN).min(len)),
        Kind::Interrupted => Err(Errno::INTR.into()),
        Kind::Flip | Kind::Panic => Ok(len),
    }
}

impl RawFile for FaultyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.planned_read(buf, offset).unwrap_or_else(|| self.file.read_at(buf, offset))
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        self.planned_write(buf, offset).unwrap_or_else(|| self.file.write_at(buf, offset))
    }

    fn planned_read(&self, buf: &mut [u8], offset: u64) -> Option<io::Result<usize>> {
        let kind = self.plan(Call::Read)?;
        let read = grant(kind, buf.len()).and_then(|n| self.file.read_at(&mut buf[..n], offset));
        if let (Kind::Flip, Some(byte)) = (kind, buf.first_mut()) {
            *byte ^= 1;
        }
        Some(read)
    }

    fn planned_write(&self, buf: &[u8], offset: u64) -> Option<io::Result<usize>> {
        let kind = self.plan(Call::Write)?;
        if kind == Kind::Flip {
            return Some(self.write_flipped(buf, offset));
        }
        Some(grant(kind, buf.len()).and_then(|n| self.file.write_at(&buf[..n], offset)))
    }
}

impl FaultyFile {
    /// The caller's bytes stay as they are, so that only the file is wrong.
    fn write_flipped(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let mut copy = AlignedBuf::zeroed(buf.len()).map_err(io::Error::other)?;
        copy.as_mut_slice().copy_from_slice(buf);
        if let Some(byte) = copy.as_mut_slice().first_mut() {
            *byte ^= 1;
        }
        self.file.write_at(copy.as_slice(), offset)
    }
}
