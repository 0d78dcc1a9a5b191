//! A right program gives no report and exact bytes on every schedule; one that leaves any step out
//! is reported on every schedule.

mod common;

use ebbtide_core::{Accelerator, Done, End, Store};
use ebbtide_sim::{Kind, Lateness, Options, Report, World, pattern};

use common::{ALL, BYTES, Rig};

/// Where a wrong program leaves a step out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Omit {
    Nothing,
    WaitBeforeCopy,
    WaitBeforeFree,
    SyncBeforePut,
    WaitForRestore,
    WaitAfterLoad,
    SyncBeforeDrop,
}

/// Two storages go out through pinned memory to the disk and come home, with work in between.
fn round_trips(rig: &mut Rig, omit: Omit) {
    for step in 0..3 {
        let storages = [rig.filled(step), rig.filled(step + 100)];
        let mut away = Vec::new();
        for mut storage in storages {
            let host = rig.device.pin(BYTES).unwrap();
            if omit != Omit::WaitBeforeCopy {
                rig.order(rig.compute(), rig.out);
            }
            rig.copy_out(&storage, &host);
            if omit != Omit::WaitBeforeFree {
                rig.order(rig.out, rig.compute());
            }
            rig.device.free(&mut storage).unwrap();
            let other = rig.filled(77);
            rig.world.check(&other, ALL, 77);
            if omit != Omit::SyncBeforePut {
                let event = rig.device.record(rig.out).unwrap();
                while !rig.device.is_done(&event) {}
            }
            let ticket = rig.disk.put(host).unwrap();
            away.push((storage, ticket));
        }
        for (index, (mut storage, ticket)) in (0..).zip(away) {
            let Done::Stored(slot, _) = rig.disk.wait(ticket).unwrap().0 else { panic!() };
            let host = rig.device.pin(BYTES).unwrap();
            let ticket = rig.disk.get(&slot, host).unwrap();
            let Done::Loaded(host) = rig.disk.wait(ticket).unwrap().0 else { panic!() };
            rig.disk.discard(slot);
            rig.device.restore(&mut storage, BYTES).unwrap();
            if omit != Omit::WaitForRestore {
                rig.order(rig.compute(), rig.into);
            }
            rig.copy_in(&host, &storage);
            if omit != Omit::WaitAfterLoad {
                rig.order(rig.into, rig.compute());
            }
            rig.world.check(&storage, ALL, step + 100 * index);
            let event = rig.device.record(rig.into).unwrap();
            if omit != Omit::SyncBeforeDrop {
                rig.device.sync(&event).unwrap();
            }
        }
    }
}

fn run(seed: u64, options: Options, omit: Omit) -> (Vec<Report>, World) {
    let mut rig = Rig::with(seed, options);
    round_trips(&mut rig, omit);
    let Rig { world, device, disk, .. } = rig;
    drop((device, disk));
    (world.finish(), world)
}

#[test]
fn a_right_program_is_right_on_every_schedule() {
    for seed in 0..200 {
        let (reports, world) = run(seed, Options::default(), Omit::Nothing);
        assert!(reports.is_empty(), "seed {seed}: {reports:#?}");
        let stats = world.stats();
        assert_eq!((stats.device_now, stats.pinned_now, stats.disk_now), (0, 0, 0));
        assert_eq!((stats.pins, stats.unpins), (12, 12));
        assert_eq!((stats.copied_out, stats.copied_in), (6 * BYTES, 6 * BYTES));
        assert!(stats.device_peak >= 2 * BYTES && stats.disk_peak >= BYTES);
    }
}

#[test]
fn the_copied_bytes_are_those_that_the_kernel_wrote() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed);
        let (_storage, host) = rig.offloaded(5);
        let (slot, host) = rig.stored(host);
        let wanted: Vec<u8> = ALL.map(|at| pattern(5, at)).collect();
        assert_eq!(host.read(), wanted);
        rig.disk.discard(slot);
        drop(host);
        assert_eq!(rig.world.finish(), []);
    }
}

#[test]
fn each_missing_order_is_reported_on_every_schedule() {
    let cases = [
        (Omit::WaitBeforeCopy, Kind::Race),
        (Omit::WaitBeforeFree, Kind::FreeInUse),
        (Omit::SyncBeforePut, Kind::Race),
        (Omit::WaitForRestore, Kind::BeforeAllocation),
        (Omit::WaitAfterLoad, Kind::Race),
        (Omit::SyncBeforeDrop, Kind::FreeInUse),
    ];
    for (omit, kind) in cases {
        for seed in 0..20 {
            let (reports, _) = run(seed, Options::default(), omit);
            let first = reports.first().map(|report| report.kind);
            assert_eq!(first, Some(kind), "{omit:?}, seed {seed}: {reports:#?}");
        }
    }
}

