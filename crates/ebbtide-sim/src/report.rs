//! What the checker reports.

use std::fmt;

use crate::call::Call;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Two accesses of the same bytes, one of them a write, without an order between them.
    Race,
    /// An access that is not ordered after the allocation of its memory.
    BeforeAllocation,
    /// Memory, or an extent of the disk, was given back while an access is not known to be complete.
    FreeInUse,
    /// An access of a storage whose memory was freed before the call.
    UseAfterFree,
    /// A storage was freed that is empty already.
    DoubleFree,
    /// A storage was restored that is not empty.
    NotEmpty,
    /// A copy or a kernel past the end of its memory.
    OutOfBounds,
    /// A kernel reads bytes that nothing has written.
    NeverWritten,
    /// A kernel read other bytes than it should have.
    WrongValue,
    /// A stream, an event or memory of another world.
    OtherWorld,
    /// A ticket was waited for twice, or never given out.
    NoSuchTicket,
    /// A slot was read or given back after it was given back.
    NoSuchSlot,
    /// Something was never given back.
    Leak,
}

/// One finding: two calls that do not go together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is wrong.
    pub kind: Kind,
    /// The earlier call.
    pub first: Call,
    /// The later call, which is the one at fault in most cases.
    pub second: Call,
    /// Which bytes, if that says more than the calls.
    pub detail: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, first, second, detail } = self;
        let (title, link) = match kind {
            Kind::Race => ("race", "is not ordered after"),
            Kind::BeforeAllocation => ("access before allocation", "is not ordered after"),
            Kind::FreeInUse => ("freed in use", "is not ordered after"),
            Kind::UseAfterFree => ("use after free", "comes after"),
            Kind::DoubleFree => ("double free", "comes after"),
            Kind::NotEmpty => ("restored while not empty", "comes after"),
            Kind::OutOfBounds => ("out of bounds", "goes past the memory of"),
            Kind::NeverWritten => ("never written", "reads bytes unwritten since"),
            Kind::WrongValue => ("wrong value", "does not find its bytes, last written by"),
            Kind::OtherWorld => ("another world", "uses what was made by"),
            Kind::NoSuchTicket => ("no such ticket", "comes after"),
            Kind::NoSuchSlot => ("no such slot", "comes after"),
            Kind::Leak => ("leak", "comes, and nothing gave back"),
        };
        write!(f, "{title}: {second} {link} {first}")?;
        if detail.is_empty() { Ok(()) } else { write!(f, "; {detail}") }
    }
}
