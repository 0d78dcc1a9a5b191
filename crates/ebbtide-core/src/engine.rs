//! Groups and what drives them: offload, load, prefetch, abort, and the counters.
//!
//! # Phases of a group
//!
//! ```text
//!   Open ──start_offload──▶ Offloading ──wait_offload──▶ Away ──start_load──▶ Loading
//!    │                                                    ▲                     │
//!    │                                     (a load failed)└─────────────────────┤ wait_load
//!    └──────────────────────────── need (nothing is away) ─────────────▶ Home ◀─┘
//! ```
//!
//! | phase | its records are in | records may be added |
//! | --- | --- | --- |
//! | `open` | `device` | yes |
//! | `offloading` | `device`, `d2h`, `away` | no |
//! | `away` | `device` (an offload that failed), `away` | no |
//! | `loading` | `device`, `away` (a load that could not start), `h2d` | no |
//! | `home` | `device` | no |
//!
//! [`Engine::close`] is allowed in every phase: it waits for what is in flight, gives every slot
//! back and forgets the group. It is the end of a normal backward and of an abandoned step alike,
//! so a failed step has no path of its own that could leak.

use std::collections::{BTreeMap, HashMap};

use crate::backend::{Device, Done, Failed, Outcome, Store, StoreStats, Timing};
use crate::error::{BackendError, Error, Kind};
use crate::observe::{Event, Observer};
use crate::order::Order;
use crate::state::{Owed, Residency, WrongState};
use crate::{LayerId, Pass};

/// Names a group. Never used twice within an engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(crate) u64);

/// What is fixed when an engine is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many groups ahead of the one in backward are loaded. 0 loads every group on demand.
    pub prefetch: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { prefetch: 1 }
    }
}

/// Totals since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that left the device.
    pub moved_out_bytes: u64,
    /// Bytes that came back.
    pub moved_in_bytes: u64,
    /// Bytes freed because backward never reads them.
    pub dropped_bytes: u64,
    /// Groups that were asked for before their load had been started.
    pub missed_prefetches: u64,
}

/// What became of a registration.
#[must_use = "a storage that another group owns is not moved by this one"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    /// The group moves it from now on.
    New,
    /// The group has it already; it moves once.
    Duplicate,
    /// Another open group has it. It stays with that one, and is not touched by this one.
    OwnedBy(GroupId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    Offloading,
    Away,
    Loading,
    Home,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Offloading => "offloading",
            Self::Away => "away",
            Self::Loading => "loading",
            Self::Home => "home",
        }
    }
}

struct Record<Storage, Slot> {
    storage: Storage,
    key: usize,
    bytes: u64,
    label: &'static str,
    residency: Residency<Slot>,
}

struct Group<Storage, Slot> {
    layer: LayerId,
    pass: Pass,
    phase: Phase,
    records: Vec<Record<Storage, Slot>>,
}

impl<Storage, Slot> Group<Storage, Slot> {
    fn name(&self) -> String {
        format!("layer {} pass {}", self.layer.0, self.pass.0)
    }

    fn require(&self, wanted: Phase, call: &'static str) -> Result<(), Error> {
        if self.phase == wanted {
            return Ok(());
        }
        let (group, found, wanted) = (self.name(), self.phase.name(), wanted.name());
        Err(Error::new(Kind::Phase { group, found, wanted, call }))
    }
}

/// The engine of one model on one device with one tier.
///
/// It is driven from one thread at a time (`&mut self`). Copies run on the store's own workers
/// between the start and the wait of a group.
pub struct Engine<D: Device, S: Store<D::Block>> {
    config: Config,
    device: D,
    store: S,
    groups: BTreeMap<GroupId, Group<D::Storage, S::Slot>>,
    /// Which open group moves the storage with this key. A key is valid while the record lives.
    owners: HashMap<usize, GroupId>,
    next_group: u64,
    order: Order,
    counters: Counters,
    observer: Box<dyn Observer + Send>,
}

