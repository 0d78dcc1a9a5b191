//! Rows T and R of the catalogue, each on the simulated accelerator.

mod rows;

use ebbtide_core::{Accelerator, Direction, End, Event, Registered, StagedConfig, view_bytes};
use ebbtide_sim::{Faults, Function, Options};

use rows::{F16, Rig, Setup, text, whole};

fn failing(function: Function, nth: u64) -> Setup {
    let faults = Faults { fail_function: Some((function, nth)), ..Faults::default() };
    Setup { options: Options { faults, ..Options::default() }, ..Setup::default() }
}

/// T1: a tensor shows the state it is in, and the tier below host memory its own.
#[test]
fn t1_states_of_a_journey() {
    let config = StagedConfig::new(4096);
    let mut rig = Rig::with(Setup { config, disk: true, ..Setup::default() });
    let storages = [rig.filled(4096, 1), rig.filled(4096, 2)];
    let (first, tensors) = rig.group(&storages[..1]);
    let state = |rig: &Rig| rig.engine.state(tensors[0]).unwrap();
    let mut seen = vec![state(&rig)];
    rig.engine.start_offload(first).unwrap();
    seen.push(state(&rig));
    rig.engine.wait_offload(first).unwrap();
    seen.push(state(&rig));
    let (second, _) = rig.group(&storages[1..]);
    rig.out(second);
    seen.push(state(&rig));
    rig.home(second, &storages[1..], 2);
    rig.engine.start_load(first).unwrap();
    rig.engine.wait_load(first).unwrap();
    seen.push(state(&rig));
    assert_eq!(seen, ["device", "d2h", "host", "disk", "device"]);
    rig.home(first, &storages[..1], 1);
    rig.finish();
}

/// T2: errors show what was remembered at registration.
#[test]
fn t2_registration_remembers_label_size_element_slice_and_pool() {
    let mut rig = Rig::with(failing(Function::Copy, 0));
    let storage = rig.filled(256, 1);
    let pool = rig.engine.mover_mut().add_pool(1 << 20);
    let label = rig.engine.label("h.0 q [4, 8]");
    assert_eq!(label, rig.engine.label("h.0 q [4, 8]"), "interned");
    let group = rig.open();
    let saved = whole(&storage).slice(64..128).element(F16).label(label).pool(pool);
    assert!(saved.is_slice());
    rig.add(group, saved);
    let error = text(rig.engine.start_offload(group).unwrap_err());
    let wanted = "offload of h.0 q [4, 8] (256 bytes, float16, slice, explicit pool, \
                  group layer 2 pass 2) failed: ";
    assert!(error.starts_with(wanted), "{error}");
    rig.engine.close(group);
    rig.finish();
}

/// T3: reading what is away names the state; asking for it brings it, and counts as a miss.
#[test]
fn t3_reading_away_is_an_error_and_asking_loads_on_demand() {
    let mut rig = Rig::new();
    let storages = [rig.filled(512, 1)];
    let (group, tensors) = rig.group(&storages);
    rig.engine.readable(tensors[0]).unwrap();
    rig.engine.start_offload(group).unwrap();
    let error = rig.engine.readable(tensors[0]).unwrap_err();
    assert_eq!(error.to_string(), "the value is not on the device: its state is `d2h`");
    rig.engine.wait_offload(group).unwrap();
    let error = rig.engine.readable(tensors[0]).unwrap_err();
    assert_eq!(error.to_string(), "the value is not on the device: its state is `host`");
    rig.engine.need(group).unwrap();
    rig.engine.readable(tensors[0]).unwrap();
    assert_eq!(rig.engine.counters().missed_prefetches, 1);
    rig.home(group, &storages, 1);
    rig.finish();
}

