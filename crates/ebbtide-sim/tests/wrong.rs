//! The smallest program for each kind of report: it is found on every seed, and found first.

mod common;

use ebbtide_core::{Accelerator, Done, End, Store};
use ebbtide_sim::Kind;

use common::{ALL, BYTES, Rig};

/// The program does this wrong, and nothing else that is reported first, on each of 20 seeds.
fn is_reported(kind: Kind, program: impl Fn(&mut Rig)) {
    for seed in 0..20 {
        let mut rig = Rig::new(seed);
        program(&mut rig);
        let Rig { world, device, disk, .. } = rig;
        drop((device, disk));
        let reports = world.finish();
        let first = reports.first().map(|report| report.kind);
        assert_eq!(first, Some(kind), "seed {seed}: {reports:#?}\n{:#?}", world.trace());
    }
}

#[test]
fn a_copy_that_does_not_wait_for_its_kernel() {
    is_reported(Kind::Race, |rig| {
        let storage = rig.world.storage(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        rig.world.fill(&storage, ALL, 1);
        let host = rig.device.pin(BYTES).unwrap();
        rig.copy_out(&storage, &host);
        rig.device.sync_stream(rig.out).unwrap();
        rig.order(rig.out, rig.compute());
    });
}

#[test]
fn a_kernel_that_does_not_wait_for_its_load() {
    is_reported(Kind::Race, |rig| {
        let (mut storage, host) = rig.offloaded(1);
        rig.device.restore(&mut storage, BYTES).unwrap();
        rig.order(rig.compute(), rig.into);
        rig.copy_in(&host, &storage);
        rig.world.check(&storage, ALL, 1);
        rig.device.sync_stream(rig.into).unwrap();
    });
}

#[test]
fn a_load_into_memory_that_is_not_there_yet() {
    is_reported(Kind::BeforeAllocation, |rig| {
        let (mut storage, host) = rig.offloaded(1);
        rig.device.restore(&mut storage, BYTES).unwrap();
        rig.copy_in(&host, &storage);
        rig.device.sync_stream(rig.into).unwrap();
    });
}

#[test]
fn memory_freed_while_a_copy_reads_it() {
    let start = |rig: &mut Rig| {
        let storage = rig.filled(1);
        let host = rig.device.pin(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        rig.copy_out(&storage, &host);
        (storage, host)
    };
    is_reported(Kind::FreeInUse, |rig| {
        let (mut storage, host) = start(rig);
        rig.device.free(&mut storage).unwrap();
        rig.device.sync_stream(rig.out).unwrap();
        drop(host);
    });
    is_reported(Kind::FreeInUse, |rig| {
        let (storage, host) = start(rig);
        drop(storage);
        rig.device.sync_stream(rig.out).unwrap();
        drop(host);
    });
    is_reported(Kind::FreeInUse, |rig| {
        let (storage, host) = start(rig);
        drop(host);
        rig.order(rig.out, rig.compute());
        drop(storage);
    });
}

#[test]
fn an_event_recorded_in_front_of_the_copy() {
    is_reported(Kind::FreeInUse, |rig| {
        let mut storage = rig.filled(1);
        let host = rig.device.pin(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        let early = rig.device.record(rig.out).unwrap();
        rig.copy_out(&storage, &host);
        rig.device.wait(rig.compute(), &early).unwrap();
        rig.device.free(&mut storage).unwrap();
        rig.device.sync_stream(rig.out).unwrap();
    });
}

#[test]
fn a_staging_block_dropped_while_a_copy_reads_it() {
    is_reported(Kind::FreeInUse, |rig| {
        let storage = rig.filled(1);
        let block = rig.device.stage(BYTES).unwrap();
        let (from, to) = (End::Storage(&storage, 0), End::Block(&block, 0));
        rig.device.copy(rig.compute(), from, to, BYTES).unwrap();
        let host = rig.device.pin(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        rig.device.copy(rig.out, End::Block(&block, 0), End::Host(&host, 0), BYTES).unwrap();
        drop(block);
        rig.device.sync_stream(rig.out).unwrap();
    });
}

#[test]
fn a_host_buffer_used_again_while_a_load_reads_it() {
    is_reported(Kind::Race, |rig| {
        let (mut storage, host) = rig.offloaded(1);
        let next = rig.filled(2);
        rig.device.restore(&mut storage, BYTES).unwrap();
        rig.order(rig.compute(), rig.into);
        rig.copy_in(&host, &storage);
        rig.order(rig.compute(), rig.out);
        rig.copy_out(&next, &host);
        rig.device.sync_stream(rig.out).unwrap();
        rig.device.sync_stream(rig.into).unwrap();
    });
}

#[test]
fn a_copy_past_its_memory() {
    is_reported(Kind::OutOfBounds, |rig| {
        let storage = rig.filled(1);
        let host = rig.device.pin(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        let (from, to) = (End::Storage(&storage, 1), End::Host(&host, 0));
        rig.device.copy(rig.out, from, to, BYTES).unwrap();
    });
    is_reported(Kind::OutOfBounds, |rig| {
        let storage = rig.filled(1);
        rig.world.check(&storage, u64::MAX - 1..u64::MAX, 1);
    });
}

#[test]
fn an_empty_storage_freed_or_used_and_a_full_one_restored() {
    is_reported(Kind::DoubleFree, |rig| {
        let mut storage = rig.filled(1);
        rig.device.free(&mut storage).unwrap();
        rig.device.free(&mut storage).unwrap();
    });
    is_reported(Kind::UseAfterFree, |rig| {
        let mut storage = rig.filled(1);
        rig.device.free(&mut storage).unwrap();
        rig.world.check(&storage, ALL, 1);
    });
    is_reported(Kind::NotEmpty, |rig| {
        let mut storage = rig.filled(1);
        rig.device.restore(&mut storage, BYTES).unwrap();
    });
}

#[test]
fn bytes_that_nothing_wrote() {
    is_reported(Kind::NeverWritten, |rig| {
        let storage = rig.world.storage(BYTES).unwrap();
        rig.world.fill(&storage, 0..BYTES - 1, 1);
        rig.world.check(&storage, ALL, 1);
    });
    // A copy is no reader, but what it brings is as undefined as what it took.
    is_reported(Kind::NeverWritten, |rig| {
        let storage = rig.world.storage(BYTES).unwrap();
        rig.world.fill(&storage, 0..100, 1);
        let host = rig.device.pin(BYTES).unwrap();
        rig.order(rig.compute(), rig.out);
        rig.copy_out(&storage, &host);
        rig.order(rig.out, rig.into);
        rig.copy_in(&host, &storage);
        rig.device.sync_stream(rig.into).unwrap();
        rig.world.check(&storage, 0..100, 1);
        rig.world.check(&storage, 0..101, 1);
    });
}

#[test]
fn a_wrong_value() {
    is_reported(Kind::WrongValue, |rig| {
        let storage = rig.filled(1);
        storage.modify_in_place(64..128, 2);
        assert_eq!(storage.version(), 1);
        rig.world.check(&storage, 0..64, 1);
        rig.world.check(&storage, 64..128, 2);
        rig.world.check(&storage, 32..96, 1);
    });
}

#[test]
fn what_belongs_to_another_world() {
    is_reported(Kind::OtherWorld, |rig| {
        let mut other = Rig::new(0);
        let event = other.device.record(other.out).unwrap();
        rig.device.wait(rig.out, &event).unwrap();
    });
    is_reported(Kind::OtherWorld, |rig| {
        let other = Rig::new(0);
        let storage = rig.filled(1);
        rig.world.check_on(other.out, &storage, ALL, 1);
    });
    is_reported(Kind::OtherWorld, |rig| {
        let mut other = Rig::new(0);
        let host = other.device.pin(BYTES).unwrap();
        assert!(rig.disk.put(host).is_err());
    });
}

#[test]
fn tickets_and_slots_are_used_once() {
    is_reported(Kind::NoSuchTicket, |rig| {
        let host = rig.offloaded(1).1;
        let ticket = rig.disk.put(host).unwrap();
        let Done::Stored(slot, _) = rig.disk.wait(ticket).unwrap().0 else { panic!() };
        assert!(rig.disk.wait(ticket).is_err());
        rig.disk.discard(slot);
    });
    is_reported(Kind::NoSuchSlot, |rig| {
        let host = rig.offloaded(1).1;
        let (slot, _host) = rig.stored(host);
        rig.disk.discard(slot.duplicate());
        rig.disk.discard(slot);
    });
    is_reported(Kind::NoSuchSlot, |rig| {
        let host = rig.offloaded(1).1;
        let (slot, host) = rig.stored(host);
        rig.disk.discard(slot.duplicate());
        assert!(rig.disk.get(&slot, host).is_err());
    });
}

#[test]
fn an_extent_given_back_while_a_job_reads_it() {
    is_reported(Kind::FreeInUse, |rig| {
        let host = rig.offloaded(1).1;
        let (slot, host) = rig.stored(host);
        let ticket = rig.disk.get(&slot, host).unwrap();
        rig.disk.discard(slot);
        rig.disk.wait(ticket).unwrap();
    });
}

#[test]
fn what_is_never_given_back() {
    is_reported(Kind::Leak, |rig| std::mem::forget(rig.device.pin(1).unwrap()));
    is_reported(Kind::Leak, |rig| std::mem::forget(rig.device.stage(1).unwrap()));
    is_reported(Kind::Leak, |rig| {
        let host = rig.offloaded(1).1;
        drop(rig.stored(host));
    });
    is_reported(Kind::Leak, |rig| {
        let host = rig.offloaded(1).1;
        rig.disk.put(host).unwrap();
    });
}
