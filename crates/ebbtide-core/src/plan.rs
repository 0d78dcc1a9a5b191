//! A plan as data: what an executor does with each layer and each of its storages.
//!
//! A [`Plan`] says what is decided and nothing that follows from it. A [`Schedule`] adds what
//! follows for one model and one budget: bytes by operation, and when each load may start. An
//! executor needs the schedule and a [`Gate`]; it computes nothing itself.

use crate::gate::{Gate, Load};
use crate::op::Op;

/// What is decided for one layer. The default keeps everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerPlan {
    /// The layer's forward runs again before its backward, and what that makes anew is dropped in
    /// between.
    pub recompute: bool,
    /// The storages that are swapped, as indices into the layer's storages, in ascending order.
    /// One that is recomputed or that nobody reads is not moved, even if it is named here.
    pub swap: Vec<usize>,
    /// The tier that they go to, as an index into the machine's tiers.
    pub tier: usize,
    /// No load of this layer starts before this operation. `None` leaves it to the bytes.
    pub load_at: Option<Op>,
}

/// One [`LayerPlan`] for each layer of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By layer.
    pub layers: Vec<LayerPlan>,
}

impl Plan {
    /// Nothing is moved or recomputed.
    pub fn keep(layers: usize) -> Self {
        Self { layers: vec![LayerPlan::default(); layers] }
    }
}

/// A storage that leaves the device and comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The layer that made it.
    pub layer: usize,
    /// Its index among that layer's storages.
    pub storage: usize,
    /// Index of the operation after which its offload begins.
    pub leave_after: usize,
    /// When it comes back. The channel is the tier.
    pub load: Load,
}

/// What an executor follows: a plan, worked out for one model and one budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Bytes of the device that may be in use at any moment.
    pub budget: u64,
    /// What each operation cannot do without, in bytes, by [index](Op::index).
    pub minimal: Vec<u64>,
    /// By layer: whether it is recomputed.
    pub recompute: Vec<bool>,
    /// The storages that move, in the order in which their loads start.
    pub moves: Vec<Move>,
}

impl Schedule {
    /// The gate of one step under this schedule.
    pub fn gate(&self) -> Gate {
        Gate::new(self.minimal.clone(), self.budget)
    }
}
