//! Rows M and W1 of the catalogue, on the simulated accelerator.

mod rows;

use std::cell::Cell;

use ebbtide_core::{
    CheckpointPolicy, Config, Declared, Engine, Event, Manager, Offered, Pass, Registered, Staged,
    StagedConfig,
};
use ebbtide_sim::{Options, SimDisk, SimStorage, World};

use rows::{Mover, Rig, Setup, whole};

type Ask = fn() -> CheckpointPolicy;

struct Managed {
    world: World,
    manager: Manager<Mover>,
    told: std::sync::Arc<std::sync::Mutex<Vec<Event>>>,
}

impl Managed {
    fn new() -> Self {
        let world = World::new(1, Options::default());
        let config = StagedConfig::new(1 << 30);
        let mover: Mover = Staged::new(&config, world.device(), None::<SimDisk>);
        let mut engine = Engine::new(Config::default(), mover);
        let told = std::sync::Arc::<std::sync::Mutex<Vec<Event>>>::default();
        let events = std::sync::Arc::clone(&told);
        engine.observe(move |event: &Event| events.lock().unwrap().push(event.clone()));
        Self { world, manager: Manager::new(engine), told }
    }

    fn filled(&self, bytes: u64, seed: u64) -> SimStorage {
        let storage = self.world.storage(bytes).unwrap();
        self.world.fill(&storage, 0..bytes, seed);
        storage
    }

    fn offer(&mut self, storage: &SimStorage, policy: Option<Ask>) -> Offered {
        self.manager.offer(1, whole(storage), policy).unwrap()
    }

    fn finish(self) {
        assert_eq!(self.manager.active_groups(), 0);
        drop(self.manager);
        let reports = self.world.finish();
        assert!(reports.is_empty(), "{}", reports[0]);
    }
}

/// M1: the current group of each context, nested, restored on failure too; groups on demand.
#[test]
fn m1_current_groups_and_groups_on_demand() {
    let mut played = Managed::new();
    let manager = &mut played.manager;
    assert_eq!(manager.current(1), None);
    let failed: Result<(), &str> = manager.with_current(1, "outer", |manager| {
        assert_eq!((manager.current(1), manager.current(2)), (Some("outer"), None));
        let inner: Result<(), &str> = manager.with_current(1, "inner", |manager| {
            assert_eq!(manager.current(1), Some("inner"));
            Err("failed")
        });
        assert_eq!(manager.current(1), Some("outer"));
        inner
    });
    assert_eq!((failed, manager.current(1)), (Err("failed"), None));
    let group = manager.ensure("h.0");
    assert_eq!(manager.ensure("h.0"), group);
    assert_eq!(manager.active_groups(), 1);
    manager.abort("h.0");
    played.finish();
}

/// M2: a schedule drives groups by name alone; unknown names are errors, or quiet while cleaning up.
#[test]
fn m2_groups_by_name() {
    let mut played = Managed::new();
    let (own, stream) = (played.filled(512, 1), played.world.stream("user's copies"));
    let manager = &mut played.manager;
    let errors = [
        manager.add("nowhere", whole(&own)).map(drop),
        manager.protect("nowhere", [&own]).map(drop),
        manager.start_offload("nowhere", None),
        manager.wait_offload("nowhere"),
        manager.start_load("nowhere", None),
        manager.wait_load("nowhere"),
    ];
    for error in errors {
        assert_eq!(error.unwrap_err().to_string(), "no group is named `nowhere`");
    }
    manager.release("nowhere");
    manager.abort("nowhere");
    assert!(!manager.is_last(1, Some("nowhere")) && !manager.is_last(1, None));

    manager.ensure("stage 0");
    let (_, registered) = manager.add("stage 0", whole(&own)).unwrap();
    assert_eq!(registered, Registered::New);
    manager.start_offload("stage 0", Some(stream)).unwrap();
    manager.wait_offload("stage 0").unwrap();
    assert!(own.is_empty());
    manager.start_load("stage 0", Some(stream)).unwrap();
    manager.wait_load("stage 0").unwrap();
    played.world.check(&own, 0..512, 1);
    played.finish();
}

