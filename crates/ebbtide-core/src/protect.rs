//! Storages that somebody outside their group uses (rows T14, G6), and room for what has to come home.

use std::ops::Range;

use crate::engine::find;
use crate::error::{Error, Kind};
use crate::group::{Group, Phase};
use crate::mark::{Mark, hit};
use crate::mover::{Mover, Saved};
use crate::{Engine, GroupId};

impl<M: Mover> Engine<M> {
    /// Keeps a storage on the device because something outside its group uses it: an output of the
    /// layer, a table, a parameter. An offload under way is called off; what is away is brought back.
    /// Returns whether any group has the storage.
    ///
    /// # Errors
    /// It is away and can't be brought back, or was freed when only a part of it was saved: protect what
    /// is used outside before its offload is waited for.
    pub fn protect(&mut self, storage: &M::Storage) -> Result<bool, Error> {
        let Some((group, index)) = self.owners.first(self.mover.key(storage)) else {
            return Ok(false);
        };
        let bytes = find(&mut self.groups, group)?.records[index as usize].bytes;
        self.protect_record(group, index, &(0..bytes))?;
        Ok(true)
    }

    /// Keeps the bytes of a tensor that was not given to any group, but may share a storage with one
    /// that was (row G6).
    pub(crate) fn keep_here(&mut self, saved: &Saved<M::Storage>) -> Result<(), Error> {
        match self.owners.first(self.mover.key(&saved.storage)) {
            Some((group, index)) => self.protect_record(group, index, &saved.range),
            None => Ok(()),
        }
    }

    /// Protects one record for somebody who uses `range` of it.
    pub(crate) fn protect_record(
        &mut self,
        group: GroupId,
        index: u32,
        range: &Range<u64>,
    ) -> Result<(), Error> {
        let index = index as usize;
        let record = &mut find(&mut self.groups, group)?.records[index];
        match record.residency.name() {
            "d2h" => hit(Mark::ProtectedInOffload),
            "host" => hit(Mark::ProtectedAway),
            _ => {}
        }
        if record.emptied && !record.ranges.contains(range) {
            hit(Mark::NotSaved);
            let label = self.labels.name(record.label).to_string();
            return Err(Error::new(Kind::NotSaved { label, range: range.clone() }));
        }
        record.kept = true;
        if record.residency.is_device() {
            return Ok(());
        }
        let loading = self.phase(group) == Some(Phase::Loading);
        self.with_room(group, |engine| {
            engine.lend(group, |mover, freight| {
                if loading {
                    mover.wait_load(freight)?;
                }
                mover.retrieve(freight, index)
            })?
        })
    }

    /// Makes a call again whose only trouble was that host memory is full of other groups on their way
    /// home: these come home first.
    pub(crate) fn with_room(
        &mut self,
        group: GroupId,
        call: impl Fn(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match call(self) {
            Err(error) if error.is_no_room() && self.finish_loads(group) => {
                hit(Mark::RoomByLoads);
                call(self)
            }
            done => done,
        }
    }

    /// Brings every other group home whose load is under way; one that can't come lets its host buffers
    /// move down. `false` if there is none. An error is left for the one who waits for the group.
    fn finish_loads(&mut self, except: GroupId) -> bool {
        let loading = |g: &&Group<M>| g.phase == Phase::Loading && g.is_travelling();
        let groups = self.groups.iter().filter(loading).filter_map(|g| g.id);
        let groups: Vec<GroupId> = groups.filter(|&id| id != except).collect();
        for &group in &groups {
            let _ = self.lend(group, M::wait_load);
        }
        !groups.is_empty()
    }
}
