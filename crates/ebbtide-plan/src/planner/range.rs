//! Between which budgets there is something to plan.

use ebbtide_core::MemoryBudget;
use ebbtide_sim::predict::{Choice, Model, Simulator};

use super::least_found;
use super::space::Means;

/// The budgets of a model that make a difference, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// What is on the device all the time.
    pub base: u64,
    /// The least that a plan was found for.
    pub least: u64,
    /// What it takes to keep everything that backward reads: more changes nothing.
    pub most: u64,
    /// The peak without ebbtide: what backward never reads stays, too, until its layer's backward.
    pub plain: u64,
}

impl Range {
    /// So many percent of what plain training needs above the base, in bytes.
    pub fn percent(&self, percent: f64) -> u64 {
        between(self.base, self.plain, percent / 100.0)
    }

    /// A budget as people write it, in bytes.
    ///
    /// ```
    /// use ebbtide_core::MemoryBudget;
    /// use ebbtide_plan::{range, synthetic};
    ///
    /// let range = range(&synthetic::trace(4, 2, 0)?.model());
    /// assert_eq!(range.bytes(MemoryBudget::parse("100%")?), range.plain);
    /// assert_eq!(range.bytes(MemoryBudget::parse("64MiB")?), 64 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn bytes(&self, budget: MemoryBudget) -> u64 {
        match budget {
            MemoryBudget::Bytes(bytes) => bytes,
            MemoryBudget::Percent(percent) => self.percent(percent),
        }
    }

    /// The budget at this part of the way from the least to the most, from 0 to 1, in bytes.
    pub fn at(&self, part: f64) -> u64 {
        between(self.least, self.most, part)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between two sizes")]
fn between(low: u64, high: u64, part: f64) -> u64 {
    low + ((high.saturating_sub(low)) as f64 * part.max(0.0)).floor() as u64
}

/// The budgets of a model that make a difference.
///
/// # Panics
/// The model has no layer.
pub fn range(model: &Model) -> Range {
    let mut simulator = Simulator::new(model);
    let most = simulator.least(&Choice::keep(model)).0;
    let least = least_found(model, Means::ALL);
    let least = simulator.least(&least).0.min(most);
    Range { base: model.static_bytes, least, most, plain: plain(model).max(most) }
}

fn plain(model: &Model) -> u64 {
    if let Some(known) = model.plain_bytes {
        return known;
    }
    let mut model = model.clone();
    for (at, layer) in model.layers.iter_mut().enumerate() {
        for storage in &mut layer.storages {
            storage.backward = Some(storage.backward.map_or((at, at), |(first, _)| (first, at)));
        }
    }
    Simulator::new(&model).least(&Choice::keep(&model)).0
}
