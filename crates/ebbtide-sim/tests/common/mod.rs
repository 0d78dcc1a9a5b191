//! A world with what a program needs at hand.

// Each file of tests uses a part of it.
#![allow(dead_code, unreachable_pub)]

use ebbtide_core::{Accelerator, BackendError, Direction, Done, End, Store};
use ebbtide_sim::{Options, SimDevice, SimDisk, SimHost, SimSlot, SimStorage, SimStream, World};

/// The size of a storage.
pub const BYTES: u64 = 4096;
/// All of it.
pub const ALL: std::ops::Range<u64> = 0..BYTES;

/// A world with its streams.
pub struct Rig {
    pub world: World,
    pub device: SimDevice,
    pub disk: SimDisk,
    pub out: SimStream,
    pub into: SimStream,
}

impl Rig {
    pub fn new(seed: u64) -> Self {
        Self::with(seed, Options { trace: true, ..Options::default() })
    }

    pub fn with(seed: u64, options: Options) -> Self {
        Self::on(World::new(seed, options)).unwrap()
    }

    pub fn on(world: World) -> Result<Self, BackendError> {
        let mut device = world.device();
        let disk = world.disk();
        let out = device.copy_stream(Direction::Out)?;
        let into = device.copy_stream(Direction::In)?;
        Ok(Self { world, device, disk, out, into })
    }

    /// A storage that a kernel has filled.
    pub fn filled(&self, seed: u64) -> SimStorage {
        let storage = self.world.storage(BYTES).unwrap();
        self.world.fill(&storage, ALL, seed);
        storage
    }

    pub fn copy_out(&mut self, storage: &SimStorage, host: &SimHost) {
        let (from, to) = (End::Storage(storage, 0), End::Host(host, 0));
        self.device.copy(self.out, from, to, BYTES).unwrap();
    }

    pub fn copy_in(&mut self, host: &SimHost, storage: &SimStorage) {
        let (from, to) = (End::Host(host, 0), End::Storage(storage, 0));
        self.device.copy(self.into, from, to, BYTES).unwrap();
    }

    /// `later` goes on behind what is queued on `earlier`.
    pub fn order(&mut self, earlier: SimStream, later: SimStream) {
        let event = self.device.record(earlier).unwrap();
        self.device.wait(later, &event).unwrap();
    }

    pub fn compute(&self) -> SimStream {
        self.world.compute()
    }

    /// A storage in pinned memory, all complete.
    pub fn offloaded(&mut self, seed: u64) -> (SimStorage, SimHost) {
        let mut storage = self.filled(seed);
        let host = self.device.pin(BYTES).unwrap();
        self.order(self.compute(), self.out);
        self.copy_out(&storage, &host);
        self.order(self.out, self.compute());
        self.device.free(&mut storage).unwrap();
        self.device.sync_stream(self.out).unwrap();
        (storage, host)
    }

    pub fn stored(&mut self, host: SimHost) -> (SimSlot, SimHost) {
        let ticket = self.disk.put(host).unwrap();
        match self.disk.wait(ticket).unwrap().0 {
            Done::Stored(slot, Some(host)) => (slot, host),
            other => panic!("{other:?}"),
        }
    }
}
