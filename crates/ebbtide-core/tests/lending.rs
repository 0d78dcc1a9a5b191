//! The engine on a device that lends its memory: a storage stays usable while its bytes are copied out.

// Test data wraps around on purpose.
#![allow(clippy::cast_possible_truncation)]

mod common;

use std::sync::{Arc, Mutex};

use common::Shared;
use ebbtide_core::model::{LendingDevice, ModelStorage};
use ebbtide_core::{Config, Direct, Engine, Error, Event, GroupId, LayerId, Pass, Saved, TensorId};

struct Rig {
    engine: Engine<Direct<LendingDevice, Shared>>,
    store: Shared,
}

/// One storage of a group, with the bytes that its user last saw or wrote.
struct Kept {
    tensor: TensorId,
    storage: ModelStorage,
    bytes: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let store = Shared::default();
        let mover = Direct::new(LendingDevice::default(), store.clone());
        Self { engine: Engine::new(Config::default(), mover), store }
    }

    fn device(&mut self) -> &mut LendingDevice {
        self.engine.mover_mut().device_mut()
    }

    fn register(&mut self, group: GroupId, storage: &ModelStorage) -> Result<TensorId, Error> {
        let bytes = storage.bytes().len() as u64;
        let saved = Saved::whole(storage.clone(), bytes).label(self.engine.label("t"));
        self.engine.register(group, saved).map(|(tensor, _)| tensor)
    }

    /// A group with storages of these sizes.
    fn group(&mut self, sizes: &[usize]) -> (GroupId, Vec<Kept>) {
        let group = self.engine.open(LayerId(0), Pass(1));
        let kept = sizes.iter().map(|&size| {
            let bytes: Vec<u8> = (0..size).map(|b| (b * 31 + size) as u8).collect();
            let storage = ModelStorage::new(bytes.clone());
            Kept { tensor: self.register(group, &storage).unwrap(), storage, bytes }
        });
        let kept = kept.collect();
        (group, kept)
    }

    /// A group whose storages are away.
    fn away(&mut self, sizes: &[usize]) -> (GroupId, Vec<Kept>) {
        let (group, kept) = self.group(sizes);
        self.engine.start_offload(group).unwrap();
        self.engine.wait_offload(group).unwrap();
        (group, kept)
    }

    fn state(&self, kept: &Kept) -> &'static str {
        self.engine.state(kept.tensor).unwrap()
    }

    fn slots(&self) -> usize {
        self.store.0.borrow().slots_in_use()
    }

    fn bytes_in(&self) -> u64 {
        self.engine.store_stats().bytes_in
    }

    fn fail_call(&mut self, n: u32) {
        self.store.0.borrow_mut().calls_left = Some(n);
    }

    /// The next step is right, and nothing is left of any.
    fn ends_well(mut self, group: GroupId) {
        self.engine.close(group);
        let (next, kept) = self.away(&[9, 10]);
        assert!(kept.iter().all(|kept| kept.storage.is_away()));
        self.engine.need(next).unwrap();
        kept.iter().for_each(Kept::assert_here);
        self.engine.close(next);
        assert_eq!((self.engine.active_groups(), self.slots()), (0, 0));
        assert_eq!(self.store.0.borrow().jobs_in_flight(), 0);
    }
}

impl Kept {
    fn assert_here(&self) {
        assert_eq!(*self.storage.bytes(), self.bytes);
    }

    fn write(&mut self) {
        self.bytes = self.bytes.iter().map(|byte| byte.wrapping_add(1)).collect();
        self.storage.write(self.bytes.clone());
    }
}

/// T4: usable until the copy is complete; then its memory goes, and comes back with the load. On the way
/// the names of the phases tell where the group is.
#[test]
fn t4_lent_memory_stays_usable_until_it_is_vacated() {
    let mut rig = Rig::new();
    let (group, kept) = rig.group(&[4096, 5]);
    assert_eq!(rig.engine.phase_name(group), Some("open"));
    rig.engine.start_offload(group).unwrap();
    assert_eq!(rig.engine.phase_name(group), Some("offloading"));
    assert_eq!(rig.state(&kept[0]), "d2h");
    kept.iter().for_each(Kept::assert_here);
    rig.engine.wait_offload(group).unwrap();
    assert_eq!(rig.engine.phase_name(group), Some("away"));
    assert!(kept.iter().all(|kept| kept.storage.is_away()));
    assert_eq!((rig.state(&kept[0]), rig.slots()), ("host", 2));
    rig.engine.start_load(group).unwrap();
    assert_eq!(rig.engine.phase_name(group), Some("loading"));
    rig.engine.wait_load(group).unwrap();
    assert_eq!(rig.engine.phase_name(group), Some("home"));
    kept.iter().for_each(Kept::assert_here);
    let counters = rig.engine.counters();
    assert_eq!((counters.moved_out_bytes, counters.moved_in_bytes), (4101, 4101));
    rig.engine.close(group);
    assert_eq!(rig.engine.phase_name(group), None);
    rig.ends_well(group);
}