/// M3: a chain gives groups once; a layer after itself is told once; contradictions are errors.
#[test]
fn m3_a_declared_chain() {
    let mut played = Managed::new();
    assert_eq!(played.manager.follow("h.0", "h.1").unwrap(), Declared::New);
    assert_eq!(played.manager.follow("h.1", "h.1").unwrap(), Declared::Itself);
    assert_eq!(played.manager.follow("h.0", "h.0").unwrap(), Declared::Itself);
    let told = played.told.lock().unwrap().clone();
    let itself = |layer: &str| Event::FollowsItself { layer: layer.into() };
    assert_eq!(told, [itself("h.1"), itself("h.0")]);
    let error = played.manager.follow("h.2", "h.1").unwrap_err().to_string();
    assert_eq!(
        error,
        "layer `h.1` has the predecessor `h.0`, `h.2` can't be its predecessor as well"
    );
    let last = played.manager.chain().group("h.1").unwrap().to_string();
    assert!(played.manager.is_last(1, Some(&last)));
    played.manager.set_current(1, Some(last));
    assert!(played.manager.is_last(1, None));
    played.finish();
}

/// A chain of layers by name, as module hooks would drive it.
fn step(played: &mut Managed, layers: u64, pass: Pass) -> Vec<(String, SimStorage, u64)> {
    played.manager.begin_pass(pass);
    let mut saved = Vec::new();
    for layer in 0..layers {
        let name = format!("h.{layer}");
        let group = played.manager.chain().group(&name).unwrap().to_string();
        let seed = pass.0 * 100 + layer;
        let storage = played.filled(512, seed);
        played.manager.set_current(1, Some(group));
        played.offer(&storage, None);
        played.manager.set_current(1, None);
        played.manager.forward_done(&name).unwrap();
        saved.push((name, storage, seed));
    }
    saved
}

fn backward(played: &mut Managed, saved: Vec<(String, SimStorage, u64)>, pass: Pass) {
    played.manager.begin_pass(pass);
    for (name, storage, seed) in saved.into_iter().rev() {
        played.manager.backward_begins(&name).unwrap();
        played.world.check(&storage, 0..512, seed);
    }
    played.manager.engine().finish_backward();
}

fn chained(layers: u64) -> Managed {
    let mut played = Managed::new();
    for layer in 1..layers {
        let _ = played.manager.follow(&format!("h.{}", layer - 1), &format!("h.{layer}")).unwrap();
    }
    played
}

/// G9: the last layer of a chain stays, unless a policy says it must be swapped. At most two layers'
/// activations are on the device (as M4).
#[test]
fn g9_the_last_layer_stays_and_at_most_two_are_on_the_device() {
    let mut played = chained(5);
    let saved = step(&mut played, 5, Pass(1));
    let away: Vec<bool> = saved.iter().map(|(_, storage, _)| storage.is_empty()).collect();
    assert_eq!(away, [true, true, true, true, false]);
    backward(&mut played, saved, Pass(1));

    played.manager.begin_pass(Pass(2));
    let last = played.manager.chain().group("h.4").unwrap().to_string();
    played.manager.set_current(1, Some(last.clone()));
    let storage = played.filled(64, 1);
    assert_eq!(played.offer(&storage, None), Offered::Kept);
    let swapped = played.offer(&storage, Some(|| CheckpointPolicy::MustSwap));
    assert!(matches!(swapped, Offered::Saved(_, Registered::New)));
    played.manager.forward_done("h.4").unwrap();
    played.manager.wait_offload(&last).unwrap();
    assert!(storage.is_empty());
    // Releasing is for what stayed: it does not touch the only copy.
    played.manager.release(&last);
    played.manager.backward_begins("h.4").unwrap();
    played.world.check(&storage, 0..64, 1);
    played.finish();
}

/// M7, C10: an aborted step leaves nothing, and the next one is right, wherever the first one stopped.
#[test]
fn m7_c10_an_aborted_step_leaves_nothing() {
    let mut played = chained(4);
    for stop in 0..8 {
        let mut saved = step(&mut played, 4, Pass(stop * 2));
        for _ in 4..stop.min(7) {
            let (name, ..) = saved.pop().unwrap();
            played.manager.backward_begins(&name).unwrap();
        }
        played.manager.abort_all();
        assert_eq!(played.manager.active_groups(), 0);
        let pass = Pass(stop * 2 + 1);
        let saved = step(&mut played, 4, pass);
        backward(&mut played, saved, pass);
    }
    played.finish();
}

