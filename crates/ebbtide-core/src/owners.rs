//! Which groups have a storage now.
//!
//! One group moves a storage as long as no other has it. From the second one on it stays on the device
//! for all of them (row G6), also when the first one is done before the others.

use std::collections::HashMap;

use crate::GroupId;
use crate::hash::Quick;

/// A record: its group, and its number there.
pub(crate) type Holding = (GroupId, u32);

/// By the device's key of the storage, which is valid while one of the records lives.
#[derive(Debug, Default)]
pub(crate) struct Owners(HashMap<usize, Holders, Quick>);

#[derive(Debug)]
struct Holders {
    first: Holding,
    /// Takes no memory as long as it is empty.
    others: Vec<Holding>,
}

/// Who has a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// Nobody.
    Free,
    /// The group itself, as this record.
    Here(u32),
    /// Another group first, which may move it.
    Elsewhere(Holding),
}

impl Owners {
    pub(crate) fn look(&self, key: usize, group: GroupId) -> Held {
        let Some(holders) = self.0.get(&key) else { return Held::Free };
        let mut all = std::iter::once(&holders.first).chain(&holders.others);
        match all.find(|(holder, _)| *holder == group) {
            Some(&(_, index)) => Held::Here(index),
            None => Held::Elsewhere(holders.first),
        }
    }

    /// Who moves the storage.
    pub(crate) fn first(&self, key: usize) -> Option<Holding> {
        self.0.get(&key).map(|holders| holders.first)
    }

    pub(crate) fn add(&mut self, key: usize, holding: Holding) {
        let new = || Holders { first: holding, others: Vec::new() };
        let holders = self.0.entry(key).or_insert_with(new);
        if holders.first != holding {
            holders.others.push(holding);
        }
    }

    pub(crate) fn remove(&mut self, key: usize, group: GroupId) {
        let Some(holders) = self.0.get_mut(&key) else { return };
        if holders.first.0 != group {
            holders.others.retain(|(holder, _)| *holder != group);
        } else if let Some(next) = holders.others.pop() {
            holders.first = next;
        } else {
            self.0.remove(&key);
        }
    }
}
