//! The engine on a device and a store of plain byte vectors.

// Test data wraps around on purpose.
#![allow(clippy::cast_possible_truncation)]

mod common;

use std::sync::{Arc, Mutex};

use common::Shared;
use ebbtide_core::model::{ModelDevice, ModelStorage, ModelStore};
use ebbtide_core::{
    BackendError, Config, Device, Direct, Engine, Error, Event, GroupId, LayerId, Mover, Pass,
    Registered, Saved,
};

fn register<M: Mover>(
    engine: &mut Engine<M>,
    group: GroupId,
    storage: M::Storage,
    bytes: u64,
    name: &str,
) -> Result<Registered, Error> {
    let saved = Saved::whole(storage, bytes).label(engine.label(name));
    engine.register(group, saved).map(|(_, registered)| registered)
}

struct Rig {
    engine: Engine<Direct<ModelDevice, Shared>>,
    store: Shared,
    pass: u64,
}

/// Storages of a group with the bytes they must have at the end.
struct Layer {
    group: GroupId,
    storages: Vec<(ModelStorage, Vec<u8>)>,
}

impl Rig {
    fn new(prefetch: usize) -> Self {
        let store = Shared::default();
        let engine =
            Engine::new(Config { prefetch }, Direct::new(ModelDevice::default(), store.clone()));
        Self { engine, store, pass: 1 }
    }

    fn layer(&mut self, layer: u32, sizes: &[usize]) -> Layer {
        let group = self.engine.open(LayerId(layer), Pass(self.pass));
        let mut storages = Vec::new();
        for (i, &size) in sizes.iter().enumerate() {
            let bytes: Vec<u8> =
                (0..size).map(|b| ((b * 31 + i * 7 + layer as usize) % 251) as u8).collect();
            let storage = self.engine.mover_mut().device_mut().storage(bytes.clone());
            let registered =
                register(&mut self.engine, group, storage.clone(), size as u64, "t").unwrap();
            assert_eq!(registered, Registered::New);
            storages.push((storage, bytes));
        }
        Layer { group, storages }
    }

    fn assert_nothing_left(&self) {
        assert_eq!(self.engine.active_groups(), 0);
        assert_eq!(self.store.0.borrow().slots_in_use(), 0);
        assert_eq!(self.store.0.borrow().jobs_in_flight(), 0);
    }
}

impl Layer {
    fn assert_home(&self) {
        for (storage, bytes) in &self.storages {
            assert_eq!(*storage.bytes(), *bytes);
        }
    }
}

/// A chain: forward with at most two layers on the device, then backward.
fn step(rig: &mut Rig, sizes: &[Vec<usize>]) -> Result<(), Error> {
    let mut layers = Vec::new();
    let mut previous: Option<GroupId> = None;
    let result = (|| {
        for (i, sizes) in sizes.iter().enumerate() {
            let layer = rig.layer(u32::try_from(i).unwrap(), sizes);
            let group = layer.group;
            layers.push(layer);
            rig.engine.start_offload(group)?;
            if let Some(previous) = previous.replace(group) {
                rig.engine.wait_offload(previous)?;
            }
        }
        for layer in layers.iter().rev() {
            rig.engine.need(layer.group)?;
            rig.engine.prefetch(layer.group);
            layer.assert_home();
            rig.engine.close(layer.group);
        }
        Ok(())
    })();
    match result {
        Ok(()) => rig.engine.finish_backward(),
        Err(_) => rig.engine.abandon_backward(),
    }
    for layer in &layers {
        rig.engine.close(layer.group);
    }
    rig.pass += 1;
    result
}

/// G3, G5, G7, G8, P3: a chain goes out and comes home, and everything is given back.
#[test]
fn g3_g5_g7_g8_p3_a_chain_goes_out_and_comes_home() {
    let sizes = vec![vec![10, 0, 4096], vec![5], vec![], vec![7, 7, 7]];
    let mut rig = Rig::new(1);
    for round in 1..=3 {
        step(&mut rig, &sizes).unwrap();
        rig.assert_nothing_left();
        let counters = rig.engine.counters();
        let bytes = round * (10 + 4096 + 5 + 21);
        assert_eq!((counters.moved_out_bytes, counters.moved_in_bytes), (bytes, bytes));
        // Only the last layer, wanted back at once, could not be prefetched.
        assert_eq!(counters.missed_prefetches, round);
    }
}

