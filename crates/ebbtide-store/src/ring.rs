//! Moving a block through `io_uring`: several chunks of it on their way at once, one system call to
//! hand them over and to wait. One of the modules of this crate with `unsafe` in it.
//!
//! The kernel writes to memory and reads from it after the call that handed a chunk over. So no
//! function here is left, by an error or by a panic, before the kernel is done with every chunk.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, types};

use crate::fault::Call;
use crate::piece::{PATIENCE, Piece};
use crate::transfer::Io;

/// Chunks of a block that are on their way at once.
const DEPTH: usize = 4;
/// Bytes of a chunk, a whole number of grains. Chunks of 512 KiB to 8 MiB, two to eight at once, were
/// tried and are the same within the noise; this is few bytes in flight.
const CHUNK: usize = 1 << 20;

/// One submission queue and one completion queue, shared with the kernel. A worker has its own.
pub(crate) struct Ring {
    ring: IoUring,
    /// The kernel refused what is left in the submission queue: it must never see it.
    broken: bool,
}

impl Ring {
    /// Asks the kernel for a ring. `Err`: it has none, or does not allow this process to use it.
    pub(crate) fn new() -> io::Result<Self> {
        let entries = u32::try_from(2 * DEPTH).unwrap_or(u32::MAX);
        // A child made by fork has no use for the queues.
        let ring = IoUring::builder().dontfork().build(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if [opcode::Read::CODE, opcode::Write::CODE].iter().all(|&code| probe.is_supported(code)) {
            return Ok(Self { ring, broken: false });
        }
        Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel is too old: before 5.6"))
    }

    /// Whether another transfer can begin.
    pub(crate) fn is_usable(&self) -> bool {
        !self.broken
    }

    /// Writes the bytes from `offset` on.
    pub(crate) fn write(&mut self, io: &Io, bytes: &[u8], offset: u64) -> io::Result<()> {
        let memory =
            Memory { start: bytes.as_ptr().cast_mut(), len: bytes.len(), borrowed: PhantomData };
        self.transfer(io, Call::Write, &memory, offset)
    }

    /// Fills `bytes` from `offset` on.
    pub(crate) fn read(&mut self, io: &Io, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let memory = Memory { start: bytes.as_mut_ptr(), len: bytes.len(), borrowed: PhantomData };
        self.transfer(io, Call::Read, &memory, offset)
    }

    fn transfer(&mut self, io: &Io, call: Call, mem: &Memory<'_>, offset: u64) -> io::Result<()> {
        let mut flight = Flight { ring: self, io, call, memory: mem, pending: 0 };
        let mut lanes: [Option<Chunk>; DEPTH] = [const { None }; DEPTH];
        let mut next = 0;
        loop {
            for (number, lane) in lanes.iter_mut().enumerate() {
                while lane.is_none() && next < mem.len {
                    let len = CHUNK.min(mem.len - next);
                    let piece = Piece::new(call, io.is_direct(), offset + next as u64, len);
                    let chunk = Chunk { start: next, piece };
                    next += len;
                    *lane = flight.go_on(number, chunk)?;
                }
            }
            if flight.pending == 0 {
                return Ok(());
            }
            flight.wait()?;
            while let Some((number, called)) = flight.reap() {
                let mut chunk = lanes[number].take().expect("an answer for a chunk on its way");
                chunk.piece.advance(called)?;
                lanes[number] = flight.go_on(number, chunk)?;
            }
        }
    }
}

/// A part of the block, and how far it has come.
struct Chunk {
    /// Where in the block it begins.
    start: usize,
    piece: Piece,
}

/// The block, borrowed for as long as the transfer takes: shared for a write, whole for a read.
struct Memory<'m> {
    start: *mut u8,
    len: usize,
    borrowed: PhantomData<&'m mut [u8]>,
}

impl Memory<'_> {
    /// What is left of a chunk.
    fn left(&self, chunk: &Chunk) -> (*mut u8, usize) {
        let (begin, len) = (chunk.start + chunk.piece.done(), chunk.piece.left());
        assert!(begin + len <= self.len, "a chunk ends within its block");
        // SAFETY: `begin` is within the `len` bytes at `start`, one allocation, by the line above.
        (unsafe { self.start.add(begin) }, len)
    }
}

/// What is on its way in a ring. Dropping it waits until nothing is.
struct Flight<'a> {
    ring: &'a mut Ring,
    io: &'a Io,
    call: Call,
    memory: &'a Memory<'a>,
    /// Entries that were pushed and have not been answered.
    pending: usize,
}

