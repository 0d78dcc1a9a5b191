//! Draws a plan from a mix of features.

use ebbtide_core::Element;

use crate::play::features::{Feature, Mix};
use crate::play::order;
use crate::play::plan::{Asks, Misuse, Moment, Plan, Source, Step, Value, View, Visit};
use crate::random::{Random, Ratio};

/// Half of the time.
pub(super) const HALF: Ratio = Ratio(1, 2);

/// How many streams of the caller's there are.
pub(super) const STREAMS: usize = 2;

/// How many pools tensors can ask for.
pub(super) const POOLS: usize = 2;

const ELEMENTS: [Element; 5] = [
    Element { name: "float32", bytes: 4 },
    Element { name: "bfloat16", bytes: 2 },
    Element { name: "int64", bytes: 8 },
    Element { name: "complex64", bytes: 8 },
    Element { name: "bool", bytes: 1 },
];

/// The sizes of what a layer saves.
type Sizes = Vec<u64>;

pub(super) struct Draw<'a> {
    pub(super) mix: &'a Mix,
    pub(super) random: &'a mut Random,
    tables: usize,
}

/// A plan for a mix.
pub(super) fn plan(mix: &Mix, random: &mut Random) -> Plan {
    let tables = if mix.has(Feature::Tables) { 1 + random.below(2) } else { 0 };
    let tables: Vec<u64> = (0..tables).map(|_| 8 * (1 + random.below(256))).collect();
    let mut draw = Draw { mix, random, tables: tables.len() };
    let many = mix.has(Feature::ManySteps);
    let layers = if many { 1 + draw.random.below(3) } else { 1 + draw.random.below(6) };
    let mut sizes: Vec<Sizes> = (0..layers).map(|_| draw.sizes()).collect();
    let count = if many { 12 } else { 1 + draw.random.below(4) };
    let mut steps = Vec::new();
    for _ in 0..count {
        steps.push(draw.step(&sizes));
        for layer in &mut sizes {
            if draw.roll(Feature::Resize) {
                *layer = draw.sizes();
            }
        }
    }
    Plan { tables, steps }
}