/// G5: an offload is complete when nobody has to be waited for; what is not on its way out is, too.
#[test]
fn g5_an_offload_that_nobody_has_to_wait_for_is_complete() {
    let mut rig = Rig::new();
    let (group, _kept) = rig.group(&[10]);
    rig.store.0.borrow_mut().busy = true;
    assert!(rig.engine.offload_is_complete(group));
    rig.engine.start_offload(group).unwrap();
    assert!(!rig.engine.offload_is_complete(group));
    rig.store.0.borrow_mut().busy = false;
    assert!(rig.engine.offload_is_complete(group));
    rig.store.0.borrow_mut().busy = true;
    rig.engine.wait_offload(group).unwrap();
    assert!(rig.engine.offload_is_complete(group), "it has been waited for");
    rig.engine.close(group);
    assert!(rig.engine.offload_is_complete(group), "there is nothing to wait for");
    rig.ends_well(group);
}

/// T14: protecting what is on its way out frees nothing, gives the copy up and reads nothing back.
#[test]
fn t14_protection_in_flight_frees_nothing() {
    let mut rig = Rig::new();
    let stored: Arc<Mutex<u64>> = Arc::default();
    let count = Arc::clone(&stored);
    rig.engine.observe(move |event: &Event| {
        *count.lock().unwrap() += u64::from(matches!(event, Event::Stored { .. }));
    });
    let (group, kept) = rig.group(&[10, 20]);
    rig.engine.start_offload(group).unwrap();
    assert!(rig.engine.protect(&kept[0].storage).unwrap());
    kept[0].assert_here();
    assert_eq!((rig.state(&kept[0]), rig.slots()), ("device", 0));
    rig.engine.wait_offload(group).unwrap();
    kept[0].assert_here();
    assert!(kept[1].storage.is_away());
    assert_eq!((*stored.lock().unwrap(), rig.bytes_in()), (1, 0));
    assert_eq!(rig.engine.counters().moved_out_bytes, 20);
    rig.engine.need(group).unwrap();
    kept.iter().for_each(Kept::assert_here);
    assert_eq!(rig.bytes_in(), 20);
    rig.ends_well(group);
}

/// T14: neither does it matter then whether the copy fails.
#[test]
fn t14_a_copy_that_was_called_off_may_fail() {
    let mut rig = Rig::new();
    let (group, kept) = rig.group(&[10]);
    rig.engine.start_offload(group).unwrap();
    rig.fail_call(0);
    assert!(rig.engine.protect(&kept[0].storage).unwrap());
    kept[0].assert_here();
    rig.engine.wait_offload(group).unwrap();
    rig.engine.need(group).unwrap();
    assert_eq!((rig.slots(), rig.bytes_in()), (0, 0));
    rig.ends_well(group);
}

/// T8: a storage that the framework doesn't let go of stays, its slot is given back, and the others go.
#[test]
fn t8_a_refusal_to_let_go_leaves_the_storage() {
    let mut rig = Rig::new();
    let (group, kept) = rig.group(&[10, 20, 30]);
    rig.engine.start_offload(group).unwrap();
    rig.device().vacates_left = Some(1);
    let error = rig.engine.wait_offload(group).unwrap_err();
    let wanted = "the device refused to move t (20 bytes, group layer 0 pass 1)";
    assert_eq!((error.to_string().as_str(), error.hint()), (wanted, Some("ask again")));
    kept[1].assert_here();
    assert!(kept[0].storage.is_away() && kept[2].storage.is_away());
    assert_eq!((rig.state(&kept[1]), rig.slots()), ("device", 2));
    rig.engine.need(group).unwrap();
    kept.iter().for_each(Kept::assert_here);
    assert_eq!(rig.bytes_in(), 40);
    rig.ends_well(group);
}

/// T7, G4: a copy that can't start, or fails, changes nothing.
#[test]
fn t7_g4_a_failed_copy_changes_nothing() {
    for call in 0..6 {
        let mut rig = Rig::new();
        let (group, kept) = rig.group(&[10, 20, 30]);
        rig.fail_call(call);
        let started = rig.engine.start_offload(group);
        kept.iter().for_each(Kept::assert_here);
        let waited = rig.engine.wait_offload(group);
        assert_eq!((started.is_err(), waited.is_err()), (call < 3, call >= 3));
        assert!(started.and(waited).unwrap_err().is_copy());
        // After a failed start those in front of it leave; after a failed copy all others do.
        for (index, kept) in kept.iter().enumerate() {
            let leaves = if call < 3 { index < call as usize } else { index != call as usize - 3 };
            assert_eq!(kept.storage.is_away(), leaves, "storage {index}, call {call}");
        }
        rig.engine.need(group).unwrap();
        kept.iter().for_each(Kept::assert_here);
        rig.ends_well(group);
    }
}