impl Flight<'_> {
    /// Hands over what is left of a chunk. `None`: there is nothing left.
    fn go_on(&mut self, number: usize, mut chunk: Chunk) -> io::Result<Option<Chunk>> {
        while !chunk.piece.is_complete() {
            let Some(called) = self.planned(&chunk) else {
                self.push(number, &chunk)?;
                return Ok(Some(chunk));
            };
            chunk.piece.advance(called)?;
        }
        Ok(None)
    }

    /// What a planned fault makes of this call.
    fn planned(&self, chunk: &Chunk) -> Option<io::Result<usize>> {
        let (start, len) = self.memory.left(chunk);
        let offset = chunk.piece.offset();
        match self.call {
            Call::Write => {
                // SAFETY: `left` gave a range of the block, which is borrowed at least while
                // `memory` lives; during a write nobody changes it, the kernel included.
                let bytes = unsafe { std::slice::from_raw_parts(start, len) };
                self.io.raw.planned_write(bytes, offset)
            }
            Call::Read => {
                // SAFETY: as above; for a read the block is borrowed mutably, and the kernel was
                // given other ranges of it only: this chunk is not on its way.
                let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
                self.io.raw.planned_read(bytes, offset)
            }
        }
    }

    fn push(&mut self, number: usize, chunk: &Chunk) -> io::Result<()> {
        let (start, len) = self.memory.left(chunk);
        let (offset, fd) = (chunk.piece.offset(), types::Fd(self.fd()));
        let len = u32::try_from(len).expect("a chunk is small");
        let entry = match self.call {
            Call::Write => opcode::Write::new(fd, start, len).offset(offset).build(),
            Call::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
        };
        let entry = entry.user_data(number as u64);
        // SAFETY: the memory is borrowed for as long as `self` lives, and `self` is not gone before
        // the kernel has answered for the entry (see `drop`). The same holds for the file.
        let pushed = unsafe { self.ring.ring.submission().push(&entry) };
        pushed.map_err(io::Error::other)?;
        self.pending += 1;
        Ok(())
    }

    fn fd(&self) -> RawFd {
        self.io.file.as_raw_fd()
    }

    /// Hands over what was pushed and waits for an answer.
    fn wait(&mut self) -> io::Result<()> {
        let mut refused = 0;
        loop {
            match self.ring.ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                // A signal came.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Short of memory, or of room for answers.
                Err(e) if is_for_the_moment(&e) && refused < PATIENCE => {
                    refused += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// The next answer that is there: for which chunk, and what a plain call would have returned.
    fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let answer = self.ring.ring.completion().next()?;
        self.pending -= 1;
        let result = answer.result();
        let called = usize::try_from(result)
            .map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
        let number = usize::try_from(answer.user_data()).expect("numbers of chunks are small");
        Some((number, called))
    }
}

fn is_for_the_moment(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

impl Drop for Flight<'_> {
    /// The memory is free to go only when the kernel is done with it.
    fn drop(&mut self) {
        while self.pending > 0 {
            if self.wait().is_err() {
                if self.ring.ring.submission().len() == self.pending {
                    // The kernel has taken none of them, and never will.
                    self.ring.broken = true;
                    return;
                }
                // What was handed over ends in any case.
                std::thread::sleep(Duration::from_millis(1));
            }
            while self.reap().is_some() {}
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("broken", &self.broken).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::sync::Arc;

    use super::*;

    /// A buffered file: what is tested here is not the disk.
    fn io(file: File) -> Io {
        let file = Arc::new(file);
        Io { raw: Box::new(Arc::clone(&file)), file, mem_align: None }
    }

    fn noise(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n * 7 + n / 251).to_le_bytes()[0]).collect()
    }

    #[test]
    fn blocks_of_any_number_of_chunks_come_back() {
        let Ok(mut ring) = Ring::new() else { return };
        let io = io(tempfile::tempfile().unwrap());
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, DEPTH * CHUNK, (2 * DEPTH + 1) * CHUNK + 3] {
            let bytes = noise(len);
            ring.write(&io, &bytes, 4096).unwrap();
            let mut home = vec![0; len];
            ring.read(&io, &mut home, 4096).unwrap();
            assert!(home == bytes, "{len}");
        }
    }

    #[test]
    fn errors_of_the_kernel_come_back_and_nothing_stays_on_its_way() {
        let Ok(mut ring) = Ring::new() else { return };
        let path = tempfile::NamedTempFile::new().unwrap();
        let bytes = noise(6 * CHUNK + 5);
        ring.write(&io(path.reopen().unwrap()), &bytes, 0).unwrap();

        let closed = io(OpenOptions::new().read(true).open(path.path()).unwrap());
        let error = ring.write(&closed, &bytes, 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
        // The end of the file is within the seventh chunk.
        let mut home = vec![0; bytes.len() + 100];
        let error = ring.read(&closed, &mut home, 0).unwrap_err();
        let text = format!("short read: 5 of 105 bytes at offset {}", 6 * CHUNK);
        assert_eq!(error.to_string(), text);

        assert!(ring.is_usable() && ring.ring.completion().is_empty());
        home.truncate(bytes.len());
        home.fill(0);
        ring.read(&closed, &mut home, 0).unwrap();
        assert!(home == bytes);
    }
}
