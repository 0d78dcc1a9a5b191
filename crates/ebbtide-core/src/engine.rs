//! Groups and what drives them: offload, load, prefetch, protection, abort, and the counters.
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
//! | `offloading` | `device`, `d2h` | no |
//! | `away` | `device` (kept, or an offload that failed), `host`, `h2d` (a wait that failed) | no |
//! | `loading` | `device`, `host` (a load that could not start), `h2d` | no |
//! | `home` | none: they are dropped, with their identities | no |
//!
//! [`Engine::close`] is allowed in every phase: it waits for what is in flight, gives everything back
//! and forgets the group. It is the end of a normal backward and of an abandoned step alike, so a
//! failed step has no path of its own that could leak.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::backend::{Device, Facts, Store, StoreStats};
use crate::direct::Direct;
use crate::error::{Error, Kind};
use crate::group::{Change, Group, GroupId, Phase, Registered, TensorId, number};
use crate::label::{Label, Labels};
use crate::mark::{Mark, hit};
use crate::mover::{Freight, Mover, Saved};
use crate::observe::{Event, Observer};
use crate::order::Order;
use crate::owners::{Held, Owners};
use crate::{LayerId, Pass};

/// What is fixed when an engine is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many groups ahead of the one in backward are loaded (row M12). 0 loads every group on
    /// demand.
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
    /// Views that were saved together with others of the same storage.
    pub merged_views: u64,
}

/// The engine of one model on one device.
///
/// It is driven from one thread at a time (`&mut self`); copies run beside it between the start and
/// the wait of a group.
pub struct Engine<M: Mover> {
    pub(crate) config: Config,
    pub(crate) mover: M,
    pub(crate) groups: Vec<Group<M>>,
    /// Slots of `groups` that no group uses.
    vacant: Vec<u32>,
    pub(crate) owners: Owners,
    next_serial: u64,
    pub(crate) order: Order,
    counters: Counters,
    pub(crate) labels: Labels,
    layer_names: HashMap<LayerId, String>,
    /// Layers whose exact repeats have been warned of.
    warned: HashSet<LayerId>,
    pub(crate) observer: Box<dyn Observer + Send>,
}

impl<M: Mover> fmt::Debug for Engine<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("config", &self.config)
            .field("groups", &self.active_groups())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

/// A group's name as errors give it.
struct Name<'a> {
    layer: LayerId,
    pass: Pass,
    names: &'a HashMap<LayerId, String>,
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names.get(&self.layer) {
            Some(name) => write!(f, "{name} pass {}", self.pass.0),
            None => write!(f, "layer {} pass {}", self.layer.0, self.pass.0),
        }
    }
}

pub(crate) fn unknown(group: GroupId) -> Error {
    hit(Mark::UnknownGroup);
    Error::new(Kind::UnknownGroup(group.serial))
}

pub(crate) fn find<M: Mover>(groups: &mut [Group<M>], id: GroupId) -> Result<&mut Group<M>, Error> {
    let group = groups.get_mut(id.slot as usize).filter(|group| group.id == Some(id));
    group.ok_or_else(|| unknown(id))
}

impl<M: Mover> Engine<M> {
    /// An engine without groups, whose events nobody observes.
    pub fn new(config: Config, mover: M) -> Self {
        Self {
            config,
            mover,
            groups: Vec::new(),
            vacant: Vec::new(),
            owners: Owners::default(),
            next_serial: 0,
            order: Order::default(),
            counters: Counters::default(),
            labels: Labels::default(),
            layer_names: HashMap::new(),
            warned: HashSet::new(),
            observer: Box::new(()),
        }
    }

    /// Sends every later event to `observer`.
    pub fn observe(&mut self, observer: impl Observer + Send + 'static) {
        self.observer = Box::new(observer);
    }

    /// The label of a tensor's name.
    pub fn label(&mut self, name: &str) -> Label {
        self.labels.intern(name)
    }

    /// What errors call the groups of a layer, instead of its number.
    pub fn name_layer(&mut self, layer: LayerId, name: impl Into<String>) {
        self.layer_names.insert(layer, name.into());
    }

