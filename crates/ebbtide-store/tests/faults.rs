//! The disk fails: clear errors, no wrong value, nothing left behind, and no hanging.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Block, both_ways, chain, get, noise, open, put, single};
use ebbtide_core::{BackendError, Bytes, Store};
use ebbtide_store::fault::{Call, Fault, Kind};
use ebbtide_store::{FileConfig, FileStore, IoChoice, Mismatch};

both_ways! {
    c21_disk_full_gives_the_block_back;
    c21_disk_full_for_good_fails_every_put_and_no_get;
    c21_write_error;
    c21_read_error;
    c21_short_read_and_short_write_are_errors;
    partial_and_interrupted_calls_are_not_noticed;
    a_panicking_worker_is_an_error_and_the_next_job_works;
    a_panicking_destructor_does_not_hang_the_caller;
    c21_spill_folder_removed_under_way;
    c21_changed_bytes_are_an_error;
    a_fault_amid_many_chunks_is_one_error_and_harms_no_other_block;
}

const LEN: usize = 100_003;

fn faulty(dir: &tempfile::TempDir, io: IoChoice, fault: Fault) -> FileStore<Block> {
    open(&FileConfig { fault: Some(fault), staging_bytes_per_worker: 16_384, ..single(dir, io) })
}

/// The error of a put whose `nth` call fails; checks everything else about it.
fn failed_put(io: IoChoice, nth: u64, kind: Kind, skip: usize) -> BackendError {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, io, Fault::once(Call::Write, nth, kind));
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
fn failed_get(io: IoChoice, nth: u64, kind: Kind, skip: usize) -> BackendError {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, io, Fault::once(Call::Read, nth, kind));
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let failed = get(&mut store, &slot, Block::zeroed(LEN, skip, &alive)).unwrap_err();
    assert_eq!(store.stats().bytes_in, 0);
    let home = get(&mut store, &slot, failed.block).expect("the slot is still valid");
    assert!(home.bytes() == noise(LEN, 1));
    let start = format!("can't read {LEN} bytes from the spill file in {}", dir.path().display());
    assert_eq!(failed.error.to_string(), start);
    failed.error
}

fn c21_disk_full_gives_the_block_back(io: IoChoice) {
    for (nth, skip) in [(1, 0), (2, 0), (1, 1), (5, 1)] {
        let error = failed_put(io, nth, Kind::NoSpace, skip);
        assert!(chain(&error).contains("No space left on device"), "{}", chain(&error));
        let hint = "free space there or name another folder";
        assert_eq!(error.hint(), Some(hint));
    }
}

