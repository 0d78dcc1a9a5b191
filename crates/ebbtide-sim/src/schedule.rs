//! What happens to bytes, and when: effects in the order of their time.

use std::collections::BTreeMap;

use crate::call::Call;
use crate::memory::Span;
use crate::shadow::Piece;

/// What a kernel compares at its start.
#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) span: Span,
    pub(crate) seed: u64,
    /// Position in the storage of the first byte.
    pub(crate) position: u64,
    pub(crate) call: Call,
    /// Who wrote which bytes last, when the kernel was queued.
    pub(crate) pieces: Vec<Piece>,
}

/// One thing that happens to bytes.
#[derive(Debug)]
pub(crate) enum Effect {
    /// A copy starts: it reads its bytes.
    Load { copy: u64, from: Span },
    /// A copy ends: it writes them.
    Save { copy: u64, to: Span },
    /// A kernel ends: it writes a pattern.
    Fill { span: Span, seed: u64, position: u64 },
    /// A kernel starts: it reads and compares.
    Check(Box<Check>),
    /// New memory holds garbage.
    Poison(Span),
}

/// Whose work an effect is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Device,
    Disk,
}

/// The effects to come.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    queue: BTreeMap<(u64, u64), (Owner, Effect)>,
    numbers: u64,
    /// Bytes that copies under way have read.
    pub(crate) in_flight: BTreeMap<u64, Vec<u8>>,
}

impl Schedule {
    /// At the same time, what was queued first happens first.
    pub(crate) fn at(&mut self, time: u64, owner: Owner, effect: Effect) {
        self.numbers += 1;
        self.queue.insert((time, self.numbers), (owner, effect));
    }

    /// A copy of `from` to `to`.
    pub(crate) fn copy(&mut self, times: (u64, u64), owner: Owner, from: Span, to: Span) {
        self.numbers += 1;
        let copy = self.numbers;
        self.at(times.0, owner, Effect::Load { copy, from });
        self.at(times.1, owner, Effect::Save { copy, to });
    }

    /// Takes the next effect, if its time has come.
    pub(crate) fn next_until(&mut self, now: u64) -> Option<Effect> {
        let next = self.queue.first_entry().filter(|entry| entry.key().0 <= now)?;
        Some(next.remove().1)
    }

    /// The time of the last effect.
    pub(crate) fn end(&self) -> Option<u64> {
        self.queue.last_key_value().map(|(key, _)| key.0)
    }

    /// The work of the device stops in the middle.
    pub(crate) fn stop_device(&mut self) {
        self.queue.retain(|_, (owner, _)| *owner == Owner::Disk);
    }
}
