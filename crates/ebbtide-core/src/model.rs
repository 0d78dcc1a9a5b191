//! Devices and a store made of plain byte vectors.
//!
//! They really move the bytes, finish each job only when it is waited for, and check what the
//! engine promises. The crate's own tests and examples run on them; nothing picks them by itself.

use std::cell::{Cell, Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use crate::backend::{Bytes, Device, Done, Facts, Failed, Store, StoreStats, Ticket, Timing};
use crate::error::BackendError;

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// A storage of [`ModelDevice`] or [`LendingDevice`]. Clones are views of the same storage.
#[derive(Clone, Debug)]
pub struct ModelStorage(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    bytes: RefCell<Option<Vec<u8>>>,
    len: usize,
    version: Cell<u64>,
    /// Its memory waits for a load to fill it.
    fresh: Cell<bool>,
}

impl ModelStorage {
    /// A storage with this content.
    pub fn new(bytes: Vec<u8>) -> Self {
        let (len, bytes) = (bytes.len(), RefCell::new(Some(bytes)));
        Self(Rc::new(Inner { bytes, len, version: Cell::new(0), fresh: Cell::new(false) }))
    }

    /// Whether the memory has been taken out.
    pub fn is_away(&self) -> bool {
        self.0.bytes.borrow().is_none()
    }

    /// The content.
    ///
    /// # Panics
    /// The storage is away: what a real framework must answer with an error.
    pub fn bytes(&self) -> Ref<'_, Vec<u8>> {
        Ref::map(self.0.bytes.borrow(), |b| b.as_ref().expect("read of a storage that is away"))
    }

    /// Changes the content in place, or the size with it.
    ///
    /// # Panics
    /// The storage is away.
    pub fn write(&self, bytes: Vec<u8>) {
        assert!(self.0.bytes.borrow_mut().replace(bytes).is_some(), "write into what is away");
        self.0.version.set(self.0.version.get() + 1);
    }
}

/// A device whose memory is byte vectors.
#[derive(Debug, Default)]
pub struct ModelDevice {
    /// When it reaches 0 the next allocation fails, once.
    pub allocations_left: Option<u32>,
}

impl ModelDevice {
    /// A new storage.
    pub fn storage(&self, bytes: Vec<u8>) -> ModelStorage {
        ModelStorage::new(bytes)
    }
}

impl Device for ModelDevice {
    type Storage = ModelStorage;
    type Block = Vec<u8>;

    fn key(&self, storage: &ModelStorage) -> usize {
        Rc::as_ptr(&storage.0).addr()
    }

    fn detach(&mut self, storage: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        let taken = storage.0.bytes.borrow_mut().take();
        Ok(taken.expect("the engine detaches a full storage only"))
    }

    fn attach(&mut self, storage: &ModelStorage, block: Vec<u8>) -> Result<(), BackendError> {
        assert_eq!(block.len(), storage.0.len, "the engine attaches a block of the right size");
        let before = storage.0.bytes.borrow_mut().replace(block);
        assert!(before.is_none(), "the engine attaches to an empty storage only");
        Ok(())
    }

    fn allocate(&mut self, storage: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        if fails_now(&mut self.allocations_left) {
            return Err(BackendError::new("out of device memory"));
        }
        Ok(vec![FRESH; storage.0.len])
    }
}

/// A device whose memory is byte vectors that never leave their storages: it lends copies of them, and
/// brings a storage back into memory of the storage's own.
#[derive(Debug, Default)]
pub struct LendingDevice {
    /// Calls of `vacate` left before one fails, once.
    pub vacates_left: Option<u32>,
    /// Calls of `allocate` left before one fails, once.
    pub allocations_left: Option<u32>,
}

impl Device for LendingDevice {
    type Storage = ModelStorage;
    type Block = Vec<u8>;

    const LENDS: bool = true;

    fn key(&self, storage: &ModelStorage) -> usize {
        Rc::as_ptr(&storage.0).addr()
    }

    fn facts(&self, storage: &ModelStorage) -> Option<Facts> {
        let bytes = storage.0.bytes.borrow().as_ref().map_or(0, Vec::len) as u64;
        Some(Facts { bytes, version: storage.0.version.get() })
    }

    fn detach(&mut self, storage: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        Ok(storage.bytes().clone())
    }

