//! Moving one block between memory and its extent of the file.
//!
//! ```text
//! block   |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|■■■|     any address, any length
//!          │ straight: whole grains,         │ through the worker's staging buffer:
//!          │ no copy                         │ copied, padded with zeros to a grain
//! extent  |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|■■■0|    4096-byte grains
//! ```
//!
//! Straight bytes go in calls of 8 MiB, or in chunks of 1 MiB through the worker's [`Ring`], four at
//! once. Straight needs an address that direct I/O accepts; else everything goes through staging. A
//! buffered file takes anything: all straight, no padding.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;

use ebbtide_core::BackendError;
use rustix::fs::{Advice, fadvise};

use crate::fault::Call;
use crate::piece::Piece;
use crate::raw::RawFile;
use crate::ring::Ring;
use crate::{AlignedBuf, GRAIN};

/// Larger calls gain nothing, and keep the caller's pages pinned for longer.
const STRAIGHT_CHUNK: usize = 8 << 20;

/// The file as the workers see it.
pub(crate) struct Io {
    pub(crate) file: Arc<File>,
    /// The same file, or one that fails as a test plans it.
    pub(crate) raw: Box<dyn RawFile>,
    /// See [`SpillFile::mem_align`](crate::SpillFile).
    pub(crate) mem_align: Option<usize>,
}

/// What one worker moves bytes with.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Bytes that can't go straight are copied through this.
    pub(crate) staging: AlignedBuf,
    /// If there is one, bytes go straight through it.
    pub(crate) ring: Option<Ring>,
}

impl Lane {
    /// # Errors
    /// There is no memory for the staging buffer.
    pub(crate) fn new(staging: usize, ring: Option<Ring>) -> Result<Self, BackendError> {
        // More than there is if it can't be rounded up.
        let len = staging.checked_next_multiple_of(GRAIN).unwrap_or(usize::MAX);
        let staging = AlignedBuf::zeroed(len)?;
        staging.keep_from_children()?;
        Ok(Self { staging, ring })
    }

    fn ring(&mut self) -> Option<&mut Ring> {
        self.ring.as_mut().filter(|ring| ring.is_usable())
    }
}

impl Io {
    /// Whether reads and writes bypass the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.mem_align.is_some()
    }

    /// How many of the first bytes go straight.
    fn straight(&self, bytes: &[u8]) -> usize {
        match self.mem_align {
            None => bytes.len(),
            Some(align) if bytes.as_ptr().addr().is_multiple_of(align) => {
                bytes.len() / GRAIN * GRAIN
            }
            Some(_) => 0,
        }
    }

    /// Writes the bytes from `offset` on, and up to 4095 zeros behind them.
    pub(crate) fn write(&self, bytes: &[u8], offset: u64, lane: &mut Lane) -> io::Result<()> {
        let (straight, rest) = bytes.split_at(self.straight(bytes));
        let mut offset = offset;
        if let Some(ring) = lane.ring() {
            ring.write(self, straight, offset)?;
            offset += straight.len() as u64;
        } else {
            for chunk in straight.chunks(STRAIGHT_CHUNK) {
                self.write_all(chunk, offset)?;
                offset += chunk.len() as u64;
            }
        }
        let staging = lane.staging.as_mut_slice();
        for chunk in rest.chunks(staging.len()) {
            let padded = &mut staging[..chunk.len().next_multiple_of(GRAIN)];
            padded[..chunk.len()].copy_from_slice(chunk);
            padded[chunk.len()..].fill(0);
            self.write_all(padded, offset)?;
            offset += padded.len() as u64;
        }
        Ok(())
    }

    /// Fills `bytes` from `offset` on.
    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64, lane: &mut Lane) -> io::Result<()> {
        let straight = self.straight(bytes);
        let (straight, rest) = bytes.split_at_mut(straight);
        let mut offset = offset;
        if let Some(ring) = lane.ring() {
            ring.read(self, straight, offset)?;
            offset += straight.len() as u64;
        } else {
            for chunk in straight.chunks_mut(STRAIGHT_CHUNK) {
                self.read_all(chunk, offset)?;
                offset += chunk.len() as u64;
            }
        }
        let staging = lane.staging.as_mut_slice();
        for chunk in rest.chunks_mut(staging.len()) {
            let padded = &mut staging[..chunk.len().next_multiple_of(GRAIN)];
            self.read_all(padded, offset)?;
            chunk.copy_from_slice(&padded[..chunk.len()]);
            offset += padded.len() as u64;
        }
        Ok(())
    }

    fn write_all(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut piece = Piece::new(Call::Write, self.is_direct(), offset, bytes.len());
        while !piece.is_complete() {
            piece.advance(self.raw.write_at(&bytes[piece.done()..], piece.offset()))?;
        }
        Ok(())
    }

    fn read_all(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut piece = Piece::new(Call::Read, self.is_direct(), offset, bytes.len());
        while !piece.is_complete() {
            piece.advance(self.raw.read_at(&mut bytes[piece.done()..], piece.offset()))?;
        }
        Ok(())
    }

    /// Asks the kernel to drop cached pages of the range: clean ones go now, dirty ones begin to
    /// be written. There are none if I/O is direct.
    pub(crate) fn drop_cache(&self, offset: u64, len: u64) {
        if let (false, Some(len)) = (self.is_direct(), NonZeroU64::new(len)) {
            // Advice: nothing is lost if it is not taken.
            let _ = fadvise(&self.file, offset, Some(len), Advice::DontNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Notes the calls; refuses what a direct file would refuse.
    #[derive(Default)]
    struct Noting(Mutex<Vec<(u64, usize)>>);

    impl Noting {
        fn note(&self, address: *const u8, len: usize, offset: u64) -> usize {
            assert!(address.addr().is_multiple_of(512), "address");
            assert_eq!((len % GRAIN, offset % GRAIN as u64), (0, 0), "length, offset");
            self.0.lock().unwrap().push((offset, len));
            len
        }
    }

    impl RawFile for Arc<Noting> {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            Ok(self.note(buf.as_ptr(), buf.len(), offset))
        }

        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
            Ok(self.note(buf.as_ptr(), buf.len(), offset))
        }
    }

    fn calls(skip: usize, len: usize) -> Vec<(u64, usize)> {
        let noting = Arc::new(Noting::default());
        let file = Arc::new(tempfile::tempfile().unwrap());
        let io = Io { file, raw: Box::new(noting.clone()), mem_align: Some(512) };
        let mut memory = AlignedBuf::zeroed(skip + len).unwrap();
        let mut lane = Lane::new(8192, None).unwrap();
        io.write(&memory.as_slice()[skip..], 4096, &mut lane).unwrap();
        let written = std::mem::take(&mut *noting.0.lock().unwrap());
        io.read(&mut memory.as_mut_slice()[skip..], 4096, &mut lane).unwrap();
        assert_eq!(*noting.0.lock().unwrap(), written, "reads are like writes");
        written
    }

    #[test]
    fn aligned_bytes_go_straight_and_the_tail_through_staging() {
        assert_eq!(calls(512, 20_000), [(4096, 16_384), (20_480, 4096)]);
        assert_eq!(calls(0, 8192), [(4096, 8192)]);
        assert_eq!(calls(0, STRAIGHT_CHUNK + 1)[1], (4096 + STRAIGHT_CHUNK as u64, 4096));
        assert_eq!(calls(0, 0), []);
    }

    #[test]
    fn unaligned_bytes_go_through_staging_in_its_size() {
        assert_eq!(calls(1, 20_000), [(4096, 8192), (12_288, 8192), (20_480, 4096)]);
    }
}
