//! One engine configuration in a process: its groups, the spans that they have, and a unit per device.
//!
//! # Access contract
//!
//! * [`Inner`] is behind one lock (`owned.rs`). While it is held the GIL may be released: a copy is waited
//!   for.
//! * Python code that runs while the lock is held must not call back into the hub: it gets an error.
//!   Nothing in here calls user code.
//! * In a forked child every call is an error, and nothing of the parent's is given back (case C25).
//! * Handles and claims may be dropped anywhere: see [`graveyard`](crate::graveyard).
//! * A group lives as long as a claim on one of its spans, or until it is closed or given up.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use ebbtide_core::{Counters, GroupId, LayerId, Pass, PoolId, StoreStats};
use pyo3::prelude::*;

use crate::error::{self, phase};
use crate::graveyard::Graveyard;
use crate::held::Held;
use crate::log::Log;
use crate::owned::{self, Owned};
use crate::picture::Picture;
use crate::ram::Tally;
use crate::torch::Torch;
use crate::unit::Unit;
use crate::view::Place;

/// Which tier was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    File,
    Host,
}

/// What is fixed when a hub is made.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) tier: Tier,
    pub(crate) spill_dir: PathBuf,
    pub(crate) host_bytes: Option<u64>,
    pub(crate) prefetch: usize,
    /// Whether to draw a picture of the run.
    pub(crate) timeline: bool,
}

/// A hub, shared by the Python objects that belong to it.
pub(crate) struct Hub {
    pub(crate) settings: Settings,
    inner: Owned<Inner>,
    pub(crate) graveyard: Arc<Graveyard>,
    pub(crate) log: Log,
    /// If there is to be one.
    pub(crate) picture: Option<Picture>,
    pub(crate) tally: Arc<Tally>,
    /// Nanoseconds that callers waited for copies.
    waited_ns: AtomicU64,
}

/// What is behind the lock.
pub(crate) struct Inner {
    units: Vec<(Place, Box<dyn Unit>)>,
    pub(crate) groups: HashMap<u64, Entry>,
    /// The spans of each storage, and the groups they belong to.
    pub(crate) spans: HashMap<usize, Vec<(Weak<Held>, u64)>>,
    layers: HashMap<String, LayerId>,
    /// Open groups of each pass.
    passes: HashMap<u64, usize>,
    next: u64,
    pub(crate) merged: u64,
    /// Tensors of an accelerator have been seen: memory of the CPU is not the device then.
    accelerated: bool,
    pub(crate) closed: bool,
}

/// One group.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) layer: LayerId,
    pub(crate) pass: u64,
    /// What it has on each unit.
    pub(crate) parts: Vec<(usize, GroupId)>,
    pub(crate) spans: Vec<Weak<Held>>,
    /// In place, in the order of registration. Who asks for proof of sole use says how many references of
    /// Python to the tensor are its own.
    pub(crate) named: Vec<(Arc<Held>, Option<usize>)>,
    /// Claims on its spans that have not ended.
    pub(crate) live: usize,
    /// Storages that are to be swapped by name, and the pool for their copy.
    pub(crate) marks: HashMap<usize, ByName>,
    /// Its phase while it has no parts.
    pub(crate) phase: &'static str,
    /// Somebody has asked for one of its tensors.
    pub(crate) asked: bool,
    /// Set when it closes because nothing that it held is left. Shared with who has the group.
    pub(crate) over: Arc<AtomicBool>,
}

/// How a storage that was named is called in errors, and how it travels.
#[derive(Clone)]
pub(crate) struct ByName {
    pub(crate) label: String,
    pub(crate) pool: Option<PoolId>,
    pub(crate) pack: bool,
}

/// The lock of a hub, held.
pub(crate) struct Locked<'a> {
    inner: owned::Locked<'a, Inner>,
    picture: Option<&'a Picture>,
}

impl Deref for Locked<'_> {
    type Target = Inner;
    fn deref(&self) -> &Inner {
        &self.inner
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        &mut self.inner
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(picture) = self.picture {
            picture.draw(|| [self.live_bytes(), self.counters().1.bytes_held]);
        }
    }
}

impl Hub {
    pub(crate) fn new(settings: Settings) -> Self {
        let inner = Inner {
            units: Vec::new(),
            groups: HashMap::new(),
            spans: HashMap::new(),
            layers: HashMap::new(),
            passes: HashMap::new(),
            next: 0,
            merged: 0,
            accelerated: false,
            closed: false,
        };
        let picture = settings.timeline.then(Picture::default);
        Self {
            settings,
            inner: Owned::new(inner),
            graveyard: Arc::default(),
            log: Log::new(picture.clone()),
            picture,
            tally: Arc::default(),
            waited_ns: AtomicU64::new(0),
        }
    }