    fn vacate(&mut self, storage: &ModelStorage) -> Result<(), BackendError> {
        if fails_now(&mut self.vacates_left) {
            return Err(BackendError::new("no").with_hint("ask again"));
        }
        let before = storage.0.bytes.borrow_mut().take();
        assert!(before.is_some(), "the engine vacates a full storage only");
        Ok(())
    }

    fn attach(&mut self, storage: &ModelStorage, block: Vec<u8>) -> Result<(), BackendError> {
        // What was lent is there.
        if storage.0.fresh.replace(false) {
            *storage.0.bytes.borrow_mut() = Some(block);
        }
        Ok(())
    }

    fn allocate(&mut self, storage: &ModelStorage) -> Result<Vec<u8>, BackendError> {
        if fails_now(&mut self.allocations_left) {
            return Err(BackendError::new("out of device memory"));
        }
        let fresh = vec![FRESH; storage.0.len];
        let before = storage.0.bytes.borrow_mut().replace(fresh.clone());
        assert!(before.is_none(), "the engine brings back what is away only");
        storage.0.fresh.set(true);
        Ok(fresh)
    }

    fn retract(&mut self, storage: &ModelStorage) {
        if storage.0.fresh.replace(false) {
            *storage.0.bytes.borrow_mut() = None;
        }
    }
}

/// What memory holds that nobody has written yet.
const FRESH: u8 = 0xAA;

/// Counts a call; true for the one that is to fail.
fn fails_now(left: &mut Option<u32>) -> bool {
    let fails = *left == Some(0);
    *left = left.and_then(|n| n.checked_sub(1));
    fails
}

/// A store of byte vectors. A job runs when it is waited for, as late as the contract allows.
#[derive(Debug, Default)]
pub struct ModelStore {
    jobs: BTreeMap<Ticket, Job>,
    slots: BTreeMap<u64, Vec<u8>>,
    next: u64,
    stats: StoreStats,
    /// Calls of `put`, `get` and `wait` left before one fails.
    pub calls_left: Option<u32>,
    /// Whether it says of no job that it is done.
    pub busy: bool,
}

#[derive(Debug)]
enum Job {
    Put(Vec<u8>),
    Get(u64, Vec<u8>),
}

impl ModelStore {
    /// Slots that hold bytes now.
    pub fn slots_in_use(&self) -> usize {
        self.slots.len()
    }

    /// Jobs that nobody has waited for yet.
    pub fn jobs_in_flight(&self) -> usize {
        self.jobs.len()
    }

    fn start(&mut self, job: Job) -> Result<Ticket, Failed<Vec<u8>>> {
        if fails_now(&mut self.calls_left) {
            let (Job::Put(block) | Job::Get(_, block)) = job;
            return Err(Failed { error: BackendError::new("planned failure"), block });
        }
        self.next += 1;
        self.jobs.insert(Ticket(self.next), job);
        Ok(Ticket(self.next))
    }
}

impl Store<Vec<u8>> for ModelStore {
    type Slot = u64;

    fn put(&mut self, block: Vec<u8>) -> Result<Ticket, Failed<Vec<u8>>> {
        self.start(Job::Put(block))
    }

    fn get(&mut self, slot: &u64, block: Vec<u8>) -> Result<Ticket, Failed<Vec<u8>>> {
        self.start(Job::Get(*slot, block))
    }

    fn is_done(&mut self, _: Ticket) -> bool {
        !self.busy
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(Done<Vec<u8>, u64>, Timing), Failed<Vec<u8>>> {
        let job = self.jobs.remove(&ticket).expect("each ticket is waited for once");
        let fails = fails_now(&mut self.calls_left);
        match job {
            Job::Put(block) | Job::Get(_, block) if fails => {
                Err(Failed { error: BackendError::new("planned failure"), block })
            }
            Job::Put(block) => {
                self.stats.bytes_out += block.len() as u64;
                self.slots.insert(ticket.0, block);
                Ok((Done::Stored(ticket.0, None), Timing::default()))
            }
            Job::Get(slot, mut block) => {
                block.copy_from_slice(&self.slots[&slot]);
                self.stats.bytes_in += block.len() as u64;
                Ok((Done::Loaded(block), Timing::default()))
            }
        }
    }

    fn discard(&mut self, slot: u64) {
        assert!(self.slots.remove(&slot).is_some(), "slot {slot} was given back twice");
    }

    fn stats(&self) -> StoreStats {
        let held = self.slots.values().map(|s| s.len() as u64).sum();
        StoreStats { bytes_held: held, ..self.stats }
    }
}
