//! The states of one storage, and every transition between them.
//!
//! ```text
//!            start_offload          finish_offload
//!   Device ────────────────▶ D2h ───────────────────▶ Away
//!     ▲  ▲                    │                        │ ▲
//!     │  └──── fail_offload ──┘          start_load    │ │ fail_load
//!     │                                                ▼ │
//!     └───────────────────── finish_load ───────────── H2d
//! ```
//!
//! # Access contract
//!
//! | state | device storage | store | who may touch the bytes |
//! | --- | --- | --- | --- |
//! | `Device` | full | nothing | the framework |
//! | `D2h` | empty (poisoned) | owns the block, job queued or running | the store's workers, reading |
//! | `Away` | empty (poisoned) | slot holds the bytes | nobody |
//! | `H2d` | empty (poisoned) | slot holds the bytes, and owns the new block | the store's workers, writing the block |
//!
//! Dangerous situations, one by one:
//!
//! * *A load is asked for while the offload is under way.* `start_load` is not allowed in `D2h`;
//!   the engine finishes the offload first. The slot does not exist before that, so nothing can
//!   read it too early.
//! * *An offload fails.* The store still owns the untouched block and hands it back:
//!   `fail_offload` returns to `Device`.
//! * *A load fails.* The slot is kept through `H2d`, so `fail_load` returns to `Away` and the load
//!   can be tried again.
//! * *A slot is given back twice or never.* It leaves this type in one place only, as the must-use
//!   result of `finish_load`, or through `abandon`.

use crate::backend::Ticket;

/// Where the bytes of one storage are.
#[derive(Debug)]
pub struct Residency<Slot>(State<Slot>);

#[derive(Debug)]
enum State<Slot> {
    Device,
    D2h(Ticket),
    Away(Slot),
    H2d(Ticket, Slot),
}

/// A transition was asked for that the state does not allow. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongState {
    /// The state found.
    pub found: &'static str,
    /// The state the transition starts from.
    pub wanted: &'static str,
}

/// What the caller owes after a storage is forgotten.
#[must_use = "a running job must be waited for, a slot must be given back"]
#[derive(Debug)]
pub enum Owed<Slot> {
    /// Nothing: the bytes are on the device.
    Nothing,
    /// Wait for this offload, then give its slot or its block back.
    Offload(Ticket),
    /// Give the slot back.
    Slot(Slot),
    /// Wait for this load, then give the slot back.
    Load(Ticket, Slot),
}

impl<Slot> Default for Residency<Slot> {
    fn default() -> Self {
        Self(State::Device)
    }
}

