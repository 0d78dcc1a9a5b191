//! The file tier against the plain loop, taking turns.

use std::path::Path;
use std::time::{Duration, Instant};

use ebbtide_core::{BackendError, Bytes, Done, Failed, Store};

use super::plain::{PlainFile, filled};
use super::{Rates, gbps, median};
use crate::checksum::checksum;
use crate::{AlignedBuf, FileConfig, FileSlot, FileStore, IoChoice, IoKind, uring_available};

/// No round begins later than this after the first.
const PATIENCE: Duration = Duration::from_mins(1);

/// The tier with one way of I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TierRates {
    /// The way.
    pub kind: IoKind,
    /// Its bandwidth, median of the rounds.
    pub gbps: Rates,
    /// Its bandwidth divided by that of the plain loop in the same round, median of the rounds.
    pub of_plain: Rates,
}

/// What [`file_tier`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct TierReport {
    /// Bytes that everyone moved each way in a round.
    pub bytes: u64,
    /// Bytes of a block, and of a call of the plain loop.
    pub block_bytes: usize,
    /// Rounds that were measured.
    pub rounds: usize,
    /// The plain loop: one thread, one block after the other. Median of the rounds.
    pub plain_gbps: Rates,
    /// The tier, for each way of I/O that the kernel allows.
    pub tiers: Vec<TierRates>,
    /// Whether the page cache is bypassed; if not, why.
    pub direct: Result<(), String>,
    /// Whether this process may use `io_uring`; if not, what the kernel answered.
    pub uring: Result<(), String>,
}

/// Measures what the tier costs: in each round, a plain loop of direct I/O and a [`FileStore`] for
/// each way of I/O move the same blocks out (put all, wait for all) and home (get all, wait for
/// all), in turns, each in a file of its own whose space is taken already. A round before the first
/// warms up, and checks that the bytes that come home are those that went.
///
/// `bytes` is rounded up to whole blocks, `block_bytes` to 4096; the blocks are all in memory, and
/// the files together take three times as much of the disk. `rounds` is at least 1. After a minute
/// no further round begins.
///
/// # Errors
/// The folder does not serve, an I/O error, no memory, or other bytes came home.
///
/// # Examples
/// ```
/// let dir = std::env::temp_dir();
/// let report = ebbtide_store::measure::file_tier(&dir, 16 << 20, 4 << 20, 3)?;
/// for tier in &report.tiers {
///     println!("{}: writes at {:.2} of the plain loop", tier.kind, tier.of_plain.write);
/// }
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub fn file_tier(
    dir: &Path,
    bytes: u64,
    block_bytes: usize,
    rounds: usize,
) -> Result<TierReport, BackendError> {
    let block_bytes = block_bytes.next_multiple_of(crate::GRAIN).max(crate::GRAIN);
    let count = bytes.div_ceil(block_bytes as u64).max(1);
    let bytes = count * block_bytes as u64;
    let mut blocks = (0..count)
        .map(|seed| filled(block_bytes, seed).map(Kept))
        .collect::<Result<Vec<_>, _>>()?;
    let plain = PlainFile::open(dir)?;
    plain.preallocate(bytes)?;
    let (direct, uring) = (plain.direct(), uring_available().map_err(|e| e.to_string()));
    let mut movers: Vec<Box<dyn Mover>> = vec![Box::new(plain)];
    let mut kinds = vec![IoKind::Threads];
    movers.push(Box::new(Tier::open(dir, IoChoice::Threads)?));
    if uring.is_ok() {
        movers.push(Box::new(Tier::open(dir, IoChoice::Uring)?));
        kinds.push(IoKind::Uring);
    }

    check(&mut movers, &mut blocks)?;
    let begin = Instant::now();
    let mut measured = Vec::new();
    while measured.is_empty() || (measured.len() < rounds && begin.elapsed() < PATIENCE) {
        let order = turn(movers.len(), measured.len());
        measured.push(round(&mut movers, &order, &mut blocks, bytes)?);
    }
    let gbps = |mover: usize| medians(measured.iter().map(|round| round[mover]));
    let of_plain = |mover: usize| {
        medians(measured.iter().map(|round| Rates {
            write: round[mover].write / round[0].write,
            read: round[mover].read / round[0].read,
        }))
    };
    let tiers = kinds.into_iter().zip(1..);
    let tiers = tiers.map(|(kind, m)| TierRates { kind, gbps: gbps(m), of_plain: of_plain(m) });
    Ok(TierReport {
        bytes,
        block_bytes,
        rounds: measured.len(),
        plain_gbps: gbps(0),
        tiers: tiers.collect(),
        direct,
        uring,
    })
}

/// Everyone is first equally often.
fn turn(movers: usize, round: usize) -> Vec<usize> {
    (0..movers).map(|mover| (mover + round) % movers).collect()
}

