//! Which storage is on the device during which operations, and what that adds up to.
//!
//! Nothing here knows of time. What a plan needs at least is a closed form of its decisions, so
//! whether it fits a budget can be told without playing it.

use std::ops::Range;

use ebbtide_core::gate::Load;

use super::choice::Choice;
use super::model::Model;

/// What becomes of a storage under a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nobody needs it after its last forward.
    Dead,
    /// It stays until its last use.
    Kept,
    /// It is away between its last forward and its first use.
    Swapped,
    /// It is made anew before the backward of its layer.
    Recomputed,
    /// Not decided yet: counted where no decision can avoid it.
    Undecided,
}

const NEVER: u32 = u32::MAX;

/// A storage, flat, with operations as indices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flat {
    pub(crate) bytes: u64,
    pub(crate) pieces: u32,
    pub(crate) layer: u32,
    pub(crate) last_forward: u32,
    /// The first backward that reads it; [`NEVER`] if none does.
    first_backward: u32,
    last_backward: u32,
    readers: (u32, u32),
    recomputable: bool,
}

/// The first and the last operation after forward that need a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uses {
    /// Index of the first; `u32::MAX` if there is none.
    pub first: u32,
    /// Index of the last.
    pub last: u32,
}

/// A model's storages in one array, and what does not depend on a plan.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) layers: usize,
    pub(crate) storages: Vec<Flat>,
    /// By layer: its storages.
    pub(crate) of_layer: Vec<Range<usize>>,
    readers: Vec<u32>,
    /// By operation: static bytes and workspace.
    base: Vec<i64>,
    /// Storages in the order in which their offloads are queued.
    pub(crate) leaving: Vec<u32>,
    /// The operations alone, and the fixed part of a step.
    pub(crate) compute_ns: u64,
}

/// Index of the recompute of a layer; its backward is the next one.
pub(crate) fn recompute_op(layers: usize, layer: usize) -> usize {
    layers + 2 * (layers - 1 - layer)
}

impl Layout {
    pub(crate) fn new(model: &Model) -> Self {
        let layers = model.layers.len();
        let mut layout = Self {
            layers,
            storages: Vec::with_capacity(model.storages()),
            of_layer: Vec::with_capacity(layers),
            readers: Vec::new(),
            base: base_bytes(model),
            leaving: Vec::new(),
            compute_ns: model.compute_ns(),
        };
        for at in 0..layers {
            layout.add_layer(model, at);
        }
        layout.leaving = (0..).take(layout.storages.len()).collect();
        layout.leaving.sort_by_key(|&s| layout.storages[s as usize].last_forward);
        layout
    }

    fn add_layer(&mut self, model: &Model, at: usize) {
        let start = self.storages.len();
        let backward = |layer: usize| small(recompute_op(self.layers, layer) + 1);
        for storage in &model.layers[at].storages {
            let first_reader = small(self.readers.len());
            self.readers.extend(storage.read_by.iter().map(|&layer| small(layer)));
            self.storages.push(Flat {
                bytes: storage.bytes,
                pieces: storage.pieces.max(1),
                layer: small(at),
                last_forward: small(storage.last_forward),
                first_backward: storage.backward.map_or(NEVER, |(first, _)| backward(first)),
                last_backward: storage.backward.map_or(0, |(_, last)| backward(last)),
                readers: (first_reader, small(self.readers.len())),
                recomputable: storage.recomputable,
            });
        }
        self.of_layer.push(start..self.storages.len());
    }

    /// Who needs a storage after forward, when these layers are recomputed.
    fn uses(&self, storage: &Flat, recompute: &[bool]) -> Uses {
        let mut uses = Uses { first: storage.first_backward, last: storage.last_backward };
        for &reader in &self.readers[storage.readers.0 as usize..storage.readers.1 as usize] {
            if recompute[reader as usize] {
                let op = small(recompute_op(self.layers, reader as usize));
                uses.first = uses.first.min(op);
                uses.last = uses.last.max(op);
            }
        }
        uses
    }

    /// Whether a layer from `decided` on reads a storage in forward.
    pub(crate) fn is_open(&self, at: usize, decided: usize) -> bool {
        let (first, last) = self.storages[at].readers;
        let readers = &self.readers[first as usize..last as usize];
        readers.iter().any(|&reader| reader as usize >= decided)
    }

    /// What becomes of a storage. Layers from `decided` on have not been decided.
    pub(crate) fn fate(&self, at: usize, choice: &Choice, decided: usize) -> (Fate, Uses) {
        let storage = &self.storages[at];
        let layer = storage.layer as usize;
        let uses = self.uses(storage, &choice.recompute);
        let own_backward = small(recompute_op(self.layers, layer) + 1);
        let fate = if uses.first == NEVER {
            Fate::Dead
        } else if layer >= decided {
            Fate::Undecided
        } else if choice.recompute[layer] && storage.recomputable && uses.first == own_backward {
            Fate::Recomputed
        } else if choice.swap[at] {
            Fate::Swapped
        } else {
            Fate::Kept
        };
        (fate, uses)
    }
}

fn base_bytes(model: &Model) -> Vec<i64> {
    let layers = model.layers.len();
    let mut base = vec![signed(model.static_bytes); 3 * layers];
    for (at, layer) in model.layers.iter().enumerate() {
        let again = recompute_op(layers, at);
        base[at] += signed(layer.workspace.forward);
        base[again] += signed(layer.workspace.recompute);
        base[again + 1] += signed(layer.workspace.backward);
    }
    base
}