/// C10: fail the n-th call of the store, for every n of a whole step. The step fails cleanly, nothing
/// is left, and the next one is right.
#[test]
fn c10_every_failing_call_of_a_step() {
    let sizes = vec![vec![10, 20], vec![30, 40], vec![50, 60]];
    let mut failures = 0;
    for n in 0.. {
        let mut rig = Rig::new(1);
        rig.store.0.borrow_mut().calls_left = Some(n);
        let result = step(&mut rig, &sizes);
        let reached = rig.store.0.borrow().calls_left.is_none();
        rig.assert_nothing_left();
        rig.store.0.borrow_mut().calls_left = None;
        step(&mut rig, &sizes).unwrap();
        rig.assert_nothing_left();
        if !reached {
            result.unwrap();
            break;
        }
        // A failing prefetch is made good on demand; everything else is the step's error.
        if let Err(error) = result {
            assert!(error.is_copy(), "{error}");
            failures += 1;
        }
    }
    assert!(failures >= 12, "{failures}");
}

/// T7, G4: after a failed start, what was not copied is on the device, untouched.
#[test]
fn t7_g4_a_failed_offload_leaves_the_rest_on_the_device() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(0, &[10, 20, 30]);
    rig.store.0.borrow_mut().calls_left = Some(1);
    let error = rig.engine.start_offload(layer.group).unwrap_err();
    assert_eq!(error.to_string(), "offload of t (20 bytes, group layer 0 pass 1) failed");
    assert!(layer.storages[0].0.is_away());
    assert_eq!(*layer.storages[1].0.bytes(), layer.storages[1].1);
    assert_eq!(*layer.storages[2].0.bytes(), layer.storages[2].1);
    rig.engine.wait_offload(layer.group).unwrap();
    rig.engine.need(layer.group).unwrap();
    layer.assert_home();
}

/// T10: a load that fails keeps the copy and can be tried again: in the tier, and for want of memory.
#[test]
fn t10_a_failed_load_can_be_tried_again() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(0, &[10, 20]);
    rig.engine.start_offload(layer.group).unwrap();
    rig.engine.wait_offload(layer.group).unwrap();
    rig.store.0.borrow_mut().calls_left = Some(2); // Two gets, then the first wait fails.
    assert!(rig.engine.need(layer.group).unwrap_err().is_copy());
    assert!(layer.storages[0].0.is_away());
    rig.engine.mover_mut().device_mut().allocations_left = Some(0);
    assert!(rig.engine.need(layer.group).unwrap_err().is_copy());
    rig.engine.need(layer.group).unwrap();
    layer.assert_home();
    rig.engine.close(layer.group);
    rig.assert_nothing_left();
}

/// G7, C3: a load asked for while the offload is under way finishes the offload first.
#[test]
fn g7_c3_a_load_during_the_offload_loses_nothing() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(0, &[10, 20]);
    rig.engine.start_offload(layer.group).unwrap();
    rig.engine.start_load(layer.group).unwrap();
    rig.engine.wait_load(layer.group).unwrap();
    layer.assert_home();
}

