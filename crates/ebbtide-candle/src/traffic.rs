//! One step under a schedule: what leaves after which layer, what comes back before which, and the
//! two gates on bytes that hold both inside the budget.
//!
//! Estimates can be wrong in both directions and cost time only: an operation waits for the oldest
//! offload on its way, never for a clock, and a load that was not started in time is started when
//! its layer needs it. Where a step departs from what was traced (another order of backward, a layer
//! that saves other storages) the gates stand aside and everything that follows is moved at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ebbtide_core::gate::Gate;
use ebbtide_core::{GroupId, LayerId, Op, Pass, Phase, Policy, Schedule};

use crate::error::Error;
use crate::record::{Recording, StorageNote};
use crate::swap::Inner;

/// A schedule and the step that it was made for.
#[derive(Debug)]
pub(crate) struct Route {
    schedule: Schedule,
    /// By layer: what it saved when it was traced.
    storages: Vec<Vec<StorageNote>>,
    /// By layer: its moves, as indices into those of the schedule.
    moves: Vec<Vec<usize>>,
}

impl Route {
    /// `None` if the schedule is for another model than the recording.
    pub(crate) fn new(schedule: Schedule, recording: &Recording) -> Option<Self> {
        let layers = recording.layers.len();
        let mut moves = vec![Vec::new(); layers];
        for (index, step) in schedule.moves.iter().enumerate() {
            recording.layers.get(step.layer)?.storages.get(step.storage)?;
            moves[step.layer].push(index);
        }
        let fits = schedule.recompute.len() == layers && schedule.minimal.len() == 3 * layers;
        let storages = recording.layers.iter().map(|layer| layer.storages.clone()).collect();
        fits.then_some(Self { schedule, storages, moves })
    }

    fn layers(&self) -> usize {
        self.storages.len()
    }
}

/// Where the books on one step under a schedule are.
#[derive(Debug)]
pub(crate) struct Traffic {
    route: Arc<Route>,
    gate: Gate,
    /// By move of the schedule: the storage's own group, from its layer's forward to its backward.
    groups: Vec<Option<GroupId>>,
    /// Moves on their way out, the oldest first.
    leaving: VecDeque<usize>,
    /// The first move whose load has not started.
    next: usize,
    /// The step is not the one that was planned for.
    lost: bool,
}

impl Traffic {
    pub(crate) fn new(route: &Arc<Route>) -> Self {
        Self {
            route: Arc::clone(route),
            gate: route.schedule.gate(),
            groups: vec![None; route.schedule.moves.len()],
            leaving: VecDeque::new(),
            next: 0,
            lost: false,
        }
    }

    /// Whether the step has departed from its plan.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// What the plan says of a layer. What is left of one that departs from it is moved.
    pub(crate) fn policy(&self, layer: usize) -> Policy {
        match self.route.schedule.recompute.get(layer) {
            Some(_) if self.lost => Policy::Swap,
            Some(true) => Policy::Recompute,
            Some(false) if self.route.moves[layer].is_empty() => Policy::Keep,
            _ => Policy::Swap,
        }
    }

    /// Compares what a layer has saved with what was planned for.
    pub(crate) fn check(&mut self, layer: usize, found: &[StorageNote]) {
        let same = |known: &StorageNote, found: &StorageNote| {
            (known.owned, known.bytes, known.dead) == (found.owned, found.bytes, found.dead)
        };
        let known = self.route.storages.get(layer);
        let fits = known.is_some_and(|known| {
            known.len() == found.len() && known.iter().zip(found).all(|(a, b)| same(a, b))
        });
        self.lost |= !fits;
    }

    /// Opens a group for each storage of the layer that moves. By index among the layer's own.
    pub(crate) fn open(
        &mut self,
        inner: &mut Inner,
        place: usize,
        layer: LayerId,
        pass: Pass,
    ) -> Vec<(usize, GroupId)> {
        let mut opened = Vec::new();
        for &index in &self.route.moves[place] {
            let group = inner.engine.open(layer, pass);
            self.groups[index] = Some(group);
            let storage = self.route.schedule.moves[index].storage;
            opened.push((self.route.storages[place][storage].owned, group));
        }
        opened
    }

    /// The layer's storages leave, and the next operation waits for room.
    pub(crate) fn after_forward(&mut self, inner: &mut Inner, place: usize) -> Result<(), Error> {
        for at in 0..self.route.moves.get(place).map_or(0, Vec::len) {
            let index = self.route.moves[place][at];
            if let Some(group) = self.groups[index] {
                inner.engine.start_offload(group)?;
                self.gate.offload_pending(self.bytes(index));
                self.leaving.push_back(index);
            }
        }
        let layers = self.route.layers();
        if place + 1 < layers {
            return self.reach(inner, Op::new(Phase::Forward, place + 1));
        }
        self.reach_backward(inner, layers.saturating_sub(1))
    }

