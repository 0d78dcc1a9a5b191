//! The states of one storage, and every transition between them.
//!
//! ```text
//!            start_offload          finish_offload
//!   Device ────────────────▶ D2h ───────────────────▶ Host
//!     ▲  ▲                    │                        │ ▲
//!     │  └─── keep_on_device ─┘          start_load    │ │ fail_load
//!     │                                                ▼ │
//!     └───────────────────── finish_load ───────────── H2d
//! ```
//!
//! `Host` means: away from the device, in host memory or in a tier below it. Which of them is the
//! business of the [`Mover`], whose values a residency carries: what an offload under way is known by
//! ([`Mover::Out`]), where the bytes are ([`Mover::Place`]), what a load under way is known by
//! ([`Mover::In`]).
//!
//! # Access contract
//!
//! | state | device storage | copy | who may touch the bytes |
//! | --- | --- | --- | --- |
//! | `Device` | full | none | the framework |
//! | `D2h` | full, or lent to the mover | being written | the mover, reading the storage; the framework only on the stream that waits for the copy before the storage is freed |
//! | `Host` | empty | complete | nobody |
//! | `H2d` | empty, or being filled | complete, being read | the mover |
//!
//! Dangerous situations, one by one:
//!
//! * *A load is asked for while the offload is under way.* `start_load` is not allowed in `D2h`; the
//!   engine finishes the offload first. The place does not exist before that, so nothing can read it
//!   too early.
//! * *An offload fails or is called off.* `keep_on_device` returns to `Device` and hands out what the
//!   copy was known by: whoever called must give it back.
//! * *A load fails.* The place is kept through `H2d`, so `fail_load` returns to `Host` and the load can
//!   be tried again.
//! * *A place is given back twice or never.* It leaves this type in one place only, as the must-use
//!   result of `finish_load`, or through `abandon`.
//! * *A duplicate is in another state than what it repeats* (row T17). A duplicate has no residency of
//!   its own; it points at the one it repeats.

use std::fmt;

use crate::mark::{Mark, hit};
use crate::mover::Mover;

/// Where the bytes of one storage are.
pub struct Residency<M: Mover + ?Sized>(State<M>);

enum State<M: Mover + ?Sized> {
    Device,
    D2h(M::Out),
    Host(M::Place),
    H2d(M::In, M::Place),
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
#[must_use = "a running copy must be waited for, a place must be given back"]
pub enum Owed<M: Mover + ?Sized> {
    /// Nothing: the bytes are on the device.
    Nothing,
    /// Wait for this offload, then give what it left back.
    Offload(M::Out),
    /// Give the place back.
    Place(M::Place),
    /// Wait for this load, then give the place back.
    Load(M::In, M::Place),
}

impl<M: Mover + ?Sized> fmt::Debug for Owed<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing",
            Self::Offload(_) => "Offload",
            Self::Place(_) => "Place",
            Self::Load(..) => "Load",
        })
    }
}

impl<M: Mover + ?Sized> Default for Residency<M> {
    fn default() -> Self {
        Self(State::Device)
    }
}

