//! Steps driven by names and layers, drawn from seeds. `EBBTIDE_SEED=n` repeats one seed.

use ebbtide_core::{
    CheckpointPolicy, Config, Engine, Manager, Offered, Saved, Staged, StagedConfig,
};
use ebbtide_sim::play::named;
use ebbtide_sim::{Options, SimDisk, World};

/// Each seed is good; how many met errors, if it was not about a single one.
fn are_good(faults: bool) -> Option<usize> {
    let only = std::env::var("EBBTIDE_SEED").ok();
    let only = only.map(|seed| seed.parse::<u64>().expect("EBBTIDE_SEED is a number"));
    let seeds = only.map_or(0..300, |seed| seed..seed + 1);
    let has_errors = |&seed: &u64| {
        let outcome = named(seed, faults);
        assert!(
            outcome.is_good(),
            "seed {seed}, faults {faults}\n{outcome}  repeat with: EBBTIDE_SEED={seed} cargo test -p \
             ebbtide-sim --test named"
        );
        outcome.errors > 0
    };
    let errors = seeds.filter(has_errors).count();
    only.is_none().then_some(errors)
}

#[test]
fn three_hundred_seeds_without_faults_are_good() {
    assert_eq!(are_good(false).unwrap_or(0), 0);
}

#[test]
fn three_hundred_seeds_with_faults_are_good() {
    let errors = are_good(true);
    assert!(errors.is_none_or(|errors| errors > 100), "{errors:?} seeds met an error");
}

/// G6, G9, W1: what a layer keeps does not leave with an earlier layer that saved it, too.
#[test]
fn g6_what_is_kept_does_not_leave_with_an_earlier_group() {
    for policy in [None, Some(CheckpointPolicy::MustSave)] {
        let world = World::new(1, Options::default());
        let mover = Staged::new(&StagedConfig::new(1 << 20), world.device(), None::<SimDisk>);
        let mut manager = Manager::new(Engine::new(Config::default(), mover));
        let _ = manager.follow("first", "last").unwrap();
        let group = |manager: &Manager<_>, layer| manager.chain().group(layer).map(str::to_string);
        let storage = world.storage(512).unwrap();
        world.fill(&storage, 0..512, 7);
        let ask = |policy: Option<CheckpointPolicy>| policy.map(|policy| move || policy);
        for (layer, policy) in [("first", None), ("last", policy)] {
            let current = group(&manager, layer);
            manager.set_current(1, current);
            let saved = Saved::whole(storage.clone(), 512);
            let offered = manager.offer(1, saved, ask(policy)).unwrap();
            assert_eq!(offered == Offered::Kept, layer == "last");
            manager.forward_done(layer).unwrap();
        }
        manager.backward_begins("last").unwrap();
        world.check(&storage, 0..512, 7);
        manager.backward_begins("first").unwrap();
        world.check(&storage, 0..512, 7);
        assert_eq!(manager.active_groups(), 0);
        drop((manager, storage));
        assert!(world.finish().is_empty());
    }
}