/// M8: without a group a tensor stays, and one warning is told for the life of the manager.
#[test]
fn m8_without_a_group_tensors_stay() {
    let mut played = Managed::new();
    let storage = played.filled(64, 1);
    assert_eq!(played.offer(&storage, None), Offered::Kept);
    assert_eq!(played.offer(&storage, Some(|| CheckpointPolicy::MustSwap)), Offered::Kept);
    assert_eq!(*played.told.lock().unwrap(), [Event::NoGroup]);
    played.finish();
}

/// M9, M10, C12: groups of several passes in flight are apart: gradient accumulation, 1F1B, a layer
/// twice in one pass.
#[test]
fn m9_m10_c12_passes_in_flight() {
    let mut played = chained(3);
    let first = step(&mut played, 3, Pass(1));
    let second = step(&mut played, 3, Pass(2));
    assert_eq!(played.manager.active_groups(), 4, "two layers of each pass; the last ones stay");
    backward(&mut played, first, Pass(1));
    let third = step(&mut played, 3, Pass(3));
    backward(&mut played, second, Pass(2));
    backward(&mut played, third, Pass(3));

    played.manager.begin_pass(Pass(4));
    let group = played.manager.chain().group("h.0").unwrap().to_string();
    played.manager.set_current(1, Some(group));
    let twice = [played.filled(64, 7), played.filled(64, 8)];
    for storage in &twice {
        assert!(matches!(played.offer(storage, None), Offered::Saved(_, Registered::New)));
        played.manager.forward_done("h.0").unwrap();
    }
    assert_eq!(played.manager.active_groups(), 2);
    played.manager.forward_done("h.1").unwrap();
    assert!(twice.iter().all(SimStorage::is_empty), "both uses of the layer have left");
    for (storage, seed) in twice.iter().zip([7, 8]).rev() {
        played.manager.backward_begins("h.0").unwrap();
        played.world.check(storage, 0..64, seed);
    }
    played.finish();
}

/// G9: the records of a layer that stayed are dropped when its backward starts.
#[test]
fn g9_records_of_the_last_layer_are_dropped_when_its_backward_starts() {
    let mut rig = Rig::new();
    let storages = [rig.filled(256, 1)];
    let (group, _) = rig.group(&storages);
    assert_eq!(storages[0].references(), 2);
    rig.engine.need(group).unwrap();
    assert_eq!(storages[0].references(), 1);
    let (next, _) = rig.group(&storages);
    let again = rig.engine.register(next, whole(&storages[0])).unwrap().1;
    assert_eq!(again, Registered::Duplicate, "the identity went with the records");
    rig.engine.close(next);
    rig.engine.close(group);
    rig.finish();
}

/// G10, M10: what arrives while a group is on its way forms a group of its own; each comes home by
/// name, the newest first.
#[test]
fn g10_m10_late_records_form_a_group_of_their_own() {
    let mut played = Managed::new();
    let storages = [played.filled(64, 1), played.filled(64, 2)];
    played.manager.ensure("stage 0");
    for storage in &storages {
        let (_, registered) = played.manager.add("stage 0", whole(storage)).unwrap();
        assert_eq!(registered, Registered::New);
        played.manager.start_offload("stage 0", None).unwrap();
    }
    assert_eq!(played.manager.active_groups(), 2);
    for _ in &storages {
        played.manager.wait_offload("stage 0").unwrap();
    }
    for _ in &storages {
        played.manager.start_load("stage 0", None).unwrap();
    }
    for _ in &storages {
        played.manager.wait_load("stage 0").unwrap();
    }
    for (storage, seed) in storages.iter().zip([1, 2]) {
        played.world.check(storage, 0..64, seed);
    }
    played.finish();
}

