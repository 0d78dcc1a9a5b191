//! What a step costs, layer by layer: the notes that a trace is made of.
//!
//! A traced step moves everything away at once and waits for it, so at any moment only the storages
//! of the layer at work are on the device. What the heap holds besides, at its peak within an
//! operation, is what that operation cannot do without whatever the plan is: its *workspace*. Among
//! it are the outputs of layers and the gradients, which no plan moves.
//!
//! # What belongs to which operation
//!
//! What runs outside the layers counts with the operation that comes next: the embedding with the
//! first forward, the head with the last layer's backward. What comes after the last backward (the
//! optimizer) counts with that one. A plan may keep the next layer's storages meanwhile, so the
//! peak outside and the operation's own are compared as they are, never added.

use std::time::{Duration, Instant};

use candle_core::backprop::GradStore;

use crate::exchange::Held;
use crate::graph::Owned;
use crate::heap::Heap;

/// A storage smaller than the largest of its layer by more than this factor always stays: moving it
/// would cost a copy's latency and free next to nothing.
const TOO_SMALL: u64 = 64;

/// The storages of a layer that a plan decides on, by index among the layer's own.
pub(crate) fn decided(owned: &[Owned], taken: &[usize]) -> Vec<usize> {
    let largest = owned.iter().map(|storage| storage.bytes).max().unwrap_or(0);
    let mut all = Vec::new();
    for (index, storage) in owned.iter().enumerate() {
        let small = storage.bytes == 0 || storage.bytes.saturating_mul(TOO_SMALL) < largest;
        if !small && !taken.contains(&index) && Held::new(storage.handle.clone()).is_some() {
            all.push(index);
        }
    }
    all
}

/// A storage that a plan decides on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StorageNote {
    /// Index among the layer's own.
    pub(crate) owned: usize,
    pub(crate) bytes: u64,
    pub(crate) dead: bool,
    /// Its number, type and shape.
    pub(crate) name: String,
}

impl StorageNote {
    pub(crate) fn all(owned: &[Owned], dead: &[bool], taken: &[usize]) -> Vec<Self> {
        let note = |index: usize| {
            let storage = &owned[index];
            let sizes: Vec<String> =
                storage.handle.dims().iter().map(ToString::to_string).collect();
            let (dtype, shape) = (storage.handle.dtype().as_str(), sizes.join("x"));
            Self {
                owned: index,
                bytes: storage.bytes,
                dead: dead.get(index).copied().unwrap_or(false),
                name: format!("{index} {dtype} {shape}"),
            }
        };
        decided(owned, taken).into_iter().map(note).collect()
    }

    fn bytes(all: &[Self], alive_only: bool) -> u64 {
        all.iter().filter(|note| !(alive_only && note.dead)).map(|note| note.bytes).sum()
    }
}

/// One layer. Bytes are above what was on the device when the step began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerNotes {
    pub(crate) name: String,
    pub(crate) storages: Vec<StorageNote>,
    /// Why it can't be recomputed.
    pub(crate) why_not: Option<String>,
    /// Outputs that backward reads: a recomputed layer has them twice.
    pub(crate) outputs_alive: u64,
    pub(crate) output_bytes: u64,
    /// What plain Candle makes in its backward and holds until all is over, in bytes: see
    /// [`Segment::backward`](crate::segment::Segment::backward).
    pub(crate) left_bytes: u64,
    pub(crate) forward_ns: u64,
    /// What comparing a recomputed layer with its forward takes, each time.
    pub(crate) hash_ns: u64,
    pub(crate) backward_ns: u64,
    /// Before the forward began: the peak since the last operation, and what there was then.
    before_forward: u64,
    at_forward: u64,
    forward_peak: u64,
    before_backward: u64,
    at_backward: u64,
    backward_peak: u64,
    /// After the backward, up to the end of the step.
    after: u64,
    has_backward: bool,
}

impl LayerNotes {
    fn all_bytes(&self) -> u64 {
        StorageNote::bytes(&self.storages, false)
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        StorageNote::bytes(&self.storages, true)
    }

    /// What its forward needs beside its storages, in bytes.
    pub(crate) fn forward_temp(&self) -> u64 {
        self.forward_peak.max(self.before_forward).saturating_sub(self.all_bytes())
    }

