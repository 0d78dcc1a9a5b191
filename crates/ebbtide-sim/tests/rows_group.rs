//! Rows G and P of the catalogue, and the cases that belong to them, on the simulated accelerator.

mod rows;

use ebbtide_core::{
    Accelerator, Budget, Element, Event, HostPool, LayerId, Pass, PoolId, Registered, Saved,
    StagedConfig, class,
};
use ebbtide_sim::{Faults, Function, Options, SimStorage, World};

use rows::{F16, F32, Rig, Setup, text, whole};

fn packed(rig: &mut Rig, count: u64, bytes: u64) -> (ebbtide_core::GroupId, Vec<SimStorage>) {
    let storages: Vec<_> = (1..=count).map(|seed| rig.filled(bytes, seed)).collect();
    let group = rig.open();
    for storage in &storages {
        rig.add(group, whole(storage).pack());
    }
    (group, storages)
}

fn failing(function: Function, nth: u64) -> Setup {
    let faults = Faults { fail_function: Some((function, nth)), ..Faults::default() };
    Setup { options: Options { faults, ..Options::default() }, ..Setup::default() }
}

/// G1: an identity ends with the load or with the records: afterwards the same number is another
/// storage.
#[test]
fn g1_identities_end_with_the_load() {
    let mut rig = Rig::new();
    let (group, storages) = packed(&mut rig, 2, 256);
    rig.out(group);
    rig.engine.start_load(group).unwrap();
    rig.engine.wait_load(group).unwrap();
    let device = rig.world.device();
    let before = device.key(&storages[0]);
    drop(storages);
    // The next storages take the numbers over.
    let fresh = [rig.filled(256, 8), rig.filled(256, 9)];
    assert!(fresh.iter().any(|storage| device.key(storage) == before));
    let next = rig.open();
    for storage in &fresh {
        let (_, registered) = rig.engine.register(next, whole(storage)).unwrap();
        assert_eq!(registered, Registered::New);
    }
    rig.out(next);
    rig.home(next, &fresh, 8);
    rig.engine.close(group);
    rig.finish();
}

/// G2: what joins a bucket, by what a bucket costs: one copy out.
#[test]
fn g2_what_is_packed_and_what_is_not() {
    let config = StagedConfig { bucket_bytes: 4096, ..StagedConfig::new(1 << 20) };
    let copies_out = |prepare: &dyn Fn(&mut Rig, ebbtide_core::GroupId) -> Vec<SimStorage>| {
        let mut setup = Setup { config: config.clone(), ..Setup::default() };
        setup.options.gathers = false;
        let mut rig = Rig::with(setup);
        let group = rig.open();
        let storages = prepare(&mut rig, group);
        rig.out(group);
        let (copies, away) = (rig.world.stats().copies, rig.world.stats().pins);
        rig.home(group, &storages, 1);
        rig.finish();
        // Gathering copies inside the device are no copies out.
        (copies, away)
    };
    let some = |rig: &mut Rig, sizes: &[u64]| -> Vec<SimStorage> {
        (1..).zip(sizes).map(|(seed, bytes)| rig.filled(*bytes, seed)).collect()
    };
    let all_packed = |sizes: &'static [u64]| {
        copies_out(&move |rig, group| {
            let storages = some(rig, sizes);
            for storage in &storages {
                rig.add(group, whole(storage).pack());
            }
            storages
        })
    };
    assert_eq!(all_packed(&[256; 4]), (4 + 1, 1), "four pieces gathered, one copy out");
    assert_eq!(all_packed(&[256]), (1, 1), "alone in its bucket: the ordinary way");
    assert_eq!(all_packed(&[4096, 256, 256]), (1 + 2 + 1, 2), "as large as a bucket: ordinary");
    assert_eq!(all_packed(&[2048, 2048, 2048, 2048]), (4 + 2, 2), "a full bucket closes");
    assert_eq!(
        all_packed(&[2048, 2047, 100]),
        (1 + 2 + 1, 2),
        "what would overflow opens a new one"
    );

    let differing = |difference: &'static str| {
        copies_out(&move |rig, group| {
            let storages = some(rig, &[256, 256]);
            let pool = rig.engine.mover_mut().add_pool(1 << 20);
            let plain = whole(&storages[0]).pack();
            let other = whole(&storages[1]).pack();
            let other = match difference {
                "element" => other.element(F16),
                "pool" => other.pool(pool),
                "strided" => other.strided(),
                "not asked for" => whole(&storages[1]),
                _ => other,
            };
            rig.add(group, plain);
            rig.add(group, other);
            if difference == "repeated" {
                rig.add(group, whole(&storages[1]));
            }
            storages
        })
    };
    assert_eq!(differing("nothing"), (3, 1));
    for difference in ["element", "pool", "strided", "not asked for", "repeated"] {
        assert_eq!(differing(difference), (2, 2), "{difference}");
    }
}

