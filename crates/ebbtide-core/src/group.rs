//! One group: the storages that one layer saved in one pass, the tensors that reach them, and the
//! phase of their journey.

use std::fmt;

use crate::backend::Facts;
use crate::error::{Error, Kind};
use crate::label::Label;
use crate::mark::{Mark, hit};
use crate::mover::{Mover, Record, Saved};
use crate::owners::Owners;
use crate::ranges::Ranges;
use crate::state::Residency;
use crate::{LayerId, Pass};

/// Names a group. Never used twice within an engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId {
    pub(crate) serial: u64,
    /// Where the engine keeps it; taken over by later groups.
    pub(crate) slot: u32,
}

/// Names a registered tensor, for as long as its group is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId {
    pub(crate) group: GroupId,
    pub(crate) index: u32,
}

impl TensorId {
    /// The group that it was registered in.
    pub fn group(&self) -> GroupId {
        self.group
    }
}

/// What became of a registration.
#[must_use = "a storage that another group owns is not moved by this one"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    /// The group moves it from now on.
    New,
    /// The group has exactly these bytes already; they move once.
    Duplicate,
    /// The group has other bytes of the same storage already; they move together.
    Merged,
    /// Another group has the storage. It stays on the device for both (row G6).
    Shared(GroupId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Open,
    Offloading,
    Away,
    Loading,
    Home,
}

impl Phase {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Offloading => "offloading",
            Self::Away => "away",
            Self::Loading => "loading",
            Self::Home => "home",
        }
    }
}

/// A tensor as it was when it was registered.
pub(crate) struct Tensor<S> {
    pub(crate) record: u32,
    /// Its own handle, unless it is the record's.
    own: Option<S>,
    facts: Option<Facts>,
    pub(crate) label: Label,
}

pub(crate) struct Group<M: Mover> {
    /// `None` while the slot waits for a new group.
    pub(crate) id: Option<GroupId>,
    pub(crate) layer: LayerId,
    pub(crate) pass: Pass,
    pub(crate) phase: Phase,
    pub(crate) records: Vec<Record<M>>,
    pub(crate) tensors: Vec<Tensor<M::Storage>>,
    pub(crate) cargo: M::Cargo,
    /// Tensors registered more than once.
    pub(crate) repeats: u64,
}

impl<M: Mover> Group<M> {
    pub(crate) fn new() -> Self {
        Self {
            id: None,
            layer: LayerId(0),
            pass: Pass(0),
            phase: Phase::Open,
            records: Vec::new(),
            tensors: Vec::new(),
            cargo: M::Cargo::default(),
            repeats: 0,
        }
    }

    pub(crate) fn open(&mut self, id: GroupId, layer: LayerId, pass: Pass) {
        (self.id, self.layer, self.pass) = (Some(id), layer, pass);
        (self.phase, self.repeats) = (Phase::Open, 0);
    }

    pub(crate) fn require(
        &self,
        wanted: Phase,
        call: &'static str,
        name: impl fmt::Display,
    ) -> Result<(), Error> {
        if self.phase == wanted {
            return Ok(());
        }
        hit(Mark::WrongPhase);
        let (found, wanted) = (self.phase.name(), wanted.name());
        Err(Error::new(Kind::Phase { group: name.to_string(), found, wanted, call }))
    }

    /// Adds a storage that this group does not have yet; `kept` if another one does.
    pub(crate) fn add(
        &mut self,
        key: usize,
        saved: Saved<M::Storage>,
        facts: Option<Facts>,
        kept: bool,
    ) -> u32 {
        let index = number(self.records.len());
        let packable = saved.pack && saved.contiguous && !saved.is_slice();
        self.tensors.push(Tensor { record: index, own: None, facts, label: saved.label });
        self.records.push(Record {
            storage: saved.storage,
            key,
            bytes: saved.bytes,
            ranges: Ranges::of(saved.range.clone()),
            reaches: (saved.range, Vec::new()),
            label: saved.label,
            element: saved.element,
            packable,
            pool: saved.pool,
            kept,
            emptied: false,
            filled: false,
            residency: Residency::default(),
        });
        index
    }

    /// Adds a tensor of a storage that this group has.
    pub(crate) fn repeat(
        &mut self,
        index: u32,
        saved: Saved<M::Storage>,
        facts: Option<Facts>,
    ) -> Registered {
        let record = &mut self.records[index as usize];
        record.packable = false;
        let (own, label) = (Some(saved.storage), saved.label);
        self.tensors.push(Tensor { record: index, own, facts, label });
        let (first, others) = &mut record.reaches;
        if *first == saved.range || others.contains(&saved.range) {
            hit(Mark::Repeat);
            self.repeats += 1;
            return Registered::Duplicate;
        }
        hit(Mark::Merge);
        others.push(saved.range.clone());
        let _ = record.ranges.insert(saved.range);
        Registered::Merged
    }

    /// Compares a tensor with what it was at registration: size first, then version (row T5).
    pub(crate) fn changed(&self, mover: &M, tensor: &Tensor<M::Storage>) -> Option<Change> {
        let then = tensor.facts?;
        let record = &self.records[tensor.record as usize];
        if record.residency.place().is_some() || record.residency.load().is_some() {
            // It is empty for everybody but the engine.
            return None;
        }
        let now = mover.facts(tensor.own.as_ref().unwrap_or(&record.storage))?;
        // While it is away the engine itself has emptied it.
        let full = record.residency.is_device()
            || (M::FULL_IN_D2H && record.residency.offload().is_some());
        if full && now.bytes != then.bytes {
            return Some(Change { what: "bytes", then: then.bytes, now: now.bytes });
        }
        let changed = now.version != then.version;
        changed.then_some(Change { what: "version", then: then.version, now: now.version })
    }

    /// Whether any bytes are away from the device or on their way.
    pub(crate) fn is_travelling(&self) -> bool {
        self.records.iter().any(|record| !record.residency.is_device())
    }

    /// Drops the records: whatever was saved belongs to the framework alone again. Identities end
    /// here, since an address means nothing once its storage is gone (row G1). The group's handles of
    /// the storages go to `to`.
    pub(crate) fn drop_records(&mut self, owners: &mut Owners, mut to: impl FnMut(M::Storage)) {
        for record in self.records.drain(..) {
            if let Some(id) = self.id {
                owners.remove(record.key, id);
            }
            to(record.storage);
        }
        self.tensors.clear();
    }
}

/// A tensor is not what it was when it was registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) what: &'static str,
    pub(crate) then: u64,
    pub(crate) now: u64,
}

pub(crate) fn number(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 tensors in a group")
}
