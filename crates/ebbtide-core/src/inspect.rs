//! Looking at one registered tensor.

use crate::engine::unknown;
use crate::error::{Error, Kind};
use crate::group::Phase;
use crate::mover::Mover;
use crate::{Engine, GroupId, TensorId};

impl<M: Mover> Engine<M> {
    /// The phase of a group: `open`, `offloading`, `away`, `loading`, `home`. `None` if it is closed.
    pub fn phase_name(&self, group: GroupId) -> Option<&'static str> {
        self.phase(group).map(Phase::name)
    }

    /// Whether [`Engine::wait_offload`] would return without making anybody wait.
    pub fn offload_is_complete(&mut self, group: GroupId) -> bool {
        let offloading = self.phase(group) == Some(Phase::Offloading);
        !offloading || self.lend(group, M::offload_is_done).is_ok_and(|done| done)
    }

    /// The state of a registered tensor: `device`, `d2h`, `host` or the name of the tier below it,
    /// `h2d`. A duplicate shows the state of what it repeats (row T17).
    ///
    /// # Errors
    /// The group is unknown.
    pub fn state(&self, tensor: TensorId) -> Result<&'static str, Error> {
        let (group, slot) = (tensor.group, tensor.group.slot as usize);
        let entry = self.groups.get(slot).filter(|g| g.id == Some(group));
        let entry = entry.ok_or_else(|| unknown(group))?;
        let record = entry.tensors.get(tensor.index as usize).map(|t| t.record);
        // Records are dropped when everything is home.
        let Some(index) = record else { return Ok("device") };
        let residency = &entry.records[index as usize].residency;
        Ok(residency.place().map_or(residency.name(), |place| self.mover.tier(place)))
    }

    /// Whether the value of a tensor may be read now (row T3).
    ///
    /// # Errors
    /// It is not on the device: the error names its state. Ask for it with [`Engine::need`].
    pub fn readable(&self, tensor: TensorId) -> Result<(), Error> {
        match self.state(tensor)? {
            "device" => Ok(()),
            state => Err(Error::new(Kind::NotReadable { state })),
        }
    }

    /// One line about a tensor, for debugging: its state, whether it repeats another one, whether its
    /// value is on the device (row T15).
    ///
    /// # Errors
    /// The group is unknown.
    pub fn describe(&self, tensor: TensorId) -> Result<String, Error> {
        let state = self.state(tensor)?;
        let entry = &self.groups[tensor.group.slot as usize];
        let index = tensor.index as usize;
        let record = entry.tensors.get(index).map(|t| t.record);
        let earlier = entry.tensors.get(..index).unwrap_or_default();
        let repeats = earlier.iter().any(|t| Some(t.record) == record);
        let label = entry.tensors.get(index).map(|t| self.labels.name(t.label));
        let (label, value) = (label.unwrap_or("a tensor"), state == "device");
        Ok(format!("{label}: state {state}, duplicate {repeats}, device value {value}"))
    }
}