/// G2, C16: where gathering into the host buffer is as fast, no staging is needed.
#[test]
fn g2_c16_gathering_devices_need_no_staging() {
    let mut setup = Setup::default();
    setup.options.gathers = true;
    setup.options.faults.fail_function = Some((Function::Stage, 0));
    let mut rig = Rig::with(setup);
    let (group, storages) = packed(&mut rig, 1000, 64);
    rig.out(group);
    assert_eq!((rig.world.stats().pins, rig.world.stats().copies), (1, 1000));
    rig.home(group, &storages, 1);
    rig.finish();
}

/// G3, C6: a copy never starts before the kernel that makes the data, however long that takes.
#[test]
fn g3_c6_copies_wait_for_the_computation() {
    for gathers in [false, true] {
        let mut setup = Setup::default();
        setup.options.gathers = gathers;
        let mut rig = Rig::with(setup);
        rig.world.busy(rig.world.compute(), 1_000_000_000);
        let (group, storages) = packed(&mut rig, 4, 256);
        let alone = rig.filled(512, 5);
        rig.add(group, whole(&alone));
        rig.out(group);
        assert!(rig.world.now() < 1_000_000_000, "the host goes on");
        rig.home(group, &[storages, vec![alone]].concat(), 1);
        rig.finish();
    }
}

/// G4: a failing bucket is named, and everything of the group is on the device, untouched.
#[test]
fn g4_c10_a_failing_bucket_leaves_everything_on_the_device() {
    // Eight pieces gathered, then one copy out for each of two buckets and one for the lone tensor.
    for nth in 0..11 {
        let mut setup = failing(Function::Copy, nth);
        setup.config.bucket_bytes = 1024;
        let mut rig = Rig::with(setup);
        let (group, mut storages) = packed(&mut rig, 8, 256);
        storages.push(rig.filled(2048, 9));
        rig.add(group, whole(&storages[8]));
        let error = text(rig.engine.start_offload(group).unwrap_err());
        let bucket = match nth {
            0..4 | 8 => "bucket 0 (256 elements of float32, 1024 bytes, default pool, group layer",
            4..8 | 9 => "bucket 1 (256 elements of float32, 1024 bytes, default pool, group layer",
            _ => "a tensor (2048 bytes, float32, whole storage, default pool, group layer",
        };
        assert!(error.starts_with(&format!("offload of {bucket}")), "{nth}: {error}");
        assert!(storages.iter().all(|storage| !storage.is_empty()));
        let stats = rig.engine.mover_mut().pool_stats(PoolId(0)).unwrap();
        assert_eq!(stats.in_use, 0);
        rig.engine.wait_offload(group).unwrap();
        rig.home(group, &storages, 1);
        assert_eq!(rig.told(|e| matches!(e, Event::Missed { .. })), 0, "nothing was away");
        rig.finish();
    }
}

/// G5, G8: waiting for what was never started, or twice, is an error; the compute stream waits, the
/// host goes on.
#[test]
fn g5_g8_waits_are_for_what_was_started() {
    let mut rig = Rig::new();
    let (group, storages) = packed(&mut rig, 4, 256);
    assert!(rig.engine.wait_offload(group).unwrap_err().is_phase());
    assert!(rig.engine.wait_load(group).unwrap_err().is_phase());
    rig.out(group);
    assert!(rig.engine.wait_offload(group).unwrap_err().is_phase());
    rig.engine.start_load(group).unwrap();
    rig.engine.wait_load(group).unwrap();
    let error = rig.engine.wait_load(group).unwrap_err();
    assert_eq!(
        error.to_string(),
        "wait_load of group layer 2 pass 2: its phase is `home`, needs `loading`"
    );
    rig.home(group, &storages, 1);
    rig.finish();
}

