//! What each storage holds.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::handles::SimStorage;
use crate::world::World;

/// Knows with which seed each storage was filled last.
#[derive(Debug)]
pub(super) struct Oracle {
    world: World,
    seeds: BTreeMap<u64, u64>,
    next: u64,
}

impl Oracle {
    pub(super) fn new(world: World) -> Self {
        Self { world, seeds: BTreeMap::new(), next: 1 }
    }

    fn new_seed(&mut self, storage: &SimStorage) -> u64 {
        self.next += 1;
        self.seeds.insert(storage.id(), self.next);
        self.next
    }

    /// A kernel fills all of a storage.
    pub(super) fn fill(&mut self, storage: &SimStorage, bytes: u64) {
        let seed = self.new_seed(storage);
        self.world.fill(storage, 0..bytes, seed);
    }

    /// A kernel overwrites all of a storage in place.
    pub(super) fn modify(&mut self, storage: &SimStorage, bytes: u64) {
        let seed = self.new_seed(storage);
        storage.modify_in_place(0..bytes, seed);
    }

    /// A kernel looks whether these bytes are what was written last.
    pub(super) fn check(&self, storage: &SimStorage, range: Range<u64>) {
        if let Some(&seed) = self.seeds.get(&storage.id()) {
            self.world.check(storage, range, seed);
        }
    }

    /// Work on memory of its own, which is gone at the end.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn scratch(&mut self, bytes: u64) -> Result<(), ebbtide_core::BackendError> {
        let storage = self.world.storage(bytes)?;
        self.fill(&storage, bytes);
        self.check(&storage, 0..bytes);
        self.seeds.remove(&storage.id());
        Ok(())
    }
}
