//! Failures of the disk on demand, for tests of this crate and of those above it.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::raw::RawFile;

/// Which system calls are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `pread`
    Read,
    /// `pwrite`
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
    file: File,
    fault: Fault,
    calls: AtomicU64,
}

impl FaultyFile {
    pub(crate) fn new(file: File, fault: Fault) -> Self {
        Self { file, fault, calls: AtomicU64::new(0) }
    }

    /// How much of `len` this call is to transfer.
    fn grant(&self, call: Call, len: usize) -> io::Result<usize> {
        let Fault { call: faulty, nth, kind, lasting } = self.fault;
        if call != faulty {
            return Ok(len);
        }
        let count = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if count != nth && !(lasting && count > nth) {
            return Ok(len);
        }
        match kind {
            Kind::NoSpace => Err(Errno::NOSPC.into()),
            Kind::Io => Err(Errno::IO.into()),
            Kind::Short => Ok(0),
            Kind::Partial => Ok((len / 2).next_multiple_of(crate::GRAIN).min(len)),
            Kind::Interrupted => Err(Errno::INTR.into()),
            Kind::Panic => panic!("planned panic in call {count}"),
        }
    }
}

impl RawFile for FaultyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = self.grant(Call::Read, buf.len())?;
        RawFile::read_at(&self.file, &mut buf[..len], offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        let len = self.grant(Call::Write, buf.len())?;
        RawFile::write_at(&self.file, &buf[..len], offset)
    }
}
