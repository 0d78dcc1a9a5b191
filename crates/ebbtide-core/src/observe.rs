//! The one interface for warnings, counters and timings.
//!
//! The engine has no clock. An observer that wants times stamps events itself; the times of copies
//! come from the store, which measured them.

use crate::backend::Timing;
use crate::{GroupId, LayerId, Pass};

/// Something that happened in the engine, told when it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A storage's bytes have left the device.
    Stored {
        /// The group it belongs to.
        group: GroupId,
        /// Layer of the group.
        layer: LayerId,
        /// Size of the storage.
        bytes: u64,
        /// When the copy ran, where a host thread ran it.
        timing: Option<Timing>,
    },
    /// A storage is back on the device.
    Loaded {
        /// The group it belongs to.
        group: GroupId,
        /// Layer of the group.
        layer: LayerId,
        /// Size of the storage.
        bytes: u64,
        /// When the copy ran, where a host thread ran it.
        timing: Option<Timing>,
    },
    /// A group was asked for before its load had been started. It costs time, never a value.
    Missed {
        /// The group.
        group: GroupId,
        /// Layer of the group.
        layer: LayerId,
        /// Pass of the group.
        pass: Pass,
    },
    /// Tensors of a group were registered more than once. Told once for each layer.
    Repeats {
        /// The group.
        group: GroupId,
        /// Its name.
        name: String,
        /// How many registrations repeated an earlier one exactly.
        count: u64,
    },
    /// A tensor was to be swapped outside of any group; it stays on the device. Told once.
    NoGroup,
    /// A layer was declared to follow itself; nothing changed.
    FollowsItself {
        /// The layer.
        layer: String,
    },
    /// A prefetch could not be started. The group is loaded on demand later, and if that fails too
    /// the step's error says so.
    PrefetchFailed {
        /// The group.
        group: GroupId,
        /// The error, rendered.
        error: String,
    },
    /// A copy failed while a step was being abandoned; the step's own error is reported elsewhere.
    AbandonedCopyFailed {
        /// The group.
        group: GroupId,
        /// The error, rendered.
        error: String,
    },
}

/// Receives every [`Event`] of an engine, on the thread that drives it.
pub trait Observer {
    /// Called once for each event. Must not call back into the engine.
    fn event(&mut self, event: &Event);
}

/// Ignores everything.
impl Observer for () {
    fn event(&mut self, _: &Event) {}
}

impl<F: FnMut(&Event)> Observer for F {
    fn event(&mut self, event: &Event) {
        self(event);
    }
}