    /// Takes the lock, letting go of the GIL while another thread has it, and acts on what was dropped.
    ///
    /// # Errors
    /// This thread has it already: Python code that runs while the engine works calls back into it. Or
    /// this is a forked child.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Locked<'_>> {
        let mut locked = Locked { inner: self.inner.lock(py)?, picture: self.picture.as_ref() };
        locked.bury(py, self);
        Ok(locked)
    }

    /// Whether this process may use it.
    pub(crate) fn is_here(&self) -> bool {
        self.inner.is_here()
    }

    /// Runs something that may wait for the copies of a group, or of several, and counts the time.
    pub(crate) fn waiting<T>(&self, what: &str, run: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = run();
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.fetch_add(nanos, Ordering::Relaxed);
        if let Some(picture) = &self.picture {
            picture.waited(what, started);
        }
        done
    }

    pub(crate) fn waited_ns(&self) -> u64 {
        self.waited_ns.load(Ordering::Relaxed)
    }
}

impl Inner {
    /// Opens a group.
    ///
    /// # Errors
    /// The hub is closed.
    pub(crate) fn open(&mut self, hub: &Hub, name: &str, pass: u64) -> PyResult<u64> {
        if self.closed {
            return Err(phase("the session is closed", "open a new one"));
        }
        let count = u32::try_from(self.layers.len()).unwrap_or(u32::MAX);
        let layer = *self.layers.entry(name.into()).or_insert_with(|| {
            if let Some(picture) = &hub.picture {
                picture.name_layer(name);
            }
            LayerId(count)
        });
        let entry = Entry {
            name: name.into(),
            layer,
            pass,
            parts: Vec::new(),
            spans: Vec::new(),
            named: Vec::new(),
            live: 0,
            marks: HashMap::new(),
            phase: "open",
            asked: false,
            over: Arc::default(),
        };
        self.next += 1;
        self.groups.insert(self.next, entry);
        *self.passes.entry(pass).or_default() += 1;
        Ok(self.next)
    }

    /// A group that is not closed.
    ///
    /// # Errors
    /// It is closed, or was given up.
    pub(crate) fn entry(&mut self, group: u64) -> PyResult<&mut Entry> {
        self.groups.get_mut(&group).ok_or_else(|| {
            phase(
                "the group is closed, or its step was given up",
                "open a new one for the next pass",
            )
        })
    }

    /// The unit of a device, opened when it is first needed.
    pub(crate) fn unit_of(&mut self, hub: &Hub, place: &Place) -> PyResult<usize> {
        if let Some(index) = self.units.iter().position(|(known, _)| known == place) {
            return Ok(index);
        }
        let unit = crate::open::open(hub, place)?;
        self.units.push((place.clone(), unit));
        Ok(self.units.len() - 1)
    }

    /// The unit of a device, if it has been opened.
    pub(crate) fn unit_of_known(&self, place: &Place) -> Option<usize> {
        self.units.iter().position(|(known, _)| known == place)
    }

    /// Bytes of saved tensors that are on the device now.
    pub(crate) fn live_bytes(&self) -> u64 {
        let spans = self.spans.values().flatten().filter_map(|(span, _)| span.upgrade());
        spans.filter(|span| span.on_device()).map(|span| span.range().len() as u64).sum()
    }

    /// Whether tensors there are the engine's business (row T1). Tells an accelerator's unit that its
    /// current stream produces one.
    pub(crate) fn takes(&mut self, py: Python<'_>, hub: &Hub, place: &Place) -> PyResult<bool> {
        if *place == Place::Ram {
            return Ok(!self.accelerated);
        }
        self.accelerated = true;
        let unit = self.unit_of(hub, place)?;
        self.unit(unit).note_producer(py);
        Ok(true)
    }

    pub(crate) fn unit(&mut self, index: usize) -> &mut dyn Unit {
        &mut *self.units[index].1
    }

    /// The part of a group on a unit, opened when it is first needed.
    pub(crate) fn part(&mut self, group: u64, unit: usize) -> PyResult<GroupId> {
        let entry = self.entry(group)?;
        if let Some((_, id)) = entry.parts.iter().find(|(known, _)| *known == unit) {
            return Ok(*id);
        }
        let (layer, pass, name) = (entry.layer, Pass(entry.pass), entry.name.clone());
        let id = self.unit(unit).open(layer, pass, &name);
        self.entry(group)?.parts.push((unit, id));
        Ok(id)
    }

    /// Runs something for each part of a group; all of them, then the first error counts.
    ///
    /// # Errors
    /// The group is closed; or the first that something makes.
    pub(crate) fn each(
        &mut self,
        group: u64,
        mut run: impl FnMut(&mut dyn Unit, GroupId) -> PyResult<()>,
    ) -> PyResult<()> {
        let parts = self.entry(group)?.parts.clone();
        let mut first = Ok(());
        for (unit, id) in parts {
            let done = run(self.unit(unit), id);
            first = first.and(done);
        }
        first
    }