fn medians(rates: impl Iterator<Item = Rates>) -> Rates {
    let (write, read) = rates.map(|Rates { write, read }| (write, read)).unzip();
    Rates { write: median(write), read: median(read) }
}

/// What each mover needs for the blocks each way, as bandwidths.
fn round(
    movers: &mut [Box<dyn Mover>],
    order: &[usize],
    blocks: &mut Vec<Kept>,
    bytes: u64,
) -> Result<Vec<Rates>, BackendError> {
    let mut rates = vec![Rates::default(); movers.len()];
    for &mover in order {
        let begin = Instant::now();
        movers[mover].out(blocks)?;
        rates[mover].write = gbps(bytes, begin.elapsed());
    }
    for &mover in order {
        let begin = Instant::now();
        movers[mover].home(blocks)?;
        rates[mover].read = gbps(bytes, begin.elapsed());
        movers[mover].forget();
    }
    Ok(rates)
}

/// A round that is not measured: figures about other bytes than those that were put say nothing.
fn check(movers: &mut [Box<dyn Mover>], blocks: &mut Vec<Kept>) -> Result<(), BackendError> {
    let sums: Vec<_> = blocks.iter().map(|block| checksum(block.bytes())).collect();
    for mover in movers {
        mover.out(blocks)?;
        for block in blocks.iter_mut() {
            block.bytes_mut().fill(0);
        }
        mover.home(blocks)?;
        mover.forget();
        if !blocks.iter().zip(&sums).all(|(block, &sum)| checksum(block.bytes()) == sum) {
            return Err(BackendError::new("other bytes came home than went out")
                .with_hint(crate::Mismatch::HINT));
        }
    }
    Ok(())
}

/// A block that comes back after a put, so that no new memory has to be found for the next.
struct Kept(AlignedBuf);

impl Bytes for Kept {
    fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }

    fn release(self) -> Option<Self> {
        Some(self)
    }
}

/// Moves all blocks one way. The same blocks are there afterwards, in the same order.
trait Mover {
    fn out(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError>;
    fn home(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError>;
    /// The bytes outside are not needed any more.
    fn forget(&mut self) {}
}

impl Mover for PlainFile {
    fn out(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError> {
        let mut offset = 0;
        for block in blocks {
            self.write(block.bytes(), offset)?;
            offset += block.size() as u64;
        }
        Ok(())
    }

    fn home(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError> {
        let mut offset = 0;
        for block in blocks {
            self.read(block.bytes_mut(), offset)?;
            offset += block.size() as u64;
        }
        Ok(())
    }
}

struct Tier {
    store: FileStore<Kept>,
    slots: Vec<FileSlot>,
}

impl Tier {
    fn open(dir: &Path, io: IoChoice) -> Result<Self, BackendError> {
        let store = FileStore::open(&FileConfig { io, ..FileConfig::new(dir) })?;
        Ok(Self { store, slots: Vec::new() })
    }
}

impl Mover for Tier {
    fn out(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError> {
        let puts =
            blocks.drain(..).map(|block| self.store.put(block)).collect::<Result<Vec<_>, _>>();
        for ticket in puts.map_err(reason)? {
            if let (Done::Stored(slot, Some(block)), _) = self.store.wait(ticket).map_err(reason)? {
                self.slots.push(slot);
                blocks.push(block);
            }
        }
        Ok(())
    }

    fn home(&mut self, blocks: &mut Vec<Kept>) -> Result<(), BackendError> {
        let jobs = blocks.drain(..).zip(&self.slots);
        let gets =
            jobs.map(|(block, slot)| self.store.get(slot, block)).collect::<Result<Vec<_>, _>>();
        for ticket in gets.map_err(reason)? {
            if let (Done::Loaded(block), _) = self.store.wait(ticket).map_err(reason)? {
                blocks.push(block);
            }
        }
        Ok(())
    }

    fn forget(&mut self) {
        for slot in self.slots.drain(..) {
            self.store.discard(slot);
        }
    }
}

fn reason(failed: Failed<Kept>) -> BackendError {
    failed.error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tier_is_measured_each_way() {
        let dir = tempfile::tempdir().unwrap();
        let report = file_tier(dir.path(), 1_000_000, 300_000, 2).unwrap();
        assert_eq!((report.bytes, report.block_bytes, report.rounds), (4 * 303_104, 303_104, 2));
        let kinds: Vec<_> = report.tiers.iter().map(|tier| tier.kind).collect();
        let expected = [IoKind::Threads, IoKind::Uring];
        assert_eq!(kinds, expected[..if report.uring.is_ok() { 2 } else { 1 }]);
        for TierRates { gbps, of_plain, .. } in report.tiers {
            assert!(
                [gbps.write, gbps.read, of_plain.write, of_plain.read].iter().all(|&r| r > 0.0)
            );
        }
    }

    #[test]
    fn turns_are_fair() {
        assert_eq!(turn(3, 0), [0, 1, 2]);
        assert_eq!(turn(3, 2), [2, 0, 1]);
    }
}