    /// Opens a group for one layer in one pass (row M10). The same layer may have any number of
    /// groups, in one pass or in several.
    pub fn open(&mut self, layer: LayerId, pass: Pass) -> GroupId {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.groups.push(Group::new());
            number(self.groups.len() - 1)
        });
        let id = GroupId { serial: self.next_serial, slot };
        self.next_serial += 1;
        self.groups[slot as usize].open(id, layer, pass);
        id
    }

    fn require(
        &mut self,
        id: GroupId,
        wanted: Phase,
        call: &'static str,
    ) -> Result<&mut Group<M>, Error> {
        let group = find(&mut self.groups, id)?;
        let name = Name { layer: group.layer, pass: group.pass, names: &self.layer_names };
        group.require(wanted, call, name)?;
        Ok(group)
    }

    pub(crate) fn phase(&self, id: GroupId) -> Option<Phase> {
        self.groups.get(id.slot as usize).filter(|g| g.id == Some(id)).map(|g| g.phase)
    }

    /// Lends a group to the mover.
    pub(crate) fn lend<T>(
        &mut self,
        id: GroupId,
        call: impl FnOnce(&mut M, &mut Freight<'_, M>) -> T,
    ) -> Result<T, Error> {
        let group = find(&mut self.groups, id)?;
        let name = Name { layer: group.layer, pass: group.pass, names: &self.layer_names };
        let mut freight = Freight {
            id,
            layer: group.layer,
            name: &name,
            labels: &self.labels,
            records: &mut group.records,
            cargo: &mut group.cargo,
            counters: &mut self.counters,
            observer: &mut *self.observer,
        };
        Ok(call(&mut self.mover, &mut freight))
    }

    /// Adds a tensor to a group. Any mix of tensors of one storage is moved once (row T13). A storage
    /// that another group has is in use outside of that group: it stays on the device, or is brought
    /// back to it, for both (row G6).
    ///
    /// # Errors
    /// The group is unknown, or its offload has been started (row G10); the tensor reaches beyond its
    /// storage; or a storage of another group can't be brought back, or has been freed when only other
    /// bytes of it were saved.
    pub fn register(
        &mut self,
        group: GroupId,
        saved: Saved<M::Storage>,
    ) -> Result<(TensorId, Registered), Error> {
        self.require(group, Phase::Open, "register")?;
        let key = self.mover.key(&saved.storage);
        let held = self.owners.look(key, group);
        if let Held::Elsewhere((other, index)) = held {
            self.protect_record(other, index, &saved.range)?;
        }
        let facts = self.mover.facts(&saved.storage);
        self.fits(&saved, facts)?;
        let entry = find(&mut self.groups, group)?;
        let tensor = TensorId { group, index: number(entry.tensors.len()) };
        let registered = match held {
            Held::Here(index) => entry.repeat(index, saved, facts),
            Held::Free => {
                let index = entry.add(key, saved, facts, self.mover.is_kept(key));
                self.owners.add(key, (group, index));
                Registered::New
            }
            Held::Elsewhere((owner, _)) => {
                hit(Mark::Shared);
                let index = entry.add(key, saved, facts, true);
                self.owners.add(key, (group, index));
                Registered::Shared(owner)
            }
        };
        self.counters.merged_views += u64::from(registered == Registered::Merged);
        Ok((tensor, registered))
    }

    /// Starts moving every storage of the group out.
    ///
    /// # Errors
    /// The group is unknown or not open (row G10), or a tensor was resized or modified in place since
    /// it was registered (row T5): nothing has happened. Or a copy can't be started; then every
    /// storage whose copy was not started is on the device, untouched (row G4), and the group can
    /// still be waited for or closed.
    pub fn start_offload(&mut self, group: GroupId) -> Result<(), Error> {
        self.start_offload_on(group, None)
    }

    /// [`Engine::start_offload`], with the copies on a stream of the caller's choice (row M2).
    ///
    /// # Errors
    /// As for [`Engine::start_offload`].
    pub fn start_offload_on(
        &mut self,
        group: GroupId,
        stream: Option<M::Stream>,
    ) -> Result<(), Error> {
        self.require(group, Phase::Open, "start_offload")?;
        self.unchanged(group)?;
        self.warn_of_repeats(group);
        find(&mut self.groups, group)?.phase = Phase::Offloading;
        self.with_room(group, |engine| {
            engine.lend(group, |mover, freight| mover.start_offload(freight, stream))?
        })
    }

    /// A tensor lies within its storage, whose size is the one that was told.
    fn fits(&self, saved: &Saved<M::Storage>, facts: Option<Facts>) -> Result<(), Error> {
        let bytes = facts.map_or(saved.bytes, |facts| facts.bytes);
        if saved.range.end <= saved.bytes && bytes == saved.bytes {
            return Ok(());
        }
        let label = self.labels.name(saved.label).to_string();
        let (range, told) = (saved.range.clone(), saved.bytes);
        Err(Error::new(Kind::DoesNotFit { label, range, told, bytes }))
    }

    fn unchanged(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        let mut changes = entry.tensors.iter().filter_map(|tensor| {
            let change = entry.changed(&self.mover, tensor)?;
            Some((tensor.label, change))
        });
        let Some((label, change)) = changes.next() else { return Ok(()) };
        hit(Mark::Changed);
        let name = Name { layer: entry.layer, pass: entry.pass, names: &self.layer_names };
        Err(changed(&name, self.labels.name(label), change))
    }

    fn warn_of_repeats(&mut self, group: GroupId) {
        let Ok(entry) = find(&mut self.groups, group) else { return };
        let (layer, count) = (entry.layer, entry.repeats);
        if count > 0 && self.warned.insert(layer) {
            hit(Mark::Repeats);
            let name = Name { layer, pass: entry.pass, names: &self.layer_names }.to_string();
            self.observer.event(&Event::Repeats { group, name, count });
        }
    }

    /// Lets the device memory of every storage of the group go. On a device with streams the compute
    /// stream waits for the copies and the host goes on; on others the host waits.
    ///
    /// # Errors
    /// The group is unknown or its offload was not started or is already waited for (row G5). Copies
    /// failed, or a tensor was modified in place meanwhile (row T5): the first error is returned, and
    /// each such storage is on the device again.
    pub fn wait_offload(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = self.require(group, Phase::Offloading, "wait_offload")?;
        entry.phase = Phase::Away;
        let modified = self.keep_modified(group);
        let moved = self.lend(group, M::wait_offload)?;
        moved.and(modified)
    }

    /// Keeps what was modified while its copy was under way: nobody knows which bytes the copy has.
    fn keep_modified(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        let mut first = Ok(());
        for tensor in 0..entry.tensors.len() {
            let tensor = &entry.tensors[tensor];
            let Some(change) = entry.changed(&self.mover, tensor) else { continue };
            hit(Mark::ChangedInOffload);
            let record = tensor.record;
            let name = Name { layer: entry.layer, pass: entry.pass, names: &self.layer_names };
            first = first.and(Err(changed(&name, self.labels.name(tensor.label), change)));
            entry.records[record as usize].kept = true;
        }
        first
    }

    /// Starts bringing the group back. An offload still under way is finished first (row G7).
    ///
    /// # Errors
    /// The group is unknown, or neither away nor on its way out; its offload failed; or a load can't
    /// be started, in which case the bytes stay away and [`Engine::need`] tries again.
    pub fn start_load(&mut self, group: GroupId) -> Result<(), Error> {
        self.start_load_on(group, None)
    }

    /// [`Engine::start_load`], with the copies on a stream of the caller's choice (row M2).
    ///
    /// # Errors
    /// As for [`Engine::start_load`].
    pub fn start_load_on(
        &mut self,
        group: GroupId,
        stream: Option<M::Stream>,
    ) -> Result<(), Error> {
        if self.phase(group) == Some(Phase::Offloading) {
            self.wait_offload(group)?;
        }
        self.require(group, Phase::Away, "start_load")?.phase = Phase::Loading;
        self.lend(group, |mover, freight| mover.start_load(freight, stream))?
    }

    /// Makes every storage of the group usable again and drops its records and identities.
    ///
    /// # Errors
    /// The group is unknown or its load was not started or is already waited for (row G8). Copies
    /// failed: the first error is returned, the bytes stay away and so does the group, so that the
    /// load can be tried again (row T10). Or everything is home, but a tensor was modified in place
    /// since it was registered (row T5): the group can only be closed.
    pub fn wait_load(&mut self, group: GroupId) -> Result<(), Error> {
        self.require(group, Phase::Loading, "wait_load")?;
        let modified = self.unchanged(group);
        let mut done = self.with_room(group, |engine| engine.lend(group, M::wait_load)?);
        if done.is_ok() && find(&mut self.groups, group)?.is_travelling() {
            // The load could be started for a part of the group only.
            done = self.with_room(group, |engine| {
                engine.lend(group, |mover, freight| {
                    mover.start_load(freight, None).and_then(|()| mover.wait_load(freight))
                })?
            });
        }
        let entry = find(&mut self.groups, group)?;
        // What was modified stays an error, however often it is asked for.
        if entry.is_travelling() || modified.is_err() {
            entry.phase = Phase::Away;
        } else {
            entry.phase = Phase::Home;
            self.forget_records(group)?;
        }
        done.and(modified)
    }

    /// Backward asks for this group now: afterwards every storage of it is on the device. What is
    /// away and not yet on its way back is loaded on demand and counted as a missed prefetch (rows T3,
    /// M11). Records that never left are dropped (row G9). Also learns the order for the next step.
    ///
    /// # Errors
    /// The group is unknown; a copy failed; or a tensor that stayed on the device was modified in
    /// place since it was registered (row T5).
    pub fn need(&mut self, group: GroupId) -> Result<(), Error> {
        let entry = find(&mut self.groups, group)?;
        let (layer, pass, phase) = (entry.layer, entry.pass, entry.phase);
        if matches!(phase, Phase::Offloading | Phase::Away) && entry.is_travelling() {
            hit(Mark::Missed);
            self.counters.missed_prefetches += 1;
            self.observer.event(&Event::Missed { group, layer, pass });
        }
        if phase == Phase::Offloading {
            self.wait_offload(group)?;
        }
        let entry = find(&mut self.groups, group)?;
        if entry.is_travelling() {
            if entry.phase == Phase::Away {
                entry.phase = Phase::Loading;
                self.with_room(group, |engine| {
                    engine.lend(group, |mover, freight| mover.start_load(freight, None))?
                })?;
            }
            self.wait_load(group)?;
        } else {
            self.unchanged(group)?;
            find(&mut self.groups, group)?.phase = Phase::Home;
            // The mover may still hold what failed copies left.
            self.forget_records(group)?;
        }
        if phase != Phase::Home {
            self.order.record(layer);
        }
        Ok(())
    }

    /// Gives back what the mover holds of a group, and drops its records.
    fn forget_records(&mut self, group: GroupId) -> Result<(), Error> {
        let ended = self.lend(group, M::abandon)?;
        let (entry, mover) = (find(&mut self.groups, group)?, &mut self.mover);
        entry.drop_records(&mut self.owners, |storage| {
            if !ended {
                mover.keep(storage);
            }
        });
        Ok(())
    }

    /// Forgets a group in whatever phase: waits for its copies, gives everything back (rows P3, M7).
    /// Storages that were away stay empty, or hold their bytes if their load was under way; their owner
    /// drops them or has them back already. Does nothing for a group that is not open (row M2).
    pub fn close(&mut self, group: GroupId) {
        if self.forget_records(group).is_err() {
            return;
        }
        let entry = &mut self.groups[group.slot as usize];
        (entry.id, entry.phase) = (None, Phase::Home);
        self.vacant.push(group.slot);
    }

    /// A backward is complete: the order it took predicts the next one.
    pub fn finish_backward(&mut self) {
        self.order.finish();
        self.mover.end_of_step();
    }

    /// A backward was given up: the order it took says nothing.
    pub fn abandon_backward(&mut self) {
        self.order.abandon();
    }

    /// Number of groups that are open now (row M9).
    pub fn active_groups(&self) -> usize {
        self.groups.len() - self.vacant.len()
    }

    /// Totals since the engine was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What has been moved.
    pub fn store_stats(&self) -> StoreStats {
        self.mover.stats()
    }

    /// What moves the bytes.
    pub fn mover(&self) -> &M {
        &self.mover
    }

    /// What moves the bytes, for what the front end does with it beside the engine.
    pub fn mover_mut(&mut self) -> &mut M {
        &mut self.mover
    }

    /// Tells the observer about something beside the engine.
    pub(crate) fn tell(&mut self, event: &Event) {
        self.observer.event(event);
    }

    /// Whether records may still be added to a group.
    pub(crate) fn is_open(&self, group: GroupId) -> bool {
        self.phase(group) == Some(Phase::Open)
    }
}

impl<D: Device, S: Store<D::Block>> Engine<Direct<D, S>> {
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
        let block = self.mover.device_mut().detach(storage).map_err(|cause| {
            let label = label.into();
            Error::caused_by(Kind::Drop { label, bytes }, cause)
        })?;
        drop(block);
        self.counters.dropped_bytes += bytes;
        Ok(())
    }
}

impl<M: Mover> Drop for Engine<M> {
    /// Gives back what is still open, so that every copy has ended and every buffer is home.
    fn drop(&mut self) {
        for slot in 0..self.groups.len() {
            if let Some(id) = self.groups[slot].id {
                self.close(id);
            }
        }
    }
}

fn changed(group: &Name<'_>, label: &str, change: Change) -> Error {
    let (group, label) = (group.to_string(), label.to_string());
    Error::changed(Kind::Changed {
        group,
        label,
        what: change.what,
        then: change.then,
        now: change.now,
    })
}

// The facts of a storage are compared on the hot path: they must stay two plain numbers.
const _: () = assert!(size_of::<Facts>() == 16);