/// M1: the outer group is current again after a panic, too.
#[test]
fn m1_the_outer_group_is_restored_after_a_panic() {
    let mut played = Managed::new();
    played.manager.set_current(1, Some("outer".into()));
    let manager = &mut played.manager;
    let inner = || manager.with_current(1, "inner", |_| panic!("planned"));
    let panicked: std::thread::Result<()> =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(inner));
    assert!(panicked.is_err());
    assert_eq!(played.manager.current(1), Some("outer"));
    played.finish();
}

/// M11: what the first backward did is prefetched in the second one; a deviating step is right too.
#[test]
fn m11_the_order_is_learnt() {
    let mut rig = Rig::with(Setup { prefetch: 1, ..Setup::default() });
    for (round, order) in [[2, 0, 1], [2, 0, 1], [0, 1, 2]].into_iter().enumerate() {
        let pass = Pass(round as u64);
        let storages: Vec<_> = (0..3).map(|seed| rig.filled(256, seed)).collect();
        let mut groups = Vec::new();
        for (layer, storage) in (0..).zip(&storages) {
            let group = rig.engine.open(ebbtide_core::LayerId(layer), pass);
            rig.add(group, whole(storage));
            rig.out(group);
            groups.push(group);
        }
        let before = rig.engine.counters().missed_prefetches;
        for layer in order {
            rig.engine.need(groups[layer]).unwrap();
            rig.world.check(&storages[layer], 0..256, layer as u64);
            rig.engine.prefetch(groups[layer]);
        }
        let missed = rig.engine.counters().missed_prefetches - before;
        assert_eq!(missed, [2, 1, 3][round], "round {round}");
        rig.engine.finish_backward();
        for group in groups {
            rig.engine.close(group);
        }
    }
    rig.finish();
}

/// M12: any depth gives the same bytes; a deeper one leaves fewer misses.
#[test]
fn m12_prefetch_depth_is_a_hint() {
    for prefetch in 0..5 {
        let mut rig = Rig::with(Setup { prefetch, ..Setup::default() });
        let storages: Vec<_> = (0..6).map(|seed| rig.filled(256, seed)).collect();
        let mut groups = Vec::new();
        for (layer, storage) in (0..).zip(&storages) {
            let group = rig.engine.open(ebbtide_core::LayerId(layer), Pass(1));
            rig.add(group, whole(storage));
            rig.out(group);
            groups.push(group);
        }
        for (layer, group) in groups.iter().enumerate().rev() {
            rig.engine.need(*group).unwrap();
            rig.engine.prefetch(*group);
            rig.world.check(&storages[layer], 0..256, layer as u64);
            let back = storages.iter().filter(|storage| !storage.is_empty()).count();
            assert_eq!(back, (6 - layer + prefetch).min(6), "depth {prefetch}");
            rig.engine.close(*group);
        }
        assert_eq!(rig.engine.counters().missed_prefetches, if prefetch == 0 { 6 } else { 1 });
        rig.finish();
    }
}

/// W1: a policy for a tensor may say keep or swap; it is asked once.
#[test]
fn w1_policies_for_single_tensors_are_asked_once() {
    let mut played = Managed::new();
    played.manager.set_current(1, Some("h.0".into()));
    let storage = played.filled(64, 1);
    let asked = Cell::new(0);
    let answer = |policy| {
        let asked = &asked;
        move || {
            asked.set(asked.get() + 1);
            policy
        }
    };
    for policy in [
        CheckpointPolicy::PreferSave,
        CheckpointPolicy::MustRecompute,
        CheckpointPolicy::PreferRecompute,
    ] {
        let error = played.manager.offer(1, whole(&storage), Some(answer(policy))).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{} is no policy for a single tensor", policy.name())
        );
        assert!(error.is_setting());
    }
    assert_eq!(asked.replace(0), 3);
    let kept = played.manager.offer(1, whole(&storage), Some(answer(CheckpointPolicy::MustSave)));
    assert_eq!(kept.unwrap(), Offered::Kept);
    assert_eq!(played.manager.active_groups(), 0, "a kept tensor opens no group");
    let saved = played.manager.offer(1, whole(&storage), Some(answer(CheckpointPolicy::MustSwap)));
    assert!(matches!(saved.unwrap(), Offered::Saved(_, Registered::New)));
    assert_eq!(asked.get(), 2);
    played.manager.abort("h.0");
    played.finish();
}