/// G5, G8, G10, M2: calls that the phase does not allow name group, phase and call, and change
/// nothing; a group that is not open is an error that names it, and closing it is quiet.
#[test]
fn g5_g8_g10_m2_calls_out_of_order() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(3, &[10]);
    let group = layer.group;
    let text = |result: Result<(), Error>| {
        let error = result.unwrap_err();
        assert!(error.is_phase());
        error.to_string()
    };
    let wrong = |call: &str, found: &str, wanted: &str| {
        format!("{call} of group layer 3 pass 1: its phase is `{found}`, needs `{wanted}`")
    };
    let engine = &mut rig.engine;
    let never = wrong("wait_offload", "open", "offloading");
    assert_eq!(text(engine.wait_offload(group)), never);
    assert_eq!(text(engine.start_load(group)), wrong("start_load", "open", "away"));
    engine.start_offload(group).unwrap();
    assert_eq!(text(engine.start_offload(group)), wrong("start_offload", "offloading", "open"));
    let late = engine.mover_mut().device_mut().storage(vec![1]);
    assert!(register(engine, group, late, 1, "late").unwrap_err().is_phase());
    engine.wait_offload(group).unwrap();
    assert_eq!(text(engine.wait_offload(group)), wrong("wait_offload", "away", "offloading"));
    assert_eq!(text(engine.wait_load(group)), wrong("wait_load", "away", "loading"));
    engine.start_load(group).unwrap();
    assert_eq!(text(engine.start_load(group)), wrong("start_load", "loading", "away"));
    engine.wait_load(group).unwrap();
    assert_eq!(text(engine.wait_load(group)), wrong("wait_load", "home", "loading"));
    layer.assert_home();
    rig.engine.close(group);
    rig.engine.close(group);
    assert_eq!(text(rig.engine.need(group)), "no group 0 is open");
}

/// T13, G6: repeats in one group move once; what a second group has stays on the device for both,
/// also for a third one that comes when the first is done.
#[test]
fn t13_g6_a_storage_moves_once_or_stays_for_all() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(0, &[10]);
    let view = layer.storages[0].0.clone();
    let again = register(&mut rig.engine, layer.group, view.clone(), 10, "view").unwrap();
    assert_eq!(again, Registered::Duplicate);
    let other = rig.layer(1, &[20]);
    let elsewhere = register(&mut rig.engine, other.group, view.clone(), 10, "view").unwrap();
    assert_eq!(elsewhere, Registered::Shared(layer.group));
    for group in [layer.group, other.group] {
        rig.engine.start_offload(group).unwrap();
        rig.engine.wait_offload(group).unwrap();
    }
    assert_eq!(rig.engine.counters().moved_out_bytes, 20);
    layer.assert_home();
    rig.engine.close(layer.group);
    let third = rig.layer(2, &[]);
    let registered = register(&mut rig.engine, third.group, view, 10, "view").unwrap();
    assert_eq!(registered, Registered::Shared(other.group));
    rig.engine.start_offload(third.group).unwrap();
    layer.assert_home();
}

/// T14: protecting calls an offload off, and brings back what is away.
#[test]
fn t14_protection_calls_off_and_brings_back() {
    for wait in [false, true] {
        let mut rig = Rig::new(1);
        let layer = rig.layer(0, &[10, 20]);
        rig.engine.start_offload(layer.group).unwrap();
        if wait {
            rig.engine.wait_offload(layer.group).unwrap();
        }
        assert!(rig.engine.protect(&layer.storages[0].0).unwrap());
        assert_eq!(*layer.storages[0].0.bytes(), layer.storages[0].1);
        assert!(layer.storages[1].0.is_away());
        rig.engine.need(layer.group).unwrap();
        layer.assert_home();
        rig.engine.close(layer.group);
        rig.assert_nothing_left();
        let stranger = rig.engine.mover_mut().device_mut().storage(vec![1]);
        assert!(!rig.engine.protect(&stranger).unwrap());
    }
}

/// G1: an identity is valid only while the group holds the storage.
#[test]
fn g1_identities_end_with_the_group() {
    let mut rig = Rig::new(1);
    let layer = rig.layer(0, &[10]);
    let storage = layer.storages[0].0.clone();
    rig.engine.close(layer.group);
    let next = rig.engine.open(LayerId(0), Pass(2));
    assert_eq!(register(&mut rig.engine, next, storage, 10, "t").unwrap(), Registered::New);
}

