//! The predictive simulator: how long a step takes under a plan, and what it needs.
//!
//! A [`Model`] (times, storages, tiers) and a [`Plan`] are played against each other with the byte
//! gates of [`ebbtide_core::gate`], the same that hold back a running step. So a prediction can be
//! wrong about time, and never about whether the budget holds.
//!
//! ```
//! use ebbtide_core::{LayerPlan, Plan};
//! use ebbtide_sim::predict::{Each, Layer, Link, Model, Storage, Tier, predict};
//!
//! let link = Link { bytes_per_s: 1e9, bytes_per_s_busy: 1e9, latency_ns: 0.0 };
//! let tier = Tier { name: "host".into(), capacity: None, out: link, back: link,
//!     slowdown_permille: 1000, shared_duplex: false };
//! let layer = |at: usize| Layer {
//!     name: format!("h.{at}"),
//!     ns: Each { forward: 1000, recompute: 1000, backward: 2000 },
//!     storages: vec![Storage { name: "saved".into(), bytes: 1000, last_forward: at,
//!         backward: Some((at, at)), recomputable: true, ..Storage::default() }],
//!     ..Layer::default()
//! };
//! let model = Model { layers: (0..4).map(layer).collect(), tiers: vec![tier], ..Model::default() };
//!
//! let keep = predict(&model, &Plan::keep(4), 4000)?;
//! assert_eq!((keep.step_ns, keep.peak_bytes), (12_000, 4000));
//! // With the first layer away, its copies hidden, three quarters do.
//! let mut plan = Plan::keep(4);
//! plan.layers[0] = LayerPlan { swap: vec![0], ..LayerPlan::default() };
//! let swap = predict(&model, &plan, 3000)?;
//! assert_eq!((swap.step_ns, swap.peak_bytes), (12_000, 3000));
//! assert_eq!(swap.tiers[0].out.hidden_ns, 1000);
//! // What no order of copies can make fit is refused.
//! assert!(predict(&model, &plan, 2999).is_err());
//! # Ok::<(), ebbtide_sim::predict::Misfit>(())
//! ```
//!
//! | module | what is there |
//! | --- | --- |
//! | `model` | layers, storages, tiers |
//! | `choice` | a plan as flat arrays |
//! | `residency` | what is on the device during which operation: no time in it |
//! | `machine`, `lane` | the play |
//! | `watch`, `prediction` | what a play tells, and what is made of it |
//! | `error` | why a plan can't be played |
//! | [`recount`] | for tests: a second way to count |

mod choice;
mod error;
mod lane;
mod machine;
mod model;
mod prediction;
pub mod recount;
mod residency;
mod simulator;
mod watch;

pub use choice::Choice;
pub use error::Misfit;
pub use model::{Each, Layer, Link, Model, Storage, Tier};
pub use prediction::{Held, LinkUse, Need, Prediction, TierUse, Waits, Why};
pub use residency::{Fate, Uses};
pub use simulator::{Optimist, Simulator};
pub use watch::Step;

use ebbtide_core::{Op, Plan, Schedule};

use machine::{Machine, Played};
use prediction::Detail;
use watch::Watch;

/// Plays a plan within a budget in bytes.
///
/// # Errors
/// The plan does not fit the model, the budget or a tier.
pub fn predict(model: &Model, plan: &Plan, budget: u64) -> Result<Prediction, Misfit> {
    let choice = Choice::of(model, plan)?;
    let mut machine = Machine::new(model);
    let mut detail = Detail::new(&machine, &choice);
    let step_ns = watched(&mut machine, &choice, budget, &mut detail)?;
    Ok(detail.finish(&machine, &choice, step_ns))
}

/// Works out what an executor needs to follow a plan within a budget in bytes.
///
/// # Errors
/// The plan does not fit the model, the budget or a tier.
pub fn schedule(model: &Model, plan: &Plan, budget: u64) -> Result<Schedule, Misfit> {
    let choice = Choice::of(model, plan)?;
    let mut machine = Machine::new(model);
    machine.prepare(&choice, budget, usize::MAX).map_err(|why| misfit(model, budget, why))?;
    Ok(prediction::schedule_of(&machine, &choice, budget))
}

/// Everything that happens in a step under a plan, in order, with its time in nanoseconds.
///
/// # Errors
/// The plan does not fit the model, the budget or a tier.
pub fn timeline(model: &Model, plan: &Plan, budget: u64) -> Result<Vec<(f64, Step)>, Misfit> {
    struct Notes(Vec<(f64, Step)>);
    impl Watch for Notes {
        fn step(&mut self, now: f64, _: u64, step: Step) {
            self.0.push((now, step));
        }
        fn copied(&mut self, _: usize, _: watch::Way, _: f64, _: bool) {}
    }
    let choice = Choice::of(model, plan)?;
    let mut notes = Notes(Vec::new());
    watched(&mut Machine::new(model), &choice, budget, &mut notes)?;
    Ok(notes.0)
}

/// What a plan needs at least, whatever the speeds: a budget of so many bytes can hold it.
///
/// # Errors
/// The plan does not fit the model.
pub fn need(model: &Model, plan: &Plan) -> Result<Need, Misfit> {
    let choice = Choice::of(model, plan)?;
    let mut machine = Machine::new(model);
    let (bytes, op) = machine.settled.settle(&machine.layout, &choice, usize::MAX);
    Ok(prediction::need_of(&machine, &choice, bytes, op))
}

fn watched<W: Watch>(
    machine: &mut Machine<'_>,
    choice: &Choice,
    budget: u64,
    watch: &mut W,
) -> Result<f64, Misfit> {
    match machine.play(choice, budget, f64::INFINITY, usize::MAX, watch) {
        Played::Took(ns) => Ok(ns),
        other => Err(misfit(machine.model, budget, other)),
    }
}

fn misfit(model: &Model, budget: u64, played: Played) -> Misfit {
    match played {
        Played::TooFull { tier, needed } => Misfit::Capacity {
            tier: model.tiers[tier].name.clone(),
            capacity: model.tiers[tier].capacity.unwrap_or(0),
            needed,
        },
        Played::TooLarge { needed, op } => {
            Misfit::Budget { budget, needed, op: Op::at(op, model.layers.len()) }
        }
        Played::Took(_) | Played::TooSlow => unreachable!("a play without a bound is played"),
    }
}
