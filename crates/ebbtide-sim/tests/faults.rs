//! Calls that fail, and a device that is lost.

mod common;

use ebbtide_core::{Accelerator, BackendError, Done, End, Store};
use ebbtide_sim::{Faults, Function, Options, Ratio, World};

use common::{BYTES, Rig};

/// A program that gives up at the first failure, and drops what it holds in the right order.
fn offload(rig: &mut Rig) -> Result<(), BackendError> {
    let storage = rig.filled(1);
    let host = rig.device.pin(BYTES)?;
    let event = rig.device.record(rig.compute())?;
    rig.device.wait(rig.out, &event)?;
    rig.device.copy(rig.out, End::Storage(&storage, 0), End::Host(&host, 0), BYTES)?;
    let event = rig.device.record(rig.out);
    let done = event.and_then(|event| rig.device.sync(&event));
    if done.is_err() && !rig.world.is_lost() {
        rig.device.sync_stream(rig.out)?;
    }
    done?;
    let ticket = rig.disk.put(host).map_err(|failed| failed.error)?;
    let (done, _) = rig.disk.wait(ticket).map_err(|failed| failed.error)?;
    let Done::Stored(slot, Some(host)) = done else { panic!() };
    let ticket = rig.disk.get(&slot, host);
    let loaded = ticket.and_then(|ticket| rig.disk.wait(ticket));
    rig.disk.discard(slot);
    loaded.map(drop).map_err(|failed| failed.error)
}

fn attempt(faults: Faults) -> (Result<(), BackendError>, World) {
    let world = World::new(1, Options { faults, ..Options::default() });
    let result = Rig::on(world.clone()).and_then(|mut rig| offload(&mut rig));
    (result, world)
}

#[test]
fn every_call_can_fail_and_a_failed_one_has_no_effect() {
    let (result, world) = attempt(Faults::default());
    result.unwrap();
    let calls = world.calls();
    assert_eq!(world.finish(), []);
    for number in 0..calls {
        let faults = Faults { fail_call: Some(number), ..Faults::default() };
        let (result, world) = attempt(faults);
        assert!(result.is_err(), "call {number}");
        assert_eq!(world.finish(), [], "call {number}");
        let faults = Faults { lost_at: Some(number), ..Faults::default() };
        let (result, world) = attempt(faults);
        let of_disk = number + 4 >= calls;
        assert_eq!(result.is_ok(), of_disk, "lost at {number}");
        assert_eq!(world.finish(), [], "lost at {number}");
        assert_eq!(world.stats().pinned_now, 0);
    }
}

#[test]
fn each_function_can_fail() {
    for function in Function::ALL {
        let faults = Faults { fail_function: Some((function, 0)), ..Faults::default() };
        let (result, world) = attempt(faults);
        let used = !matches!(function, Function::SyncStream | Function::Free | Function::Restore);
        let used = used && function != Function::Stage;
        assert_eq!(result.is_err(), used, "{function:?}");
        assert_eq!(world.finish(), [], "{function:?}");
    }
}

#[test]
fn a_lost_device_answers_and_a_healed_world_works() {
    let faults = Faults { lost_at: Some(5), ..Faults::default() };
    let mut rig = Rig::with(0, Options { faults, ..Options::default() });
    let storage = rig.filled(1);
    let host = rig.device.pin(BYTES).unwrap();
    rig.copy_out(&storage, &host);
    let event = rig.device.record(rig.out).unwrap();
    assert!(rig.device.sync(&event).is_err());
    assert!(rig.world.is_lost() && rig.device.is_done(&event));
    assert!(rig.device.pin(1).is_err() && rig.world.storage(1).is_err());

    let faults = Faults { device: Ratio(1, 1), ..Faults::default() };
    let world = World::new(0, Options { faults, ..Options::default() });
    let mut device = world.device();
    assert!(device.pin(1).is_err());
    world.heal();
    assert!(device.pin(1).is_ok());
    assert_eq!(world.finish(), []);
}

#[test]
fn rates_fail_calls_of_their_side_only() {
    let faults = Faults { disk: Ratio(1, 2), ..Faults::default() };
    let mut rig = Rig::with(4, Options { faults, ..Options::default() });
    let mut host = rig.offloaded(1).1;
    let mut failed = 0;
    for _ in 0..100 {
        host = match rig.disk.put(host) {
            Err(error) => {
                failed += 1;
                error.block
            }
            Ok(ticket) => match rig.disk.wait(ticket) {
                Err(error) => {
                    failed += 1;
                    error.block
                }
                Ok((Done::Stored(slot, Some(host)), _)) => {
                    rig.disk.discard(slot);
                    host
                }
                Ok(other) => panic!("{other:?}"),
            },
        };
    }
    assert!((55..95).contains(&failed), "{failed}");
    drop(host);
    assert_eq!(rig.world.finish(), []);
}
