//! The file tier: round trips, order, bounds, counters.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Block, both_ways, get, noise, open, put, single};
use ebbtide_core::{Bytes, Store};
use ebbtide_store::{FileConfig, FileStore, IoChoice, IoKind, IoReason};

both_ways! {
    odd_sizes_and_addresses_come_back_bit_exact;
    buffered_files_serve_too;
    many_jobs_at_once_with_reuse_of_extents;
    a_put_frees_the_block_without_being_waited_for;
    times_count_from_the_origin;
    a_full_queue_blocks_and_goes_on;
    loads_go_before_writes;
    dropping_the_store_drops_what_is_queued;
    a_capacity_is_an_error_at_once_and_gives_the_block_back;
    shrinking_gives_back_what_is_not_in_use;
    an_unused_file_is_emptied_if_asked_for;
    checksums_are_kept_with_the_slot;
}

const SIZES: [usize; 12] = [
    0,
    1,
    511,
    4095,
    4096,
    4097,
    65_535,
    1 << 20,
    (1 << 20) + 1,
    3_000_017,
    8 << 20,
    (9 << 20) + 5,
];

fn round_trips(config: &FileConfig) {
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(config);
    for (seed, len) in (0..).zip(SIZES) {
        for skip in [0, 1, 16, 512, 4095] {
            let slot = put(&mut store, Block::filled(len, skip, seed, &alive)).unwrap();
            assert_eq!(alive.load(Ordering::SeqCst), 0, "a finished put drops the block");
            // Back to an address of another alignment.
            let home = Block::zeroed(len, (skip + 1) % 3, &alive);
            let home = get(&mut store, &slot, home).unwrap();
            assert!(home.bytes() == noise(len, seed), "{len} bytes, {skip} past a page");
            store.discard(slot);
        }
    }
    assert_eq!(store.stats().bytes_held, 0);
}

fn odd_sizes_and_addresses_come_back_bit_exact(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    round_trips(&single(&dir, io));
    // Staging of one grain: many chunks; the size is rounded up.
    round_trips(&FileConfig { staging_bytes_per_worker: 1, ..single(&dir, io) });
}

fn buffered_files_serve_too(io: IoChoice) {
    let Some(shm) = common::ram_folder() else { return };
    let config = single(&shm, io);
    assert!(!open(&config).is_direct());
    round_trips(&config);
}

fn many_jobs_at_once_with_reuse_of_extents(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&FileConfig { workers: 4, ..single(&dir, io) });
    let len = |n: u64| 1000 + usize::try_from(n).unwrap() % 13 * 17_003;
    let mut high_water = None;
    for round in 0..5 {
        let seeds = round * 100..round * 100 + 100;
        let puts: Vec<_> = seeds
            .clone()
            .map(|n| store.put(Block::filled(len(n - round * 100), 16, n, &alive)).unwrap())
            .collect();
        let slots: Vec<_> = puts
            .into_iter()
            .map(|ticket| match store.wait(ticket).unwrap().0 {
                ebbtide_core::Done::Stored(slot, _) => slot,
                ebbtide_core::Done::Loaded(_) => unreachable!(),
            })
            .collect();
        let end = slots.iter().map(|s| s.extent().offset() + s.extent().len()).max();
        assert_eq!(*high_water.get_or_insert(end), end, "the file stops growing");
        let gets: Vec<_> = slots
            .iter()
            .map(|slot| {
                let len = usize::try_from(slot.bytes()).unwrap();
                store.get(slot, Block::zeroed(len, 0, &alive)).unwrap()
            })
            .collect();
        // Waiting in another order than asking.
        for (ticket, n) in gets.into_iter().rev().zip(seeds.rev()) {
            let ebbtide_core::Done::Loaded(block) = store.wait(ticket).unwrap().0 else {
                unreachable!()
            };
            assert!(block.bytes() == noise(block.bytes().len(), n));
        }
        for slot in slots {
            store.discard(slot);
        }
    }
    let stats = store.stats();
    assert_eq!((stats.bytes_held, stats.bytes_in), (0, stats.bytes_out));
    assert_eq!(alive.load(Ordering::SeqCst), 0);
}

