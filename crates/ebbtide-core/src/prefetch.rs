//! Loading ahead of backward. A hint: correctness never depends on it (rows M11, M12).

use crate::error::{Error, chain};
use crate::group::Phase;
use crate::mark::{Mark, hit};
use crate::mover::Mover;
use crate::observe::Event;
use crate::{Engine, GroupId, LayerId};

impl<M: Mover> Engine<M> {
    /// Starts loading the groups that backward will ask for after `current`, as many as the
    /// configured depth. A hint: a load that can't be started is told to the observer and tried
    /// again by [`Engine::need`].
    pub fn prefetch(&mut self, current: GroupId) {
        for group in self.upcoming(current) {
            let started = match self.phase(group) {
                Some(Phase::Away) => self.start_load(group),
                Some(Phase::Loading) => self.advance_load(group),
                Some(Phase::Offloading) => {
                    let done = self.lend(group, M::offload_is_done);
                    if done.is_ok_and(|done| done) { self.start_load(group) } else { Ok(()) }
                }
                _ => Ok(()),
            };
            if let Err(error) = started {
                hit(Mark::PrefetchFailed);
                let error = chain(&error);
                self.observer.event(&Event::PrefetchFailed { group, error });
            }
        }
    }

    fn advance_load(&mut self, group: GroupId) -> Result<(), Error> {
        self.lend(group, M::advance_load)?
    }

    /// The next groups of the same pass that are not home, nearest first, at most the depth.
    fn upcoming(&self, current: GroupId) -> Vec<GroupId> {
        let pass = self.groups.get(current.slot as usize).filter(|g| g.id == Some(current));
        let Some(pass) = pass.map(|g| g.pass).filter(|_| self.config.prefetch > 0) else {
            return Vec::new();
        };
        let waiting = |phase| matches!(phase, Phase::Offloading | Phase::Away | Phase::Loading);
        let mut open: Vec<(GroupId, LayerId)> = self
            .groups
            .iter()
            .filter(|g| g.pass == pass && waiting(g.phase))
            .filter_map(|g| Some((g.id.filter(|&id| id != current)?, g.layer)))
            .collect();
        open.sort_unstable_by_key(|(id, _)| std::cmp::Reverse(*id));
        let depth = self.config.prefetch.min(open.len());
        let mut chosen: Vec<GroupId> = Vec::new();
        // What comes soon is looked for, not the whole rest of a long backward.
        for layer in self.order.expected().iter().take(2 * depth + 8) {
            if chosen.len() == depth {
                break;
            }
            let next = open.iter().find(|(id, l)| l == layer && !chosen.contains(id));
            chosen.extend(next.map(|(id, _)| *id));
        }
        if chosen.is_empty() {
            let behind = open.iter().filter(|(id, _)| *id < current);
            chosen.extend(behind.map(|(id, _)| *id).take(self.config.prefetch));
        }
        chosen
    }
}
