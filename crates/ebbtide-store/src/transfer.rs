//! Moving one block between memory and its extent of the file.
//!
//! ```text
//! block   |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|■■■|     any address, any length
//!          │ straight: whole grains,         │ through the worker's staging buffer:
//!          │ 8 MiB a call, no copy           │ copied, padded with zeros to a grain
//! extent  |■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■|■■■0|    4096-byte grains
//! ```
//!
//! Straight needs an address that direct I/O accepts; else everything goes through staging. A
//! buffered file takes anything: all straight, no padding.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;

use rustix::fs::{Advice, fadvise};

use crate::raw::RawFile;
use crate::{AlignedBuf, GRAIN};

/// Larger calls gain nothing, and keep the caller's pages pinned for longer.
const STRAIGHT_CHUNK: usize = 8 << 20;

/// The file as the workers see it.
pub(crate) struct Io {
    pub(crate) raw: Box<dyn RawFile>,
    /// See [`SpillFile::mem_align`](crate::SpillFile).
    pub(crate) mem_align: Option<usize>,
    /// The file again, if its pages in the page cache are to be dropped after use.
    pub(crate) cached: Option<File>,
}

impl Io {
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
    pub(crate) fn write(
        &self,
        bytes: &[u8],
        mut offset: u64,
        staging: &mut AlignedBuf,
    ) -> io::Result<()> {
        let (straight, rest) = bytes.split_at(self.straight(bytes));
        for chunk in straight.chunks(STRAIGHT_CHUNK) {
            self.write_all(chunk, offset)?;
            offset += chunk.len() as u64;
        }
        for chunk in rest.chunks(staging.len()) {
            let padded = &mut staging.as_mut_slice()[..chunk.len().next_multiple_of(GRAIN)];
            padded[..chunk.len()].copy_from_slice(chunk);
            padded[chunk.len()..].fill(0);
            self.write_all(padded, offset)?;
            offset += padded.len() as u64;
        }
        Ok(())
    }

    /// Fills `bytes` from `offset` on.
    pub(crate) fn read(
        &self,
        bytes: &mut [u8],
        mut offset: u64,
        staging: &mut AlignedBuf,
    ) -> io::Result<()> {
        let straight = self.straight(bytes);
        let (straight, rest) = bytes.split_at_mut(straight);
        for chunk in straight.chunks_mut(STRAIGHT_CHUNK) {
            self.read_all(chunk, offset)?;
            offset += chunk.len() as u64;
        }
        for chunk in rest.chunks_mut(staging.len()) {
            let padded = &mut staging.as_mut_slice()[..chunk.len().next_multiple_of(GRAIN)];
            self.read_all(padded, offset)?;
            chunk.copy_from_slice(&padded[..chunk.len()]);
            offset += padded.len() as u64;
        }
        Ok(())
    }

    fn write_all(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let n = self.raw.write_at(&bytes[done..], offset + done as u64);
            match self.progress(n, bytes.len() - done)? {
                Some(0) => {
                    let message = "short write: the file takes no more bytes";
                    return Err(io::Error::new(io::ErrorKind::WriteZero, message));
                }
                n => done += n.unwrap_or(0),
            }
        }
        Ok(())
    }

    fn read_all(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let len = bytes.len();
        let mut done = 0;
        while done < len {
            let n = self.raw.read_at(&mut bytes[done..], offset + done as u64);
            match self.progress(n, len - done)? {
                Some(0) => {
                    let message = format!("short read: {done} of {len} bytes at offset {offset}");
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
                }
                n => done += n.unwrap_or(0),
            }
        }
        Ok(())
    }

    /// How far to go on after a call for `wanted` bytes: direct I/O can only go on at a whole
    /// grain. `None` if a signal interrupted the call, which is to be repeated.
    fn progress(&self, called: io::Result<usize>, wanted: usize) -> io::Result<Option<usize>> {
        match called {
            Ok(n) if self.mem_align.is_none() || n == wanted => Ok(Some(n)),
            Ok(n) => Ok(Some(n / GRAIN * GRAIN)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Asks the kernel to drop cached pages of the range: clean ones go now, dirty ones begin to
    /// be written.
    pub(crate) fn drop_cache(&self, offset: u64, len: u64) {
        if let (Some(file), Some(len)) = (&self.cached, NonZeroU64::new(len)) {
            // Advice: nothing is lost if it is not taken.
            let _ = fadvise(file, offset, Some(len), Advice::DontNeed);
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

    impl RawFile for std::sync::Arc<Noting> {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            Ok(self.note(buf.as_ptr(), buf.len(), offset))
        }

        fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
            Ok(self.note(buf.as_ptr(), buf.len(), offset))
        }
    }

    fn calls(skip: usize, len: usize) -> Vec<(u64, usize)> {
        let noting = std::sync::Arc::new(Noting::default());
        let io = Io { raw: Box::new(noting.clone()), mem_align: Some(512), cached: None };
        let mut memory = AlignedBuf::zeroed(skip + len).unwrap();
        let mut staging = AlignedBuf::zeroed(8192).unwrap();
        io.write(&memory.as_slice()[skip..], 4096, &mut staging).unwrap();
        let written = std::mem::take(&mut *noting.0.lock().unwrap());
        io.read(&mut memory.as_mut_slice()[skip..], 4096, &mut staging).unwrap();
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
