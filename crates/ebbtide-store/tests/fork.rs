//! A child that was forked from the owner of a store, with writes and reads under way (C25).

#[path = "fork/child.rs"]
mod child;
mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use child::{end, fork};
use common::{Block, both_ways, noise, open, single};
use ebbtide_core::{Bytes, Done, Store};
use ebbtide_store::{FileConfig, FileSlot, FileStore, IoChoice};

both_ways! {
    c25_a_child_can_call_everything_and_changes_nothing;
    c25_a_child_can_drop_the_store;
    c25_forks_at_any_moment_find_no_held_lock;
}

const LEN: usize = (8 << 20) + 5;

/// A store with a slot and eight writes under way.
struct Busy {
    store: FileStore<Block>,
    slot: FileSlot,
    writes: Vec<ebbtide_core::Ticket>,
    alive: Arc<AtomicUsize>,
}

impl Busy {
    fn new(dir: &tempfile::TempDir, io: IoChoice) -> Self {
        let alive = Arc::new(AtomicUsize::new(0));
        let mut store = open(&FileConfig { workers: 2, ..single(dir, io) });
        let slot = common::put(&mut store, Block::filled(LEN, 0, 100, &alive)).unwrap();
        let writes =
            (0..8).map(|seed| store.put(Block::filled(LEN, 0, seed, &alive)).unwrap()).collect();
        Self { store, slot, writes, alive }
    }

    /// Every write arrived, in the process that asked for it.
    fn check(mut self) {
        for (seed, ticket) in (0..).zip(std::mem::take(&mut self.writes)) {
            let Done::Stored(slot, _) = self.store.wait(ticket).unwrap().0 else { unreachable!() };
            self.check_slot(&slot, seed);
        }
        let other = self.written(1);
        let slot = std::mem::replace(&mut self.slot, other);
        self.check_slot(&slot, 100);
        self.store.check_owner().unwrap();
    }

    fn written(&mut self, seed: u64) -> FileSlot {
        common::put(&mut self.store, Block::filled(100, 0, seed, &self.alive)).unwrap()
    }

    fn check_slot(&mut self, slot: &FileSlot, seed: u64) {
        let block = Block::zeroed(LEN, 0, &self.alive);
        let home = common::get(&mut self.store, slot, block).unwrap();
        assert!(home.bytes() == noise(LEN, seed), "block {seed}");
    }
}

fn c25_a_child_can_call_everything_and_changes_nothing(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let busy = Busy::new(&dir, io);
    let owner = std::process::id();
    let block = Block::filled(LEN, 0, 55, &busy.alive);
    let Some(child) = fork() else { end(move || call_everything(busy, block, owner)) };
    child.join();
    busy.check();
}

fn call_everything(busy: Busy, block: Block, owner: u32) {
    let Busy { mut store, slot, writes, .. } = busy;
    let here = std::process::id();
    let text = format!("the tier belongs to process {owner}, this is process {here}");
    let failed = store.put(block).unwrap_err();
    assert_eq!(failed.error.to_string(), text);
    assert!(failed.error.hint().is_some());
    assert!(failed.block.bytes() == noise(LEN, 55), "the block comes back");
    let failed = store.get(&slot, failed.block).unwrap_err();
    assert_eq!(failed.error.to_string(), text);
    assert_eq!(store.check_owner().unwrap_err().to_string(), text);
    assert_eq!(store.shrink().unwrap_err().to_string(), text);
    assert_eq!(store.file_bytes().unwrap_err().to_string(), text);
    assert!(store.is_done(writes[0]));
    let (done, _) = store.wait(writes[7]).unwrap();
    let Done::Stored(nowhere, None) = done else { panic!("an empty slot") };
    assert_eq!(nowhere.bytes(), 0);
    store.discard(nowhere);
    store.discard(slot);
    assert_eq!(store.stats(), ebbtide_core::StoreStats::default());
    assert!(format!("{store:?}").contains("owner"));
    drop(store);
}

fn c25_a_child_can_drop_the_store(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let busy = Busy::new(&dir, io);
    let Some(child) = fork() else { end(move || drop(busy)) };
    child.join();
    busy.check();
}

/// Small jobs, so that a worker often holds the lock when the fork comes.
fn c25_forks_at_any_moment_find_no_held_lock(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&FileConfig { workers: 2, ..single(&dir, io) });
    for round in 0..20 {
        let tickets: Vec<_> = (0..100)
            .map(|seed| store.put(Block::filled(5000, 0, round * 100 + seed, &alive)).unwrap())
            .collect();
        let Some(child) = fork() else {
            end(move || {
                assert!(store.put(Block::zeroed(1, 0, &alive)).is_err());
                assert!(store.is_done(tickets[99]));
                store.stats();
                store.wait(tickets[99]).unwrap();
            })
        };
        child.join();
        for (seed, ticket) in (round * 100..).zip(tickets) {
            let Done::Stored(slot, _) = store.wait(ticket).unwrap().0 else { unreachable!() };
            let block = Block::zeroed(5000, 0, &alive);
            let home = common::get(&mut store, &slot, block).unwrap();
            assert!(home.bytes() == noise(5000, seed));
            store.discard(slot);
        }
    }
}
