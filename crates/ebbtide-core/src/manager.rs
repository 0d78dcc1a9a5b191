//! Groups by name and by layer: what a hook, a pipeline schedule or a user drives (rows M1 to M9).
//!
//! # Names and passes
//!
//! A name stands for a layer. Several groups may have it at a time: one for each pass in flight, and
//! within a pass one for each use of the layer (row M10). A call by name means the pass that was last
//! begun; within it, what is saved goes to the newest group that is still open, and what is loaded is
//! the newest that is not yet home, since backward runs through a pass the other way round.
//!
//! # Quiet and loud
//!
//! Adding, protecting, starting and waiting need a group: a name that has none is an error. Dropping,
//! aborting and asking whether a group is last are quiet, because they also run while cleaning up.

use std::collections::HashMap;

use crate::chain::{Chain, Declared};
use crate::context::Contexts;
use crate::error::{Error, Kind};
use crate::group::Phase;
use crate::mover::{Mover, Saved};
use crate::observe::Event;
use crate::policy::{CheckpointPolicy, TensorPolicy};
use crate::{Engine, GroupId, LayerId, Pass, Registered, TensorId};

/// Named groups on top of an [`Engine`].
#[derive(Debug)]
pub struct Manager<M: Mover> {
    engine: Engine<M>,
    /// The layer that stands for a name.
    layers: HashMap<String, LayerId>,
    /// Open groups by name and pass, oldest first.
    groups: HashMap<(LayerId, Pass), Vec<GroupId>>,
    pass: Pass,
    chain: Chain,
    contexts: Contexts,
    warned_missing: bool,
}

/// What became of a tensor that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// It stays on the device: there is no group, it is the last one, or a policy says so.
    Kept,
    /// A group has it.
    Saved(TensorId, Registered),
}

/// In these phases a group has something to come home, or may have.
const NOT_HOME: [Phase; 4] = [Phase::Open, Phase::Offloading, Phase::Away, Phase::Loading];

/// Makes the outer group current again, however the scope ends.
struct Within<'a, M: Mover> {
    manager: &'a mut Manager<M>,
    context: u64,
    outer: Option<String>,
}

impl<M: Mover> Drop for Within<'_, M> {
    fn drop(&mut self) {
        self.manager.set_current(self.context, self.outer.take());
    }
}

impl<M: Mover> Manager<M> {
    /// A manager without groups.
    pub fn new(engine: Engine<M>) -> Self {
        Self {
            engine,
            layers: HashMap::new(),
            groups: HashMap::new(),
            pass: Pass(0),
            chain: Chain::default(),
            contexts: Contexts::default(),
            warned_missing: false,
        }
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine<M> {
        &mut self.engine
    }

    /// The declared order of layers.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// From now on names mean groups of this pass.
    pub fn begin_pass(&mut self, pass: Pass) {
        self.pass = pass;
    }

    /// The open group of a name in the current pass, made if there is none, or if the one there is has
    /// been offloaded already (rows M1, G10, M10).
    pub fn ensure(&mut self, name: &str) -> GroupId {
        let layer = self.layer(name);
        let groups = self.groups.entry((layer, self.pass)).or_default();
        if let Some(&group) = groups.last().filter(|group| self.engine.is_open(**group)) {
            return group;
        }
        let group = self.engine.open(layer, self.pass);
        groups.push(group);
        group
    }

    fn layer(&mut self, name: &str) -> LayerId {
        if let Some(&layer) = self.layers.get(name) {
            return layer;
        }
        let layer = LayerId(u32::try_from(self.layers.len()).unwrap_or(u32::MAX));
        self.layers.insert(name.into(), layer);
        self.engine.name_layer(layer, name);
        layer
    }

    /// The groups of a name in the current pass, oldest first.
    fn named(&self, name: &str) -> &[GroupId] {
        let groups = self.layers.get(name).and_then(|&layer| self.groups.get(&(layer, self.pass)));
        groups.map(Vec::as_slice).unwrap_or_default()
    }

    /// The newest group of a name in one of these phases.
    fn newest(&self, name: &str, phases: &[Phase]) -> Option<GroupId> {
        let fits =
            |group: &&GroupId| self.engine.phase(**group).is_some_and(|p| phases.contains(&p));
        self.named(name).iter().rev().find(fits).copied()
    }

    /// The same; where no group is in such a phase, the newest one, whose refusal says what is wrong.
    fn find(&self, name: &str, phases: &[Phase]) -> Result<GroupId, Error> {
        let group = self.newest(name, phases).or(self.named(name).last().copied());
        group.ok_or_else(|| Error::new(Kind::UnknownName(name.into())))
    }

    /// Adds a tensor to a group of this name; to a new one, if those that there are have left already
    /// (rows G10, M10).
    ///
    /// # Errors
    /// The name has no group; or as for [`Engine::register`].
    pub fn add(
        &mut self,
        name: &str,
        saved: Saved<M::Storage>,
    ) -> Result<(TensorId, Registered), Error> {
        self.find(name, &[Phase::Open])?;
        let group = self.ensure(name);
        self.engine.register(group, saved)
    }

    /// Keeps what shares a storage with one of these on the device (row G6). Returns how many did.
    ///
    /// # Errors
    /// The name has no group; or a storage can't be brought back.
    pub fn protect<'a>(
        &mut self,
        name: &str,
        storages: impl IntoIterator<Item = &'a M::Storage>,
    ) -> Result<usize, Error>
    where
        M::Storage: 'a,
    {
        self.find(name, &[])?;
        let mut count = 0;
        for storage in storages {
            count += usize::from(self.engine.protect(storage)?);
        }
        Ok(count)
    }