/// G6, C2: one table that twelve layers save stays on the device for all of them, also for those that
/// come when the first ones are done.
#[test]
fn g6_c2_a_shared_table_is_never_freed_under_its_user() {
    let mut rig = Rig::new();
    let table = rig.filled(1024, 77);
    let mut groups = Vec::new();
    for layer in 0..12 {
        let own = rig.filled(256, layer);
        let group = rig.open();
        rig.add(group, whole(&own));
        // The second layer finds it away already: that it is registered again brings it back.
        rig.add(group, Saved::whole(table.clone(), 1024).element(F32).pack());
        rig.world.check(&table, 0..1024, 77);
        rig.out(group);
        if layer > 0 {
            rig.world.check(&table, 0..1024, 77);
        }
        groups.push((group, own, layer));
        if layer == 6 {
            // The first pass is over before the second one saves the table again.
            for (group, own, seed) in groups.drain(..3) {
                rig.home(group, &[own], seed);
            }
        }
    }
    for (group, own, seed) in groups.into_iter().rev() {
        rig.world.check(&table, 0..1024, 77);
        rig.home(group, &[own], seed);
    }
    assert!(!table.is_empty());
    rig.finish();
}

/// G6: the layer's outputs stay; what nobody registered is none of the engine's business.
#[test]
fn g6_outputs_stay_on_the_device() {
    let mut rig = Rig::new();
    let (group, storages) = packed(&mut rig, 3, 256);
    assert!(rig.engine.protect(&storages[2]).unwrap());
    let stranger = rig.filled(64, 5);
    assert!(!rig.engine.protect(&stranger).unwrap());
    rig.out(group);
    let empty: Vec<bool> = storages.iter().map(SimStorage::is_empty).collect();
    assert_eq!(empty, [true, true, false]);
    rig.world.check(&storages[2], 0..256, 3);
    rig.home(group, &storages, 1);
    rig.finish();
}

/// G7, C3: a load asked for while the offload is still queued finishes the offload first.
#[test]
fn g7_c3_a_load_during_the_offload() {
    for seed in 0..20 {
        let mut rig = Rig::with(Setup { seed, ..Setup::default() });
        rig.world.busy(rig.world.compute(), 1_000_000_000);
        let (group, storages) = packed(&mut rig, 4, 4096);
        rig.engine.start_offload(group).unwrap();
        rig.engine.start_load(group).unwrap();
        rig.home(group, &storages, 1);
        rig.finish();
    }
}

/// G8, C4: two steps share one host buffer; the second never gets it while a slow load reads it.
#[test]
fn g8_c4_a_host_buffer_waits_for_its_last_reader() {
    let mut setup = Setup { config: StagedConfig::new(4096), ..Setup::default() };
    setup.options.speeds.copy_ns = 100_000_000;
    let mut rig = Rig::with(setup);
    for step in 0..5 {
        let storages = [rig.filled(4096, step)];
        let (group, _) = rig.group(&storages);
        rig.out(group);
        rig.home(group, &storages, step);
    }
    assert_eq!(rig.world.stats().pins, 1);
    rig.finish();
}

/// G8, C4: neither does the disk get a buffer that a slow load still reads.
#[test]
fn g8_c4_a_host_buffer_is_not_filled_from_disk_while_a_load_reads_it() {
    let config = StagedConfig::new(4096);
    let mut setup = Setup { config, disk: true, ..Setup::default() };
    setup.options.speeds.copy_ns = 100_000_000;
    let mut rig = Rig::with(setup);
    let storages = [rig.filled(4096, 1), rig.filled(4096, 2)];
    let (below, tensors) = rig.group(&storages[..1]);
    rig.out(below);
    let (above, _) = rig.group(&storages[1..]);
    rig.out(above);
    assert_eq!(rig.engine.state(tensors[0]).unwrap(), "disk");
    rig.home(above, &storages[1..], 2);
    rig.home(below, &storages[..1], 1);
    assert_eq!(rig.world.stats().pins, 1);
    rig.finish();
}

/// G10: what is under way or away is not started again, and nothing changes.
#[test]
fn g10_starting_twice_is_an_error() {
    let mut rig = Rig::new();
    let (group, storages) = packed(&mut rig, 2, 256);
    rig.engine.start_offload(group).unwrap();
    let error = rig.engine.start_offload(group).unwrap_err();
    let wanted = "start_offload of group layer 2 pass 2: its phase is `offloading`, needs `open`";
    assert_eq!(error.to_string(), wanted);
    let late = rig.filled(64, 9);
    assert!(rig.engine.register(group, whole(&late)).unwrap_err().is_phase());
    rig.engine.wait_offload(group).unwrap();
    assert!(rig.engine.start_offload(group).unwrap_err().is_phase());
    assert_eq!(rig.world.stats().copied_out, 512);
    rig.home(group, &storages, 1);
    rig.finish();
}