/// M11: what the first backward did is prefetched in the second, though it is no chain.
#[test]
fn m11_a_learnt_order_is_prefetched() {
    let mut rig = Rig::new(2);
    let order = [1usize, 3, 0, 2];
    for round in 0..2 {
        let layers: Vec<Layer> = (0..4).map(|i| rig.layer(i, &[8])).collect();
        for layer in &layers {
            rig.engine.start_offload(layer.group).unwrap();
            rig.engine.wait_offload(layer.group).unwrap();
        }
        let before = rig.engine.counters().missed_prefetches;
        for i in order {
            rig.engine.need(layers[i].group).unwrap();
            rig.engine.prefetch(layers[i].group);
            layers[i].assert_home();
        }
        for layer in &layers {
            rig.engine.close(layer.group);
        }
        rig.engine.finish_backward();
        let missed = rig.engine.counters().missed_prefetches - before;
        if round == 1 {
            assert_eq!(missed, 1, "only the first one, before which there is nothing");
        }
        rig.pass += 1;
    }
}

/// M10: passes in flight don't mix: prefetch stays within the pass.
#[test]
fn m10_prefetch_stays_within_the_pass() {
    let mut rig = Rig::new(4);
    let mut passes = Vec::new();
    for _ in 0..3 {
        let layers: Vec<Layer> = (0..3).map(|i| rig.layer(i, &[8])).collect();
        for layer in &layers {
            rig.engine.start_offload(layer.group).unwrap();
            rig.engine.wait_offload(layer.group).unwrap();
        }
        passes.push(layers);
        rig.pass += 1;
    }
    rig.engine.need(passes[1][2].group).unwrap();
    rig.engine.prefetch(passes[1][2].group);
    assert_eq!(rig.store.0.borrow().jobs_in_flight(), 2, "the other two of this pass");
    for pass in &passes {
        for layer in pass.iter().rev() {
            rig.engine.need(layer.group).unwrap();
            layer.assert_home();
            rig.engine.close(layer.group);
        }
    }
    rig.assert_nothing_left();
}

/// Bytes that backward never reads are freed and counted; a device that refuses changes nothing.
#[test]
fn dead_bytes_are_dropped_and_counted() {
    let mut rig = Rig::new(1);
    let storage = rig.engine.mover_mut().device_mut().storage(vec![1; 100]);
    rig.engine.drop_dead(&storage, 100, "dead").unwrap();
    assert!(storage.is_away());
    assert_eq!(rig.engine.counters().dropped_bytes, 100);
}