/// T5: size first, then version, before the first copy of the group; the error names both numbers.
#[test]
fn t5_a_tensor_changed_before_the_copy_is_an_error() {
    let mut rig = Rig::new();
    let mut storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let (group, _) = rig.group(&storages);
    storages[1].modify_in_place(0..512, 9);
    let error = rig.engine.start_offload(group).unwrap_err();
    assert!(error.is_changed() && error.hint().is_some());
    let wanted = "a tensor (group layer 2 pass 2) changed after it was saved: version was 0, is 1";
    assert_eq!(error.to_string(), wanted);
    // The framework's own resize: both size and version differ now, and the size is named.
    rig.world.device().free(&mut storages[1]).unwrap();
    let error = rig.engine.start_offload(group).unwrap_err();
    assert!(error.to_string().ends_with("bytes was 512, is 0"), "{error}");
    assert_eq!(rig.world.stats().copies, 0, "nothing of the group has been copied");
    rig.world.check(&storages[0], 0..512, 1);
    rig.engine.close(group);
    rig.finish();
}

/// T5: changed while the copy was under way, or kept and changed later: never another value.
#[test]
fn t5_a_tensor_changed_during_the_copy_or_before_its_use_is_an_error() {
    let mut rig = Rig::new();
    let storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let (group, _) = rig.group(&storages);
    rig.engine.start_offload(group).unwrap();
    // The user's kernel is ordered behind the copy, as a race between them would be the user's own.
    let mut device = rig.world.device();
    let out = device.copy_stream(Direction::Out).unwrap();
    let copied = device.record(out).unwrap();
    device.wait(rig.world.compute(), &copied).unwrap();
    storages[0].modify_in_place(0..512, 9);
    assert!(rig.engine.wait_offload(group).unwrap_err().is_changed());
    rig.world.check(&storages[0], 0..512, 9);
    assert!(rig.engine.need(group).unwrap_err().is_changed());
    rig.engine.close(group);

    let (group, _) = rig.group(&storages[..1]);
    storages[0].modify_in_place(0..512, 10);
    assert!(rig.engine.need(group).unwrap_err().is_changed());
    rig.engine.close(group);
    rig.finish();
}

/// T5: resized while the copy was under way: nothing is freed, and the error says both sizes.
#[test]
fn t5_a_storage_resized_during_the_copy_is_an_error() {
    let mut rig = Rig::new();
    let mut storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let (group, _) = rig.group(&storages);
    rig.engine.start_offload(group).unwrap();
    let mut device = rig.world.device();
    let out = device.copy_stream(Direction::Out).unwrap();
    let copied = device.record(out).unwrap();
    device.wait(rig.world.compute(), &copied).unwrap();
    device.free(&mut storages[0]).unwrap();
    let error = rig.engine.wait_offload(group).unwrap_err();
    assert!(error.to_string().ends_with("bytes was 512, is 0"), "{error}");
    rig.engine.close(group);
    rig.finish();
}

/// T5: what is kept and modified is found at its use on every path, not only through `need`.
#[test]
fn t5_a_kept_tensor_modified_before_the_load_is_an_error() {
    let mut rig = Rig::new();
    let storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let (group, _) = rig.group(&storages);
    assert!(rig.engine.protect(&storages[0]).unwrap());
    rig.out(group);
    storages[0].modify_in_place(0..512, 9);
    rig.engine.start_load(group).unwrap();
    assert!(rig.engine.wait_load(group).unwrap_err().is_changed());
    rig.world.check(&storages[1], 0..512, 2);
    assert!(
        rig.engine.need(group).unwrap_err().is_changed(),
        "asking again does not make it right"
    );
    rig.engine.close(group);
    rig.finish();
}

/// A tensor that does not lie within its storage, or whose storage has another size than it says.
#[test]
fn t2_registrations_that_make_no_sense_are_refused() {
    let mut rig = Rig::new();
    let storage = rig.filled(64, 1);
    let group = rig.open();
    let error = rig.engine.register(group, whole(&storage).slice(32..128)).unwrap_err();
    let wanted = "a tensor reaches bytes 32..128 of a storage of 64 bytes, which has 64";
    assert_eq!(error.to_string(), wanted);
    let told = ebbtide_core::Saved::whole(storage.clone(), 128);
    let error = rig.engine.register(group, told).unwrap_err();
    let wanted = "a tensor reaches bytes 0..128 of a storage of 128 bytes, which has 64";
    assert_eq!(error.to_string(), wanted);
    rig.engine.close(group);
    rig.finish();
}

