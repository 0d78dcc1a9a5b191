//! The two gates on bytes that keep a step inside its budget.
//!
//! One asks before an *operation* allocates, the other before a *load* starts. Both compare bytes,
//! never clocks, so a link that is slower than was thought costs time and nothing else. The
//! predictor and the engines that run steps use the same code.
//!
//! # What is counted
//!
//! `minimal[o]` is what operation `o` cannot do without: static bytes, its workspace, and every
//! storage that is resident then. A swapped storage counts from its production to its last read in
//! forward and from its first to its last use in backward. Besides there are
//!
//! * *pending* bytes: offloads that began and are not complete, and
//! * *prefetched* bytes: loads that started and whose first use is behind the current operation.
//!
//! # The contract
//!
//! 1. Every `minimal[o]` is at most the budget, and loads got their triggers from [`set_triggers`].
//! 2. Compute calls [`Gate::reach`] before each operation, waits for [`Gate::may_start`], then until
//!    every load with `first_use <= o` is complete, and only then allocates and runs.
//! 3. After the operation, [`Gate::offload_pending`] for each storage that leaves now, and
//!    [`Gate::offload_done`] when its bytes are free.
//! 4. Loads of a channel start in the order of their first use. One starts when its offload is
//!    complete and [`Gate::may_load`] says so; [`Gate::load_started`] follows at once.
//!
//! Then the bytes in use never exceed the budget, and nothing waits forever: whatever is prefetched
//! has room at every operation up to its first use (that is what a trigger is), so an operation
//! waits for offloads alone, and those wait for nobody.
//!
//! ```
//! use ebbtide_core::gate::{Gate, Load, set_triggers};
//!
//! // Two layers: F0 F1 R1 B1 R0 B0. A storage of 40 bytes made by F0 is away until B0 needs it.
//! let minimal = vec![60, 80, 20, 80, 20, 60];
//! let mut loads = [Load { bytes: 40, earliest: 1, first_use: 5, channel: 0, trigger: 0 }];
//! set_triggers(&minimal, 100, &mut loads, &mut Vec::new());
//! assert_eq!(loads[0].trigger, 4, "at B1 it would not fit");
//!
//! let mut gate = Gate::new(minimal, 100);
//! gate.reach(0);
//! gate.offload_pending(40);
//! gate.reach(1);
//! assert!(!gate.may_start(), "80 + 40 bytes");
//! gate.offload_done(40);
//! assert!(gate.may_start());
//! gate.reach(4);
//! assert!(gate.may_load(&loads[0]));
//! gate.load_started(&loads[0]);
//! gate.reach(5);
//! assert_eq!(gate.bytes(), 60, "what is used now is no longer prefetched");
//! ```

/// The most channels that loads can be spread over.
pub const MAX_CHANNELS: usize = 16;

/// A load, as far as the gates know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Bytes on the device.
    pub bytes: u64,
    /// Index of the first operation at which it may start: one behind its last read in forward,
    /// and not before the last forward. May lie behind `first_use`, which then counts.
    pub earliest: usize,
    /// Index of the operation that needs it first.
    pub first_use: usize,
    /// Which queue it waits in. Below [`MAX_CHANNELS`].
    pub channel: usize,
    /// Index of the operation from which it may start: the result of [`set_triggers`].
    pub trigger: usize,
}

/// Finds how early each load may start, without ever taking the room of a later operation.
///
/// `loads` are in order of first use. Each is granted the longest run of operations in front of its
/// first use in which its bytes fit beside `minimal` and the loads granted before it. Within a
/// channel triggers never decrease, since its loads start in order. `scratch` is only memory that
/// is used again.
///
/// # Panics
/// A channel is not below [`MAX_CHANNELS`], or a first use is no index of `minimal`.
pub fn set_triggers(minimal: &[u64], budget: u64, loads: &mut [Load], scratch: &mut Vec<u64>) {
    scratch.clear();
    scratch.extend_from_slice(minimal);
    let mut last = [0; MAX_CHANNELS];
    for load in loads {
        let low = load.earliest.max(last[load.channel]);
        let room = budget.saturating_sub(load.bytes);
        let mut at = load.first_use;
        while at > low && scratch[at - 1] <= room && load.bytes <= budget {
            at -= 1;
            scratch[at] += load.bytes;
        }
        load.trigger = at;
        last[load.channel] = at;
    }
}

/// The bytes of a running step against its budget. See the [module](self) for how to use it.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    minimal: Vec<u64>,
    budget: u64,
    op: usize,
    pending: u64,
    prefetched: u64,
    /// By operation: bytes of loads that started early and that this operation uses first.
    arriving: Vec<u64>,
}

impl Gate {
    /// A step that has not begun. `minimal` are bytes by index of operation, `budget` is in bytes.
    pub fn new(minimal: Vec<u64>, budget: u64) -> Self {
        let arriving = vec![0; minimal.len()];
        Self { minimal, budget, arriving, ..Self::default() }
    }

    /// Begins another step, with the same memory: `fill` writes the new minimal bytes.
    pub fn restart(&mut self, budget: u64, fill: impl FnOnce(&mut Vec<u64>)) {
        fill(&mut self.minimal);
        self.budget = budget;
        (self.op, self.pending, self.prefetched) = (0, 0, 0);
        self.arriving.clear();
        self.arriving.resize(self.minimal.len(), 0);
    }

    /// The minimal bytes by index of operation.
    pub fn minimal(&self) -> &[u64] {
        &self.minimal
    }

    /// The budget in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Index of the operation that was reached last.
    pub fn op(&self) -> usize {
        self.op
    }

    /// What is counted now: minimal, pending and prefetched bytes. Above the budget only while the
    /// operation that was reached must wait, and has not allocated anything.
    pub fn bytes(&self) -> u64 {
        self.minimal[self.op] + self.pending + self.prefetched
    }

    /// Compute has done everything before operation `op` and wants to run it. Operations that do
    /// not take place (a layer that is not recomputed) may be skipped.
    ///
    /// # Panics
    /// There is no such operation, or it lies before the one reached last.
    pub fn reach(&mut self, op: usize) {
        assert!(op >= self.op && op < self.minimal.len(), "operation {op} after {}", self.op);
        let due: u64 = self.arriving[self.op..=op].iter_mut().map(std::mem::take).sum();
        self.prefetched -= due;
        self.op = op;
    }

    /// Whether the operation that was reached may allocate. If not, it waits for an offload.
    pub fn may_start(&self) -> bool {
        self.bytes() <= self.budget
    }

    /// The offload of a storage that the operation reached last has read for the last time began.
    pub fn offload_pending(&mut self, bytes: u64) {
        self.pending += bytes;
    }

    /// An offload is complete and its bytes are free.
    ///
    /// # Panics
    /// More is done than was pending.
    pub fn offload_done(&mut self, bytes: u64) {
        assert!(bytes <= self.pending, "{bytes} bytes left, {} were pending", self.pending);
        self.pending -= bytes;
    }

    /// Whether this load may start now, as far as bytes go: its trigger is reached, and it fits.
    /// A load whose first use is reached is part of the minimal bytes already.
    pub fn may_load(&self, load: &Load) -> bool {
        let extra = if load.first_use > self.op { load.bytes } else { 0 };
        load.trigger <= self.op && self.bytes() + extra <= self.budget
    }

    /// The load started.
    pub fn load_started(&mut self, load: &Load) {
        if load.first_use > self.op {
            self.prefetched += load.bytes;
            self.arriving[load.first_use] += load.bytes;
        }
    }
}