    /// What its backward needs beside its storages, in bytes.
    pub(crate) fn backward_temp(&self) -> u64 {
        let own = self.backward_peak.saturating_sub(self.live_bytes()) + self.outputs_alive;
        own.max(self.before_backward).max(self.after.saturating_sub(self.live_bytes()))
    }

    /// What running its forward again needs beside its storages, in bytes: as much as the first
    /// time, on top of what there is right before its backward.
    pub(crate) fn recompute_temp(&self) -> u64 {
        let forward = self.forward_peak.saturating_sub(self.at_forward);
        let peak = (forward + self.at_backward).max(self.before_backward);
        peak.saturating_sub(self.live_bytes())
    }

    fn lower(&mut self, bytes: u64) {
        let all = [
            &mut self.before_forward,
            &mut self.at_forward,
            &mut self.forward_peak,
            &mut self.before_backward,
            &mut self.at_backward,
            &mut self.backward_peak,
            &mut self.after,
        ];
        for above in all {
            *above = above.saturating_sub(bytes);
        }
    }

    /// The most of two steps in bytes, the least in time. `false` if it is another layer.
    fn merge(&mut self, other: &Self) -> bool {
        if self.name != other.name || self.storages != other.storages {
            return false;
        }
        let least = |mine: &mut u64, other: u64| *mine = (*mine).min(other);
        least(&mut self.forward_ns, other.forward_ns);
        least(&mut self.hash_ns, other.hash_ns);
        least(&mut self.backward_ns, other.backward_ns);
        let most = |mine: &mut u64, other: u64| *mine = (*mine).max(other);
        most(&mut self.before_forward, other.before_forward);
        most(&mut self.at_forward, other.at_forward);
        most(&mut self.forward_peak, other.forward_peak);
        most(&mut self.before_backward, other.before_backward);
        most(&mut self.at_backward, other.at_backward);
        most(&mut self.backward_peak, other.backward_peak);
        most(&mut self.after, other.after);
        most(&mut self.outputs_alive, other.outputs_alive);
        self.why_not = self.why_not.take().or_else(|| other.why_not.clone());
        true
    }
}

/// The notes of one or several steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recording {
    pub(crate) layers: Vec<LayerNotes>,
    /// What was on the device when the steps began.
    pub(crate) static_bytes: u64,
    /// What a step takes beside its layers.
    pub(crate) fixed_ns: u64,
    /// The most bytes at one time in any of the steps.
    pub(crate) peak_bytes: u64,
    pub(crate) steps: usize,
}

impl Recording {
    fn merge(&mut self, mut other: Self) {
        // What a step takes for good (a thread's buffers, say) is workspace in the step that does, and
        // part of what is always there afterwards.
        let static_bytes = self.static_bytes.max(other.static_bytes);
        self.rebase(static_bytes);
        other.rebase(static_bytes);
        let same = self.layers.len() == other.layers.len()
            && self.layers.iter_mut().zip(&other.layers).all(|(mine, other)| mine.merge(other));
        if !same {
            // Another model from here on.
            *self = other;
            return;
        }
        self.fixed_ns = self.fixed_ns.min(other.fixed_ns);
        self.peak_bytes = self.peak_bytes.max(other.peak_bytes);
        self.steps += other.steps;
    }

    /// The same bytes above another, higher base.
    fn rebase(&mut self, static_bytes: u64) {
        let higher = static_bytes - self.static_bytes;
        self.static_bytes = static_bytes;
        self.layers.iter_mut().for_each(|layer| layer.lower(higher));
    }

    /// Corrects times by what steps under a plan took.
    pub(crate) fn correct_times(&mut self, factor: f64, beside: Duration) {
        for layer in &mut self.layers {
            for ns in [&mut layer.forward_ns, &mut layer.backward_ns, &mut layer.hash_ns] {
                *ns =
                    Duration::from_nanos(*ns).mul_f64(factor).as_nanos().try_into().unwrap_or(*ns);
            }
        }
        self.fixed_ns = beside.as_nanos().try_into().unwrap_or(self.fixed_ns);
    }

    /// Takes in one more step.
    pub(crate) fn add(known: &mut Option<Self>, step: Self) {
        match known {
            Some(known) => known.merge(step),
            None => *known = Some(step),
        }
    }
}

