//! Host buffers on their way: what one holds, who needs it, and the tier it is in.
//!
//! ```text
//!            spill                     fetch
//!   Host ──────────────▶ Disk ─────────────────▶ Fetching
//!    ▲ ▲                  ▲                         │ │
//!    │ └── (spill failed) └──── (fetch failed) ─────┘ │
//!    └────────────────────── arrived ◀───────────────┘
//! ```
//!
//! # Access contract
//!
//! | tier | host buffer | slot | who may touch the bytes |
//! | --- | --- | --- | --- |
//! | `Host` | ours | none | copies in front of `written`; copies back, behind it |
//! | `Disk` | given back | holds the bytes | nobody |
//! | `Fetching` | lent to the store | holds the bytes | the store, writing the buffer |
//!
//! A parcel that a load reads or is about to read is *busy*: it is not spilled.

use crate::PoolId;
use crate::accel::Accelerator;
use crate::backend::{Store, Ticket};
use crate::pool::{Buffer, Place};

/// Which parcel, and where in it, the bytes of a storage are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub(crate) parcel: u32,
    pub(crate) offset: u64,
}

pub(crate) enum Tier<A: Accelerator, Slot> {
    Host(Buffer<A>),
    /// The slot holds a whole host buffer, of this many bytes.
    Disk(Slot, u64),
    Fetching(Ticket, Slot, Place),
    /// Between two tiers, within one call.
    Between,
}

pub(crate) struct Parcel<A: Accelerator, Slot> {
    /// Never used twice, unlike the parcel's number.
    pub(crate) serial: u64,
    pub(crate) bytes: u64,
    pub(crate) pool: PoolId,
    /// Storages whose bytes are here and nowhere else.
    pub(crate) users: u32,
    pub(crate) packed: bool,
    pub(crate) busy: bool,
    /// The copy that filled the buffer is in front of it. `None` once the host has seen it complete.
    pub(crate) written: Option<A::Event>,
    pub(crate) tier: Tier<A, Slot>,
}

/// All parcels, by number. Numbers are used again.
pub(crate) struct Parcels<A: Accelerator, S: Store<A::Host>> {
    list: Vec<Option<Parcel<A, S::Slot>>>,
    vacant: Vec<u32>,
    next_serial: u64,
}

impl<A: Accelerator, S: Store<A::Host>> Parcels<A, S> {
    pub(crate) fn new() -> Self {
        Self { list: Vec::new(), vacant: Vec::new(), next_serial: 0 }
    }

    pub(crate) fn add(&mut self, buffer: Buffer<A>, bytes: u64, packed: bool) -> u32 {
        let (serial, pool) = (self.next_serial, buffer.pool());
        self.next_serial += 1;
        let (users, busy, written, tier) = (0, false, None, Tier::Host(buffer));
        let parcel = Parcel { serial, bytes, pool, users, packed, busy, written, tier };
        if let Some(number) = self.vacant.pop() {
            self.list[number as usize] = Some(parcel);
            return number;
        }
        self.list.push(Some(parcel));
        crate::group::number(self.list.len() - 1)
    }

    /// A parcel that some group's cargo names.
    pub(crate) fn get(&mut self, number: u32) -> &mut Parcel<A, S::Slot> {
        self.list[number as usize].as_mut().expect("a parcel lives as long as a cargo names it")
    }

    /// The same, by number and serial, for those who keep numbers longer.
    pub(crate) fn find(&mut self, number: u32, serial: u64) -> Option<&mut Parcel<A, S::Slot>> {
        self.list.get_mut(number as usize)?.as_mut().filter(|parcel| parcel.serial == serial)
    }

    pub(crate) fn is_live(&self, number: u32) -> bool {
        self.list.get(number as usize).is_some_and(Option::is_some)
    }

    pub(crate) fn remove(&mut self, number: u32) -> Parcel<A, S::Slot> {
        self.vacant.push(number);
        self.list[number as usize].take().expect("a parcel is removed once")
    }

    /// The tier's name for people.
    pub(crate) fn tier(&self, number: u32) -> &'static str {
        match self.list.get(number as usize) {
            Some(Some(Parcel { tier: Tier::Disk(..) | Tier::Fetching(..), .. })) => "disk",
            _ => "host",
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len() - self.vacant.len()
    }
}