impl<Slot> Residency<Slot> {
    /// The state's name as every front end shows it: `device`, `d2h`, `away`, `h2d`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            State::Device => "device",
            State::D2h(_) => "d2h",
            State::Away(_) => "away",
            State::H2d(..) => "h2d",
        }
    }

    /// The bytes are on the device and the framework may use them.
    pub fn is_device(&self) -> bool {
        matches!(self.0, State::Device)
    }

    /// The slot that holds the bytes, while no job runs.
    pub fn slot(&self) -> Option<&Slot> {
        match &self.0 {
            State::Away(slot) => Some(slot),
            _ => None,
        }
    }

    /// The running offload, if any.
    pub fn offload_ticket(&self) -> Option<Ticket> {
        match self.0 {
            State::D2h(ticket) => Some(ticket),
            _ => None,
        }
    }

    /// The running load, if any.
    pub fn load_ticket(&self) -> Option<Ticket> {
        match self.0 {
            State::H2d(ticket, _) => Some(ticket),
            _ => None,
        }
    }

    /// `device` → `d2h`: the store has accepted the block.
    ///
    /// # Errors
    /// From any other state.
    pub fn start_offload(&mut self, ticket: Ticket) -> Result<(), WrongState> {
        match self.0 {
            State::Device => {
                self.0 = State::D2h(ticket);
                Ok(())
            }
            _ => Err(self.wrong("device")),
        }
    }

    /// `d2h` → `away`: the store has copied every byte and freed the block.
    ///
    /// # Errors
    /// From any other state.
    pub fn finish_offload(&mut self, slot: Slot) -> Result<(), WrongState> {
        match self.0 {
            State::D2h(_) => {
                self.0 = State::Away(slot);
                Ok(())
            }
            _ => Err(self.wrong("d2h")),
        }
    }

    /// `d2h` → `device`: the store gave the block back, and it has been attached again.
    ///
    /// # Errors
    /// From any other state.
    pub fn fail_offload(&mut self) -> Result<(), WrongState> {
        match self.0 {
            State::D2h(_) => {
                self.0 = State::Device;
                Ok(())
            }
            _ => Err(self.wrong("d2h")),
        }
    }

    /// `away` → `h2d`: the store has accepted a fresh block to fill.
    ///
    /// # Errors
    /// From any other state.
    pub fn start_load(&mut self, ticket: Ticket) -> Result<(), WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::Away(slot) => {
                self.0 = State::H2d(ticket, slot);
                Ok(())
            }
            other => {
                self.0 = other;
                Err(self.wrong("away"))
            }
        }
    }

    /// `h2d` → `device`: the block is filled and attached. The slot is the caller's to give back.
    ///
    /// # Errors
    /// From any other state.
    #[must_use = "the slot must be given back to the store"]
    pub fn finish_load(&mut self) -> Result<Slot, WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::H2d(_, slot) => Ok(slot),
            other => {
                self.0 = other;
                Err(self.wrong("h2d"))
            }
        }
    }

    /// `h2d` → `away`: the copy failed, the slot still holds the bytes.
    ///
    /// # Errors
    /// From any other state.
    pub fn fail_load(&mut self) -> Result<(), WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::H2d(_, slot) => {
                self.0 = State::Away(slot);
                Ok(())
            }
            other => {
                self.0 = other;
                Err(self.wrong("h2d"))
            }
        }
    }

    /// Forgets the storage, whatever its state.
    pub fn abandon(self) -> Owed<Slot> {
        match self.0 {
            State::Device => Owed::Nothing,
            State::D2h(ticket) => Owed::Offload(ticket),
            State::Away(slot) => Owed::Slot(slot),
            State::H2d(ticket, slot) => Owed::Load(ticket, slot),
        }
    }

    fn wrong(&self, wanted: &'static str) -> WrongState {
        WrongState { found: self.name(), wanted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_state(name: &str) -> Residency<u32> {
        Residency(match name {
            "device" => State::Device,
            "d2h" => State::D2h(Ticket(1)),
            "away" => State::Away(9),
            _ => State::H2d(Ticket(2), 9),
        })
    }

    /// T4, T8, T10, T12: each transition is allowed from one state only, and a refused one names
    /// both states and changes nothing.
    #[test]
    fn t4_t8_t10_t12_every_transition_from_every_state() {
        type Step = fn(&mut Residency<u32>) -> Result<(), WrongState>;
        let table: [(&str, &str, &str, Step); 6] = [
            ("start_offload", "device", "d2h", |r| r.start_offload(Ticket(3))),
            ("finish_offload", "d2h", "away", |r| r.finish_offload(9)),
            ("fail_offload", "d2h", "device", Residency::fail_offload),
            ("start_load", "away", "h2d", |r| r.start_load(Ticket(3))),
            ("finish_load", "h2d", "device", |r| r.finish_load().map(|slot| assert_eq!(slot, 9))),
            ("fail_load", "h2d", "away", Residency::fail_load),
        ];
        for (call, from, to, step) in table {
            for state in ["device", "d2h", "away", "h2d"] {
                let mut residency = in_state(state);
                let result = step(&mut residency);
                if state == from {
                    assert_eq!((result, residency.name()), (Ok(()), to), "{call} from {state}");
                } else {
                    let error = WrongState { found: in_state(state).name(), wanted: from };
                    assert_eq!(result, Err(error), "{call} from {state}");
                    assert_eq!(residency.name(), state, "{call} from {state} changed the state");
                }
            }
        }
    }

    /// M7: whatever the state, forgetting a storage names what is owed.
    #[test]
    fn m7_abandon_names_what_is_owed() {
        assert!(matches!(in_state("device").abandon(), Owed::Nothing));
        assert!(matches!(in_state("d2h").abandon(), Owed::Offload(Ticket(1))));
        assert!(matches!(in_state("away").abandon(), Owed::Slot(9)));
        assert!(matches!(in_state("h2d").abandon(), Owed::Load(Ticket(2), 9)));
    }
}
