//! The backward of one layer: it asks for its group, looks at every byte, and closes the group.

use ebbtide_core::{Error, GroupId};

use crate::play::draw::HALF;
use crate::play::plan::{Misuse, Moment};
use crate::play::player::{Played, Player, Stop, text};
use crate::random::Ratio;

impl Player<'_> {
    pub(super) fn backward(&mut self, visit: usize) -> Played {
        let Some(live) = self.live.get(&visit) else { return Ok(()) };
        let (group, asks) = (live.group, self.visit(visit).asks);
        if let Some(again) = asks.recompute {
            self.forward(again)?;
            self.backward(again)?;
        }
        if asks.prefetch_first {
            self.engine().prefetch(group);
        }
        if let Some(next) = asks.starts {
            self.start_by_hand(next)?;
        }
        if let Some((Moment::After, value)) = self.visit(visit).change
            && self.changed_after(visit, value)?
        {
            return Ok(());
        }
        self.protect_at(visit, Moment::Loading)?;
        self.ask(visit, group)?;
        if asks.prefetch_then {
            self.engine().prefetch(group);
        }
        self.all_is_home(visit)?;
        let done = self.oracle.scratch(64);
        done.map_err(|error| self.failed("gradients", &error))?;
        self.leave(visit, group)
    }

    /// Handles go before the group is closed, or after.
    fn leave(&mut self, visit: usize, group: GroupId) -> Played {
        let handles = (visit, 0)..(visit + 1, 0);
        let keys: Vec<_> = self.values.range(handles).map(|(key, _)| *key).collect();
        let mut held = Vec::new();
        for key in keys {
            // What others use may live on.
            let reused = self.visit(visit).values[key.1].reused;
            if !reused || self.random.chance(HALF) {
                held.extend(self.values.remove(&key));
            }
        }
        if self.random.chance(HALF) {
            held.clear();
        }
        self.close(visit);
        if self.visit(visit).misuse == Some(Misuse::AfterClose) {
            self.engine().close(group);
            self.engine().prefetch(group);
            Self::refused(self.engine().need(group), "need")?;
        }
        Ok(())
    }

    fn all_is_home(&mut self, visit: usize) -> Played {
        for tensor in self.live[&visit].tensors.clone() {
            if let Err(error) = self.engine().readable(tensor) {
                return Err(Stop::Wrong(format!("after need: {}", text(&error))));
            }
        }
        self.check_values(visit);
        Ok(())
    }

    /// The load of another group, which may be under way already.
    fn start_by_hand(&mut self, visit: usize) -> Played {
        let Some(live) = self.live.get(&visit) else { return Ok(()) };
        let (group, stream) = (live.group, self.own_stream(visit));
        match self.engine().start_load_on(group, stream) {
            // Host memory is full of groups that are needed before: `need` tries again.
            Err(error) if error.is_phase() || error.is_no_room() => Ok(()),
            // The change is noticed by this call or by the next one.
            Err(error) if error.is_changed() && self.visit(visit).change.is_some() => Ok(()),
            Err(error) => {
                let stop = self.failed("start_load", &text(&error));
                if self.tolerant && self.scenario.stubborn { Ok(()) } else { Err(stop) }
            }
            Ok(()) => Ok(()),
        }
    }

    /// Afterwards all of the group is on the device. A load that fails can be tried again, as often as
    /// one likes; without faults it goes well.
    fn ask(&mut self, visit: usize, group: GroupId) -> Played {
        loop {
            let Err(error) = self.ask_once(visit, group) else { return Ok(()) };
            // What a call that failed may still use stays out of use until its group is closed.
            if error.is_no_room() && self.errors > 0 {
                return Err(Stop::Failed(text(&error)));
            }
            let stop = self.failed("need", &text(&error));
            if !self.tolerant || !self.scenario.stubborn || self.world.is_lost() {
                return Err(stop);
            }
            if self.scenario.has_one_fault() {
                // The failed load has been undone.
                self.states_are_right(visit)?;
            }
            if self.random.chance(Ratio(1, 4)) {
                self.heal();
            }
        }
    }

    fn ask_once(&mut self, visit: usize, group: GroupId) -> Result<(), Error> {
        if !self.visit(visit).asks.by_hand {
            return self.engine().need(group);
        }
        let stream = self.own_stream(visit);
        let started = self.engine().start_load_on(group, stream);
        let quiet = |error: &Error| error.is_phase() || error.is_no_room();
        if let Err(error) = started
            && !quiet(&error)
        {
            return Err(error);
        }
        if let Err(error) = self.engine().wait_load(group)
            && !quiet(&error)
        {
            return Err(error);
        }
        // Whatever happened by hand, this is true afterwards.
        self.engine().need(group)
    }

    /// A tensor that stayed is changed in place. Whether that was noticed: the group is closed then.
    fn changed_after(&mut self, visit: usize, value: usize) -> Played<bool> {
        let tensor = self.live[&visit].tensors[value];
        let state = self.engine().state(tensor).map_err(|error| Stop::Wrong(text(&error)))?;
        let Some(storage) = self.values.get(&(visit, value)).cloned() else { return Ok(false) };
        if state != "device" {
            return Err(Stop::Wrong(format!("a protected value is in state {state}")));
        }
        self.oracle.modify(&storage, self.bytes(visit, value));
        let group = self.group(visit);
        match self.engine().need(group) {
            // All of it was home before; nothing is compared any more.
            Ok(()) => Ok(false),
            Err(error) if error.is_changed() || self.tolerant => {
                self.check_value(visit, value);
                self.close(visit);
                Ok(true)
            }
            Err(error) => Err(self.failed("need", &text(&error))),
        }
    }
}