/// T6: a slice copies its own bytes only, a whole tensor its storage, and a pool is used if named.
#[test]
fn t6_what_is_copied_and_where_to() {
    let mut rig = Rig::new();
    let storages = [rig.filled(4096, 1), rig.filled(4096, 2)];
    let pool = rig.engine.mover_mut().add_pool(1 << 20);
    let group = rig.open();
    rig.add(group, whole(&storages[0]).slice(1024..2048));
    rig.add(group, whole(&storages[1]).pool(pool));
    rig.out(group);
    assert_eq!(rig.world.stats().copied_out, 1024 + 4096);
    assert_eq!(rig.engine.mover_mut().pool_stats(pool).unwrap().in_use, 4096);
    rig.engine.need(group).unwrap();
    rig.world.check(&storages[0], 1024..2048, 1);
    rig.world.check(&storages[1], 0..4096, 2);
    rig.engine.close(group);
    rig.finish();
}

/// T7: a failed copy leaves the tensor on the device, and its buffer goes back behind what was queued.
#[test]
fn t7_a_failed_copy_gives_its_buffer_back_guarded() {
    let mut setup = failing(Function::Copy, 1);
    // The copy that was queued before takes long.
    setup.options.speeds.copy_ns = 1_000_000_000;
    let mut rig = Rig::with(setup);
    let storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let pool = rig.engine.mover_mut().add_pool(1024);
    let group = rig.open();
    let tensors = storages.each_ref().map(|storage| rig.add(group, whole(storage).pool(pool)));
    let error = rig.engine.start_offload(group).unwrap_err();
    assert!(error.is_copy(), "{error}");
    assert!(tensors.iter().all(|tensor| rig.engine.state(*tensor).unwrap() == "device"));
    let stats = rig.engine.mover_mut().pool_stats(pool).unwrap();
    assert_eq!((stats.in_use, stats.pending), (0, 1024), "behind an event, not at once");
    rig.home(group, &storages, 1);
    rig.finish();
}

/// T8: when the offload is waited for the storage is empty, but lives on.
#[test]
fn t8_a_finished_offload_frees_the_storage() {
    let mut rig = Rig::new();
    let storages = [rig.filled(512, 1)];
    let (group, _) = rig.group(&storages);
    rig.engine.start_offload(group).unwrap();
    assert!(!storages[0].is_empty());
    rig.engine.wait_offload(group).unwrap();
    assert!(storages[0].is_empty());
    let view = storages[0].clone();
    rig.engine.need(group).unwrap();
    rig.world.check(&view, 0..512, 1);
    rig.engine.close(group);
    rig.finish();
}

/// T9, T10: a load that fails anywhere leaves the copy, and storages that are empty again; it can be
/// tried again, and restores each storage once.
#[test]
fn t9_t10_a_failed_load_can_be_tried_again() {
    for function in [Function::Restore, Function::Stage, Function::Copy, Function::Record] {
        for nth in 0..8 {
            let mut rig = Rig::with(failing(function, nth));
            let storages = [rig.filled(512, 1), rig.filled(512, 2), rig.filled(2048, 3)];
            let group = rig.open();
            for storage in &storages {
                rig.add(group, whole(storage).pack());
            }
            if rig.engine.start_offload(group).is_ok() && rig.engine.wait_offload(group).is_ok() {
                if let Err(error) = rig.engine.start_load(group) {
                    assert!(error.is_copy(), "{error}");
                    assert!(storages.iter().all(ebbtide_sim::SimStorage::is_empty));
                }
                assert!(storages.iter().all(|s| s.version() == 0), "a load is no change");
            }
            rig.home(group, &storages, 1);
            rig.finish();
        }
    }
}

