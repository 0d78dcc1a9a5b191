//! What the tests of catalogue rows share: a world, an engine on it, and the events it told.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::sync::{Arc, Mutex};

use ebbtide_core::{
    Config, Element, Engine, Event, GroupId, LayerId, Pass, Saved, Staged, StagedConfig, TensorId,
};
use ebbtide_sim::{Options, SimDevice, SimDisk, SimStorage, World};

/// The mover under test.
pub type Mover = Staged<SimDevice, SimDisk>;

/// Four bytes each.
pub const F32: Element = Element { name: "float32", bytes: 4 };
/// Two bytes each.
pub const F16: Element = Element { name: "float16", bytes: 2 };

/// How a rig is set up.
#[derive(Clone)]
pub struct Setup {
    /// The world.
    pub options: Options,
    /// Bounds of host memory and of buckets.
    pub config: StagedConfig,
    /// Whether there is a disk below host memory.
    pub disk: bool,
    /// Groups fetched ahead.
    pub prefetch: usize,
    /// Of the world.
    pub seed: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            options: Options::default(),
            config: StagedConfig::new(1 << 30),
            disk: false,
            prefetch: 1,
            seed: 1,
        }
    }
}

/// A world, an engine on it, and the events it told.
pub struct Rig {
    pub world: World,
    pub engine: Engine<Mover>,
    pub events: Arc<Mutex<Vec<Event>>>,
    next: u64,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(Setup::default())
    }

    pub fn with(setup: Setup) -> Self {
        let world = World::new(setup.seed, setup.options);
        let disk = setup.disk.then(|| world.disk());
        let mover = Staged::new(&setup.config, world.device(), disk);
        let mut engine = Engine::new(Config { prefetch: setup.prefetch }, mover);
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let told = Arc::clone(&events);
        engine.observe(move |event: &Event| told.lock().unwrap().push(event.clone()));
        Self { world, engine, events, next: 1 }
    }

    /// A storage whose bytes are those of a seed.
    pub fn filled(&self, bytes: u64, seed: u64) -> SimStorage {
        let storage = self.world.storage(bytes).unwrap();
        self.world.fill(&storage, 0..bytes, seed);
        storage
    }

    /// A group of its own layer and pass.
    pub fn open(&mut self) -> GroupId {
        self.next += 1;
        self.engine.open(LayerId(u32::try_from(self.next).unwrap()), Pass(self.next))
    }

    /// A group of these whole storages.
    pub fn group(&mut self, storages: &[SimStorage]) -> (GroupId, Vec<TensorId>) {
        let group = self.open();
        let tensors = storages.iter().map(|storage| self.add(group, whole(storage)));
        let tensors = tensors.collect();
        (group, tensors)
    }

    pub fn add(&mut self, group: GroupId, saved: Saved<SimStorage>) -> TensorId {
        self.engine.register(group, saved).unwrap().0
    }

    /// Out, and the device memory free.
    pub fn out(&mut self, group: GroupId) {
        self.engine.start_offload(group).unwrap();
        self.engine.wait_offload(group).unwrap();
    }

    /// Home, and the bytes those of the seeds.
    pub fn home(&mut self, group: GroupId, storages: &[SimStorage], first_seed: u64) {
        self.engine.need(group).unwrap();
        for (seed, storage) in (first_seed..).zip(storages) {
            self.world.check(storage, 0..storage.bytes(), seed);
        }
        self.engine.close(group);
    }

    /// Events of one kind.
    pub fn told(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.events.lock().unwrap().iter().filter(|event| wanted(event)).count()
    }

    /// Ends everything; nothing may be wrong or left.
    pub fn finish(self) {
        let Self { world, engine, .. } = self;
        assert_eq!(engine.active_groups(), 0, "groups are left");
        drop(engine);
        let reports = world.finish();
        assert!(reports.is_empty(), "{}", reports[0]);
        assert_eq!(world.stats().pinned_now, 0);
        assert_eq!(world.stats().disk_now, 0);
    }
}

/// A storage as a whole.
pub fn whole(storage: &SimStorage) -> Saved<SimStorage> {
    Saved::whole(storage.clone(), storage.bytes()).element(F32)
}

/// The error and its causes on one line.
pub fn text(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