fn a_put_frees_the_block_without_being_waited_for(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    let ticket = store.put(Block::filled(1 << 20, 0, 1, &alive)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while alive.load(Ordering::SeqCst) > 0 {
        assert!(Instant::now() < deadline, "the block was not dropped");
        std::thread::yield_now();
    }
    let (_, timing) = store.wait(ticket).unwrap();
    assert!(timing.started_ns < timing.finished_ns);
    assert_eq!(timing.worker, 0);
}

fn times_count_from_the_origin(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let origin = Instant::now().checked_sub(Duration::from_secs(7)).unwrap();
    let mut store = open(&FileConfig { origin, ..single(&dir, io) });
    let ticket = store.put(Block::filled(100, 0, 1, &alive)).unwrap();
    let (_, timing) = store.wait(ticket).unwrap();
    assert!(timing.started_ns >= 7_000_000_000);
}

/// A block whose reader waits for a sign, so that a worker is busy for as long as a test likes.
#[derive(Debug)]
struct Gate(Vec<u8>, Option<std::sync::Mutex<std::sync::mpsc::Receiver<()>>>);

impl Bytes for Gate {
    fn bytes(&self) -> &[u8] {
        // The caller asks for the length; only a worker waits.
        if let (Some(gate), Some("ebbtide-io-0")) = (&self.1, std::thread::current().name()) {
            let _ = gate.lock().unwrap().recv();
        }
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

fn a_full_queue_blocks_and_goes_on(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let config = FileConfig { queue_bytes: 10_000, ..single(&dir, io) };
    let mut store = FileStore::<Gate>::open(&config).unwrap();
    let (open_gate, gate) = std::sync::mpsc::channel();
    // Larger than the bound, but the queue is empty.
    let first = store.put(Gate(vec![1; 20_000], Some(gate.into()))).unwrap();
    assert!(!store.is_done(first));
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(open_gate);
    });
    let second = store.put(Gate(vec![2; 10_000], None)).unwrap();
    assert!(store.is_done(first), "there was no room before");
    assert!(store.stats().blocked_ns >= 40_000_000, "{:?}", store.stats());
    opener.join().unwrap();
    store.wait(second).unwrap();
    store.wait(first).unwrap();
}

fn loads_go_before_writes(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = FileStore::<Gate>::open(&single(&dir, io)).unwrap();
    let ticket = store.put(Gate(vec![7; 100], None)).unwrap();
    let ebbtide_core::Done::Stored(slot, _) = store.wait(ticket).unwrap().0 else { unreachable!() };
    let (open_gate, gate) = std::sync::mpsc::channel();
    let busy = store.put(Gate(vec![1; 100], Some(gate.into()))).unwrap();
    let write = store.put(Gate(vec![2; 100], None)).unwrap();
    let load = store.get(&slot, Gate(vec![0; 100], None)).unwrap();
    drop(open_gate);
    let (_, write) = store.wait(write).unwrap();
    let (done, load) = store.wait(load).unwrap();
    assert!(load.finished_ns <= write.started_ns);
    assert!(matches!(done, ebbtide_core::Done::Loaded(Gate(bytes, _)) if bytes == [7; 100]));
    store.wait(busy).unwrap();
}

fn dropping_the_store_drops_what_is_queued(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    for seed in 0..50 {
        store.put(Block::filled(100_000, 0, seed, &alive)).unwrap();
    }
    drop(store);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
}

fn a_capacity_is_an_error_at_once_and_gives_the_block_back(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&FileConfig { capacity_bytes: Some(16_384), ..single(&dir, io) });
    let slot = put(&mut store, Block::filled(10_000, 0, 1, &alive)).unwrap();
    let failed = store.put(Block::filled(5000, 0, 2, &alive)).unwrap_err();
    assert!(failed.block.bytes() == noise(5000, 2));
    let text = common::chain(&failed.error);
    assert!(text.ends_with("8192 bytes needed, 12288 of 16384 bytes in use"), "{text}");
    assert!(failed.error.hint().is_some());
    store.discard(slot);
    put(&mut store, failed.block).unwrap();
}

#[test]
#[should_panic(expected = "exactly once")]
fn waiting_twice_panics() {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, IoChoice::Threads));
    let ticket = store.put(Block::filled(1, 0, 1, &alive)).unwrap();
    store.wait(ticket).unwrap();
    let _ = store.wait(ticket);
}

#[test]
#[should_panic(expected = "length of the block")]
fn a_block_of_another_length_panics() {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, IoChoice::Threads));
    let slot = put(&mut store, Block::filled(100, 0, 1, &alive)).unwrap();
    let _ = store.get(&slot, Block::zeroed(101, 0, &alive));
}

#[test]
fn settings_of_zero_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    for config in [
        FileConfig { workers: 0, ..single(&dir, IoChoice::Threads) },
        FileConfig { staging_bytes_per_worker: 0, ..single(&dir, IoChoice::Threads) },
    ] {
        let error = FileStore::<Block>::open(&config).unwrap_err();
        assert_eq!(error.to_string(), "the file tier needs a worker and a staging buffer");
    }
}