pub(crate) fn small(number: usize) -> u32 {
    u32::try_from(number).expect("fewer than 2^32 operations and storages")
}

/// Sums of bytes are checked when a model is made; below 2^63 by far.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX / 4)
}

/// A storage that moves: its index in the layout, and its load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moving {
    pub(crate) storage: u32,
    pub(crate) load: Load,
}

/// What follows from a choice, before it is played.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settled {
    /// By operation.
    pub(crate) minimal: Vec<u64>,
    /// In order of first use, then of storage.
    pub(crate) moving: Vec<Moving>,
    /// By storage: whether it moves.
    pub(crate) moves: Vec<bool>,
    /// By operation, of storages alone: what the operation adds to the one before.
    steps: Vec<i64>,
    /// By operation: how many loads it is the first user of; then where they go in `moving`.
    places: Vec<u32>,
    unsorted: Vec<Moving>,
}

impl Settled {
    /// Works out residency. The largest of the minimal bytes, and its operation, come back.
    pub(crate) fn settle(
        &mut self,
        layout: &Layout,
        choice: &Choice,
        decided: usize,
    ) -> (u64, usize) {
        self.steps.clear();
        self.steps.resize(3 * layout.layers + 1, 0);
        self.unsorted.clear();
        self.moves.clear();
        self.moves.resize(layout.storages.len(), false);
        for at in 0..layout.storages.len() {
            self.place(layout, choice, at, decided);
        }
        self.sum(layout, choice)
    }

    fn place(&mut self, layout: &Layout, choice: &Choice, at: usize, decided: usize) {
        let storage = &layout.storages[at];
        let (fate, uses) = layout.fate(at, choice, decided);
        let (made, last_forward) = (storage.layer as usize, storage.last_forward as usize);
        let (first, last) = (uses.first as usize, uses.last as usize);
        let bytes = signed(storage.bytes);
        let mut resident = |from: usize, to: usize| {
            self.steps[from] += bytes;
            self.steps[to + 1] -= bytes;
        };
        match fate {
            Fate::Dead => resident(made, last_forward),
            Fate::Kept => resident(made, last),
            Fate::Recomputed => {
                resident(made, last_forward);
                resident(recompute_op(layout.layers, made), last);
            }
            Fate::Undecided | Fate::Swapped => {
                resident(made, last_forward);
                resident(first, last);
            }
        }
        if fate == Fate::Swapped {
            self.moves[at] = true;
            self.unsorted.push(moving(layout, choice, at, first));
        }
    }

    /// A missing recompute has no workspace; what is resident then is so at the backward, too.
    fn sum(&mut self, layout: &Layout, choice: &Choice) -> (u64, usize) {
        self.minimal.clear();
        let (mut level, mut most) = (0, (0, 0));
        for (op, base) in layout.base.iter().enumerate() {
            level += self.steps[op];
            let absent = op >= layout.layers
                && (op - layout.layers).is_multiple_of(2)
                && !choice.recompute[layout.layers - 1 - (op - layout.layers) / 2];
            let bytes = if absent { level } else { level + base };
            let bytes = u64::try_from(bytes).unwrap_or(0);
            self.minimal.push(bytes);
            if bytes > most.0 {
                most = (bytes, op);
            }
        }
        most
    }

    /// Bytes that move to this tier.
    pub(crate) fn swapped(&self, layout: &Layout, choice: &Choice, tier: usize) -> u64 {
        let moving = layout.storages.iter().zip(&self.moves).filter(|(_, moves)| **moves);
        let here = moving.filter(|(flat, _)| usize::from(choice.tier[flat.layer as usize]) == tier);
        here.map(|(flat, _)| flat.bytes).sum()
    }

    /// Brings the loads into the order of their first use. Counting keeps it linear and stable.
    pub(crate) fn order(&mut self, layout: &Layout) {
        self.places.clear();
        self.places.resize(3 * layout.layers + 1, 0);
        for moving in &self.unsorted {
            self.places[moving.load.first_use + 1] += 1;
        }
        for op in 1..self.places.len() {
            self.places[op] += self.places[op - 1];
        }
        self.moving.clear();
        self.moving.resize(self.unsorted.len(), Moving::default());
        for moving in &self.unsorted {
            let place = &mut self.places[moving.load.first_use];
            self.moving[*place as usize] = *moving;
            *place += 1;
        }
    }
}

/// Beyond this many layers, loads start at most [`FAR`] operations early: looking further costs
/// planning time and gains nothing.
const DEEP: usize = 64;
const FAR: usize = 24;

fn moving(layout: &Layout, choice: &Choice, at: usize, first_use: usize) -> Moving {
    let storage = &layout.storages[at];
    let layer = storage.layer as usize;
    let turn = layout.layers - 1;
    let far = if layout.layers > DEEP { first_use.saturating_sub(FAR) } else { 0 };
    let earliest = (storage.last_forward as usize + 1).max(turn).max(far);
    let load = Load {
        bytes: storage.bytes,
        earliest: earliest.max(choice.load_at[layer] as usize),
        first_use,
        channel: usize::from(choice.tier[layer]),
        trigger: 0,
    };
    Moving { storage: small(at), load }
}