/// T5: what is resized or modified while it is copied stays, and the copy is given up.
#[test]
fn t5_a_change_in_flight_is_found_and_kept() {
    for resized in [false, true] {
        let mut rig = Rig::new();
        let (group, mut kept) = rig.group(&[10, 20]);
        rig.engine.start_offload(group).unwrap();
        kept[0].bytes.resize(if resized { 11 } else { 10 }, 0);
        kept[0].write();
        let error = rig.engine.wait_offload(group).unwrap_err();
        assert!(error.is_changed());
        let what = if resized { "bytes was 10, is 11" } else { "version was 0, is 1" };
        assert!(error.to_string().ends_with(what), "{error}");
        kept[0].assert_here();
        assert!(kept[1].storage.is_away());
        assert_eq!(rig.slots(), 1);
        assert!(rig.engine.need(group).unwrap_err().is_changed());
        kept.iter().for_each(Kept::assert_here);
        rig.ends_well(group);
    }
}

/// T10: a load that fails leaves nothing to be read, whichever part of it fails, and can be tried again.
#[test]
fn t10_a_failed_load_leaves_storages_empty() {
    for call in 0..5 {
        let mut rig = Rig::new();
        let (group, kept) = rig.away(&[10, 20]);
        match call {
            4 => rig.device().allocations_left = Some(1),
            _ => rig.fail_call(call),
        }
        assert!(rig.engine.need(group).unwrap_err().is_copy());
        for kept in &kept {
            if rig.state(kept) == "host" {
                assert!(kept.storage.is_away(), "call {call}");
            }
        }
        rig.engine.need(group).unwrap();
        kept.iter().for_each(Kept::assert_here);
        rig.ends_well(group);
    }
}

/// M7: closing during a load leaves the bytes or, if the load fails, nothing to be read.
#[test]
fn m7_closing_during_a_load_leaves_bytes_or_nothing() {
    for fails in [false, true] {
        let mut rig = Rig::new();
        let (group, kept) = rig.away(&[10]);
        rig.engine.start_load(group).unwrap();
        if fails {
            rig.fail_call(0);
        }
        rig.engine.close(group);
        if !kept[0].storage.is_away() {
            kept[0].assert_here();
        }
        rig.ends_well(group);
    }
}

mod random {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Call {
        Open,
        Register(usize, u8),
        /// A storage of one group, given to another one as well.
        Share(usize, usize),
        StartOffload(usize),
        WaitOffload(usize),
        StartLoad(usize),
        WaitLoad(usize),
        Need(usize),
        Prefetch(usize),
        Protect(usize),
        Write(usize),
        Close(usize),
        FailCopy(u32),
        FailVacate(u32),
        FailAllocate(u32),
    }

    fn call() -> impl Strategy<Value = Call> {
        let (group, storage) = (0..4usize, 0..8usize);
        prop_oneof![
            2 => Just(Call::Open),
            4 => (group.clone(), 1..50u8).prop_map(|(g, n)| Call::Register(g, n)),
            1 => (group.clone(), storage.clone()).prop_map(|(g, s)| Call::Share(g, s)),
            4 => group.clone().prop_map(Call::StartOffload),
            4 => group.clone().prop_map(Call::WaitOffload),
            3 => group.clone().prop_map(Call::StartLoad),
            3 => group.clone().prop_map(Call::WaitLoad),
            3 => group.clone().prop_map(Call::Need),
            2 => group.clone().prop_map(Call::Prefetch),
            1 => storage.clone().prop_map(Call::Protect),
            1 => storage.prop_map(Call::Write),
            2 => group.prop_map(Call::Close),
            1 => (0..10u32).prop_map(Call::FailCopy),
            1 => (0..4u32).prop_map(Call::FailVacate),
            1 => (0..4u32).prop_map(Call::FailAllocate),
        ]
    }

    /// The rig, and what a user knows of it.
    struct World {
        rig: Rig,
        groups: Vec<GroupId>,
        kept: Vec<Kept>,
    }

    impl World {
        /// The state of a storage, if its group is open.
        fn state(&self, kept: &Kept) -> Option<&'static str> {
            self.rig.engine.state(kept.tensor).ok()
        }