impl Draw<'_> {
    pub(super) fn roll(&mut self, feature: Feature) -> bool {
        self.mix.roll(feature, self.random)
    }

    pub(super) fn index(&mut self, length: usize) -> usize {
        let index = self.random.below(u64::try_from(length).unwrap_or(u64::MAX));
        usize::try_from(index).unwrap_or(0)
    }

    fn sizes(&mut self) -> Sizes {
        let count = 1 + self.random.below(5);
        (0..count).map(|_| self.size()).collect()
    }

    fn size(&mut self) -> u64 {
        let largest = [64, 512, 512, 2048, 2048, 4096, 16384][self.index(7)];
        8 * (1 + self.random.below(largest / 8))
    }

    fn step(&mut self, sizes: &[Sizes]) -> Step {
        let passes = if self.mix.has(Feature::MicroBatches) { 1 + self.random.below(4) } else { 1 };
        let mut step = Step { visits: Vec::new(), events: Vec::new(), shrink: None };
        let mut forwards = Vec::new();
        for pass in 0..passes {
            forwards.push(self.pass(&mut step, pass, sizes));
        }
        self.reuse(&mut step, &forwards);
        let backwards: Vec<_> = forwards.iter().map(|visits| self.backward(visits)).collect();
        for (pass, order) in backwards.iter().enumerate() {
            self.asks(&mut step, pass, order, sizes);
        }
        self.changes(&mut step);
        step.events = order::events(self, &forwards, &backwards);
        if self.roll(Feature::Shrink) {
            step.shrink = Some(self.random.below(1 << 16));
        }
        step
    }

    /// The visits of one pass, in the order of forward.
    fn pass(&mut self, step: &mut Step, pass: u64, sizes: &[Sizes]) -> Vec<usize> {
        let mut visits = Vec::new();
        for (layer, sizes) in (0..).zip(sizes) {
            let times = if self.roll(Feature::Twice) { 2 } else { 1 };
            for _ in 0..times {
                let mut visit = self.visit(pass, layer, sizes);
                if self.mix.has(Feature::Tables) {
                    self.add_table(&mut visit);
                }
                visit.waits_for = visits.last().copied().into_iter().collect();
                visits.push(step.visits.len());
                step.visits.push(visit);
            }
        }
        if let Some(&last) = visits.last() {
            step.visits[last].waits_for.push(last);
        }
        for &visit in &visits {
            if self.roll(Feature::LateWaits) {
                step.visits[visit].waits_for.clear();
            }
        }
        visits
    }

    fn visit(&mut self, pass: u64, layer: u32, sizes: &[u64]) -> Visit {
        let values = sizes.iter().map(|&bytes| self.value(bytes)).collect();
        let mut visit = Visit { pass, layer, values, ..Visit::default() };
        if self.roll(Feature::Streams) {
            visit.own_stream = Some(self.index(STREAMS));
        }
        if self.roll(Feature::LongKernels) {
            visit.busy_ns = 1000 * (1 + self.random.below(400));
        }
        if self.roll(Feature::Pressure) {
            visit.pressure = self.sizes();
        }
        if self.roll(Feature::Misuse) {
            visit.misuse = Some(
                [
                    Misuse::WaitBeforeStart,
                    Misuse::StartTwice,
                    Misuse::RegisterLate,
                    Misuse::LoadTooEarly,
                    Misuse::AfterClose,
                ][self.index(5)],
            );
        }
        visit
    }

    fn value(&mut self, bytes: u64) -> Value {
        let bytes = if self.roll(Feature::Empty) && self.random.chance(HALF) { 0 } else { bytes };
        let element =
            if self.roll(Feature::Elements) { ELEMENTS[self.index(5)] } else { ELEMENTS[0] };
        let mut value = Value {
            source: Source::Fresh(bytes),
            views: self.views(bytes),
            element,
            pack: self.roll(Feature::Pack),
            pool: None,
            protect: None,
            reused: false,
            dropped: self.roll(Feature::DropHandles),
        };
        if self.roll(Feature::Pools) {
            value.pool = Some(self.index(POOLS));
        }
        if self.roll(Feature::Protect) {
            value.protect = Some(self.moment());
        }
        value
    }

    fn moment(&mut self) -> Moment {
        [Moment::Before, Moment::During, Moment::After, Moment::Loading][self.index(4)]
    }

    fn views(&mut self, bytes: u64) -> Vec<View> {
        let mut views = Vec::new();
        let whole = View { range: 0..bytes, strided: false };
        if self.roll(Feature::Slices) {
            views.push(self.view(bytes));
        } else {
            views.push(whole.clone());
        }
        if self.roll(Feature::Views) {
            for _ in 0..=self.random.below(4) {
                views.push(self.view(bytes));
            }
        }
        if self.roll(Feature::Repeats) {
            let again = views[self.index(views.len())].clone();
            views.push(again);
        }
        if self.roll(Feature::Empty) {
            let at = self.random.below(bytes + 1);
            views.insert(0, View { range: at..at, strided: false });
        }
        views
    }

    fn view(&mut self, bytes: u64) -> View {
        let start = self.random.below(bytes);
        let end = (start + 1 + self.random.below(bytes - start)).min(bytes);
        View { range: start..end, strided: self.random.chance(Ratio(1, 4)) }
    }

    fn add_table(&mut self, visit: &mut Visit) {
        for table in 0..self.tables {
            if !self.roll(Feature::Tables) {
                continue;
            }
            let mut value = self.value(8);
            value.source = Source::Table(table);
            // All of it, since others use it; its size is known to the player.
            value.views = vec![View { range: 0..u64::MAX, strided: false }];
            value.dropped = false;
            // Another layer uses it, even if no other group has it now.
            let early = self.random.chance(HALF);
            value.protect = Some(if early { Moment::Before } else { Moment::During });
            visit.values.push(value);
        }
    }

    /// Lets later visits of a pass save what earlier ones made.
    fn reuse(&mut self, step: &mut Step, forwards: &[Vec<usize>]) {
        for (pass, visits) in forwards.iter().enumerate() {
            let earlier: Vec<usize> = forwards[..pass].iter().flatten().copied().collect();
            for &visit in visits {
                if !earlier.is_empty() && self.roll(Feature::AcrossPasses) {
                    let from = earlier[self.index(earlier.len())];
                    self.reuse_one(step, from, visit, false);
                }
            }
            for (at, &visit) in visits.iter().enumerate().skip(1) {
                if self.roll(Feature::Outputs) {
                    self.reuse_one(step, visits[at - 1], visit, true);
                }
                if self.roll(Feature::Skips) {
                    let any = self.index(at);
                    let from = visits[if self.random.chance(HALF) { 0 } else { any }];
                    self.reuse_one(step, from, visit, false);
                }
            }
        }
    }

    fn reuse_one(&mut self, step: &mut Step, from: usize, to: usize, output: bool) {
        let values = &mut step.visits[from].values;
        let fresh: Vec<usize> = (0..values.len())
            .filter(|&at| matches!(values[at].source, Source::Fresh(bytes) if bytes > 0))
            .collect();
        if fresh.is_empty() {
            return;
        }
        // Often the same one, so that more than two have it.
        let any = self.index(fresh.len());
        let at = fresh[if self.random.chance(HALF) { 0 } else { any }];
        let source = Source::Of(from, at);
        if step.visits[to].values.iter().any(|value| value.source == source) {
            return;
        }
        let value = &mut step.visits[from].values[at];
        let Source::Fresh(bytes) = value.source else { return };
        value.reused = true;
        value.dropped = false;
        let whole = value.views.iter().any(|view| view.range == (0..bytes));
        if output || !whole {
            value.protect = Some(Moment::Before);
        }
        let mut again = self.value(bytes);
        (again.source, again.dropped) = (source, false);
        if matches!(again.views[..], [View { range: ref r, .. }] if *r == (0..0)) {
            again.views = vec![View { range: 0..bytes, strided: false }];
        }
        if again.views.iter().all(|view| view.range != (0..bytes)) {
            again.protect = Some(Moment::Before);
        }
        step.visits[to].values.push(again);
    }

    fn backward(&mut self, forward: &[usize]) -> Vec<usize> {
        let mut order: Vec<usize> = forward.iter().rev().copied().collect();
        for at in 1..order.len() {
            if self.roll(Feature::Deviate) {
                let other = self.index(at + 1);
                order.swap(at, other);
            }
        }
        order.retain(|_| !self.roll(Feature::Unused));
        order
    }

    fn asks(&mut self, step: &mut Step, pass: usize, order: &[usize], sizes: &[Sizes]) {
        for (at, &visit) in order.iter().enumerate() {
            let when = self.random.below(4);
            let mut asks = Asks {
                prefetch_first: when == 1 || when == 3,
                prefetch_then: when > 1,
                ..Asks::default()
            };
            if self.roll(Feature::ByHand) {
                asks.by_hand = true;
                asks.starts = order.get(at + 1).copied();
            }
            if self.roll(Feature::Recompute) {
                let layer = step.visits[visit].layer;
                let pass = 100 + u64::try_from(pass).unwrap_or(0);
                let mut again = self.visit(pass, layer, &sizes[layer as usize]);
                let number = step.visits.len();
                again.waits_for = if self.random.chance(HALF) { vec![number] } else { Vec::new() };
                again.asks.prefetch_first = self.random.chance(HALF);
                step.visits.push(again);
                if self.roll(Feature::Skips) {
                    let from = order[self.index(order.len())];
                    self.reuse_one(step, from, number, false);
                }
                asks.recompute = Some(number);
            }
            step.visits[visit].asks = asks;
        }
    }

    /// Changes in place, where nobody else looks at the value.
    fn changes(&mut self, step: &mut Step) {
        for visit in &mut step.visits {
            if !self.roll(Feature::Modify) {
                continue;
            }
            let moment = [Moment::Before, Moment::During, Moment::After][self.index(3)];
            let at = self.index(visit.values.len());
            let value = &visit.values[at];
            let alone = matches!(value.source, Source::Fresh(bytes) if bytes > 0)
                && !value.reused
                && !value.dropped;
            let stays = matches!(value.protect, Some(Moment::Before | Moment::During));
            // The group is given up afterwards: nobody else may miss what it has away.
            let sole = visit
                .values
                .iter()
                .all(|v| !v.reused && (matches!(v.source, Source::Fresh(_) | Source::Of(..))));
            let fits = match moment {
                Moment::Before => alone,
                Moment::During => alone && sole && value.protect.is_none(),
                Moment::After | Moment::Loading => alone && sole && stays,
            };
            if fits {
                visit.change = Some((moment, at));
            }
        }
    }
}
