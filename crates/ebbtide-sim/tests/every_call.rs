//! A whole step with everything in it, once for each of its calls: that call fails, or the device is
//! lost there. Afterwards nothing is leaked, and the next step is right.

use std::collections::BTreeSet;

use ebbtide_sim::play::{Feature, Mix, Scenario};
use ebbtide_sim::{Faults, Ratio};

const EVERYTHING: &[Feature] = &[
    Feature::Pack,
    Feature::SmallBuckets,
    Feature::Elements,
    Feature::Slices,
    Feature::Views,
    Feature::Repeats,
    Feature::Empty,
    Feature::Pools,
    Feature::TightHost,
    Feature::Skips,
    Feature::Tables,
    Feature::Outputs,
    Feature::Twice,
    Feature::MicroBatches,
    Feature::Interleaved,
    Feature::Recompute,
    Feature::Evaluation,
    Feature::Unused,
    Feature::Deviate,
    Feature::Protect,
    Feature::Streams,
    Feature::DropHandles,
    Feature::Pressure,
    Feature::LateWaits,
    Feature::ByHand,
    Feature::Shrink,
    // On, so that errors are expected; what fails is set below.
    Feature::FailCall,
];

/// A long step: the first such one of the seeds from `first` on.
fn step(first: u64, more: &[Feature], stubborn: bool) -> Scenario {
    let features: Vec<_> = EVERYTHING.iter().chain(more).copied().collect();
    let scenario = |seed| {
        let mut scenario = Scenario::with(seed, Mix::of(&features, Ratio(1, 3)));
        scenario.plan.steps.truncate(1);
        scenario.stubborn = stubborn;
        scenario.machine.faults = Faults::default();
        scenario
    };
    let mut steps = (first..).map(scenario);
    steps.find(|scenario| (250..900).contains(&scenario.play().calls)).expect("seeds have no end")
}

fn is_good(scenario: &Scenario, what: &str) {
    let outcome = scenario.play();
    let seed = scenario.seed;
    assert!(
        outcome.is_good(),
        "seed {seed}, {what}\n{outcome}  repeat with: cargo test -p ebbtide-sim --test every_call"
    );
}

fn every_call_can_fail(mut scenario: Scenario) {
    let calls = scenario.play().calls;
    for call in 0..calls {
        scenario.machine.faults = Faults { fail_call: Some(call), ..Faults::default() };
        is_good(&scenario, &format!("call {call} of {calls} fails"));
        scenario.machine.faults = Faults { lost_at: Some(call), ..Faults::default() };
        is_good(&scenario, &format!("the device is lost at call {call} of {calls}"));
    }
}

#[test]
fn c10_every_call_of_a_step_can_fail() {
    for seed in [0, 100, 200] {
        every_call_can_fail(step(seed, &[], false));
    }
}

#[test]
fn c10_every_call_can_fail_where_the_device_gathers() {
    every_call_can_fail(step(300, &[Feature::Gathers], false));
}

/// The step goes on after the error, as far as it can.
#[test]
fn t10_every_call_can_fail_and_the_step_goes_on() {
    for seed in [0, 400] {
        every_call_can_fail(step(seed, &[], true));
    }
}

/// Two calls in a row: whatever helps after a failure fails, too.
#[test]
fn c10_every_pair_of_neighbouring_calls_can_fail() {
    let mut scenario = step(500, &[], false);
    let calls = scenario.play().calls;
    let mut seen = BTreeSet::new();
    for call in 0..calls {
        for more in [2, 3] {
            scenario.machine.faults = Faults { fail_calls: call..call + more, ..Faults::default() };
            scenario.stubborn = call % 2 == 0;
            is_good(&scenario, &format!("{more} calls from {call} on fail, of {calls}"));
            seen.insert(scenario.play().errors);
        }
    }
    assert!(seen.len() > 1, "{seen:?}");
}
