//! Plans from prices: what a nanosecond of copying and of recomputing is worth, by position.
//!
//! Given prices, every means to free bytes has a cost for each byte. The cheapest ones are taken
//! until the plan fits, and those that turn out not to be needed are given back. What is searched is
//! not the plan but ten numbers, whatever the size of the model.

use ebbtide_sim::predict::{Choice, Fate, Model, Storage};

use super::search::Search;
use super::slack::Profile;
use super::space::Way;

/// Knots of a price over the position of a layer.
const KNOTS: usize = 4;

/// Logarithms of prices, and how recomputed layers are spread between others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prices {
    /// Of a nanosecond of copying (4 knots), then of recomputing (4 knots); then how much the cost
    /// of recomputing differs from layer to layer, and where that pattern begins.
    pub(crate) numbers: [f64; 2 * KNOTS + 2],
}

impl Prices {
    /// One price for copying relative to recomputing, rising by `slope` from the first layer to the
    /// last.
    pub(crate) fn flat(copy: f64, slope: f64, jitter: f64) -> Self {
        let mut numbers = [0.0; 2 * KNOTS + 2];
        for (at, knot) in numbers[..KNOTS].iter_mut().enumerate() {
            *knot = copy + slope * (at as f64 / (KNOTS - 1) as f64 - 0.5);
        }
        numbers[2 * KNOTS] = jitter;
        Self { numbers }
    }

    fn at(knots: &[f64], position: f64) -> f64 {
        let place = position * (KNOTS - 1) as f64;
        let left = (0..KNOTS - 1).rev().find(|&knot| knot as f64 <= place).unwrap_or(0);
        let part = place - left as f64;
        (knots[left] * (1.0 - part) + knots[left + 1] * part).exp()
    }

    fn copy(&self, position: f64) -> f64 {
        Self::at(&self.numbers[..KNOTS], position)
    }

    fn recompute(&self, position: f64, layer: usize) -> f64 {
        const GOLDEN: f64 = 0.618_033_988_749_894_9;
        let [jitter, phase] = [self.numbers[2 * KNOTS], self.numbers[2 * KNOTS + 1]];
        let wave = (layer as f64 * GOLDEN + phase).rem_euclid(1.0) * 2.0 - 1.0;
        Self::at(&self.numbers[KNOTS..2 * KNOTS], position) * (1.0 + jitter * wave).max(0.05)
    }
}

/// A means to free bytes.
#[derive(Clone, Copy, Debug)]
enum Means {
    /// A bit of a layer's mask.
    Swap { bit: usize },
    /// A whole layer.
    Recompute,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    layer: usize,
    means: Means,
    bytes: f64,
    /// Copying out and back (of the inputs that nobody else needs, for a recompute), halved.
    copy_ns: f64,
    recompute_ns: f64,
    /// Inputs that live on only for this.
    input_bytes: f64,
}

/// What is asked of a storage again and again.
#[derive(Clone, Copy, Debug)]
struct Small {
    bytes: u64,
    pieces: u32,
    last_forward: usize,
    layer: usize,
}

/// Makes plans from prices. It keeps its memory.
pub(crate) struct Greedy {
    items: Vec<Item>,
    /// Which tiers a plan spreads over: one after the other, or all at once.
    pub(crate) spread: bool,
    /// By layer: inputs that nobody needs unless it is recomputed, numbered through all layers.
    inputs: Vec<Vec<usize>>,
    /// Numbered through all layers.
    storages: Vec<Small>,
    /// Cost for each byte, and the item; for a recompute, whether inputs are swapped.
    order: Vec<(f64, usize, bool)>,
    used: Vec<u64>,
    busy: Vec<f64>,
    has_tier: Vec<bool>,
    profile: Profile,
}

impl Greedy {
    pub(crate) fn new(search: &Search<'_>) -> Self {
        let model = search.model;
        let mut greedy = Self {
            items: Vec::new(),
            spread: false,
            inputs: vec![Vec::new(); model.layers.len()],
            storages: Vec::new(),
            order: Vec::new(),
            used: Vec::new(),
            busy: Vec::new(),
            has_tier: Vec::new(),
            profile: Profile::default(),
        };
        for (layer, from) in model.layers.iter().enumerate() {
            for storage in &from.storages {
                let Storage { bytes, pieces, last_forward, .. } = *storage;
                if storage.backward.is_none() {
                    let number = greedy.storages.len();
                    storage.read_by.iter().for_each(|&reader| greedy.inputs[reader].push(number));
                }
                greedy.storages.push(Small { bytes, pieces, last_forward, layer });
            }
        }
        (0..model.layers.len()).for_each(|layer| greedy.add_items(search, layer));
        greedy
    }