/// T11: a packed tensor comes back into the storage that it came from, so every view sees it.
#[test]
fn t11_a_packed_tensor_comes_back_into_its_own_storage() {
    let mut rig = Rig::new();
    let storages: Vec<_> = (0..4).map(|seed| rig.filled(256, seed)).collect();
    let views = storages.clone();
    let group = rig.open();
    for storage in &storages {
        rig.add(group, whole(storage).pack());
    }
    rig.out(group);
    let ids: Vec<u64> = storages.iter().map(ebbtide_sim::SimStorage::id).collect();
    rig.engine.need(group).unwrap();
    for ((seed, view), id) in (0..).zip(&views).zip(ids) {
        assert_eq!(view.id(), id);
        rig.world.check(view, 0..256, seed);
    }
    rig.engine.close(group);
    rig.finish();
}

/// T12: the host buffer goes back exactly once, behind the event of the load.
#[test]
fn t12_the_buffer_goes_back_once_behind_the_load() {
    let mut setup = Setup::default();
    setup.options.speeds.copy_ns = 1_000_000_000;
    let mut rig = Rig::with(setup);
    let storages = [rig.filled(4096, 1)];
    let (group, _) = rig.group(&storages);
    rig.out(group);
    let pool = |rig: &mut Rig| {
        let stats = rig.engine.mover_mut().pool_stats(ebbtide_core::PoolId(0)).unwrap();
        (stats.in_use, stats.pending, stats.free)
    };
    assert_eq!(pool(&mut rig), (4096, 0, 0));
    rig.engine.start_load(group).unwrap();
    assert_eq!(pool(&mut rig), (4096, 0, 0));
    rig.engine.wait_load(group).unwrap();
    assert_eq!(pool(&mut rig), (0, 4096, 0));
    assert!(rig.engine.wait_load(group).unwrap_err().is_phase());
    rig.world.host_works(10_000_000_000);
    rig.engine.finish_backward();
    assert_eq!(pool(&mut rig), (0, 0, 4096));
    rig.home(group, &storages, 1);
    rig.finish();
}

/// T13, C1: any mix of overlapping views is saved once, and every view comes back exact.
#[test]
fn t13_c1_overlapping_views_are_saved_once_and_come_back_exact() {
    let mut rig = Rig::new();
    let storage = rig.filled(64, 1);
    let group = rig.open();
    let views = [
        (view_bytes(0, &[3], &[1], 4), Registered::New),
        (view_bytes(0, &[5], &[1], 4), Registered::Merged),
        (view_bytes(0, &[3], &[1], 4), Registered::Duplicate),
        (view_bytes(8, &[4], &[2], 4), Registered::Merged),
        (view_bytes(0, &[8, 8], &[1, 0], 4), Registered::Merged),
    ];
    let mut tensors = Vec::new();
    for (range, wanted) in &views {
        let (tensor, registered) =
            rig.engine.register(group, whole(&storage).slice(range.clone())).unwrap();
        assert_eq!(registered, *wanted);
        tensors.push(tensor);
    }
    rig.out(group);
    assert_eq!(rig.world.stats().copied_out, 32 + 28, "two ranges, each byte once");
    assert!(tensors.iter().all(|tensor| rig.engine.state(*tensor).unwrap() == "host"));
    rig.engine.need(group).unwrap();
    for (range, _) in views {
        rig.world.check(&storage, range, 1);
    }
    rig.engine.close(group);
    rig.finish();
}

/// T14: protection during the offload calls the freeing off; the buffer goes back behind the copy.
/// Protection of what is away, also packed or on disk, brings it back.
#[test]
fn t14_protection_at_any_moment() {
    for (wait, pack, host) in [
        (false, false, 1 << 20),
        (false, true, 1 << 20),
        (true, false, 1 << 20),
        (true, true, 1 << 20),
        (true, true, 1024),
    ] {
        let config = StagedConfig::new(host);
        let mut rig = Rig::with(Setup { config, disk: true, ..Setup::default() });
        let storages = [rig.filled(256, 1), rig.filled(256, 2)];
        let group = rig.open();
        let tensors = storages.each_ref().map(|storage| {
            let saved = whole(storage);
            rig.add(group, if pack { saved.pack() } else { saved })
        });
        rig.engine.start_offload(group).unwrap();
        let other = rig.filled(1024, 7);
        let (later, _) = rig.group(std::slice::from_ref(&other));
        if wait {
            rig.engine.wait_offload(group).unwrap();
            rig.out(later);
        }
        assert!(rig.engine.protect(&storages[0]).unwrap());
        assert_eq!(rig.engine.state(tensors[0]).unwrap(), "device");
        assert_ne!(rig.engine.state(tensors[1]).unwrap(), "device");
        rig.world.check(&storages[0], 0..256, 1);
        if !wait {
            rig.engine.wait_offload(group).unwrap();
            assert!(!storages[0].is_empty() && storages[1].is_empty());
        }
        rig.home(later, &[other], 7);
        rig.home(group, &storages, 1);
        rig.finish();
    }
}

