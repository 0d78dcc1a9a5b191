//! Random jobs against a map from slot to content, for every tier.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Block, noise};
use ebbtide_core::{Bytes, Done, Store, Ticket};
use ebbtide_store::{AnySlot, AnyStore, FileConfig, FileStore, HostConfig, HostStore, IoChoice};
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Clone, Debug)]
enum Op {
    Put { len: usize, skip: usize },
    Get { slot: Index, skip: usize },
    Wait(Index),
    Discard(Index),
    Shrink,
}

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![Just(0), 1_usize..5000, 1_usize..200_000, Just(65_536)];
    let skip = prop_oneof![Just(0), Just(16), 0_usize..4096];
    prop_oneof![
        4 => (len, skip.clone()).prop_map(|(len, skip)| Op::Put { len, skip }),
        3 => (any::<Index>(), skip).prop_map(|(slot, skip)| Op::Get { slot, skip }),
        4 => any::<Index>().prop_map(Op::Wait),
        2 => any::<Index>().prop_map(Op::Discard),
        1 => Just(Op::Shrink),
    ]
}

/// What a job is to leave.
enum Expected {
    Stored { len: usize, seed: u64 },
    Loaded { slot: usize },
}

struct Slot {
    place: AnySlot,
    len: usize,
    seed: u64,
    readers: usize,
}

struct Run {
    store: AnyStore<Block>,
    jobs: Vec<(Ticket, Expected)>,
    slots: HashMap<usize, Slot>,
    alive: Arc<AtomicUsize>,
    count: usize,
}

impl Run {
    fn new(store: AnyStore<Block>) -> Self {
        Self { store, jobs: Vec::new(), slots: HashMap::new(), alive: Arc::default(), count: 0 }
    }

    fn pick(&self, index: Index) -> Option<usize> {
        let mut names: Vec<_> = self.slots.keys().copied().collect();
        names.sort_unstable();
        (!names.is_empty()).then(|| names[index.index(names.len())])
    }

    fn step(&mut self, op: &Op) {
        self.count += 1;
        match *op {
            Op::Put { len, skip } => {
                let seed = self.count as u64;
                let block = Block::filled(len, skip, seed, &self.alive);
                let ticket = self.store.put(block).unwrap();
                self.jobs.push((ticket, Expected::Stored { len, seed }));
            }
            Op::Get { slot, skip } => {
                let Some(name) = self.pick(slot) else { return };
                let slot = self.slots.get_mut(&name).unwrap();
                slot.readers += 1;
                let block = Block::zeroed(slot.len, skip, &self.alive);
                let ticket = self.store.get(&slot.place, block).unwrap();
                self.jobs.push((ticket, Expected::Loaded { slot: name }));
            }
            Op::Wait(job) if !self.jobs.is_empty() => self.wait(job.index(self.jobs.len())),
            Op::Wait(_) => {}
            Op::Shrink => {
                if let AnyStore::File(store) = &mut self.store {
                    store.shrink().unwrap();
                }
            }
            Op::Discard(slot) => {
                let name = self.pick(slot).filter(|name| self.slots[name].readers == 0);
                let Some(name) = name else { return };
                self.store.discard(self.slots.remove(&name).unwrap().place);
            }
        }
    }

    fn wait(&mut self, job: usize) {
        let (ticket, expected) = self.jobs.swap_remove(job);
        let (done, timing) = self.store.wait(ticket).unwrap();
        assert!(timing.started_ns <= timing.finished_ns);
        match (done, expected) {
            (Done::Stored(place, _), Expected::Stored { len, seed }) => {
                self.slots.insert(self.count, Slot { place, len, seed, readers: 0 });
                self.count += 1;
            }
            (Done::Loaded(block), Expected::Loaded { slot }) => {
                let slot = self.slots.get_mut(&slot).unwrap();
                slot.readers -= 1;
                assert!(block.bytes() == noise(slot.len, slot.seed), "other bytes came back");
            }
            _ => panic!("a put gave a block or a get gave a slot"),
        }
    }

    fn end(mut self) {
        while !self.jobs.is_empty() {
            self.wait(0);
        }
        assert_eq!(self.alive.load(Ordering::SeqCst), 0, "blocks that nobody gave back");
        let held: usize = self.slots.values().map(|slot| slot.len.next_multiple_of(4096)).sum();
        assert_eq!(self.store.stats().bytes_held, held as u64);
        for (_, slot) in self.slots.drain() {
            self.store.discard(slot.place);
        }
        assert_eq!(self.store.stats().bytes_held, 0);
    }
}

fn check(store: AnyStore<Block>, ops: &[Op]) {
    let mut run = Run::new(store);
    for op in ops {
        run.step(op);
    }
    run.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_tier_agrees_with_a_map(ops in prop::collection::vec(op(), 1..80), workers in 1_usize..4) {
        let dir = tempfile::tempdir().unwrap();
        let mut ways = vec![IoChoice::Threads];
        if common::ring_is_allowed("every_tier_agrees_with_a_map") {
            ways.push(IoChoice::Uring);
        }
        for io in ways {
            let config = FileConfig {
                workers,
                staging_bytes_per_worker: 8192,
                queue_bytes: 300_000,
                ..common::single(&dir, io)
            };
            check(FileStore::open(&config).unwrap().into(), &ops);
        }
        check(HostStore::new(&HostConfig::default()).unwrap().into(), &ops);
    }
}

#[test]
#[should_panic(expected = "another store")]
fn a_slot_of_another_tier_panics() {
    let mut host = HostStore::new(&HostConfig::default()).unwrap();
    let slot = common::put(&mut host, Block::zeroed(1, 0, &Arc::default())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut file: AnyStore<Block> = common::open(&common::single(&dir, IoChoice::Threads)).into();
    assert!(file.notices().len() < 2);
    file.discard(AnySlot::Host(slot));
}