    fn add_items(&mut self, search: &Search<'_>, layer: usize) {
        let space = &search.space.layers[layer];
        let storages = &self.storages;
        let storage = |number: usize| storages[number];
        let item = Item {
            layer,
            means: Means::Recompute,
            bytes: 0.0,
            copy_ns: 0.0,
            recompute_ns: 0.0,
            input_bytes: 0.0,
        };
        if search.space.tiers() > 0 {
            for (bit, &number) in space.movable.iter().enumerate() {
                let bytes = storage(number).bytes as f64;
                let copy_ns = copy_ns(search.model, storage(number));
                self.items.push(Item { means: Means::Swap { bit }, bytes, copy_ns, ..item });
            }
        }
        let anew = |bit: &usize| space.made_anew >> bit & 1 == 1;
        let bits = (0..space.movable.len()).filter(anew);
        let bytes: u64 = bits.map(|bit| storage(space.movable[bit]).bytes).sum();
        if space.recomputable && bytes > 0 {
            let inputs = self.inputs[layer].iter().map(|&number| storage(number));
            let input_bytes: u64 = inputs.clone().map(|input| input.bytes).sum();
            let can_swap = search.space.tiers() > 0;
            let copies = inputs.map(|input| copy_ns(search.model, input)).sum();
            self.items.push(Item {
                bytes: bytes as f64,
                copy_ns: if can_swap { copies } else { f64::INFINITY },
                recompute_ns: search.model.layers[layer].ns.recompute as f64,
                input_bytes: input_bytes as f64,
                ..item
            });
        }
    }