impl<M: Mover + ?Sized> fmt::Debug for Residency<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl<M: Mover + ?Sized> Residency<M> {
    /// The state's name as every front end shows it: `device`, `d2h`, `host`, `h2d`.
    pub fn name(&self) -> &'static str {
        match self.0 {
            State::Device => "device",
            State::D2h(_) => "d2h",
            State::Host(_) => "host",
            State::H2d(..) => "h2d",
        }
    }

    /// The bytes are on the device and the framework may use them.
    pub fn is_device(&self) -> bool {
        matches!(self.0, State::Device)
    }

    /// Where the bytes are, while nothing is under way.
    pub fn place(&self) -> Option<&M::Place> {
        match &self.0 {
            State::Host(place) => Some(place),
            _ => None,
        }
    }

    /// The offload under way, if any.
    pub fn offload(&self) -> Option<&M::Out> {
        match &self.0 {
            State::D2h(out) => Some(out),
            _ => None,
        }
    }

    /// The load under way, if any, and where it reads.
    pub fn load(&self) -> Option<(&M::In, &M::Place)> {
        match &self.0 {
            State::H2d(load, place) => Some((load, place)),
            _ => None,
        }
    }

    /// `device` → `d2h`: the copy is queued.
    ///
    /// # Errors
    /// From any other state.
    pub fn start_offload(&mut self, out: M::Out) -> Result<(), WrongState> {
        match self.0 {
            State::Device => {
                hit(Mark::StartOffload);
                self.0 = State::D2h(out);
                Ok(())
            }
            _ => Err(self.wrong("device")),
        }
    }

    /// `d2h` → `host`: every byte is copied, or ordered before whatever comes next, and the device
    /// memory is free.
    ///
    /// # Errors
    /// From any other state.
    pub fn finish_offload(&mut self, place: M::Place) -> Result<(), WrongState> {
        match self.0 {
            State::D2h(_) => {
                hit(Mark::FinishOffload);
                self.0 = State::Host(place);
                Ok(())
            }
            _ => Err(self.wrong("d2h")),
        }
    }

    /// `d2h` → `device`: the copy failed, or the storage is needed after all. Its memory is where it
    /// was.
    ///
    /// # Errors
    /// From any other state.
    #[must_use = "what the copy was known by must be given back"]
    pub fn keep_on_device(&mut self) -> Result<M::Out, WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::D2h(out) => {
                hit(Mark::KeepOnDevice);
                Ok(out)
            }
            other => {
                self.0 = other;
                Err(self.wrong("d2h"))
            }
        }
    }

    /// `host` → `h2d`: the copy back is queued.
    ///
    /// # Errors
    /// From any other state.
    pub fn start_load(&mut self, load: M::In) -> Result<(), WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::Host(place) => {
                hit(Mark::StartLoad);
                self.0 = State::H2d(load, place);
                Ok(())
            }
            other => {
                self.0 = other;
                Err(self.wrong("host"))
            }
        }
    }

    /// `h2d` → `device`: the bytes are there, or ordered before whatever comes next. The place is the
    /// caller's to give back.
    ///
    /// # Errors
    /// From any other state.
    #[must_use = "the place must be given back"]
    pub fn finish_load(&mut self) -> Result<M::Place, WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::H2d(_, place) => {
                hit(Mark::FinishLoad);
                Ok(place)
            }
            other => {
                self.0 = other;
                Err(self.wrong("h2d"))
            }
        }
    }

    /// `h2d` → `host`: the copy failed, the bytes are still where they were.
    ///
    /// # Errors
    /// From any other state.
    pub fn fail_load(&mut self) -> Result<(), WrongState> {
        match std::mem::replace(&mut self.0, State::Device) {
            State::H2d(_, place) => {
                hit(Mark::FailLoad);
                self.0 = State::Host(place);
                Ok(())
            }
            other => {
                self.0 = other;
                Err(self.wrong("h2d"))
            }
        }
    }

    /// Forgets the storage, whatever its state.
    pub fn abandon(&mut self) -> Owed<M> {
        let (mark, owed) = match std::mem::replace(&mut self.0, State::Device) {
            State::Device => (Mark::AbandonDevice, Owed::Nothing),
            State::D2h(out) => (Mark::AbandonD2h, Owed::Offload(out)),
            State::Host(place) => (Mark::AbandonHost, Owed::Place(place)),
            State::H2d(load, place) => (Mark::AbandonH2d, Owed::Load(load, place)),
        };
        hit(mark);
        owed
    }

    fn wrong(&self, wanted: &'static str) -> WrongState {
        WrongState { found: self.name(), wanted }
    }
}

/// The state was looked at just before: a refusal here is a bug in the engine.
pub(crate) fn sure<T>(transition: Result<T, WrongState>) -> T {
    match transition {
        Ok(value) => value,
        Err(wrong) => unreachable!("state {} where {} was checked", wrong.found, wrong.wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Ticket;
    use crate::direct::Direct;
    use crate::model::{ModelDevice, ModelStore};

    type Moved = Direct<ModelDevice, ModelStore>;

    fn in_state(name: &str) -> Residency<Moved> {
        Residency(match name {
            "device" => State::Device,
            "d2h" => State::D2h(Ticket(1)),
            "host" => State::Host(9),
            _ => State::H2d(Ticket(2), 9),
        })
    }

    /// T4, T8, T10, T12: each transition is allowed from one state only, and a refused one names
    /// both states and changes nothing.
    #[test]
    fn t4_t8_t10_t12_every_transition_from_every_state() {
        type Step = fn(&mut Residency<Moved>) -> Result<(), WrongState>;
        let table: [(&str, &str, &str, Step); 6] = [
            ("start_offload", "device", "d2h", |r| r.start_offload(Ticket(3))),
            ("finish_offload", "d2h", "host", |r| r.finish_offload(9)),
            ("keep_on_device", "d2h", "device", |r| {
                r.keep_on_device().map(|out| assert_eq!(out, Ticket(1)))
            }),
            ("start_load", "host", "h2d", |r| r.start_load(Ticket(3))),
            ("finish_load", "h2d", "device", |r| r.finish_load().map(|place| assert_eq!(place, 9))),
            ("fail_load", "h2d", "host", Residency::fail_load),
        ];
        for (call, from, to, step) in table {
            for state in ["device", "d2h", "host", "h2d"] {
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
        assert!(matches!(in_state("host").abandon(), Owed::Place(9)));
        assert!(matches!(in_state("h2d").abandon(), Owed::Load(Ticket(2), 9)));
    }
}
