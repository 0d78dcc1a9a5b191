//! What happens in one layer or stage: its forward, and what its backward asks for.

use std::cell::Cell;
use std::collections::BTreeSet;

use ebbtide_core::{CheckpointPolicy, Error, Offered, Saved};

use super::{Flight, Item, Named, Run, Use, Value, stage_name};
use crate::handles::{SimStorage, SimStream};
use crate::play::player::{Played, Stop};
use crate::random::Ratio;

impl Run {
    fn make_values(&mut self) -> Played<Vec<Value>> {
        let mut values = Vec::new();
        for _ in 0..self.below(4) {
            self.values += 1;
            let (bytes, seed) = (1 + self.random.below(4096), self.values);
            let storage = self.world.storage(bytes).map_err(|error| self.stop("storage", error))?;
            self.world.fill(&storage, 0..bytes, seed);
            values.push(Value { storage, bytes, seed, saved: false, kept: false });
        }
        Ok(values)
    }

    /// The forward of a layer, as its hooks see it.
    pub(super) fn layer(&mut self, layer: usize, flight: &mut Flight) -> Played {
        let (name, group) = (self.layers[layer].clone(), self.group(layer));
        let mut values = self.make_values()?;
        let before = flight.uses.last_mut().and_then(|used| used.values.last_mut());
        if let Some(value) = before.filter(|_| self.random.chance(Ratio(1, 5))) {
            // The layer saves its input, too.
            value.kept = true;
            values.push(Value { saved: false, ..value.clone() });
        }
        for mut value in std::mem::take(&mut values) {
            // A layer whose value was refused does without it.
            if self.offer(layer, &group, &mut value)? {
                values.push(value);
            }
        }
        if self.one_in(10) {
            self.manager.release(&group);
            for value in &mut values {
                value.saved = false;
            }
        }
        flight.uses.push(Use { item: Item::Layer(layer), groups: 0, values });
        let (outputs, early) = (self.one_in(5), self.one_in(2));
        if outputs && early {
            self.protect(&group, flight)?;
        }
        let done = self.manager.forward_done(&name);
        self.cope("forward_done", done)?;
        if outputs && !early {
            self.protect(&group, flight)?;
        }
        self.at_most_two(flight)
    }

    fn offer(&mut self, layer: usize, group: &str, value: &mut Value) -> Played<bool> {
        const SWAP: CheckpointPolicy = CheckpointPolicy::MustSwap;
        const SAVE: CheckpointPolicy = CheckpointPolicy::MustSave;
        let policy = [None, None, None, Some(SWAP), Some(SAVE)][self.below(5)];
        let (context, without) = (self.random.below(3), self.one_in(8));
        let is_last = layer + 1 == self.layers.len();
        let stays = without || policy == Some(SAVE) || (is_last && policy != Some(SWAP));
        for _ in 0..=u64::from(self.one_in(6)) {
            let (saved, ask) = (self.whole(value), policy.map(|policy| move || policy));
            let offered = if without {
                self.manager.offer(context, saved, ask)
            } else {
                self.manager.with_current(context, group, |it| it.offer(context, saved, ask))
            };
            match offered {
                Err(error) => return self.cope("offer", Err(error)).map(|()| false),
                Ok(offered) if (offered == Offered::Kept) != stays => {
                    return Err(Stop::Wrong(format!("{group}, {policy:?}: {offered:?}")));
                }
                Ok(_) => value.saved |= !stays,
            }
        }
        Ok(true)
    }

    fn whole(&mut self, value: &Value) -> Saved<SimStorage> {
        let saved = Saved::whole(value.storage.clone(), value.bytes);
        if self.one_in(2) { saved.pack() } else { saved }
    }

    /// Protects a value of this use or of an earlier one.
    fn protect(&mut self, group: &str, flight: &mut Flight) -> Played {
        let has_group = |used: &Use| used.values.iter().any(|value| value.saved);
        if !flight.uses.last().is_some_and(has_group) {
            return Ok(());
        }
        let back = self.below(flight.uses.len().min(3));
        let at = flight.uses.len() - 1 - back;
        let Some(value) = flight.uses[at].values.last_mut() else { return Ok(()) };
        value.kept = true;
        match self.manager.protect(group, [&value.storage]) {
            Ok(_) => self.world.check(&value.storage, 0..value.bytes, value.seed),
            Err(error) => self.cope("protect", Err(error))?,
        }
        Ok(())
    }