    /// The phase of a group, `closed` for one that is not there.
    pub(crate) fn phase(&self, group: u64) -> &'static str {
        let Some(entry) = self.groups.get(&group) else { return "closed" };
        let first = entry.parts.first().and_then(|(unit, id)| self.units[*unit].1.phase(*id));
        first.unwrap_or(entry.phase)
    }

    /// Forgets a group of which nothing is left. Calls that a schedule makes for it do nothing from now on.
    pub(crate) fn close_by_itself(&mut self, group: u64) {
        if let Some(entry) = self.groups.get(&group) {
            entry.over.store(true, Ordering::Relaxed);
        }
        self.close(group);
    }

    /// Forgets a group: waits for its copies and gives everything back.
    pub(crate) fn close(&mut self, group: u64) {
        let Some(entry) = self.groups.remove(&group) else { return };
        for (unit, id) in &entry.parts {
            self.units[*unit].1.close(*id);
        }
        let named = entry.named.iter().map(|(held, _)| Arc::clone(held));
        Python::attach(|py| {
            entry
                .spans
                .iter()
                .filter_map(Weak::upgrade)
                .chain(named)
                .for_each(|held| held.give_up(py));
        });
        let Some(open) = self.passes.get_mut(&entry.pass) else { return };
        *open -= 1;
        if *open == 0 {
            self.passes.remove(&entry.pass);
            // The order in which backward asked for layers predicts the next one.
            for (_, unit) in &mut self.units {
                if entry.asked { unit.finish_backward() } else { unit.abandon_backward() }
            }
        }
    }

    /// Forgets all groups, or those of a pass.
    pub(crate) fn close_all(&mut self, pass: Option<u64>) {
        let of_pass = |entry: &&Entry| pass.is_none_or(|pass| entry.pass == pass);
        let groups = self.groups.iter().filter(|(_, entry)| of_pass(entry));
        let groups: Vec<u64> = groups.map(|(group, _)| *group).collect();
        for group in groups {
            self.close(group);
        }
    }

    /// Gives all units back.
    pub(crate) fn shut(&mut self) -> Vec<Box<dyn Unit>> {
        self.close_all(None);
        self.closed = true;
        self.units.drain(..).map(|(_, unit)| unit).collect()
    }

    /// Acts on what was dropped: closes groups on which no claim is left, forgets spans that are gone.
    fn bury(&mut self, py: Python<'_>, hub: &Hub) {
        while let Some(dead) = hub.graveyard.take() {
            for group in dead.claims {
                let Some(entry) = self.groups.get_mut(&group) else { continue };
                entry.live -= 1;
                let over = entry.live == 0 && entry.named.is_empty();
                if over && self.phase(group) != "open" {
                    self.close_by_itself(group);
                }
            }
            for storage in dead.storages {
                if let Some(spans) = self.spans.get_mut(&storage) {
                    spans.retain(|(span, _)| span.strong_count() > 0);
                    if spans.is_empty() {
                        self.spans.remove(&storage);
                    }
                }
            }
            give_back_weak(py, &dead.weak);
        }
    }

    /// Totals of all units.
    pub(crate) fn counters(&self) -> (Counters, StoreStats, (u64, u64)) {
        let mut sum = (Counters::default(), StoreStats::default(), (0, 0));
        for (_, unit) in &self.units {
            let (counters, store, host) = unit.counters();
            sum.0.moved_out_bytes += counters.moved_out_bytes;
            sum.0.moved_in_bytes += counters.moved_in_bytes;
            sum.0.missed_prefetches += counters.missed_prefetches;
            sum.0.merged_views += counters.merged_views;
            sum.1.bytes_held += store.bytes_held;
            sum.2.0 += host.0;
            sum.2.1 += host.1;
        }
        sum
    }

    /// Every unit.
    pub(crate) fn units(&mut self) -> impl Iterator<Item = &mut Box<dyn Unit>> {
        self.units.iter_mut().map(|(_, unit)| unit)
    }
}

fn give_back_weak(py: Python<'_>, weak: &[usize]) {
    if weak.is_empty() {
        return;
    }
    let Ok(torch) = Torch::get(py) else { return };
    let Some(free) = &torch.free_weak else { return };
    for reference in weak {
        if let Err(error) = free.bind(py).call1((*reference,)) {
            // Costs the few bytes of a storage object.
            error.write_unraisable(py, None);
        }
    }
}

/// A setting that can't be used, from whoever opens a tier.
pub(crate) fn cannot_open(error: ebbtide_core::BackendError) -> PyErr {
    error::raise_backend(error::Class::Setting, error)
}