/// Whether two sizes on disk differ by no more than the blocks in which a file system lists the
/// pieces of a file. They count as the file's own, and come and go as it gets more or fewer pieces:
/// on a disk whose free space is in small pieces an ext4 file has one where else it has none.
fn same_but_for_lists(a: u64, b: u64) -> bool {
    a.abs_diff(b) <= 64 << 10
}

fn shrinking_gives_back_what_is_not_in_use(io: IoChoice) {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    assert_eq!((store.file_bytes().unwrap(), store.shrink().unwrap()), (0, 0));
    let mut slots: Vec<_> = (0..8)
        .map(|seed| Some(put(&mut store, Block::filled(1 << 20, 0, seed, &alive)).unwrap()))
        .collect();
    let all = store.file_bytes().unwrap();
    assert!(all >= 8 * MIB, "{all}");
    assert_eq!(store.shrink().unwrap(), 0, "everything is in use");
    // Two holes in the middle, one at the end.
    for place in [1, 4, 6, 7] {
        store.discard(slots[place].take().unwrap());
    }
    let kept = store.file_bytes().unwrap();
    assert!(same_but_for_lists(kept, all), "kept for the next blocks: {kept} of {all}");
    // While a write is under way.
    let ticket = store.put(Block::filled(1 << 20, 0, 100, &alive)).unwrap();
    let given = store.shrink().unwrap();
    assert!(same_but_for_lists(given, 3 * MIB), "one of the four is taken again: {given}");
    let ebbtide_core::Done::Stored(slot, _) = store.wait(ticket).unwrap().0 else { unreachable!() };
    let left = store.file_bytes().unwrap();
    assert!(same_but_for_lists(left, all - given), "{left} left of {all}");
    for (seed, slot) in (0..8).zip(&slots) {
        let Some(slot) = slot else { continue };
        let home = get(&mut store, slot, Block::zeroed(1 << 20, 0, &alive)).unwrap();
        assert!(home.bytes() == noise(1 << 20, seed));
    }
    let home = get(&mut store, &slot, Block::zeroed(1 << 20, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(1 << 20, 100));
    // What was given back can be taken again.
    for seed in 0..8 {
        put(&mut store, Block::filled(1 << 20, 0, seed, &alive)).unwrap();
    }
    slots.into_iter().flatten().for_each(|slot| store.discard(slot));
}

fn an_unused_file_is_emptied_if_asked_for(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    for empty_when_unused in [false, true] {
        let mut store = open(&FileConfig { empty_when_unused, ..single(&dir, io) });
        let [a, b] = [1, 2].map(|n| put(&mut store, Block::filled(1 << 20, 0, n, &alive)).unwrap());
        store.discard(a);
        assert!(store.file_bytes().unwrap() >= 2 << 20);
        store.discard(b);
        assert_eq!(store.file_bytes().unwrap() == 0, empty_when_unused);
        let slot = put(&mut store, Block::filled(5000, 0, 3, &alive)).unwrap();
        let home = get(&mut store, &slot, Block::zeroed(5000, 0, &alive)).unwrap();
        assert!(home.bytes() == noise(5000, 3));
    }
}

fn checksums_are_kept_with_the_slot(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    for checksums in [false, true] {
        let mut store = open(&FileConfig { checksums, ..single(&dir, io) });
        let [a, b, c] =
            [1, 1, 2].map(|n| put(&mut store, Block::filled(5000, 0, n, &alive)).unwrap());
        assert_eq!(a.checksum().is_some(), checksums);
        assert_eq!(a.checksum(), b.checksum());
        assert_eq!(a.checksum() == c.checksum(), !checksums);
    }
}

#[test]
fn the_way_of_io_is_the_one_asked_for_or_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let report = |io| open(&single(&dir, io)).io().clone();
    let threads = report(IoChoice::Threads);
    assert_eq!((threads.kind, threads.reason), (IoKind::Threads, IoReason::Asked));
    let auto = report(IoChoice::Auto);
    match ebbtide_store::uring_available() {
        Ok(()) => {
            let uring = report(IoChoice::Uring);
            assert_eq!((uring.kind, uring.reason), (IoKind::Uring, IoReason::Asked));
            assert!(!matches!(auto.reason, IoReason::Asked | IoReason::Refused(_)), "{auto}");
        }
        Err(why) => {
            let config = single(&dir, IoChoice::Uring);
            let error = FileStore::<Block>::open(&config).unwrap_err();
            let text = "the kernel refuses io_uring, which the settings ask for";
            assert_eq!(error.to_string(), text);
            assert!(error.hint().is_some());
            assert_eq!(auto.kind, IoKind::Threads);
            assert_eq!(auto.reason, IoReason::Refused(why.to_string()));
        }
    }
}