    /// After a layer's forward at most two layers are on the device, beside the last one.
    fn at_most_two(&self, flight: &Flight) -> Played {
        let here = |value: &Value| value.saved && !value.kept && !value.storage.is_empty();
        let layers = flight.uses.iter().filter(|used| used.values.iter().any(here));
        let layers: BTreeSet<_> = layers
            .filter_map(|used| match used.item {
                Item::Layer(layer) if layer + 1 < self.layers.len() => Some(layer),
                _ => None,
            })
            .collect();
        if self.faults || layers.len() <= 2 {
            return Ok(());
        }
        Err(Stop::Wrong(format!("on the device are the layers {layers:?}")))
    }

    /// The forward of what is driven by name: what is added late leaves as a group of its own.
    pub(super) fn stage(&mut self, stage: u64, flight: &mut Flight) -> Played {
        let name = stage_name(stage);
        let mut used = Use { item: Item::Stage(stage), groups: 0, values: Vec::new() };
        loop {
            self.manager.ensure(&name);
            for mut value in self.make_values()? {
                let saved = self.whole(&value);
                let added = self.manager.add(&name, saved).map(drop);
                value.saved = added.is_ok();
                self.cope("add", added)?;
                used.values.push(value);
            }
            if self.one_in(6) {
                // The last of its groups stays on the device.
                self.manager.release(&name);
                break;
            }
            let stream = self.own_stream();
            let started = self.manager.start_offload(&name, stream);
            self.cope("start_offload", started)?;
            used.groups += 1;
            if self.one_in(2) {
                break;
            }
        }
        for _ in 0..self.below(used.groups + 1) {
            let waited = self.manager.wait_offload(&name);
            self.cope("wait_offload", waited)?;
        }
        flight.uses.push(used);
        Ok(())
    }

    fn own_stream(&mut self) -> Option<SimStream> {
        self.one_in(3).then_some(self.stream)
    }

    pub(super) fn backward(&mut self, used: &Use) -> Played {
        match used.item {
            Item::Layer(layer) => {
                let name = self.layers[layer].clone();
                self.bring("backward_begins", |manager| manager.backward_begins(&name))
            }
            Item::Stage(stage) => self.stage_backward(&stage_name(stage), used.groups),
        }
    }

    fn stage_backward(&mut self, name: &str, groups: usize) -> Played {
        for _ in 0..groups {
            let stream = self.own_stream();
            match self.manager.start_load(name, stream) {
                // A prefetch was faster, or host memory is full of others: the wait tries again.
                Err(error) if error.is_phase() || error.is_no_room() => {}
                started => self.cope("start_load", started)?,
            }
        }
        for _ in 0..groups {
            let failed = Cell::new(false);
            self.bring("wait_load", |manager| {
                // A name means the newest group: the one whose load has failed is started again first.
                if failed.get() {
                    match manager.start_load(name, None) {
                        Err(error) if !error.is_phase() && !error.is_no_room() => {
                            return Err(error);
                        }
                        _ => {}
                    }
                }
                let done = manager.wait_load(name);
                failed.set(done.is_err());
                done
            })?;
        }
        Ok(())
    }

    /// What must succeed in the end: without faults at once, else when nothing fails any more.
    fn bring(&mut self, call: &str, make: impl Fn(&mut Named) -> Result<(), Error>) -> Played {
        let mut done = make(&mut self.manager);
        for _ in 0..3 {
            if done.is_ok() || !self.tolerant || !self.stubborn || self.world.is_lost() {
                break;
            }
            self.errors += 1;
            self.world.heal();
            done = make(&mut self.manager);
        }
        done.map_err(|error| self.stop(call, error))
    }

    /// An error of a call after which the step can go on.
    fn cope(&mut self, call: &str, done: Result<(), Error>) -> Played {
        match done {
            Err(error) if self.tolerant && self.stubborn => {
                let _ = self.stop(call, error);
                Ok(())
            }
            done => done.map_err(|error| self.stop(call, error)),
        }
    }
}