    /// The plan that these prices lead to; `None` if they lead to none that fits.
    pub(crate) fn plan(&mut self, search: &mut Search<'_>, prices: &Prices) -> Option<Choice> {
        self.sort(prices);
        let mut choice = Choice::keep(search.model);
        let all = self.order.len();
        if !self.fits(search, &mut choice, all) {
            return None;
        }
        let (mut low, mut high) = (0, all);
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.fits(search, &mut choice, middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        // More means can need more: the shortest that was tried and fits is taken.
        if !self.fits(search, &mut choice, high) {
            return None;
        }
        self.give_back(search, &mut choice, high);
        Some(choice)
    }

    fn sort(&mut self, prices: &Prices) {
        let last = self.inputs.len().saturating_sub(1).max(1) as f64;
        self.order.clear();
        for (at, item) in self.items.iter().enumerate() {
            let position = item.layer as f64 / last;
            let copy = prices.copy(position) * item.copy_ns;
            let (cost, swap_inputs) = match item.means {
                Means::Swap { .. } => (copy / item.bytes.max(1.0), false),
                Means::Recompute => {
                    let again = prices.recompute(position, item.layer) * item.recompute_ns;
                    let left = item.bytes - item.input_bytes;
                    let keep = if left > 0.0 { again / left } else { f64::INFINITY };
                    let swap = (again + copy) / item.bytes;
                    (keep.min(swap), swap < keep)
                }
            };
            self.order.push((cost, at, swap_inputs));
        }
        self.order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    }

    fn fits(&mut self, search: &mut Search<'_>, choice: &mut Choice, count: usize) -> bool {
        choice.recompute.fill(false);
        choice.swap.fill(false);
        choice.tier.fill(0);
        self.used.clear();
        self.used.resize(search.model.tiers.len(), 0);
        self.busy.clear();
        self.busy.resize(search.model.tiers.len(), 0.0);
        self.has_tier.clear();
        self.has_tier.resize(search.model.layers.len(), false);
        for at in 0..count {
            let (_, item, swap_inputs) = self.order[at];
            self.take(search, choice, item, swap_inputs);
        }
        search.simulator.least(choice).0 <= search.budget
    }

    fn take(&mut self, search: &Search<'_>, choice: &mut Choice, at: usize, swap_inputs: bool) {
        let item = self.items[at];
        let space = &search.space.layers[item.layer];
        match item.means {
            Means::Swap { bit } => {
                let is_anew = choice.recompute[item.layer] && space.made_anew >> bit & 1 == 1;
                if !is_anew {
                    self.swap(search.model, choice, space.movable[bit]);
                }
            }
            Means::Recompute => {
                let way = search.space.way(choice, item.layer);
                let bits = (0..space.movable.len())
                    .filter(|bit| (way.mask & space.made_anew) >> bit & 1 == 1);
                let away = bits.map(|bit| self.storages[space.movable[bit]].bytes);
                // A layer that is half away already has its cost behind it.
                if 2.0 * away.sum::<u64>() as f64 >= item.bytes {
                    return;
                }
                search.space.set(choice, item.layer, Way { recompute: true, ..way });
                for input in 0..if swap_inputs { self.inputs[item.layer].len() } else { 0 } {
                    self.swap(search.model, choice, self.inputs[item.layer][input]);
                }
            }
        }
    }

    /// Moves a storage to a tier with room; not at all if there is none.
    fn swap(&mut self, model: &Model, choice: &mut Choice, number: usize) {
        let storage = self.storages[number];
        let layer = storage.layer;
        if choice.swap[number] {
            return;
        }
        let room = |tier: &usize| {
            let capacity = model.tiers[*tier].capacity.unwrap_or(u64::MAX);
            self.used[*tier].saturating_add(storage.bytes) <= capacity
        };
        let tiers = 0..model.tiers.len();
        let ns = |tier: usize| {
            self.busy[tier] + model.tiers[tier].out.busy_ns(storage.bytes, storage.pieces)
        };
        let tier = if self.has_tier[layer] {
            Some(usize::from(choice.tier[layer])).filter(room)
        } else if self.spread {
            tiers.filter(room).min_by(|&a, &b| ns(a).total_cmp(&ns(b)))
        } else {
            tiers.into_iter().find(room)
        };
        let Some(tier) = tier else { return };
        self.busy[tier] = ns(tier);
        self.used[tier] += storage.bytes;
        self.has_tier[layer] = true;
        choice.tier[layer] = u8::try_from(tier).expect("a model has at most 16 tiers");
        choice.swap[number] = true;
    }

    /// Leaves out what is not needed for the plan to fit, the most expensive first.
    fn give_back(&mut self, search: &mut Search<'_>, choice: &mut Choice, count: usize) {
        search.simulator.least(choice);
        self.profile.fill(search.simulator.minimal());
        for at in (0..count).rev() {
            let item = self.items[self.order[at].1];
            let space = &search.space.layers[item.layer];
            match item.means {
                Means::Swap { bit } if choice.swap[space.movable[bit]] => {
                    let number = space.movable[bit];
                    if self.stays(search, choice, &[number], Fate::Swapped) {
                        choice.swap[number] = false;
                    }
                }
                Means::Recompute if choice.recompute[item.layer] => {
                    let stays = self.stays(search, choice, &space.movable, Fate::Recomputed);
                    choice.recompute[item.layer] = !stays;
                }
                _ => {}
            }
        }
    }

    /// Whether those of these storages that have this fate can stay all the time. If so, they do.
    fn stays(
        &mut self,
        search: &Search<'_>,
        choice: &Choice,
        numbers: &[usize],
        fate: Fate,
    ) -> bool {
        let layers = search.model.layers.len();
        let mut added = Vec::new();
        let mut fits = true;
        for &number in numbers {
            let (is, uses) = search.simulator.fate(number, choice);
            if is != fate {
                continue;
            }
            let storage = self.storages[number];
            let from = storage.last_forward + 1;
            // A recompute comes one operation before the backward that is the first use.
            let to = uses.first as usize - usize::from(fate == Fate::Recomputed);
            let bytes = i64::try_from(storage.bytes).unwrap_or(i64::MAX / 4);
            self.profile.add(from, to, bytes);
            added.push((from, to, bytes));
            let budget = i64::try_from(search.budget).unwrap_or(i64::MAX);
            fits &= self.profile.most(from, to.min(3 * layers)) <= budget;
        }
        if !fits {
            for (from, to, bytes) in added {
                self.profile.add(from, to, -bytes);
            }
        }
        fits
    }
}

/// Half of the time that a storage is copied on the fastest tier.
fn copy_ns(model: &Model, storage: Small) -> f64 {
    let Some(tier) = model.tiers.first() else { return f64::INFINITY };
    let (bytes, pieces) = (storage.bytes, storage.pieces);
    f64::midpoint(tier.out.busy_ns(bytes, pieces), tier.back.busy_ns(bytes, pieces))
}