/// Writes down one step.
#[derive(Debug)]
pub(crate) struct Recorder {
    heap: &'static Heap,
    notes: Recording,
    started: Instant,
    /// The layers' own times, and what would not be there in a step that is not traced.
    inside: Duration,
    since: Instant,
}

impl Recorder {
    /// A step begins.
    pub(crate) fn begin(heap: &'static Heap) -> Self {
        heap.lap();
        let notes = Recording { static_bytes: heap.live_bytes(), steps: 1, ..Recording::default() };
        let now = Instant::now();
        Self { heap, notes, started: now, inside: Duration::ZERO, since: now }
    }

    /// Something that only a traced step does, such as waiting for its copies.
    pub(crate) fn aside(&mut self, since: Instant) {
        self.inside += since.elapsed();
        self.lap();
    }

    /// The peak since the last call, above what there was when the step began.
    fn lap(&mut self) -> u64 {
        let peak = self.heap.lap();
        self.notes.peak_bytes = self.notes.peak_bytes.max(peak);
        peak.saturating_sub(self.notes.static_bytes)
    }

    fn now(&self) -> u64 {
        self.heap.live_bytes().saturating_sub(self.notes.static_bytes)
    }

    /// The forward of the next layer is about to run, probes included.
    pub(crate) fn before_forward(&mut self, name: &str) {
        let before_forward = self.lap();
        self.notes.layers.push(LayerNotes {
            name: name.to_string(),
            before_forward,
            ..LayerNotes::default()
        });
    }

    /// It runs now.
    pub(crate) fn forward(&mut self) {
        self.lap();
        let now = self.now();
        if let Some(layer) = self.notes.layers.last_mut() {
            layer.at_forward = now;
        }
        self.since = Instant::now();
    }

    /// It has run; all it made is still there. `note` adds what is known of the layer.
    pub(crate) fn forward_done(&mut self, note: impl FnOnce(&mut LayerNotes)) {
        let (ns, peak) = (self.spent(), self.lap());
        if let Some(layer) = self.notes.layers.last_mut() {
            (layer.forward_ns, layer.forward_peak) = (ns, peak);
            note(layer);
        }
    }

    /// The layer's storages were compared with themselves, which a recomputed layer has done twice.
    pub(crate) fn hashed(&mut self, since: Instant) {
        let ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if let Some(layer) = self.notes.layers.last_mut() {
            layer.hash_ns = ns;
        }
        self.inside += since.elapsed();
    }

    /// A layer's backward is about to run; its storages are away.
    pub(crate) fn before_backward(&mut self, layer: usize) {
        let (peak, now) = (self.lap(), self.now());
        if let Some(layer) = self.notes.layers.get_mut(layer) {
            (layer.before_backward, layer.at_backward) = (peak, now);
        }
    }

    /// Its storages are home, it runs now.
    pub(crate) fn backward(&mut self) {
        self.lap();
        self.since = Instant::now();
    }

    /// Lets go of what its backward made besides the sums, and counts it.
    pub(crate) fn leave(&mut self, layer: usize, left: GradStore) {
        let before = self.now();
        drop(left);
        let now = self.now();
        if let Some(layer) = self.notes.layers.get_mut(layer) {
            layer.left_bytes = before.saturating_sub(now);
        }
    }

    /// It has run, and its storages are gone.
    pub(crate) fn backward_done(&mut self, layer: usize) {
        let (ns, peak) = (self.spent(), self.lap());
        if let Some(layer) = self.notes.layers.get_mut(layer) {
            (layer.backward_ns, layer.backward_peak, layer.has_backward) = (ns, peak, true);
        }
    }

    fn spent(&mut self) -> u64 {
        let spent = self.since.elapsed();
        self.inside += spent;
        u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The step is over, optimizer included. `took` is its time, if the caller knows it better.
    pub(crate) fn finish(mut self, took: Option<Duration>) -> Recording {
        let after = self.lap();
        // Layers are left in the order of backward, which ends with the first one it reached.
        if let Some(last) = self.notes.layers.iter_mut().find(|layer| layer.has_backward) {
            last.after = after;
        }
        let took = took.unwrap_or_else(|| self.started.elapsed());
        let fixed = took.saturating_sub(self.inside).as_nanos();
        self.notes.fixed_ns = u64::try_from(fixed).unwrap_or(u64::MAX);
        self.notes
    }
}