/// C5: the user's own handle is gone right after the offload was started, and memory is short.
#[test]
fn c5_device_memory_is_not_reused_while_a_copy_reads_it() {
    for seed in 0..20 {
        let mut setup = Setup { seed, ..Setup::default() };
        setup.options.device_bytes = 3 * 4096;
        setup.options.speeds.copy_ns = 10_000_000;
        let mut rig = Rig::with(setup);
        let (group, storages) = packed(&mut rig, 1, 4096);
        rig.engine.start_offload(group).unwrap();
        drop(storages);
        for step in 0..4 {
            let pressure = rig.filled(4096, 50 + step);
            rig.world.check(&pressure, 0..4096, 50 + step);
        }
        rig.engine.wait_offload(group).unwrap();
        rig.engine.need(group).unwrap();
        rig.engine.close(group);
        rig.finish();
    }
}

/// P1, C13: classes waste at most 12.5 %; the smallest sufficient buffer is handed out whole; a buffer
/// is used again for any element type.
#[test]
fn p1_c13_the_default_pool() {
    let world = World::new(1, Options { pinned_bytes: 4 << 30, ..Options::default() });
    let mut device = world.device();
    let mut pool: HostPool<_> = HostPool::new(PoolId(0), 2 << 30);
    let asked: u64 = (11 << 30) / 10;
    let large = pool.acquire(&mut device, asked).unwrap();
    assert!(large.bytes() >= asked && large.bytes() * 1000 <= asked * 1125);
    assert_eq!(pool.stats().allocated, large.bytes());
    pool.release(large, None).unwrap();
    // There is room for this one, so the large one is not wasted on it.
    let small = pool.acquire(&mut device, 5000).unwrap();
    assert_eq!(small.bytes(), class::bytes(class::of(5000)));
    // There is none for this one beside the large one: the smallest sufficient buffer serves whole.
    let other = pool.acquire(&mut device, 1 << 30).unwrap();
    assert!(other.bytes() > 1 << 30);
    pool.release(small, None).unwrap();
    pool.release(other, None).unwrap();
    assert_eq!(pool.stats().free, pool.stats().allocated);
    assert_eq!(pool.shrink_to(0), pool.stats().high_water);
    drop(pool);
    assert!(world.finish().is_empty());
}

/// P2, P3: capacity, pending buffers, waiting, errors with all three numbers, foreign buffers, failed
/// allocations.
#[test]
fn p2_p3_an_explicit_pool() {
    let faults = Faults { fail_function: Some((Function::Pin, 1)), ..Faults::default() };
    let world = World::new(1, Options { faults, ..Options::default() });
    let mut device = world.device();
    let mut pool = HostPool::new(PoolId(1), 8192);
    let first = pool.acquire(&mut device, 4096).unwrap();
    let error = pool.acquire(&mut device, 4096).unwrap_err();
    assert_eq!(error.to_string(), "can't allocate a host buffer of 4096 bytes");
    assert_eq!(pool.stats().allocated, 4096, "the reservation was given back");
    let second = pool.acquire(&mut device, 4096).unwrap();
    let error = pool.acquire(&mut device, 100).unwrap_err();
    assert!(error.is_no_room());
    let wanted = "host memory would exceed its bound: 512 bytes requested, \
                  8192 of 8192 bytes pooled";
    assert_eq!(error.to_string(), wanted);

    let mut other = HostPool::new(PoolId(2), 8192);
    let (first, error) = other.release(first, None).unwrap_err();
    assert_eq!(error.to_string(), "the buffer belongs to another pool");

    world.busy(world.compute(), 1_000_000);
    let event = device.record(world.compute()).unwrap();
    pool.release(first, Some(event)).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.pending, stats.free), (4096, 4096, 0));
    let again = pool.acquire(&mut device, 4096).unwrap();
    assert!(world.now() >= 1_000_000, "it waited for the earliest pending one");
    pool.release(again, None).unwrap();
    pool.release(second, None).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.pending, stats.free), (0, 0, 8192));
    assert_eq!((stats.allocated, stats.high_water), (8192, 8192));
    drop((pool, other));
    assert!(world.finish().is_empty());
}