/// T14, G6: a storage of which only a part was saved can't be brought back as a whole, and nobody gets
/// bytes that were not saved.
#[test]
fn t14_g6_bytes_that_were_not_saved_are_an_error() {
    let mut rig = Rig::new();
    let storage = rig.filled(256, 1);
    let group = rig.open();
    rig.add(group, whole(&storage).slice(0..128));
    rig.out(group);
    let error = rig.engine.protect(&storage).unwrap_err();
    let wanted = "bytes 0..256 of the storage of a tensor were not saved before it was freed";
    assert_eq!(error.to_string(), wanted);
    let other = rig.open();
    let whole = || ebbtide_core::Saved::whole(storage.clone(), 256);
    let error = rig.engine.register(other, whole().slice(128..256)).unwrap_err();
    assert!(error.is_not_saved(), "{error}");
    // What was saved can be had.
    let saved = whole().slice(64..128);
    let (_, registered) = rig.engine.register(other, saved).unwrap();
    assert_eq!(registered, Registered::Shared(group));
    rig.world.check(&storage, 0..128, 1);
    rig.engine.close(other);
    rig.engine.close(group);
    rig.finish();
}

/// T14: protecting what is on its way home after its wait has failed.
#[test]
fn t14_protection_after_a_wait_that_failed() {
    let mut setup = Setup::default();
    setup.options.speeds.copy_ns = 1_000_000;
    let mut rig = Rig::with(setup);
    let storages = [rig.filled(512, 1), rig.filled(512, 2)];
    let (group, tensors) = rig.group(&storages);
    rig.out(group);
    rig.engine.start_load(group).unwrap();
    let calls = rig.world.calls();
    rig.world.inject(Faults { fail_calls: calls..calls + 2, ..Faults::default() });
    rig.engine.wait_load(group).unwrap_err();
    rig.world.heal();
    assert!(rig.engine.protect(&storages[0]).unwrap());
    assert_eq!(rig.engine.state(tensors[0]).unwrap(), "device");
    rig.world.check(&storages[0], 0..512, 1);
    rig.home(group, &storages, 1);
    rig.finish();
}

/// M7: a group given up after a failed load leaves no memory that nobody has filled.
#[test]
fn m7_nothing_readable_is_left_of_a_load_that_failed() {
    let mut rig = Rig::new();
    let storages = [rig.filled(512, 1)];
    let (group, _) = rig.group(&storages);
    rig.out(group);
    // The copy home fails, and so does the freeing after it: the storage keeps its new memory.
    let copy = rig.world.calls() + 4;
    let fail_function = Some((Function::Free, 1));
    rig.world.inject(Faults { fail_call: Some(copy), fail_function, ..Faults::default() });
    rig.engine.start_load(group).unwrap_err();
    rig.engine.close(group);
    assert!(storages[0].is_empty());
    rig.finish();
}

/// T15: one line for debugging.
#[test]
fn t15_the_debug_line() {
    let mut rig = Rig::new();
    let storage = rig.filled(256, 1);
    let label = rig.engine.label("h.0 gelu [64]");
    let group = rig.open();
    let first = rig.add(group, whole(&storage).label(label));
    let again = rig.add(group, whole(&storage).label(label));
    let line = rig.engine.describe(first).unwrap();
    assert_eq!(line, "h.0 gelu [64]: state device, duplicate false, device value true");
    rig.out(group);
    let line = rig.engine.describe(again).unwrap();
    assert_eq!(line, "h.0 gelu [64]: state host, duplicate true, device value false");
    rig.engine.close(group);
    assert!(rig.engine.describe(first).unwrap_err().is_phase());
    rig.finish();
}