fn c21_disk_full_for_good_fails_every_put_and_no_get(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = faulty(&dir, io, Fault::lasting(Call::Write, 3, Kind::NoSpace));
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

fn c21_write_error(io: IoChoice) {
    let error = failed_put(io, 2, Kind::Io, 0);
    assert!(chain(&error).contains("Input/output error"), "{}", chain(&error));
    assert!(error.hint().unwrap().contains("kernel log"));
}

fn c21_read_error(io: IoChoice) {
    for (nth, skip) in [(1, 0), (2, 0), (4, 1)] {
        let error = failed_get(io, nth, Kind::Io, skip);
        assert!(chain(&error).contains("Input/output error"), "{}", chain(&error));
    }
}

fn c21_short_read_and_short_write_are_errors(io: IoChoice) {
    for (nth, skip) in [(1, 0), (2, 0), (4, 1)] {
        let error = failed_get(io, nth, Kind::Short, skip);
        assert!(chain(&error).contains("short read: 0 of "), "{}", chain(&error));
    }
    assert!(chain(&failed_put(io, 1, Kind::Short, 0)).contains("short write"));
}

fn partial_and_interrupted_calls_are_not_noticed(io: IoChoice) {
    for call in [Call::Read, Call::Write] {
        for kind in [Kind::Partial, Kind::Interrupted] {
            for (nth, skip) in [(1, 0), (2, 0), (3, 1)] {
                let dir = tempfile::tempdir().unwrap();
                let alive = Arc::new(AtomicUsize::new(0));
                let mut store = faulty(&dir, io, Fault::once(call, nth, kind));
                let slot = put(&mut store, Block::filled(LEN, skip, 1, &alive)).unwrap();
                let home = get(&mut store, &slot, Block::zeroed(LEN, skip, &alive)).unwrap();
                assert!(home.bytes() == noise(LEN, 1));
            }
        }
    }
}

fn a_panicking_worker_is_an_error_and_the_next_job_works(io: IoChoice) {
    let error = failed_put(io, 1, Kind::Panic, 0);
    assert!(chain(&error).ends_with("a worker panicked: planned panic in call 1"));
    let error = failed_get(io, 2, Kind::Panic, 0);
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

fn a_panicking_destructor_does_not_hang_the_caller(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = FileStore::open(&single(&dir, io)).unwrap();
    for byte in [13, 1] {
        let ticket = store.put(Bomb(vec![byte; 100])).unwrap();
        store.wait(ticket).unwrap_or_else(|_| panic!("the bytes were written"));
    }
}

fn refused(dir: &Path) -> String {
    let error = FileStore::<Block>::open(&FileConfig::new(dir)).unwrap_err();
    assert_eq!(error.hint(), Some("name another folder"));
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

fn c21_spill_folder_removed_under_way(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    dir.close().unwrap();
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let home = get(&mut store, &slot, Block::zeroed(LEN, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(LEN, 1));
}

#[test]
fn c21_tmpfs_draws_a_warning() {
    let Some(shm) = common::ram_folder() else { return };
    let store = open(&single(&shm, IoChoice::Threads));
    let dir = shm.path().display();
    let notice = format!("{dir} is RAM, not disk: swapping there saves nothing");
    assert_eq!(store.notices(), [notice]);
}

fn c21_changed_bytes_are_an_error(io: IoChoice) {
    for (call, nth, skip) in [Call::Write, Call::Read]
        .into_iter()
        .flat_map(|call| [(1, 0), (2, 0), (3, 1)].map(|(nth, skip)| (call, nth, skip)))
    {
        let dir = tempfile::tempdir().unwrap();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut store = faulty(&dir, io, Fault::once(call, nth, Kind::Flip));
        let slot = put(&mut store, Block::filled(LEN, skip, 1, &alive)).unwrap();
        let failed = get(&mut store, &slot, Block::zeroed(LEN, skip, &alive)).unwrap_err();
        let text = chain(&failed.error);
        assert!(text.starts_with(&format!("can't read {LEN} bytes from the spill file")), "{text}");
        assert!(failed.error.hint().unwrap().contains("memory is faulty"));
        let source = std::error::Error::source(&failed.error).unwrap();
        let mismatch = source.downcast_ref::<Mismatch>().unwrap();
        assert_eq!((mismatch.offset, mismatch.bytes), (slot.extent().offset(), LEN as u64));
        assert_eq!(Some(mismatch.written), slot.checksum());
        assert_ne!(mismatch.written, mismatch.read);
        assert_eq!(store.stats().bytes_in, 0);
        // A read that went wrong once is right the next time; a wrong write stays wrong.
        let again = get(&mut store, &slot, failed.block);
        match call {
            Call::Read => assert!(again.unwrap().bytes() == noise(LEN, 1)),
            Call::Write => drop(again.unwrap_err()),
        }
    }
}

#[test]
fn without_checksums_changed_bytes_are_not_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let fault = Some(Fault::once(Call::Write, 1, Kind::Flip));
    let config = FileConfig { fault, checksums: false, ..single(&dir, IoChoice::Threads) };
    let mut store = open(&config);
    let slot = put(&mut store, Block::filled(LEN, 0, 1, &alive)).unwrap();
    let home = get(&mut store, &slot, Block::zeroed(LEN, 0, &alive)).unwrap();
    let wrong: Vec<_> = home.bytes().iter().zip(noise(LEN, 1)).map(|(a, b)| a ^ b).collect();
    assert_eq!(wrong.iter().map(|bits| bits.count_ones()).sum::<u32>(), 1, "one bit");
}

fn a_fault_amid_many_chunks_is_one_error_and_harms_no_other_block(io: IoChoice) {
    const LARGE: usize = (17 << 20) + 5;
    for (call, kind) in [Call::Write, Call::Read]
        .into_iter()
        .flat_map(|call| [Kind::Io, Kind::Short, Kind::Panic].map(|kind| (call, kind)))
    {
        for nth in [1, 2] {
            let dir = tempfile::tempdir().unwrap();
            let alive = Arc::new(AtomicUsize::new(0));
            let fault = Some(Fault::once(call, nth, kind));
            let mut store = open(&FileConfig { fault, ..single(&dir, io) });
            let slot = match put(&mut store, Block::filled(LARGE, 0, 1, &alive)) {
                Ok(slot) => slot,
                Err(failed) => put(&mut store, failed.block).unwrap(),
            };
            let home = match get(&mut store, &slot, Block::zeroed(LARGE, 0, &alive)) {
                Ok(home) => home,
                Err(failed) => get(&mut store, &slot, failed.block).unwrap(),
            };
            assert!(home.bytes() == noise(LARGE, 1), "{call:?} {kind:?} {nth}");
        }
    }
}
