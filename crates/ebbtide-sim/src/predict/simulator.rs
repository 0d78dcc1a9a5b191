//! The simulator as a search uses it: the time of a choice, or that it is no better.

use ebbtide_core::{Op, Plan};

use super::choice::Choice;
use super::machine::{Machine, Played};
use super::model::Model;
use super::prediction::{self, Need};
use super::residency::{Fate, Uses};

/// Plays choices on one model and counts them. It allocates when it is made and then no more.
#[derive(Clone, Debug)]
pub struct Simulator<'m> {
    machine: Machine<'m>,
    plays: u64,
}

impl<'m> Simulator<'m> {
    /// For plans of this model.
    ///
    /// # Panics
    /// The model has more than 16 tiers, or no layer.
    pub fn new(model: &'m Model) -> Self {
        assert!(model.tiers.len() <= ebbtide_core::gate::MAX_CHANNELS, "too many tiers");
        assert!(!model.layers.is_empty(), "a model without layers");
        Self { machine: Machine::new(model), plays: 0 }
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.machine.model
    }

    /// How many choices were played so far. What is refused before that is free.
    pub fn plays(&self) -> u64 {
        self.plays
    }

    /// The time of a step in nanoseconds, if it fits the budget in bytes and is below `bound`.
    pub fn time(&mut self, choice: &Choice, budget: u64, bound: f64) -> Option<f64> {
        self.play(choice, budget, bound, usize::MAX)
    }

    fn play(&mut self, choice: &Choice, budget: u64, bound: f64, decided: usize) -> Option<f64> {
        if self.machine.compute_ns(choice) as f64 >= bound {
            return None;
        }
        match self.machine.play(choice, budget, bound, decided, &mut ()) {
            Played::Took(ns) => {
                self.plays += 1;
                (ns < bound).then_some(ns)
            }
            Played::TooSlow => {
                self.plays += 1;
                None
            }
            Played::TooLarge { .. } | Played::TooFull { .. } => None,
        }
    }

    /// The operations alone, with what is recomputed, in nanoseconds.
    pub fn compute_ns(&self, choice: &Choice) -> f64 {
        self.machine.compute_ns(choice) as f64
    }

    /// What the choice needs at least, in bytes, and the index of the operation that needs it.
    pub fn least(&mut self, choice: &Choice) -> (u64, usize) {
        self.machine.settled.settle(&self.machine.layout, choice, usize::MAX)
    }

    /// By operation: what the choice given to [`least`](Self::least) or played last needs.
    pub fn minimal(&self) -> &[u64] {
        &self.machine.settled.minimal
    }

    /// The storages of a layer, numbered through all layers.
    pub fn storages_of(&self, layer: usize) -> std::ops::Range<usize> {
        self.machine.layout.of_layer[layer].clone()
    }

    /// What becomes of a storage, and the first and last operation after forward that need it.
    pub fn fate(&self, storage: usize, choice: &Choice) -> (Fate, Uses) {
        self.machine.layout.fate(storage, choice, usize::MAX)
    }

    /// The same as [`least`](Self::least), unless a tier gets more than it holds.
    pub fn least_that_tiers_hold(&mut self, choice: &Choice) -> Option<(u64, usize)> {
        let least = self.least(choice);
        self.machine.check_tiers(choice).is_ok().then_some(least)
    }

    /// What the choice needs at least, and what that is.
    pub fn need(&mut self, choice: &Choice) -> Need {
        let (bytes, op) = self.least(choice);
        prediction::need_of(&self.machine, choice, bytes, op)
    }

    /// The choice as a plan that names only what moves and says when each layer's loads may start.
    /// `None` if it does not fit the budget in bytes, or a tier.
    pub fn plan(&mut self, choice: &Choice, budget: u64) -> Option<Plan> {
        self.machine.prepare(choice, budget, usize::MAX).ok()?;
        let layers = self.model().layers.len();
        let mut plan = Plan::keep(layers);
        for (layer, to) in plan.layers.iter_mut().enumerate() {
            to.recompute = choice.recompute[layer];
        }
        let schedule = prediction::schedule_of(&self.machine, choice, budget);
        for moved in &schedule.moves {
            let to = &mut plan.layers[moved.layer];
            to.swap.push(moved.storage);
            to.tier = moved.load.channel;
            let told = choice.load_at[moved.layer] as usize;
            let trigger = if told > 0 { told } else { moved.load.trigger };
            if to.load_at.is_none_or(|op| op.index(layers) > trigger) {
                to.load_at = Some(Op::at(trigger, layers));
            }
        }
        plan.layers.iter_mut().for_each(|layer| layer.swap.sort_unstable());
        Some(plan)
    }
}

/// What no plan can do better than, given what is decided for its first layers.
///
/// Everything that makes a step slower in roundabout ways is left out: loads take no room, triggers
/// look at each load alone, and directions and compute don't slow each other down. What is left only
/// gets faster when bytes and copies are taken away, so that layers which are not decided can be
/// counted with the bytes that no decision avoids, and without copies.
#[derive(Clone, Debug)]
pub struct Optimist<'m>(Simulator<'m>);

impl<'m> Optimist<'m> {
    /// For a model as it comes from [`Model::at_best`].
    ///
    /// # Panics
    /// As for [`Simulator::new`].
    pub fn new(at_best: &'m Model) -> Self {
        let mut simulator = Simulator::new(at_best);
        simulator.machine.optimist = true;
        Self(simulator)
    }

    /// A time in nanoseconds that no plan beats which decides the layers below `decided` as this
    /// choice does; `None` if none fits the budget in bytes or beats `bound`. Layers from `decided`
    /// on must not be recomputed in the choice.
    pub fn bound(
        &mut self,
        choice: &Choice,
        budget: u64,
        bound: f64,
        decided: usize,
    ) -> Option<f64> {
        self.0.play(choice, budget, bound, decided)
    }

    /// How many times it was asked.
    pub fn plays(&self) -> u64 {
        self.0.plays
    }
}