/// T16: broadcast, empty and offset views move their real bytes, in every element type.
#[test]
fn t16_broadcast_empty_and_odd_views() {
    let mut rig = Rig::new();
    let storages = [rig.filled(4096, 1), rig.filled(100, 2), rig.filled(7, 3)];
    let group = rig.open();
    rig.add(group, whole(&storages[0]).slice(view_bytes(5, &[1 << 40], &[0], 8)).strided());
    rig.add(group, whole(&storages[1]).slice(view_bytes(3, &[0, 9], &[9, 1], 2)));
    rig.add(group, whole(&storages[2]).slice(view_bytes(6, &[7], &[-1], 1)).strided());
    rig.out(group);
    assert_eq!(rig.world.stats().copied_out, 8 + 7);
    assert!(!storages[1].is_empty(), "a view without elements moves nothing");
    rig.engine.need(group).unwrap();
    rig.world.check(&storages[0], 40..48, 1);
    rig.world.check(&storages[1], 0..100, 2);
    rig.world.check(&storages[2], 0..7, 3);
    rig.engine.close(group);
    rig.finish();
}

/// T17: a duplicate always shows the state of the registration that it repeats.
#[test]
fn t17_a_duplicate_shows_the_state_of_what_it_repeats() {
    let mut rig = Rig::new();
    let storage = rig.filled(256, 1);
    let group = rig.open();
    let both = [rig.add(group, whole(&storage)), rig.add(group, whole(&storage))];
    let states = |rig: &Rig| both.map(|tensor| rig.engine.state(tensor).unwrap());
    assert_eq!(states(&rig), ["device"; 2]);
    rig.engine.start_offload(group).unwrap();
    assert_eq!(states(&rig), ["d2h"; 2]);
    rig.engine.wait_offload(group).unwrap();
    assert_eq!(states(&rig), ["host"; 2]);
    rig.engine.start_load(group).unwrap();
    assert_eq!(states(&rig), ["h2d"; 2]);
    rig.engine.wait_load(group).unwrap();
    assert_eq!(states(&rig), ["device"; 2]);
    rig.engine.close(group);
    rig.finish();
}

/// R2, R3: all tensors of all regions of a group go together; repeats are found on arrival, counted,
/// and told once for a layer; finishing the load empties the records, finishing the offload does not.
#[test]
fn r2_r3_records_of_a_group() {
    let mut rig = Rig::new();
    for _ in 0..2 {
        let storages = [rig.filled(256, 1), rig.filled(256, 2)];
        let group = rig.engine.open(ebbtide_core::LayerId(0), ebbtide_core::Pass(1));
        for storage in [&storages[0], &storages[1], &storages[0], &storages[0]] {
            rig.add(group, whole(storage));
        }
        rig.out(group);
        assert_eq!(storages[0].references(), 4, "ours, and one for each registration");
        rig.engine.start_load(group).unwrap();
        rig.engine.wait_load(group).unwrap();
        assert_eq!(storages[0].references(), 1);
        rig.home(group, &storages, 1);
    }
    let counts = rig.events.lock().unwrap();
    let repeats: Vec<_> = counts
        .iter()
        .filter_map(|event| match event {
            Event::Repeats { name, count, .. } => Some((name.clone(), *count)),
            _ => None,
        })
        .collect();
    assert_eq!(repeats, [("layer 0 pass 1".to_string(), 2)]);
    drop(counts);
    rig.finish();
}

/// A copy of the test's own, to see that the rig finds what it should.
#[test]
fn the_rig_finds_a_copy_that_waits_for_nothing() {
    let rig = Rig::new();
    let storage = rig.filled(256, 1);
    let mut device = rig.world.device();
    let stream = device.copy_stream(Direction::Out).unwrap();
    let host = device.pin(256).unwrap();
    device.copy(stream, End::Storage(&storage, 0), End::Host(&host, 0), 256).unwrap();
    device.sync_stream(stream).unwrap();
    drop(host);
    assert_eq!(rig.world.finish().len(), 1);
}