        /// Whether a user may touch a storage: it is not away, nor on its way back, for any group.
        fn usable(&self, index: usize) -> bool {
            let key = |kept: &Kept| std::ptr::from_ref(&*kept.storage.bytes()).addr();
            if self.kept[index].storage.is_away() {
                return false;
            }
            let wanted = key(&self.kept[index]);
            let same = |kept: &&Kept| !kept.storage.is_away() && key(kept) == wanted;
            !self.kept.iter().filter(same).any(|kept| self.state(kept) == Some("h2d"))
        }

        fn call(&mut self, call: &Call) {
            match *call {
                Call::Open => self.groups.push(self.rig.engine.open(LayerId(0), Pass(1))),
                Call::Register(group, size) => {
                    let bytes = vec![size; size.into()];
                    self.register(group, &ModelStorage::new(bytes.clone()), bytes);
                }
                Call::Share(group, index) => {
                    if index < self.kept.len() && self.usable(index) {
                        let (storage, bytes) =
                            (self.kept[index].storage.clone(), self.kept[index].bytes.clone());
                        self.register(group, &storage, bytes);
                    }
                }
                Call::Protect(index) => {
                    if let Some(kept) = self.kept.get(index) {
                        let _ = self.rig.engine.protect(&kept.storage);
                    }
                }
                Call::Write(index) => self.write(index),
                Call::FailCopy(n) => self.rig.fail_call(n),
                Call::FailVacate(n) => self.rig.device().vacates_left = Some(n),
                Call::FailAllocate(n) => self.rig.device().allocations_left = Some(n),
                _ => self.call_group(call),
            }
        }

        fn register(&mut self, group: usize, storage: &ModelStorage, bytes: Vec<u8>) {
            let Some(&group) = self.groups.get(group) else { return };
            if let Ok(tensor) = self.rig.register(group, storage) {
                self.kept.push(Kept { tensor, storage: storage.clone(), bytes });
            }
        }

        /// All views of a storage see what is written.
        fn write(&mut self, index: usize) {
            if index >= self.kept.len() || !self.usable(index) {
                return;
            }
            self.kept[index].write();
            let bytes = self.kept[index].bytes.clone();
            let address = std::ptr::from_ref(&*self.kept[index].storage.bytes()).addr();
            for kept in self.kept.iter_mut().filter(|kept| !kept.storage.is_away()) {
                if std::ptr::from_ref(&*kept.storage.bytes()).addr() == address {
                    kept.bytes.clone_from(&bytes);
                }
            }
        }

        fn call_group(&mut self, call: &Call) {
            let engine = &mut self.rig.engine;
            let group = |index: usize| self.groups.get(index).copied();
            let _ = match *call {
                Call::StartOffload(g) => group(g).map(|g| engine.start_offload(g)),
                Call::WaitOffload(g) => group(g).map(|g| engine.wait_offload(g)),
                Call::StartLoad(g) => group(g).map(|g| engine.start_load(g)),
                Call::WaitLoad(g) => group(g).map(|g| engine.wait_load(g)),
                Call::Need(g) => group(g).map(|g| engine.need(g)),
                Call::Prefetch(g) => group(g).map(|g| {
                    engine.prefetch(g);
                    Ok(())
                }),
                Call::Close(g) => group(g).map(|closed| {
                    engine.close(closed);
                    self.groups.remove(g);
                    Ok(())
                }),
                _ => None,
            };
        }

        /// Whoever may read a storage reads what was last written, at every moment.
        fn check(&self) {
            for (index, kept) in self.kept.iter().enumerate() {
                match self.state(kept) {
                    Some("device" | "d2h") => kept.assert_here(),
                    Some("host") => assert!(kept.storage.is_away()),
                    Some("h2d") => {}
                    _ if self.usable(index) => kept.assert_here(),
                    _ => {}
                }
            }
        }
    }

    proptest! {
        /// Any calls in any order, with failures of copies and of the device: a storage is always full
        /// of what was last written, or empty, and nothing is left at the end.
        #[test]
        fn any_order_of_calls_is_safe(calls in proptest::collection::vec(call(), 1..80)) {
            let mut world = World { rig: Rig::new(), groups: Vec::new(), kept: Vec::new() };
            for call in &calls {
                world.call(call);
                world.check();
            }
            world.rig.store.0.borrow_mut().calls_left = None;
            *world.rig.device() = LendingDevice::default();
            for group in std::mem::take(&mut world.groups) {
                // The first attempt may meet copies that failed earlier; what was modified stays an error.
                let _ = world.rig.engine.need(group);
                let needed = world.rig.engine.need(group);
                assert!(needed.is_ok() || needed.is_err_and(|error| error.is_changed()));
                world.kept.iter().filter(|k| k.tensor.group() == group).for_each(Kept::assert_here);
                world.rig.engine.close(group);
            }
            world.check();
            let group = world.rig.engine.open(LayerId(0), Pass(2));
            world.rig.ends_well(group);
        }
    }
}
