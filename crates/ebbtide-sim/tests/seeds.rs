//! Whole runs, drawn from seeds: nothing goes wrong, and together they reach every place in the engine.

use ebbtide_core::mark::{self, Mark};
use ebbtide_core::model::{ModelDevice, ModelStore};
use ebbtide_core::{Config, Direct, Engine, LayerId, Pass, Saved};
use ebbtide_sim::play::{Feature, Scenario, Sweep, sweep};

fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

fn are_good(first: u64, count: u64, forced: &[Feature]) -> Sweep {
    let swept = sweep(first..first + count, forced, threads());
    assert!(swept.bad.is_empty(), "{}", swept.describe(forced));
    swept
}

/// 500 seeds; every transition and every error path is reached by one of them.
#[test]
fn five_hundred_seeds_are_good_and_reach_everything() {
    let mut swept = are_good(0, 500, &[]);
    a_load_that_fails_without_streams();
    swept.marks.extend(mark::seen());
    let missing: Vec<_> = Mark::ALL.iter().filter(|mark| !swept.marks.contains(mark)).collect();
    assert!(missing.is_empty(), "no seed reaches {missing:?}");
    assert!(swept.with_errors > 100, "{}", swept.with_errors);
}

/// Where copies are ordered by streams, a load that was queued does not fail afterwards; where a store
/// reads straight into the device's memory, it does.
fn a_load_that_fails_without_streams() {
    let device = ModelDevice::default();
    let storage = device.storage(vec![7; 64]);
    // Each of put, get and their waits is a call.
    let mut store = ModelStore::default();
    store.calls_left = Some(3);
    let mut engine = Engine::new(Config::default(), Direct::new(device, store));
    let group = engine.open(LayerId(0), Pass(1));
    let _ = engine.register(group, Saved::whole(storage.clone(), 64)).unwrap();
    engine.start_offload(group).unwrap();
    engine.wait_offload(group).unwrap();
    engine.start_load(group).unwrap();
    assert!(engine.wait_load(group).unwrap_err().is_copy());
    engine.need(group).unwrap();
    assert_eq!(*storage.bytes(), vec![7; 64]);
}

/// What each feature alone can break: it is on in each of these runs.
#[test]
fn every_feature_is_good_on_seeds_of_its_own() {
    for (at, &feature) in (0..).zip(Feature::ALL) {
        are_good(1_000_000 + 100 * at, 8, &[feature]);
    }
}

/// Errors upon errors: whatever helps after a failure fails, too.
#[test]
fn bursts_of_failures_are_good() {
    are_good(2_000_000, 250, &[Feature::FailBurst]);
    are_good(2_100_000, 250, &[Feature::DeviceFaults, Feature::DiskFaults]);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..40 {
        let mut scenario = Scenario::draw(seed, &[]);
        scenario.machine.trace = true;
        let (first, second) = (scenario.play(), scenario.play());
        assert!(!first.trace.is_empty());
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert_eq!(first.reports, second.reports, "seed {seed}");
    }
}