/// Events tell what moved and what was missed.
#[test]
fn events_tell_what_happened() {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut rig = Rig::new(0);
    let log = Arc::clone(&seen);
    rig.engine.observe(move |event: &Event| {
        let line = match event {
            Event::Stored { layer, bytes, .. } => format!("out {} {bytes}", layer.0),
            Event::Loaded { layer, bytes, .. } => format!("in {} {bytes}", layer.0),
            Event::Missed { layer, .. } => format!("missed {}", layer.0),
            other => format!("{other:?}"),
        };
        log.lock().unwrap().push(line);
    });
    step(&mut rig, &[vec![10], vec![20, 30]]).unwrap();
    let expected = [
        "out 0 10", "missed 1", "out 1 20", "out 1 30", "in 1 20", "in 1 30", "missed 0", "in 0 10",
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

/// A storage whose device refuses to let go of it.
struct Stubborn(ModelDevice);

impl Device for Stubborn {
    type Storage = ModelStorage;
    type Block = Vec<u8>;
    fn key(&self, storage: &ModelStorage) -> usize {
        self.0.key(storage)
    }
    fn detach(&mut self, _: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        Err(BackendError::new("no").with_hint("ask again"))
    }
    fn attach(&mut self, storage: &ModelStorage, block: Vec<u8>) -> Result<(), BackendError> {
        self.0.attach(storage, block)
    }
    fn allocate(&mut self, storage: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        self.0.allocate(storage)
    }
}

#[test]
fn a_device_that_refuses_is_an_error_with_its_hint() {
    let device = Stubborn(ModelDevice::default());
    let storage = device.0.storage(vec![1, 2, 3]);
    let mut engine = Engine::new(Config::default(), Direct::new(device, ModelStore::default()));
    let group = engine.open(LayerId(0), Pass(1));
    let _ = register(&mut engine, group, storage.clone(), 3, "t").unwrap();
    let error = engine.start_offload(group).unwrap_err();
    let wanted = "the device refused to move t (3 bytes, group layer 0 pass 1)";
    assert_eq!(error.to_string(), wanted);
    assert_eq!(error.hint(), Some("ask again"));
    assert_eq!(*storage.bytes(), [1, 2, 3]);
}

mod random {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Call {
        Open(u32),
        Register(usize, u16),
        StartOffload(usize),
        WaitOffload(usize),
        StartLoad(usize),
        WaitLoad(usize),
        Need(usize),
        Prefetch(usize),
        Close(usize),
        Fail(u32),
    }

    fn call() -> impl Strategy<Value = Call> {
        let group = 0..6usize;
        prop_oneof![
            3 => (0..4u32).prop_map(Call::Open),
            4 => (group.clone(), 0..500u16).prop_map(|(g, n)| Call::Register(g, n)),
            3 => group.clone().prop_map(Call::StartOffload),
            3 => group.clone().prop_map(Call::WaitOffload),
            3 => group.clone().prop_map(Call::StartLoad),
            3 => group.clone().prop_map(Call::WaitLoad),
            3 => group.clone().prop_map(Call::Need),
            2 => group.clone().prop_map(Call::Prefetch),
            2 => group.prop_map(Call::Close),
            1 => (0..20u32).prop_map(Call::Fail),
        ]
    }

    proptest! {
        /// Any calls in any order, with failures: what is needed is home with the right bytes, and
        /// nothing is left at the end.
        #[test]
        fn any_order_of_calls_is_safe(calls in proptest::collection::vec(call(), 1..80)) {
            let mut rig = Rig::new(2);
            let mut layers: Vec<Layer> = Vec::new();
            for call in calls {
                let at = |layers: &[Layer], i: usize| layers.get(i % layers.len().max(1)).map(|l| l.group);
                match call {
                    Call::Open(layer) => layers.push(rig.layer(layer, &[])),
                    Call::Register(i, size) => {
                        let count = layers.len().max(1);
                        let Some(layer) = layers.get_mut(i % count) else { continue };
                        let bytes = vec![size.to_le_bytes()[0]; usize::from(size)];
                        let storage = rig.engine.mover_mut().device_mut().storage(bytes.clone());
                        let result =
                            register(&mut rig.engine, layer.group, storage.clone(), size.into(), "t");
                        if result.is_ok() {
                            layer.storages.push((storage, bytes));
                        }
                    }
                    Call::Fail(n) => rig.store.0.borrow_mut().calls_left = Some(n),
                    Call::Close(i) => {
                        if let Some(group) = at(&layers, i) {
                            rig.engine.close(group);
                            layers.retain(|layer| layer.group != group);
                        }
                    }
                    Call::Need(i) => {
                        if let Some(group) = at(&layers, i)
                            && rig.engine.need(group).is_ok()
                        {
                            layers.iter().filter(|l| l.group == group).for_each(Layer::assert_home);
                        }
                    }
                    Call::StartOffload(i) => {
                        at(&layers, i).map(|g| rig.engine.start_offload(g));
                    }
                    Call::WaitOffload(i) => {
                        at(&layers, i).map(|g| rig.engine.wait_offload(g));
                    }
                    Call::StartLoad(i) => {
                        at(&layers, i).map(|g| rig.engine.start_load(g));
                    }
                    Call::WaitLoad(i) => {
                        at(&layers, i).map(|g| rig.engine.wait_load(g));
                    }
                    Call::Prefetch(i) => {
                        if let Some(group) = at(&layers, i) {
                            rig.engine.prefetch(group);
                        }
                    }
                }
            }
            rig.store.0.borrow_mut().calls_left = None;
            for layer in &layers {
                // The first attempt may meet copies that failed earlier; the second may not.
                let _ = rig.engine.need(layer.group);
                rig.engine.need(layer.group).unwrap();
                layer.assert_home();
                rig.engine.close(layer.group);
            }
            rig.assert_nothing_left();
        }
    }
}