/// P2: two pools with one budget hold the bound together; what one gives back the other may have.
#[test]
fn p2_pools_can_share_a_bound() {
    let world = World::new(1, Options::default());
    let mut device = world.device();
    let budget = Budget::new(8192);
    let mut one = HostPool::sharing(PoolId(1), budget.clone());
    let mut other = HostPool::sharing(PoolId(1), budget.clone());
    let first = one.acquire(&mut device, 4096).unwrap();
    let second = other.acquire(&mut device, 4096).unwrap();
    let error = one.acquire(&mut device, 512).unwrap_err();
    let wanted = "host memory would exceed its bound: 512 bytes requested, \
                  8192 of 8192 bytes pooled";
    assert_eq!(error.to_string(), wanted);
    other.release(second, None).unwrap();
    assert!(
        one.acquire(&mut device, 512).unwrap_err().is_no_room(),
        "it is kept for the other one"
    );
    assert_eq!((other.shrink_to(0), budget.allocated(), budget.room()), (4096, 4096, 4096));
    let third = one.acquire(&mut device, 512).unwrap();
    assert_eq!(budget.allocated(), 4608);
    one.release(first, None).unwrap();
    one.release(third, None).unwrap();
    let again = one.acquire(&mut device, 8192).unwrap();
    assert_eq!((one.stats().allocated, budget.allocated()), (8192, 8192));
    one.release(again, None).unwrap();
    drop((one, other));
    assert_eq!(budget.allocated(), 0);
    assert!(world.finish().is_empty());
}

/// P2: buffers count with the size of their class, and the error says so.
#[test]
fn p2_a_bound_between_two_classes() {
    let world = World::new(1, Options::default());
    let mut device = world.device();
    let mut pool: HostPool<_> = HostPool::new(PoolId(1), 5000);
    let error = pool.acquire(&mut device, 5000).unwrap_err();
    let wanted = "host memory would exceed its bound: 5120 bytes requested, \
                  0 of 5000 bytes pooled";
    assert_eq!(error.to_string(), wanted);
    drop(pool.acquire(&mut device, 4608).unwrap());
}

/// P1: the pool may be used from any thread, behind a lock.
#[test]
fn p1_pools_can_be_shared_between_threads() {
    let world = World::new(1, Options::default());
    let device = world.device();
    let pool = HostPool::new(PoolId(0), 1 << 20);
    let shared = std::sync::Mutex::new((pool, device));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for bytes in 1..50 {
                    let (pool, device) = &mut *shared.lock().unwrap();
                    let buffer = pool.acquire(device, bytes * 64).unwrap();
                    pool.release(buffer, None).unwrap();
                }
            });
        }
    });
    let (pool, _) = shared.into_inner().unwrap();
    assert_eq!(pool.stats().in_use, 0);
}

/// C14: one long sequence, then short ones: memory goes back on request, and by itself when it has been
/// idle for some steps.
#[test]
fn c14_host_memory_is_given_back() {
    let mut rig = Rig::new();
    let step = |rig: &mut Rig, bytes: u64| {
        let storages = [rig.filled(bytes, 1)];
        let (group, _) = rig.group(&storages);
        rig.out(group);
        rig.home(group, &storages, 1);
        rig.engine.finish_backward();
        rig.world.stats().pinned_now
    };
    assert_eq!(step(&mut rig, 1 << 20), 1 << 20);
    assert_eq!(step(&mut rig, 1 << 12), (1 << 20) + (1 << 12), "kept for a while");
    let last = (0..12).map(|_| step(&mut rig, 1 << 12)).last().unwrap();
    assert!(last <= 1 << 16, "given back when idle; {last} bytes are left");
    rig.world.host_works(1_000_000_000);
    assert_eq!(rig.engine.mover_mut().shrink(0), last, "given back on request");
    assert_eq!(rig.world.stats().pinned_now, 0);
    rig.finish();
}

