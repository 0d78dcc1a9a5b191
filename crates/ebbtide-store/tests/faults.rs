//! The disk fails: clear errors, no wrong value, nothing left behind, and no hanging.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Block, chain, get, noise, open, put, single};
use ebbtide_core::{BackendError, Bytes, Store};
use ebbtide_store::fault::{Call, Fault, Kind};
use ebbtide_store::{FileConfig, FileStore};

const LEN: usize = 100_003;

fn faulty(dir: &tempfile::TempDir, fault: Fault) -> FileStore<Block> {
    open(&FileConfig { fault: Some(fault), staging_bytes_per_worker: 16_384, ..single(dir) })
}

/// The error of a put whose `nth` call fails; checks everything else about it.
fn failed_put(nth: u64, kind: Kind, skip: usize) -> BackendError {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, Fault::once(Call::Write, nth, kind));
    let failed = put(&mut store, Block::filled(LEN, skip, 1, &alive)).unwrap_err();
    assert!(failed.block.bytes() == noise(LEN, 1), "the block comes back as it was");
    let stats = store.stats();
    assert_eq!((stats.bytes_held, stats.bytes_out), (0, 0), "its room is free again");

    let slot = put(&mut store, failed.block).expect("the next try works");
    let home = get(&mut store, &slot, Block::zeroed(LEN, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(LEN, 1));
    drop((store, home));
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    let start = format!("can't write {LEN} bytes to the spill file in {}", dir.path().display());
    assert_eq!(failed.error.to_string(), start);
    failed.error
}

/// The same for a get.
fn failed_get(nth: u64, kind: Kind, skip: usize) -> BackendError {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, Fault::once(Call::Read, nth, kind));
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let failed = get(&mut store, &slot, Block::zeroed(LEN, skip, &alive)).unwrap_err();
    assert_eq!(store.stats().bytes_in, 0);
    let home = get(&mut store, &slot, failed.block).expect("the slot is still valid");
    assert!(home.bytes() == noise(LEN, 1));
    let start = format!("can't read {LEN} bytes from the spill file in {}", dir.path().display());
    assert_eq!(failed.error.to_string(), start);
    failed.error
}

#[test]
fn c21_disk_full_gives_the_block_back() {
    for (nth, skip) in [(1, 0), (2, 0), (1, 1), (5, 1)] {
        let error = failed_put(nth, Kind::NoSpace, skip);
        assert!(chain(&error).contains("No space left on device"), "{}", chain(&error));
        let hint = "free space there or name another folder with --spill-dir";
        assert_eq!(error.hint(), Some(hint));
    }
}

#[test]
fn c21_disk_full_for_good_fails_every_put_and_no_get() {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, Fault::lasting(Call::Write, 3, Kind::NoSpace));
    // Two calls: straight and tail.
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let tickets: Vec<_> =
        (2..10).map(|seed| store.put(Block::filled(LEN, 0, seed, &alive)).unwrap()).collect();
    for (ticket, seed) in tickets.into_iter().zip(2..) {
        let failed = store.wait(ticket).unwrap_err();
        assert!(failed.block.bytes() == noise(LEN, seed));
    }
    let home = get(&mut store, &slot, Block::zeroed(LEN, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(LEN, 1));
    assert_eq!(store.stats().bytes_held, 102_400);
}

#[test]
fn c21_write_error() {
    let error = failed_put(2, Kind::Io, 0);
    assert!(chain(&error).contains("Input/output error"), "{}", chain(&error));
    assert!(error.hint().unwrap().contains("kernel log"));
}

#[test]
fn c21_read_error() {
    for (nth, skip) in [(1, 0), (2, 0), (4, 1)] {
        let error = failed_get(nth, Kind::Io, skip);
        assert!(chain(&error).contains("Input/output error"), "{}", chain(&error));
    }
}

#[test]
fn c21_short_read_and_short_write_are_errors() {
    for (nth, skip) in [(1, 0), (2, 0), (4, 1)] {
        let error = failed_get(nth, Kind::Short, skip);
        assert!(chain(&error).contains("short read: 0 of "), "{}", chain(&error));
    }
    assert!(chain(&failed_put(1, Kind::Short, 0)).contains("short write"));
}

#[test]
fn partial_and_interrupted_calls_are_not_noticed() {
    for call in [Call::Read, Call::Write] {
        for kind in [Kind::Partial, Kind::Interrupted] {
            for (nth, skip) in [(1, 0), (2, 0), (3, 1)] {
                let dir = tempfile::tempdir().unwrap();
                let alive = Arc::new(AtomicUsize::new(0));
                let mut store = faulty(&dir, Fault::once(call, nth, kind));
                let slot = put(&mut store, Block::filled(LEN, skip, 1, &alive)).unwrap();
                let home = get(&mut store, &slot, Block::zeroed(LEN, skip, &alive)).unwrap();
                assert!(home.bytes() == noise(LEN, 1));
            }
        }
    }
}

#[test]
fn a_panicking_worker_is_an_error_and_the_next_job_works() {
    let error = failed_put(1, Kind::Panic, 0);
    assert!(chain(&error).ends_with("a worker panicked: planned panic in call 1"));
    let error = failed_get(2, Kind::Panic, 0);
    assert!(chain(&error).ends_with("a worker panicked: planned panic in call 2"));
}

/// A block that panics when it is dropped, once.
#[derive(Debug)]
struct Bomb(Vec<u8>);

impl Bytes for Bomb {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(self.0[0] != 13, "a destructor panics");
    }
}

#[test]
fn a_panicking_destructor_does_not_hang_the_caller() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = FileStore::open(&single(&dir)).unwrap();
    for byte in [13, 1] {
        let ticket = store.put(Bomb(vec![byte; 100])).unwrap();
        store.wait(ticket).unwrap_or_else(|_| panic!("the bytes were written"));
    }
}

fn refused(dir: &Path) -> String {
    let error = FileStore::<Block>::open(&FileConfig::new(dir)).unwrap_err();
    assert_eq!(error.hint(), Some("name another folder with --spill-dir"));
    chain(&error)
}

#[test]
fn c21_spill_folder_missing() {
    let text = refused(Path::new("/no/such/folder"));
    assert_eq!(text, "can't use /no/such/folder for a spill file: the folder doesn't exist");
}

#[test]
fn c21_spill_folder_is_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    assert!(refused(file.path()).ends_with("it is not a folder"));
}

#[test]
fn c21_spill_folder_read_only() {
    // Not even root can make a file here.
    let text = refused(Path::new("/proc/self"));
    assert!(text.starts_with("can't use /proc/self for a spill file: "), "{text}");
}

#[test]
fn c21_spill_folder_removed_under_way() {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir));
    dir.close().unwrap();
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let home = get(&mut store, &slot, Block::zeroed(LEN, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(LEN, 1));
}

#[test]
fn c21_tmpfs_draws_a_warning() {
    let Some(shm) = common::ram_folder() else { return };
    let store = open(&single(&shm));
    let dir = shm.path().display();
    let notice = format!("{dir} is RAM, not disk: swapping there saves nothing");
    assert_eq!(store.notices(), [notice]);
}