    /// Starts the offload of a group.
    ///
    /// # Errors
    /// The name has no group; or as for [`Engine::start_offload`].
    pub fn start_offload(&mut self, name: &str, stream: Option<M::Stream>) -> Result<(), Error> {
        let group = self.find(name, &[Phase::Open])?;
        self.engine.start_offload_on(group, stream)
    }

    /// Waits for the offload of a group.
    ///
    /// # Errors
    /// The name has no group; or as for [`Engine::wait_offload`].
    pub fn wait_offload(&mut self, name: &str) -> Result<(), Error> {
        let group = self.find(name, &[Phase::Offloading])?;
        self.engine.wait_offload(group)
    }

    /// Starts the load of a group.
    ///
    /// # Errors
    /// The name has no group; or as for [`Engine::start_load`].
    pub fn start_load(&mut self, name: &str, stream: Option<M::Stream>) -> Result<(), Error> {
        let group = self.find(name, &[Phase::Offloading, Phase::Away])?;
        self.engine.start_load_on(group, stream)
    }

    /// Waits for the load of a group. It is forgotten afterwards.
    ///
    /// # Errors
    /// The name has no group; or as for [`Engine::wait_load`].
    pub fn wait_load(&mut self, name: &str) -> Result<(), Error> {
        let group = self.find(name, &[Phase::Loading])?;
        let done = self.engine.wait_load(group);
        if self.engine.phase(group) == Some(Phase::Home) {
            self.forget(name, group);
        }
        done
    }

    fn forget(&mut self, name: &str, group: GroupId) {
        self.engine.close(group);
        let Some(&layer) = self.layers.get(name) else { return };
        if let Some(groups) = self.groups.get_mut(&(layer, self.pass)) {
            groups.retain(|open| *open != group);
            if groups.is_empty() {
                self.groups.remove(&(layer, self.pass));
            }
        }
    }

    /// Drops the records of a group that stayed on the device. Quiet if there is none (row M2); what has
    /// left is not touched.
    pub fn release(&mut self, name: &str) {
        if let Some(group) = self.newest(name, &[Phase::Open]) {
            self.forget(name, group);
        }
    }

    /// Forgets all groups of a name in the current pass; the host waits for their copies and
    /// everything goes back (row M7). Quiet if there is none.
    pub fn abort(&mut self, name: &str) {
        while let Some(group) = self.named(name).last().copied() {
            self.forget(name, group);
        }
    }

    /// Forgets all groups of all names and passes.
    pub fn abort_all(&mut self) {
        for group in self.groups.drain().flat_map(|(_, groups)| groups) {
            self.engine.close(group);
        }
        self.engine.abandon_backward();
    }

    /// How many groups exist (row M9).
    pub fn active_groups(&self) -> usize {
        self.engine.active_groups()
    }

    /// The current group of a thread or task (row M1).
    pub fn current(&self, context: u64) -> Option<&str> {
        self.contexts.current(context)
    }

    /// Sets the current group of a thread or task and returns what it was.
    pub fn set_current(&mut self, context: u64, group: Option<String>) -> Option<String> {
        self.contexts.set(context, group)
    }

