//! Blocks that know their content, and short forms of the calls.
#![allow(dead_code, unused_macros, unused_imports, reason = "each test binary uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ebbtide_core::{Bytes, Done, Failed, Store};
use ebbtide_store::{AlignedBuf, FileConfig, FileStore, IoChoice};

/// `len` bytes at an address that is `skip` bytes past a page; counts itself while it lives.
#[derive(Debug)]
pub(crate) struct Block {
    memory: AlignedBuf,
    skip: usize,
    alive: Arc<AtomicUsize>,
}

impl Block {
    pub(crate) fn zeroed(len: usize, skip: usize, alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        let memory = AlignedBuf::zeroed(skip + len).unwrap();
        Self { memory, skip, alive: Arc::clone(alive) }
    }

    pub(crate) fn filled(len: usize, skip: usize, seed: u64, alive: &Arc<AtomicUsize>) -> Self {
        let mut block = Self::zeroed(len, skip, alive);
        block.bytes_mut().copy_from_slice(&noise(len, seed));
        block
    }
}

impl Bytes for Block {
    fn bytes(&self) -> &[u8] {
        &self.memory.as_slice()[self.skip..]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut_slice()[self.skip..]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Bytes that differ at every place and for every seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn open(config: &FileConfig) -> FileStore<Block> {
    FileStore::open(config).unwrap()
}

/// A folder in RAM, where the machine has one at the usual place.
pub(crate) fn ram_folder() -> Option<tempfile::TempDir> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let tmpfs =
        mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq(["/dev/shm", "tmpfs"]));
    tmpfs.then(|| tempfile::tempdir_in("/dev/shm").unwrap())
}

/// One worker, so that the order of calls is known. Blocks are checked.
pub(crate) fn single(dir: &tempfile::TempDir, io: IoChoice) -> FileConfig {
    FileConfig { workers: 1, io, checksums: true, ..FileConfig::new(dir.path()) }
}

/// Makes two tests of each function: one for each way of I/O. Those with the ring are left out,
/// with a message, where the kernel refuses it.
macro_rules! both_ways {
    ($($(#[$attribute:meta])* $name:ident;)*) => {
        mod threads {
            $(#[test] $(#[$attribute])* fn $name() {
                super::$name(ebbtide_store::IoChoice::Threads);
            })*
        }

        mod uring {
            $(#[test] $(#[$attribute])* fn $name() {
                if $crate::common::ring_is_allowed(stringify!($name)) {
                    super::$name(ebbtide_store::IoChoice::Uring);
                }
            })*
        }
    };
}
pub(crate) use both_ways;

/// Says that a test does nothing, and why.
#[allow(clippy::print_stderr, reason = "nothing is hidden about what was not tested")]
pub(crate) fn skipped(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
}

pub(crate) fn ring_is_allowed(test: &str) -> bool {
    match ebbtide_store::uring_available() {
        Ok(()) => true,
        Err(why) => {
            skipped(&format!("uring::{test}"), &format!("the kernel refuses io_uring: {why}"));
            false
        }
    }
}

pub(crate) fn put<S: Store<Block>>(store: &mut S, block: Block) -> Result<S::Slot, Failed<Block>> {
    let ticket = store.put(block)?;
    match store.wait(ticket)?.0 {
        Done::Stored(slot, _) => Ok(slot),
        Done::Loaded(_) => panic!("a put stores"),
    }
}

pub(crate) fn get<S: Store<Block>>(
    store: &mut S,
    slot: &S::Slot,
    block: Block,
) -> Result<Block, Failed<Block>> {
    let ticket = store.get(slot, block)?;
    match store.wait(ticket)?.0 {
        Done::Loaded(block) => Ok(block),
        Done::Stored(..) => panic!("a get loads"),
    }
}

/// The error and its causes, as a program would print them.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |e| e.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
