//! How far one chunk of a block has come, whichever way the calls for it are made.
//!
//! A call may do less than it was asked for, be interrupted, or be refused for the moment. What
//! follows from that is decided here, once, for plain calls and for the ring.

use std::io;
use std::time::Duration;

use crate::GRAIN;
use crate::fault::Call;

/// How often in a row the kernel may say "try again" before it is an error: a second in all.
pub(crate) const PATIENCE: u32 = 1000;

/// A range of the file that is being written or read.
#[derive(Debug)]
pub(crate) struct Piece {
    call: Call,
    /// Whether the file is: direct I/O can only go on at a whole grain.
    direct: bool,
    offset: u64,
    len: usize,
    done: usize,
    refused: u32,
}

impl Piece {
    pub(crate) fn new(call: Call, direct: bool, offset: u64, len: usize) -> Self {
        Self { call, direct, offset, len, done: 0, refused: 0 }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.done == self.len
    }

    /// Bytes that have been moved: the next call begins behind them.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Bytes that are left.
    pub(crate) fn left(&self) -> usize {
        self.len - self.done
    }

    /// Where in the file the next call begins.
    pub(crate) fn offset(&self) -> u64 {
        self.offset + self.done as u64
    }

    /// Takes what a call for everything that is [`left`](Self::left) answered.
    pub(crate) fn advance(&mut self, called: io::Result<usize>) -> io::Result<()> {
        let moved = match called {
            Ok(n) if self.direct && n < self.left() => n / GRAIN * GRAIN,
            Ok(n) => n.min(self.left()),
            // A signal: the call is repeated.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.refused < PATIENCE => {
                self.refused += 1;
                std::thread::sleep(Duration::from_millis(1));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        self.refused = 0;
        self.done += moved;
        if moved == 0 { Err(self.stuck()) } else { Ok(()) }
    }

    fn stuck(&self) -> io::Error {
        let Self { offset, len, done, .. } = self;
        match self.call {
            Call::Read => {
                let message = format!("short read: {done} of {len} bytes at offset {offset}");
                io::Error::new(io::ErrorKind::UnexpectedEof, message)
            }
            Call::Write => {
                let message = "short write: the file takes no more bytes";
                io::Error::new(io::ErrorKind::WriteZero, message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn direct_pieces_go_on_at_whole_grains() {
        let mut piece = Piece::new(Call::Read, true, 8192, 3 * GRAIN);
        piece.advance(Ok(GRAIN + 100)).unwrap();
        assert_eq!((piece.done(), piece.left(), piece.offset()), (GRAIN, 2 * GRAIN, 12_288));
        let error = piece.advance(Ok(100)).unwrap_err();
        assert_eq!(error.to_string(), "short read: 4096 of 12288 bytes at offset 8192");
        piece.advance(Ok(2 * GRAIN)).unwrap();
        assert!(piece.is_complete());
    }

    #[test]
    fn buffered_pieces_go_on_anywhere() {
        let mut piece = Piece::new(Call::Write, false, 1, 10);
        piece.advance(Ok(3)).unwrap();
        assert_eq!((piece.done(), piece.left(), piece.offset()), (3, 7, 4));
        assert!(piece.advance(Ok(0)).unwrap_err().to_string().starts_with("short write"));
    }

    #[test]
    fn interruptions_change_nothing_and_refusals_end() {
        let mut piece = Piece::new(Call::Write, true, 0, GRAIN);
        for _ in 0..5 {
            piece.advance(Err(Errno::INTR.into())).unwrap();
            piece.advance(Err(Errno::AGAIN.into())).unwrap();
        }
        assert_eq!(piece.left(), GRAIN);
        piece.refused = PATIENCE;
        let error = piece.advance(Err(Errno::AGAIN.into())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