    /// The next operation is the second forward of the layer, or its backward.
    pub(crate) fn reach_backward(&mut self, inner: &mut Inner, place: usize) -> Result<(), Error> {
        let again = self.route.schedule.recompute.get(place) == Some(&true);
        let phase = if again { Phase::Recompute } else { Phase::Backward };
        self.reach(inner, Op::new(phase, place))
    }

    /// Waits until `op` may allocate, then starts the loads that may start.
    pub(crate) fn reach(&mut self, inner: &mut Inner, op: Op) -> Result<(), Error> {
        if self.lost || op.layer >= self.route.layers() {
            return Ok(());
        }
        let index = op.index(self.route.layers());
        if index < self.gate.op() {
            self.lost = true; // Another order of backward: loads come on demand.
            return Ok(());
        }
        self.land(inner)?;
        self.gate.reach(index);
        while !self.gate.may_start() {
            let Some(oldest) = self.leaving.pop_front() else { break };
            let since = Instant::now();
            self.landed(inner, oldest)?;
            inner.waited("wait for offload", since);
        }
        self.start_loads(inner)
    }

    fn bytes(&self, index: usize) -> u64 {
        self.route.schedule.moves[index].load.bytes
    }

    /// Takes the offloads off the books that are complete.
    fn land(&mut self, inner: &mut Inner) -> Result<(), Error> {
        let mut at = 0;
        while at < self.leaving.len() {
            let index = self.leaving[at];
            let group = self.groups[index];
            let complete = match group {
                Some(group) => inner.engine.offload_is_complete(group),
                None => true,
            };
            if complete {
                self.leaving.remove(at);
                self.landed(inner, index)?;
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Waits for one offload; its bytes are free then.
    fn landed(&mut self, inner: &mut Inner, index: usize) -> Result<(), Error> {
        if let Some(group) = self.groups[index] {
            inner.engine.wait_offload(group)?;
        }
        self.gate.offload_done(self.bytes(index));
        Ok(())
    }

    /// Starts loads in their order, as far as triggers and bytes allow.
    fn start_loads(&mut self, inner: &mut Inner) -> Result<(), Error> {
        while let Some(planned) = self.route.schedule.moves.get(self.next) {
            // One whose layer has had its backward, or was never run, is over.
            let Some(group) = self.groups[self.next] else {
                let first_use = planned.load.first_use;
                if first_use > self.gate.op() {
                    break;
                }
                self.next += 1;
                continue;
            };
            if self.leaving.contains(&self.next) || !self.gate.may_load(&planned.load) {
                break;
            }
            inner.engine.start_load(group)?;
            self.gate.load_started(&planned.load);
            self.next += 1;
        }
        Ok(())
    }

    /// Brings a layer's storages home. Whether one that is not on its way yet was missed.
    pub(crate) fn come_home(&mut self, inner: &mut Inner, place: usize) -> Result<(), Error> {
        let moves = self.route.moves.get(place).cloned().unwrap_or_default();
        let late = |&index: &usize| index >= self.next && self.groups[index].is_some();
        inner.missed += u64::from(!self.lost && moves.iter().any(late));
        let since = Instant::now();
        // All are started before the first one is waited for.
        for &index in &moves {
            let Some(group) = self.groups[index].filter(|_| index >= self.next) else { continue };
            if let Some(at) = self.leaving.iter().position(|&other| other == index) {
                self.leaving.remove(at);
                self.landed(inner, index)?;
            }
            inner.engine.start_load(group)?;
        }
        for &index in &moves {
            if let Some(group) = self.groups[index] {
                inner.engine.need(group)?;
            }
        }
        inner.waited("wait for load", since);
        // They count as part of the operation now, whether they were early or late.
        if let Some(last) = moves.iter().max() {
            self.next = self.next.max(last + 1);
        }
        if !self.lost {
            self.land(inner)?;
            self.start_loads(inner)?;
        }
        Ok(())
    }

    /// A layer's backward is over.
    pub(crate) fn close(&mut self, inner: &mut Inner, place: usize) {
        for &index in self.route.moves.get(place).into_iter().flatten() {
            if let Some(group) = self.groups[index].take() {
                inner.engine.close(group);
            }
        }
    }

    /// The step is over, however it ended.
    pub(crate) fn close_all(&mut self, inner: &mut Inner) {
        for group in self.groups.iter_mut().filter_map(Option::take) {
            inner.engine.close(group);
        }
    }
}
