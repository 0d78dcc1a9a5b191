//! A tier that is chosen at run time.

use ebbtide_core::{BackendError, Bytes, Done, Failed, Store, StoreStats, Ticket, Timing};

use crate::{FileSlot, FileStore, HostSlot, HostStore};

/// One of the tiers.
#[derive(Debug)]
pub enum AnyStore<B> {
    /// In a file.
    File(FileStore<B>),
    /// In host memory.
    Host(HostStore<B>),
}

/// A slot of an [`AnyStore`].
#[derive(Debug)]
pub enum AnySlot {
    /// In a file.
    File(FileSlot),
    /// In host memory.
    Host(HostSlot),
}

impl<B: Bytes + Send + 'static> AnyStore<B> {
    /// What the user should know about the tier, one sentence each, without a full stop.
    pub fn notices(&self) -> &[String] {
        match self {
            Self::File(store) => store.notices(),
            Self::Host(_) => &[],
        }
    }

    /// Whether this process can use the tier: see [`FileStore::check_owner`]. A child has its own
    /// copy of a host tier, and can.
    ///
    /// # Errors
    /// The tier is a file that another process opened.
    pub fn check_owner(&self) -> Result<(), BackendError> {
        match self {
            Self::File(store) => store.check_owner(),
            Self::Host(_) => Ok(()),
        }
    }
}

impl<B> From<FileStore<B>> for AnyStore<B> {
    fn from(store: FileStore<B>) -> Self {
        Self::File(store)
    }
}

impl<B> From<HostStore<B>> for AnyStore<B> {
    fn from(store: HostStore<B>) -> Self {
        Self::Host(store)
    }
}

type Outcome<B, Slot> = Result<(Done<B, Slot>, Timing), Failed<B>>;

fn convert<B, Slot>(
    outcome: Outcome<B, Slot>,
    slot: impl Fn(Slot) -> AnySlot,
) -> Outcome<B, AnySlot> {
    let (done, timing) = outcome?;
    let done = match done {
        Done::Stored(stored, block) => Done::Stored(slot(stored), block),
        Done::Loaded(block) => Done::Loaded(block),
    };
    Ok((done, timing))
}

const FOREIGN: &str = "the slot is another store's";

/// `get` and `discard` panic if the slot is one of another tier.
impl<B: Bytes + Send + 'static> Store<B> for AnyStore<B> {
    type Slot = AnySlot;

    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        match self {
            Self::File(store) => store.put(block),
            Self::Host(store) => store.put(block),
        }
    }

    fn get(&mut self, slot: &AnySlot, block: B) -> Result<Ticket, Failed<B>> {
        match (self, slot) {
            (Self::File(store), AnySlot::File(slot)) => store.get(slot, block),
            (Self::Host(store), AnySlot::Host(slot)) => store.get(slot, block),
            _ => panic!("{FOREIGN}"),
        }
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        match self {
            Self::File(store) => store.is_done(ticket),
            Self::Host(store) => store.is_done(ticket),
        }
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(Done<B, AnySlot>, Timing), Failed<B>> {
        match self {
            Self::File(store) => convert(store.wait(ticket), AnySlot::File),
            Self::Host(store) => convert(store.wait(ticket), AnySlot::Host),
        }
    }

    fn discard(&mut self, slot: AnySlot) {
        match (self, slot) {
            (Self::File(store), AnySlot::File(slot)) => store.discard(slot),
            (Self::Host(store), AnySlot::Host(slot)) => store.discard(slot),
            _ => panic!("{FOREIGN}"),
        }
    }

    fn stats(&self) -> StoreStats {
        match self {
            Self::File(store) => store.stats(),
            Self::Host(store) => store.stats(),
        }
    }
}
