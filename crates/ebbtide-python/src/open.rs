//! Opening the engine of a device with the tier that was asked for.

use std::sync::Arc;

use ebbtide_core::{NoDisk, Staged, StagedConfig};
use ebbtide_store::{AnyStore, FileConfig, FileStore, HostConfig, HostStore, host_bound};
use pyo3::prelude::*;

use crate::gather::Gatherer;
use crate::hub::{Hub, Tier, cannot_open};
use crate::ram::{Block, Lender};
use crate::unit::{RamMover, Unit, unit};
use crate::view::Place;
use crate::waiting::Waiting;

/// Opens a unit.
///
/// # Errors
/// The folder can't be used, or more host memory was asked for than there is.
pub(crate) fn open(hub: &Hub, place: &Place) -> PyResult<Box<dyn Unit>> {
    match (place, hub.settings.tier) {
        (Place::Ram | Place::Outside, Tier::File) => open_file(hub),
        (Place::Ram, Tier::Host) => open_host(hub),
        (Place::Outside, Tier::Host) => open_host_store(hub),
        (Place::Accelerator(kind, index), _) => crate::accel::open(hub, kind, *index),
    }
}

/// A spill file in the folder of the settings.
///
/// # Errors
/// It can't be opened.
pub(crate) fn spill_file<B: ebbtide_core::Bytes + Send + 'static>(
    hub: &Hub,
) -> PyResult<FileStore<B>> {
    let mut config = FileConfig::new(&hub.settings.spill_dir);
    if let Some(picture) = &hub.picture {
        config.origin = picture.origin();
    }
    let store = FileStore::open(&config).map_err(cannot_open)?;
    for notice in store.notices() {
        hub.log.warn(notice.clone());
    }
    Ok(store)
}

fn open_file(hub: &Hub) -> PyResult<Box<dyn Unit>> {
    let store: FileStore<Block> = spill_file(hub)?;
    let device = Lender::new(Arc::clone(&hub.tally));
    let mover: RamMover = ebbtide_core::Direct::new(device, Waiting(AnyStore::from(store)));
    Ok(unit(hub.settings.prefetch, mover, hub.log.clone()))
}

fn open_host_store(hub: &Hub) -> PyResult<Box<dyn Unit>> {
    let mut config = HostConfig { host_bytes: hub.settings.host_bytes, ..HostConfig::default() };
    if let Some(picture) = &hub.picture {
        config.origin = picture.origin();
    }
    let store: HostStore<Block> = HostStore::new(&config).map_err(cannot_open)?;
    let device = Lender::new(Arc::clone(&hub.tally));
    let mover: RamMover = ebbtide_core::Direct::new(device, Waiting(AnyStore::from(store)));
    Ok(unit(hub.settings.prefetch, mover, hub.log.clone()))
}

fn open_host(hub: &Hub) -> PyResult<Box<dyn Unit>> {
    let mut config = StagedConfig::new(host_bound(hub.settings.host_bytes).map_err(cannot_open)?);
    // One bucket must leave room for others.
    config.bucket_bytes = config.bucket_bytes.min(config.host_bytes / 4);
    let mover = Staged::new(&config, Gatherer::new(Arc::clone(&hub.tally)), None::<NoDisk>);
    Ok(unit(hub.settings.prefetch, mover, hub.log.clone()))
}