impl<D: Device, S: Store<D::Block>> std::fmt::Debug for Engine<D, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("config", &self.config)
            .field("groups", &self.groups.len())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl<D: Device, S: Store<D::Block>> Engine<D, S> {
    /// An engine without groups, whose events nobody observes.
    pub fn new(config: Config, device: D, store: S) -> Self {
        Self {
            config,
            device,
            store,
            groups: BTreeMap::new(),
            owners: HashMap::new(),
            next_group: 0,
            order: Order::default(),
            counters: Counters::default(),
            observer: Box::new(()),
        }
    }

    /// Sends every later event to `observer`.
    pub fn observe(&mut self, observer: impl Observer + Send + 'static) {
        self.observer = Box::new(observer);
    }

    /// Opens a group for one layer in one pass (row M10). The same layer may have any number of
    /// groups, in one pass or in several.
    pub fn open(&mut self, layer: LayerId, pass: Pass) -> GroupId {
        let id = GroupId(self.next_group);
        self.next_group += 1;
        self.groups.insert(id, Group { layer, pass, phase: Phase::Open, records: Vec::new() });
        id
    }

    /// Adds a storage of `bytes` bytes to a group. A storage that the group has already is moved
    /// once (row T13); one that another open group has stays with that one (row G6).
    ///
    /// # Errors
    /// The group is unknown, or its offload has been started (row G10).
    pub fn register(
        &mut self,
        group: GroupId,
        storage: D::Storage,
        bytes: u64,
        label: &'static str,
    ) -> Result<Registered, Error> {
        let key = self.device.key(&storage);
        let entry = find(&mut self.groups, group)?;
        entry.require(Phase::Open, "register")?;
        match self.owners.get(&key) {
            Some(&owner) if owner == group => return Ok(Registered::Duplicate),
            Some(&owner) => return Ok(Registered::OwnedBy(owner)),
            None => {}
        }
        self.owners.insert(key, group);
        entry.records.push(Record { storage, key, bytes, label, residency: Residency::default() });
        Ok(Registered::New)
    }

    /// Frees the bytes of a storage that backward never reads. They don't come back; what is left
    /// makes every later read an error.
    ///
    /// # Errors
    /// The device can't empty the storage; it is unchanged.
    pub fn drop_dead(
        &mut self,
        storage: &D::Storage,
        bytes: u64,
        label: &str,
    ) -> Result<(), Error> {
        let block = self.device.detach(storage).map_err(|cause| {
            let (group, label) = ("dead bytes".into(), label.into());
            Error::caused_by(Kind::Device { group, label, bytes }, cause)
        })?;
        drop(block);
        self.counters.dropped_bytes += bytes;
        Ok(())
    }

    /// Starts moving every storage of the group out.
    ///
    /// # Errors
    /// The group is unknown or not open (row G10: nothing changes), or a copy can't be started;
    /// then every storage whose copy was not started is on the device, untouched (row G4), and the
    /// group can still be waited for or closed.
    pub fn start_offload(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        entry.require(Phase::Open, "start_offload")?;
        entry.phase = Phase::Offloading;
        let name = entry.name();
        for record in &mut entry.records {
            let failed = |kind: fn(String, String, u64) -> Kind, cause| {
                Error::caused_by(kind(name.clone(), record.label.into(), record.bytes), cause)
            };
            let block = self.device.detach(&record.storage).map_err(|e| failed(device_kind, e))?;
            match self.store.put(block) {
                Ok(ticket) => sure(record.residency.start_offload(ticket)),
                Err(Failed { error, block }) => {
                    let back = self.device.attach(&record.storage, block);
                    back.map_err(|e| failed(device_kind, e))?;
                    return Err(failed(offload_kind, error));
                }
            }
        }
        Ok(())
    }

    /// Waits until every storage of the group has left the device.
    ///
    /// # Errors
    /// The group is unknown or its offload was not started or is already waited for (row G5); or
    /// copies failed: the first error is returned, and each storage whose copy failed is on the
    /// device again.
    pub fn wait_offload(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        entry.require(Phase::Offloading, "wait_offload")?;
        entry.phase = Phase::Away;
        let (layer, name) = (entry.layer, entry.name());
        let mut first = Ok(());
        for record in &mut entry.records {
            let Some(ticket) = record.residency.offload_ticket() else { continue };
            match stored(self.store.wait(ticket)) {
                Ok((slot, timing)) => {
                    sure(record.residency.finish_offload(slot));
                    let bytes = record.bytes;
                    self.counters.moved_out_bytes += bytes;
                    self.observer.event(&Event::Stored { group, layer, bytes, timing });
                }
                Err(Failed { error, block }) => {
                    sure(record.residency.fail_offload());
                    let back = self.device.attach(&record.storage, block);
                    let kind = back.as_ref().map_or(device_kind as KindOf, |()| offload_kind);
                    let cause = back.err().unwrap_or(error);
                    let kind = kind(name.clone(), record.label.into(), record.bytes);
                    first = first.and(Err(Error::caused_by(kind, cause)));
                }
            }
        }
        first
    }

    /// Starts bringing the group back. An offload still under way is finished first (row G7).
    ///
    /// # Errors
    /// The group is unknown, or neither away nor on its way out; its offload failed; or a load
    /// can't be started, in which case the bytes stay in the tier and [`Engine::need`] tries again.
    pub fn start_load(&mut self, group: GroupId) -> Result<(), Error> {
        if find(&mut self.groups, group)?.phase == Phase::Offloading {
            self.wait_offload(group)?;
        }
        let entry = find(&mut self.groups, group)?;
        entry.require(Phase::Away, "start_load")?;
        entry.phase = Phase::Loading;
        let name = entry.name();
        for record in &mut entry.records {
            let Some(slot) = record.residency.slot() else { continue };
            let load = |cause| {
                Error::caused_by(load_kind(name.clone(), record.label.into(), record.bytes), cause)
            };
            let block = self.device.allocate(&record.storage).map_err(load)?;
            let ticket = self.store.get(slot, block).map_err(|failed| load(failed.error))?;
            sure(record.residency.start_load(ticket));
        }
        Ok(())
    }

    /// Waits until every storage of the group is on the device again.
    ///
    /// # Errors
    /// The group is unknown or its load was not started or is already waited for (row G8); or
    /// copies failed: the first error is returned, the bytes stay in the tier and the group is
    /// `away`, so that the load can be tried again (row T10).
    pub fn wait_load(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        entry.require(Phase::Loading, "wait_load")?;
        let (layer, name) = (entry.layer, entry.name());
        let mut first = Ok(());
        for record in &mut entry.records {
            let Some(ticket) = record.residency.load_ticket() else { continue };
            let (device, bytes) = (&mut self.device, record.bytes);
            let home = loaded(self.store.wait(ticket))
                .and_then(|(block, timing)| device.attach(&record.storage, block).map(|()| timing));
            match home {
                Ok(timing) => {
                    self.store.discard(sure(record.residency.finish_load()));
                    self.counters.moved_in_bytes += bytes;
                    self.observer.event(&Event::Loaded { group, layer, bytes, timing });
                }
                Err(error) => {
                    sure(record.residency.fail_load());
                    let kind = load_kind(name.clone(), record.label.into(), bytes);
                    first = first.and(Err(Error::caused_by(kind, error)));
                }
            }
        }
        let all_home = entry.records.iter().all(|r| r.residency.is_device());
        entry.phase = if all_home { Phase::Home } else { Phase::Away };
        first
    }

    /// Backward asks for this group now: afterwards every storage of it is on the device. What is
    /// away and not yet on its way back is loaded on demand and counted as a missed prefetch
    /// (rows T3, M11). Also learns the order for the next step.
    ///
    /// # Errors
    /// The group is unknown, or a copy failed.
    pub fn need(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        let (layer, pass) = (entry.layer, entry.pass);
        self.order.record(layer);
        if entry.phase == Phase::Open {
            entry.phase = Phase::Home;
        }
        if matches!(entry.phase, Phase::Offloading | Phase::Away) {
            self.counters.missed_prefetches += 1;
            self.observer.event(&Event::Missed { group, layer, pass });
            self.start_load(group)?;
        }
        if find(&mut self.groups, group)?.phase != Phase::Loading {
            return Ok(());
        }
        self.wait_load(group)?;
        // A prefetch that could only be started for a part of the group leaves the rest away.
        if find(&mut self.groups, group)?.phase == Phase::Away {
            self.start_load(group)?;
            self.wait_load(group)?;
        }
        Ok(())
    }

    /// Starts loading the groups that backward will ask for after `current`, as many as the
    /// configured depth. A hint: a load that can't be started is told to the observer and tried
    /// again by [`Engine::need`].
    pub fn prefetch(&mut self, current: GroupId) {
        for group in self.upcoming(current) {
            let ready = self.groups.get(&group).is_some_and(|g| match g.phase {
                Phase::Away => true,
                Phase::Offloading => {
                    let mut tickets = g.records.iter().filter_map(|r| r.residency.offload_ticket());
                    tickets.all(|ticket| self.store.is_done(ticket))
                }
                _ => false,
            });
            if ready && let Err(error) = self.start_load(group) {
                let error = chain(&error);
                self.observer.event(&Event::PrefetchFailed { group, error });
            }
        }
    }

    /// The next groups of the same pass that are not home, nearest first, at most the depth.
    fn upcoming(&self, current: GroupId) -> Vec<GroupId> {
        let Some(pass) = self.groups.get(&current).map(|g| g.pass) else { return Vec::new() };
        let waiting = |phase| matches!(phase, Phase::Offloading | Phase::Away | Phase::Loading);
        let open: Vec<(GroupId, LayerId)> = self
            .groups
            .iter()
            .rev()
            .filter(|(id, g)| **id != current && g.pass == pass && waiting(g.phase))
            .map(|(id, g)| (*id, g.layer))
            .collect();
        let mut chosen: Vec<GroupId> = Vec::new();
        for layer in self.order.expected() {
            let next = open.iter().find(|(id, l)| l == layer && !chosen.contains(id));
            chosen.extend(next.map(|(id, _)| *id));
        }
        if chosen.is_empty() {
            chosen.extend(open.iter().filter(|(id, _)| *id < current).map(|(id, _)| *id));
        }
        chosen.truncate(self.config.prefetch);
        chosen
    }

    /// Forgets a group in whatever phase: waits for its copies, gives its slots back (rows P3, M7).
    /// Storages that were away stay empty; their owner drops them or has them back already. Does
    /// nothing for a group that is not open (row M2).
    pub fn close(&mut self, group: GroupId) {
        let Some(entry) = self.groups.remove(&group) else { return };
        for record in entry.records {
            self.owners.remove(&record.key);
            match record.residency.abandon() {
                Owed::Nothing => {}
                Owed::Slot(slot) => self.store.discard(slot),
                Owed::Offload(ticket) => match stored(self.store.wait(ticket)) {
                    Ok((slot, _)) => self.store.discard(slot),
                    Err(failed) => self.abandoned(group, &failed.error),
                },
                Owed::Load(ticket, slot) => {
                    if let Err(error) = loaded(self.store.wait(ticket)) {
                        self.abandoned(group, &error);
                    }
                    self.store.discard(slot);
                }
            }
        }
    }

    fn abandoned(&mut self, group: GroupId, error: &BackendError) {
        let error = chain(error);
        self.observer.event(&Event::AbandonedCopyFailed { group, error });
    }

    /// A backward is complete: the order it took predicts the next one.
    pub fn finish_backward(&mut self) {
        self.order.finish();
    }

    /// A backward was given up: the order it took says nothing.
    pub fn abandon_backward(&mut self) {
        self.order.abandon();
    }

    /// Number of groups that are open now (row M9).
    pub fn active_groups(&self) -> usize {
        self.groups.len()
    }

    /// Totals since the engine was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What the store has done.
    pub fn store_stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// The device, for what the front end does with it beside the engine.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }
}