    /// Runs something with a group as the current one; the outer one is current again afterwards,
    /// whatever was returned, and after a panic.
    pub fn with_current<T>(
        &mut self,
        context: u64,
        group: &str,
        run: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let outer = self.set_current(context, Some(group.into()));
        let within = Within { manager: self, context, outer };
        run(&mut *within.manager)
    }

    /// Whether a group, or the current one of this context, belongs to the last layer of a chain.
    /// Quiet on unknown names: they are not.
    pub fn is_last(&self, context: u64, name: Option<&str>) -> bool {
        let name = name.or_else(|| self.current(context));
        name.is_some_and(|name| self.chain.is_last_group(name))
    }

    /// Declares that `second` runs right after `first` (row M3).
    ///
    /// # Errors
    /// As for [`Chain::follow`].
    pub fn follow(&mut self, first: &str, second: &str) -> Result<Declared, Error> {
        let declared = self.chain.follow(first, second)?;
        if declared == Declared::Itself {
            self.engine.tell(&Event::FollowsItself { layer: first.into() });
        }
        Ok(declared)
    }

    /// Offers a tensor to the current group of a context. The policy is asked once, whether or not
    /// there is a group (rows W1, W2). Without a group the tensor is kept, with a warning once for the
    /// life of the manager (row M8); in the last group of a chain it is kept unless the policy says it
    /// must be swapped (row G9). What is kept stays on the device, even if an earlier group has its
    /// storage (row G6).
    ///
    /// # Errors
    /// The policy's answer makes no sense for a tensor; or as for [`Engine::register`].
    pub fn offer(
        &mut self,
        context: u64,
        saved: Saved<M::Storage>,
        policy: Option<impl FnOnce() -> CheckpointPolicy>,
    ) -> Result<Offered, Error> {
        let answer = policy.map(|ask| TensorPolicy::try_from(ask())).transpose()?;
        if answer == Some(TensorPolicy::Keep) {
            return self.keep(&saved);
        }
        let Some(name) = self.current(context).map(str::to_string) else {
            if !std::mem::replace(&mut self.warned_missing, true) {
                self.engine.tell(&Event::NoGroup);
            }
            return self.keep(&saved);
        };
        if self.chain.is_last_group(&name) && answer != Some(TensorPolicy::Swap) {
            return self.keep(&saved);
        }
        let group = self.ensure(&name);
        let (tensor, registered) = self.engine.register(group, saved)?;
        Ok(Offered::Saved(tensor, registered))
    }

    /// What stays must not leave with a group that has its storage, too.
    fn keep(&mut self, saved: &Saved<M::Storage>) -> Result<Offered, Error> {
        self.engine.keep_here(saved)?;
        Ok(Offered::Kept)
    }

    /// A layer's forward is over: its group starts to leave, and the layer before it has left when this
    /// returns. So at most two layers are on the device at a time.
    ///
    /// # Errors
    /// As for [`Engine::start_offload`] and [`Engine::wait_offload`].
    pub fn forward_done(&mut self, layer: &str) -> Result<(), Error> {
        let group = self.chain.group(layer).map(str::to_string);
        let previous = self.chain.previous(layer).and_then(|previous| self.chain.group(previous));
        let previous = previous.map(str::to_string);
        // The last layer has a group only if a policy has asked for it.
        if let Some(group) = group.and_then(|group| self.newest(&group, &[Phase::Open])) {
            self.engine.start_offload(group)?;
        }
        let Some(previous) = previous else { return Ok(()) };
        // The layer may have been used more than once.
        while let Some(group) = self.newest(&previous, &[Phase::Offloading]) {
            self.engine.wait_offload(group)?;
        }
        Ok(())
    }

    /// A layer's backward begins: the layer before it starts to come back, and its own group is home
    /// when this returns. Its records are dropped.
    ///
    /// # Errors
    /// As for [`Engine::need`]. A load of the layer before that can't be started is no error: it is
    /// loaded on demand.
    pub fn backward_begins(&mut self, layer: &str) -> Result<(), Error> {
        let own = self.chain.group(layer).map(str::to_string);
        let own = own.and_then(|name| {
            let group = self.newest(&name, &NOT_HOME)?;
            Some((name, group))
        });
        let Some((name, group)) = own else { return Ok(()) };
        self.engine.prefetch(group);
        let done = self.engine.need(group);
        if self.engine.phase(group) == Some(Phase::Home) {
            self.forget(&name, group);
        }
        done
    }
}
