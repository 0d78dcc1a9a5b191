//! ebbtide for [Candle](https://docs.rs/candle-core): train a model inside less memory, with the
//! same losses and gradients, bit for bit.
//!
//! Candle keeps every activation of a layer until the whole backward is over. Run the layers of a
//! model through a [`Step`], and each one's activations are kept, moved to a file ([`Tier::File`])
//! and brought back in time, or made again, as its [`Policy`] says. What backward never reads, about
//! half of what Candle keeps, is dropped in any case.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use ebbtide_candle::{Policies, Swap};
//!
//! let weights: Vec<Var> = (0..4)
//!     .map(|_| Var::randn(0f32, 0.1, (32, 32), &Device::Cpu))
//!     .collect::<Result<_, _>>()?;
//! let x = Tensor::randn(0f32, 1.0, (8, 32), &Device::Cpu)?;
//!
//! // Plain Candle …
//! let mut h = x.clone();
//! for w in &weights {
//!     h = (h.matmul(w)?.gelu()? + &h)?;
//! }
//! let plain = h.sqr()?.mean_all()?.backward()?;
//!
//! // … and the same model with every layer but the last in a file between forward and backward.
//! let swap = Swap::builder(Policies::parse("swap", 4)?).build()?;
//! let mut step = swap.step();
//! let mut h = x.clone();
//! for (i, w) in weights.iter().enumerate() {
//!     let params = [("w".to_string(), w.clone())];
//!     h = step.layer(&format!("h.{i}"), &params, &h, |h| h.matmul(w)?.gelu()? + h)?;
//! }
//! let swapped = step.backward(&h.sqr()?.mean_all()?)?;
//!
//! for w in &weights {
//!     let (plain, swapped) = (plain.get(w).unwrap(), swapped.get(w).unwrap());
//!     assert_eq!(plain.to_vec2::<f32>()?, swapped.to_vec2::<f32>()?);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What to know
//!
//! * Call [`Step::backward`], not `loss.backward()`: that one is an error, since it would lose the
//!   gradients of everything before the last layer.
//! * A layer's closure is run again for probing and for recompute. It must be a function of its
//!   inputs and its listed variables. If it draws random numbers, recompute is refused; numbers that
//!   come from a generator of your own are also drawn by the probe, so make masks outside and
//!   capture them, or switch probing off ([`SwapBuilder::probe`]).
//! * candle-nn's `LayerNorm`, `rms_norm`, `softmax_last_dim`, `rope` and `sdpa` have fast paths
//!   without backward that lose gradients silently. A layer whose listed parameters or inputs get
//!   none is named in [`Swap::notices`].
//! * Candle itself does not notice a variable that is changed between forward and backward (by an
//!   optimizer step in between, say): it uses the new value in the old graph. Kept and swapped
//!   layers do the same; a recomputed layer compares and is an error.
//! * Higher-order gradients are not supported, as in Candle (its gradients are detached).
//! * Side effects of a closure happen once more for each run of it. candle-nn's `BatchNorm` in
//!   training mode updates its running statistics in forward: keep or swap such a layer, with
//!   `probe(false)`.
//! * Random numbers are found by running a layer twice and comparing values and gradients. Numbers that
//!   are few for each sample and hidden behind zero weights, or that are switched on later behind zero
//!   weights, can be missed: don't recompute a layer that draws any.
//! * Bits are those of plain Candle, with exceptions that are reported: [`Swap::notices`] names the
//!   layer wherever a sum of three and more contributions may be added up in another order (a variable
//!   used left of another input and behind that input as well, as in `a.matmul(w)? + b` with `w` also
//!   behind `b`; an output made from another output), and where a strided view at a layer's border
//!   becomes a contiguous copy.
//! * Return what you want to look at as an output. An activation that a closure puts aside reads as an
//!   error once its layer has moved or dropped it, and may come from the probe's small run.
//! * Backward borrows the closures until it has run, so what they refer to has to outlive the
//!   [`Step`].
#![warn(missing_docs)]

mod ahead;
mod auto;
mod backward;
mod error;
mod exchange;
mod graph;
mod guard;
mod heap;
mod link;
mod overlap;
mod planned;
mod probe;
mod record;
mod run;
mod segment;
mod step;
mod swap;
mod tracing;
mod traffic;

pub use auto::{Auto, Memory, Outcome, Settled};
pub use ebbtide_core::{LayerId, Policies, Policy};
pub use ebbtide_plan::Trace;
pub use ebbtide_store::Timeline;
pub use error::Error;
pub use heap::Heap;
pub use overlap::LinkTime;
pub use run::StepTimes;
pub use step::Step;
pub use swap::{Report, Swap, SwapBuilder, Tier};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