impl<D: Device, S: Store<D::Block>> Drop for Engine<D, S> {
    /// Gives back what is still open, so that the store sees every job ended and every slot home.
    fn drop(&mut self) {
        while let Some((&id, _)) = self.groups.first_key_value() {
            self.close(id);
        }
    }
}

type KindOf = fn(String, String, u64) -> Kind;

fn device_kind(group: String, label: String, bytes: u64) -> Kind {
    Kind::Device { group, label, bytes }
}

fn offload_kind(group: String, label: String, bytes: u64) -> Kind {
    Kind::Offload { group, label, bytes }
}

fn load_kind(group: String, label: String, bytes: u64) -> Kind {
    Kind::Load { group, label, bytes }
}

fn find<Storage, Slot>(
    groups: &mut BTreeMap<GroupId, Group<Storage, Slot>>,
    id: GroupId,
) -> Result<&mut Group<Storage, Slot>, Error> {
    groups.get_mut(&id).ok_or_else(|| Error::new(Kind::UnknownGroup(id.0)))
}

/// The engine looked at the state just before: a refusal here is a bug in the engine.
fn sure<T>(transition: Result<T, WrongState>) -> T {
    match transition {
        Ok(value) => value,
        Err(wrong) => unreachable!("state {} where {} was checked", wrong.found, wrong.wanted),
    }
}

fn stored<B, Slot>(done: Outcome<B, Slot>) -> Result<(Slot, Timing), Failed<B>> {
    match done? {
        (Done::Stored(slot, _), timing) => Ok((slot, timing)),
        (Done::Loaded(_), _) => unreachable!("the store answered a put with a load"),
    }
}

fn loaded<B, Slot>(done: Outcome<B, Slot>) -> Result<(B, Timing), BackendError> {
    match done.map_err(|failed| failed.error)? {
        (Done::Loaded(block), timing) => Ok((block, timing)),
        (Done::Stored(..), _) => unreachable!("the store answered a get with a put"),
    }
}

/// An error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
