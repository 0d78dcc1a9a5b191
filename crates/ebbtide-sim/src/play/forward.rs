//! The forward of one layer: it saves, offloads, and waits for the layer before it.

use ebbtide_core::{GroupId, LayerId, Pass, Saved};

use crate::handles::SimStorage;
use crate::play::draw::HALF;
use crate::play::plan::{Misuse, Moment, Source, View};
use crate::play::player::{Live, Played, Player, Stop, text};

impl Player<'_> {
    pub(super) fn forward(&mut self, visit: usize) -> Played {
        let plan = self.visit(visit);
        let pass = Pass(self.first_pass + plan.pass);
        let group = self.engine().open(LayerId(plan.layer), pass);
        let live = Live { group, tensors: Vec::new(), started: false, waited: false };
        self.live.insert(visit, live);
        if plan.busy_ns > 0 {
            self.world.busy(self.world.compute(), plan.busy_ns);
        }
        for value in 0..plan.values.len() {
            self.save(visit, value)?;
        }
        self.protect_at(visit, Moment::Before)?;
        self.misuse_before(visit)?;
        if let Some(closed) = self.last_closed {
            // As careless cleaning up does. The number is another group's place by now.
            self.engine().close(closed);
        }
        if let Some((Moment::Before, value)) = plan.change {
            return self.changed_before(visit, value);
        }
        self.start(visit)?;
        self.misuse_after(visit)?;
        if let Some((Moment::During, value)) = plan.change {
            return self.changed_during(visit, value);
        }
        self.protect_at(visit, Moment::During)?;
        for value in (0..plan.values.len()).filter(|&value| plan.values[value].dropped) {
            self.values.remove(&(visit, value));
        }
        for &bytes in &plan.pressure {
            let done = self.oracle.scratch(bytes);
            done.map_err(|error| self.failed("other work", &error))?;
        }
        for &earlier in &plan.waits_for {
            self.wait(earlier)?;
        }
        Ok(())
    }

    /// Makes or finds a storage, and registers its tensors.
    fn save(&mut self, visit: usize, value: usize) -> Played {
        let (plan, bytes) = (self.visit(visit).values[value].clone(), self.bytes(visit, value));
        let found = match plan.source {
            Source::Fresh(_) => None,
            Source::Table(table) => Some(self.tables[table].clone()),
            Source::Of(visit, value) => self.values.get(&(visit, value)).cloned(),
        };
        let fresh = found.is_none();
        let storage = if let Some(storage) = found {
            storage
        } else {
            let made = self.world.storage(bytes);
            made.map_err(|error| self.failed("a storage", &error))?
        };
        // Some operations save a tensor before their kernel fills it.
        let late = fresh && self.random.chance(HALF);
        if fresh && !late {
            self.oracle.fill(&storage, bytes);
        }
        for view in &plan.views {
            self.register(visit, value, &storage, view)?;
        }
        if late {
            self.oracle.fill(&storage, bytes);
        }
        if !fresh {
            // It may have been away a moment ago.
            self.oracle.check(&storage, 0..bytes);
        }
        self.values.insert((visit, value), storage);
        Ok(())
    }

    fn saved(
        &mut self,
        visit: usize,
        value: usize,
        storage: &SimStorage,
        view: &View,
    ) -> Saved<SimStorage> {
        let (plan, bytes) = (&self.visit(visit).values[value], self.bytes(visit, value));
        let label = self.engine().label(&format!("visit {visit} value {value}"));
        let range = view.range.start..view.range.end.min(bytes);
        let mut saved = Saved::whole(storage.clone(), bytes).element(plan.element).label(label);
        if range != (0..bytes) {
            saved = saved.slice(range);
        }
        if view.strided {
            saved = saved.strided();
        }
        if plan.pack {
            saved = saved.pack();
        }
        match plan.pool {
            Some(pool) => saved.pool(self.pools[pool]),
            None => saved,
        }
    }

    fn register(
        &mut self,
        visit: usize,
        value: usize,
        storage: &SimStorage,
        view: &View,
    ) -> Played {
        let saved = self.saved(visit, value, storage, view);
        let group = self.group(visit);
        let registered = self.engine().register(group, saved);
        let (tensor, _) = registered.map_err(|error| self.failed("register", &text(&error)))?;
        if let Some(live) = self.live.get_mut(&visit) {
            live.tensors.truncate(value);
            live.tensors.push(tensor);
        }
        Ok(())
    }

    pub(super) fn group(&self, visit: usize) -> GroupId {
        self.live[&visit].group
    }

    /// Somebody uses these storages from now on: they are right at once.
    pub(super) fn protect_at(&mut self, visit: usize, moment: Moment) -> Played {
        let values = &self.visit(visit).values;
        for value in (0..values.len()).filter(|&value| values[value].protect == Some(moment)) {
            let Some(storage) = self.values.get(&(visit, value)).cloned() else { continue };
            if self.is_shared(visit, &storage) && self.random.chance(HALF) {
                // The engine keeps it in any case.
                continue;
            }
            match self.engine().protect(&storage) {
                // A part of it was saved, and the rest is gone: nobody may take that for protected.
                Err(error) if error.is_not_saved() && !self.is_whole(visit, value) => continue,
                done => done.map_err(|error| self.failed("protect", &text(&error)))?,
            };
            self.check_value(visit, value);
        }
        Ok(())
    }

    /// Whether one view at least reaches every byte of a value's storage.
    fn is_whole(&self, visit: usize, value: usize) -> bool {
        let (views, bytes) = (&self.visit(visit).values[value].views, self.bytes(visit, value));
        views.iter().any(|view| view.range.start == 0 && view.range.end >= bytes)
    }

    /// What was registered of a value is right, now.
    pub(super) fn check_value(&self, visit: usize, value: usize) {
        let Some(storage) = self.values.get(&(visit, value)) else { return };
        let bytes = self.bytes(visit, value);
        for view in &self.visit(visit).values[value].views {
            self.oracle.check(storage, view.range.start..view.range.end.min(bytes));
        }
    }

    pub(super) fn check_values(&self, visit: usize) {
        for value in 0..self.visit(visit).values.len() {
            self.check_value(visit, value);
        }
    }

    fn start(&mut self, visit: usize) -> Played {
        let group = self.group(visit);
        let stream = self.own_stream(visit);
        let started = self.engine().start_offload_on(group, stream);
        if let Some(live) = self.live.get_mut(&visit) {
            live.started = true;
        }
        let Err(error) = started else { return Ok(()) };
        // Whatever failed: all is on the device.
        self.check_values(visit);
        if error.is_no_room() && self.scenario.may_be_full {
            return Ok(());
        }
        let stop = self.failed("start_offload", &text(&error));
        if self.tolerant && self.scenario.stubborn { Ok(()) } else { Err(stop) }
    }

    /// Waits for the offload of a visit, if that was not done yet.
    fn wait(&mut self, visit: usize) -> Played {
        let Some(live) = self.live.get_mut(&visit) else { return Ok(()) };
        if !live.started || std::mem::replace(&mut live.waited, true) {
            return Ok(());
        }
        let group = live.group;
        let waited = self.engine().wait_offload(group);
        if let Err(error) = waited {
            let stop = self.failed("wait_offload", &text(&error));
            if !self.tolerant || !self.scenario.stubborn {
                return Err(stop);
            }
        }
        self.states_are_right(visit)?;
        self.protect_at(visit, Moment::After)
    }

    /// A storage is empty exactly if its state says so.
    pub(super) fn states_are_right(&mut self, visit: usize) -> Played {
        let tensors = self.live[&visit].tensors.clone();
        for (value, tensor) in tensors.into_iter().enumerate() {
            let Some(storage) = self.values.get(&(visit, value)).cloned() else { continue };
            let state = self.engine().state(tensor).map_err(|error| Stop::Wrong(text(&error)))?;
            let readable = self.engine().readable(tensor).is_ok();
            let stays = self.is_shared(visit, &storage);
            let fits = match state {
                "host" | "disk" if stays => false,
                "device" => readable && !storage.is_empty(),
                "host" | "disk" => !readable && storage.is_empty(),
                _ => false,
            };
            if !fits && !self.world.is_lost() {
                let what = self.engine().describe(tensor).unwrap_or_default();
                let bytes = storage.bytes();
                return Err(Stop::Wrong(format!("{what}: {bytes} bytes on the device")));
            }
        }
        Ok(())
    }

    /// The group is given up before its offload: all of it is on the device.
    fn changed_before(&mut self, visit: usize, value: usize) -> Played {
        let bytes = self.bytes(visit, value);
        if let Some(storage) = self.values.get(&(visit, value)) {
            self.oracle.modify(storage, bytes);
        }
        let group = self.group(visit);
        match self.engine().start_offload(group) {
            Err(error) if error.is_changed() => {}
            other => return Err(Stop::Wrong(format!("changed before the offload: {other:?}"))),
        }
        self.check_values(visit);
        self.close(visit);
        Ok(())
    }

    /// The changed tensor is on the device; the group is given up with what it has away.
    fn changed_during(&mut self, visit: usize, value: usize) -> Played {
        let bytes = self.bytes(visit, value);
        if let Some(storage) = self.values.get(&(visit, value)) {
            self.oracle.modify(storage, bytes);
        }
        let group = self.group(visit);
        match self.engine().wait_offload(group) {
            Err(error) if error.is_changed() || self.tolerant => {}
            other => return Err(Stop::Wrong(format!("changed during the offload: {other:?}"))),
        }
        self.check_value(visit, value);
        self.close(visit);
        Ok(())
    }

    /// A wrong call is an error and changes nothing.
    pub(super) fn refused<T>(result: Result<T, ebbtide_core::Error>, call: &str) -> Played {
        match result {
            Err(error) if error.is_phase() => Ok(()),
            Err(error) => Err(Stop::Wrong(format!("{call} in a wrong phase: {}", text(&error)))),
            Ok(_) => Err(Stop::Wrong(format!("{call} in a wrong phase went well"))),
        }
    }

    fn misuse_before(&mut self, visit: usize) -> Played {
        let group = self.group(visit);
        match self.visit(visit).misuse {
            Some(Misuse::WaitBeforeStart) => {
                Self::refused(self.engine().wait_offload(group), "wait_offload")
            }
            Some(Misuse::LoadTooEarly) => {
                Self::refused(self.engine().start_load(group), "start_load")?;
                Self::refused(self.engine().wait_load(group), "wait_load")
            }
            _ => Ok(()),
        }
    }

    fn misuse_after(&mut self, visit: usize) -> Played {
        let group = self.group(visit);
        match self.visit(visit).misuse {
            Some(Misuse::StartTwice) => {
                Self::refused(self.engine().start_offload(group), "start_offload")
            }
            Some(Misuse::RegisterLate) => {
                let Some(storage) = self.values.get(&(visit, 0)).cloned() else { return Ok(()) };
                let view = self.visit(visit).values[0].views[0].clone();
                let saved = self.saved(visit, 0, &storage, &view);
                Self::refused(self.engine().register(group, saved), "register")
            }
            _ => Ok(()),
        }
    }
}