/// Host, then disk: what does not fit moves down, the oldest first, and comes home the same; also a
/// group that never fits into host memory at once.
#[test]
fn a_full_host_spills_to_the_disk() {
    for (host, sizes) in [(8192, [4096; 6]), (4096, [512, 4096, 1024, 4096, 2048, 64])] {
        for seed in 0..20 {
            let config = StagedConfig::new(host);
            let mut rig = Rig::with(Setup { config, disk: true, seed, ..Setup::default() });
            let mut groups = Vec::new();
            for (fill, bytes) in (1..).zip(sizes) {
                let storages = [rig.filled(bytes, fill)];
                let (group, tensors) = rig.group(&storages);
                rig.out(group);
                groups.push((group, storages, fill, tensors[0]));
            }
            assert_eq!(rig.engine.state(groups[0].3).unwrap(), "disk");
            assert_eq!(rig.engine.state(groups[5].3).unwrap(), "host");
            assert!(rig.world.stats().pinned_peak <= host);
            for (group, storages, fill, _) in groups.into_iter().rev() {
                rig.home(group, &storages, fill);
                rig.engine.prefetch(group);
            }
            rig.finish();
        }
    }
}

/// A group larger than host memory goes through it in turns, both ways.
#[test]
fn a_group_may_be_larger_than_host_memory() {
    for (seed, gathers) in (0..20).zip([false, true].into_iter().cycle()) {
        let config = StagedConfig { bucket_bytes: 2048, ..StagedConfig::new(8192) };
        let mut setup = Setup { config, disk: true, seed, ..Setup::default() };
        setup.options.gathers = gathers;
        let mut rig = Rig::with(setup);
        let (group, mut storages) = packed(&mut rig, 20, 512);
        for seed in 21..=24 {
            storages.push(rig.filled(4096, seed));
            rig.add(group, whole(&storages[storages.len() - 1]));
        }
        rig.out(group);
        assert!(rig.world.stats().disk_now > 0 && rig.world.stats().pinned_now <= 8192);
        rig.home(group, &storages, 1);
        rig.finish();
    }
}

/// Both tiers full: a typed error that says what was needed, and everything is on the device.
#[test]
fn when_both_tiers_are_full_tensors_stay() {
    let mut setup = Setup { config: StagedConfig::new(4096), disk: true, ..Setup::default() };
    setup.options.disk_bytes = 4096;
    let mut rig = Rig::with(setup);
    let storages: Vec<_> = (1..=3).map(|seed| rig.filled(4096, seed)).collect();
    let mut groups = Vec::new();
    for storage in &storages[..2] {
        let (group, _) = rig.group(std::slice::from_ref(storage));
        rig.out(group);
        groups.push(group);
    }
    let (third, tensors) = rig.group(&storages[2..]);
    let error = rig.engine.start_offload(third).unwrap_err();
    assert!(text(&error).contains("4096 bytes"), "{}", text(&error));
    assert!(error.is_no_room());
    assert_eq!(rig.engine.state(tensors[0]).unwrap(), "device");
    rig.home(third, &storages[2..], 3);
    rig.home(groups[1], &storages[1..2], 2);
    rig.home(groups[0], &storages[..1], 1);
    rig.finish();
}

/// The disk is full, but a group on its way home is about to give its buffer back: that is waited for.
#[test]
fn a_full_disk_waits_for_loads_on_their_way() {
    let mut setup = Setup { config: StagedConfig::new(8192), disk: true, ..Setup::default() };
    setup.options.disk_bytes = 4096;
    let mut rig = Rig::with(setup);
    let storages: Vec<_> = (1..=4).map(|seed| rig.filled(4096, seed)).collect();
    let mut groups = Vec::new();
    for storage in &storages[..3] {
        let (group, _) = rig.group(std::slice::from_ref(storage));
        rig.out(group);
        groups.push(group);
    }
    rig.engine.start_load(groups[2]).unwrap();
    let (fourth, _) = rig.group(&storages[3..]);
    rig.out(fourth);
    rig.home(fourth, &storages[3..], 4);
    for at in (0..3).rev() {
        rig.home(groups[at], &storages[at..=at], 1 + at as u64);
    }
    rig.finish();
}

/// Layers and elements as errors name them.
#[test]
fn errors_name_layers() {
    let mut rig = Rig::with(failing(Function::CopyStream, 0));
    rig.engine.name_layer(LayerId(7), "h.7");
    let storage = rig.filled(64, 1);
    let group = rig.engine.open(LayerId(7), Pass(3));
    rig.add(group, whole(&storage).element(Element::BYTE));
    let error = rig.engine.start_offload(group).unwrap_err();
    assert_eq!(error.to_string(), "offload of group h.7 pass 3 failed: no copy stream");
    assert_eq!(F32.bytes, 4);
    rig.engine.close(group);
    rig.finish();
}