#[test]
fn a_wrong_order_gives_wrong_bytes_on_some_schedule() {
    let wrong = (0..50).filter(|seed| {
        let (reports, _) = run(*seed, Options::default(), Omit::WaitAfterLoad);
        reports.iter().any(|report| report.kind == Kind::WrongValue)
    });
    assert!(wrong.count() > 10);
}

#[test]
fn a_report_names_both_calls_and_their_places() {
    let (reports, _) = run(3, Options::default(), Omit::WaitAfterLoad);
    let text = reports[0].to_string();
    assert!(text.starts_with("race: kernel check storage#"), "{text}");
    assert!(text.contains("on compute (call ") && text.contains("on in (call "), "{text}");
    assert!(text.contains("tests/world.rs:") && text.contains("tests/common/mod.rs:"), "{text}");
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_one_another() {
    let trace = |seed| {
        let options = Options { trace: true, ..Options::default() };
        run(seed, options, Omit::Nothing).1.trace()
    };
    assert_eq!(trace(8), trace(8));
    assert_ne!(trace(8), trace(9));
}

#[test]
fn the_identity_of_a_storage_is_used_again_at_once() {
    let rig = Rig::new(0);
    let (first, second) = (rig.filled(1), rig.filled(2));
    let key = rig.device.key(&first);
    let other = first.clone();
    drop(first);
    assert_eq!(rig.device.key(&other), key);
    drop(other);
    let third = rig.filled(3);
    assert_eq!(rig.device.key(&third), key);
    assert!(third.id() != second.id() && rig.device.key(&second) != key);
    assert_eq!(rig.world.finish(), []);
}

#[test]
fn memory_runs_out() {
    let options = Options {
        device_bytes: 2 * BYTES,
        pinned_bytes: BYTES,
        disk_bytes: BYTES,
        ..Options::default()
    };
    let mut rig = Rig::with(0, options);
    let mut first = rig.world.storage(BYTES).unwrap();
    rig.device.free(&mut first).unwrap();
    let block = rig.device.stage(2 * BYTES).unwrap();
    assert!(rig.world.storage(1).is_err());
    assert!(rig.device.stage(1).is_err());
    assert!(rig.device.restore(&mut first, 1).is_err());
    assert!(first.is_empty());
    drop(block);
    rig.device.restore(&mut first, BYTES).unwrap();
    let host = rig.device.pin(BYTES).unwrap();
    assert!(rig.device.pin(1).is_err());
    let (slot, host) = rig.stored(host);
    let failed = rig.disk.put(host).unwrap_err();
    assert_eq!(failed.block.bytes(), BYTES);
    rig.disk.discard(slot);
    drop(failed);
    assert_eq!(rig.world.finish(), []);
}

#[test]
fn without_lateness_times_are_those_of_the_speeds() {
    let options = Options { lateness: Lateness::NONE, ..Options::default() };
    let speeds = options.speeds.clone();
    let mut rig = Rig::with(0, options);
    let bytes = 25_000_000;
    let storage = rig.world.storage(bytes).unwrap();
    let host = rig.device.pin(bytes).unwrap();
    rig.world.busy(rig.compute(), 500_000);
    let started = rig.world.now();
    rig.order(rig.compute(), rig.out);
    rig.device.copy(rig.out, End::Storage(&storage, 0), End::Host(&host, 0), bytes).unwrap();
    rig.device.sync_stream(rig.out).unwrap();
    assert_eq!(rig.world.now() - started, 500_000 + 1_000_000 + speeds.copy_ns);
}

/// Host buffers are exactly as large as was asked for, and a large one costs no real memory.
#[test]
fn a_large_buffer_is_counted_exactly() {
    let mut rig = Rig::new(0);
    let bytes = 11 * (1 << 30) / 10;
    let host = rig.device.pin(bytes).unwrap();
    assert_eq!((host.bytes(), rig.world.stats().pinned_now), (bytes, bytes));
    drop(host);
    assert_eq!(rig.world.stats().pinned_now, 0);
    assert_eq!(rig.world.finish(), []);
}
