//! Plain calls against rings, measured in the spill file itself when a store is opened.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::AlignedBuf;
use crate::ring::Ring;
use crate::transfer::{Io, Lane};

/// Bytes that each thread writes and reads back in a round: several chunks of a ring.
const BLOCK: usize = 2 << 20;
/// Threads that do so at once, at most: as many as a store usually has.
const THREADS: usize = 2;
/// Nobody wants to wait for longer when a store is opened.
const BUDGET: Duration = Duration::from_millis(45);
/// Fewer rounds than this show nothing, more are not needed.
const ROUNDS: std::ops::RangeInclusive<usize> = 2..=5;
/// A file that may not grow further than this is not worth the time.
const TINY: u64 = 64 << 20;

/// 10⁹ bytes a second, written and read back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    pub(crate) threads_gbps: f64,
    pub(crate) uring_gbps: f64,
}

/// Lets threads with plain calls and threads with these rings take turns. The file has other
/// content afterwards. `Err`: why there is nothing to tell.
pub(crate) fn compare(
    io: &Io,
    rings: &mut [Ring],
    capacity: Option<u64>,
) -> Result<Comparison, String> {
    if !io.is_direct() {
        return Err("the file is in the page cache".into());
    }
    if let Some(bytes) = capacity.filter(|&bytes| bytes < TINY) {
        return Err(format!("a file of {bytes} bytes is too small for it to matter"));
    }
    run(io, rings).map_err(|e| format!("trying failed: {e}"))?
}

/// The outer error is one of the disk.
fn run(io: &Io, rings: &mut [Ring]) -> io::Result<Result<Comparison, String>> {
    // Without the faults that tests plan: those are for the store.
    let file = Arc::clone(&io.file);
    let io = &Io { raw: Box::new(Arc::clone(&file)), file, mem_align: io.mem_align };
    let begin = Instant::now();
    let mut blocks = Vec::new();
    for ring in rings.iter_mut().take(THREADS) {
        let mut memory = AlignedBuf::zeroed(BLOCK).map_err(io::Error::other)?;
        // Pages that are there, of which the disk can't tell that they are empty.
        memory.as_mut_slice().fill(0xEB);
        let lane = Lane::new(crate::GRAIN, None).map_err(io::Error::other)?;
        blocks.push(Block { memory, lane, ring });
    }

    // What is written for the first time is slower: that is not counted.
    let mut round = both(io, &mut blocks)?;
    let (mut threads, mut uring) = (Vec::new(), Vec::new());
    while threads.len() < *ROUNDS.end() && begin.elapsed() + round.0 + round.1 < BUDGET {
        round = both(io, &mut blocks)?;
        threads.push(round.0);
        uring.push(round.1);
    }
    if threads.len() < *ROUNDS.start() {
        return Ok(Err(format!(
            "the disk needs {:.0?} for {} bytes out and home, too long to compare",
            round.0,
            blocks.len() * BLOCK
        )));
    }
    let bytes = 2 * blocks.len() * BLOCK;
    let rate = |mut times: Vec<Duration>| {
        times.sort_unstable();
        bytes as f64 / times[(times.len() - 1) / 2].as_secs_f64() / 1e9
    };
    Ok(Ok(Comparison { threads_gbps: rate(threads), uring_gbps: rate(uring) }))
}

/// What one thread uses.
struct Block<'r> {
    memory: AlignedBuf,
    lane: Lane,
    ring: &'r mut Ring,
}

/// A turn of each: with plain calls, and with rings.
fn both(io: &Io, blocks: &mut [Block<'_>]) -> io::Result<(Duration, Duration)> {
    let threads = together(blocks, |block, offset| {
        io.write(block.memory.as_slice(), offset, &mut block.lane)?;
        io.read(block.memory.as_mut_slice(), offset, &mut block.lane)
    })?;
    let uring = together(blocks, |block, offset| {
        block.ring.write(io, block.memory.as_slice(), offset)?;
        block.ring.read(io, block.memory.as_mut_slice(), offset)
    })?;
    Ok((threads, uring))
}

/// Does something with each block at once, and tells how long the slowest took.
fn together(
    blocks: &mut [Block<'_>],
    job: impl Fn(&mut Block<'_>, u64) -> io::Result<()> + Sync,
) -> io::Result<Duration> {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(blocks.iter_mut())
            .map(|(number, block)| {
                let job = &job;
                scope.spawn(move || job(block, number * BLOCK as u64))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        })
    })?;
    Ok(begin.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpillFile;

    fn io(dir: &std::path::Path) -> Io {
        let SpillFile { file, mem_align, .. } = SpillFile::open(dir).unwrap();
        let file = Arc::new(file);
        Io { raw: Box::new(Arc::clone(&file)), file, mem_align }
    }

    fn rings() -> Option<Vec<Ring>> {
        (0..2).map(|_| Ring::new().ok()).collect()
    }

    #[test]
    fn small_and_buffered_files_are_not_measured() {
        let Some(mut rings) = rings() else { return };
        let dir = tempfile::tempdir().unwrap();
        let direct = io(dir.path());
        if direct.is_direct() {
            let why = compare(&direct, &mut rings, Some(4096)).unwrap_err();
            assert_eq!(why, "a file of 4096 bytes is too small for it to matter");
        }
        let buffered = Io { mem_align: None, ..direct };
        let why = compare(&buffered, &mut rings, None).unwrap_err();
        assert_eq!(why, "the file is in the page cache");
        assert_eq!(buffered.file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn both_ways_are_measured_or_it_is_said_why_not() {
        let Some(mut rings) = rings() else { return };
        let dir = tempfile::tempdir().unwrap();
        match compare(&io(dir.path()), &mut rings, None) {
            Ok(Comparison { threads_gbps, uring_gbps }) => {
                assert!(threads_gbps > 0.0 && uring_gbps > 0.0);
            }
            Err(why) => assert!(why.contains("too long") || why.contains("page cache"), "{why}"),
        }
    }
}
