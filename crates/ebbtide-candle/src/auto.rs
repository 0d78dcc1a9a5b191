//! One number in, a plan out: traces the first steps, plans, compares, plans again.

use std::time::Duration;

use ebbtide_core::Plan;
use ebbtide_core::size;
use ebbtide_plan::trace::{LinkRecord, TierRecord};
use ebbtide_plan::{
    Model, PlanFile, Planned, Prediction, Pure, Solver, Trace, plan, plan_pure, predict,
};

use crate::error::{Error, Kind};
use crate::heap::Heap;
use crate::record::Recording;
use crate::swap::Swap;
use crate::tracing::plain_peak;

/// Steps that are traced before the first plan: bytes are the most of them, times the least.
const TRACED: usize = 2;
/// A link, or computing, that is off by more than this has drifted.
const DRIFT: f64 = 0.2;
/// What the least budget that is named has to spare, in bytes.
const SPARE: u64 = 128 << 10;
/// Speeds are corrected at most so many times in a row: the rest is noise.
const CORRECTIONS: u32 = 3;

/// How many bytes of the device a step may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// So many in all.
    Bytes(u64),
    /// What is there between steps, and so many percent of what a step without ebbtide needs above
    /// that.
    Percent(f64),
    /// The same, or the least that a plan is found for where that is more.
    PercentOrLeast(f64),
}

/// What is followed now.
#[derive(Clone, Debug)]
pub struct Settled {
    /// The trace that the plan was made from.
    pub trace: Trace,
    /// The budget in bytes.
    pub memory_bytes: u64,
    /// The peak of a step without ebbtide, as predicted from the traced steps, in bytes.
    pub plain_peak_bytes: u64,
    /// The plan.
    pub plan: Plan,
    /// What it is predicted to come to.
    pub prediction: Prediction,
}

/// What became of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was traced, and another one will be.
    Traced,
    /// It was the last one to be traced: from the next on there is a plan.
    Planned,
    /// It ran under the plan, as was expected.
    AsPlanned,
    /// It ran under the plan, and the next one follows a new plan, since the tier or computing has become
    /// faster or slower.
    Replanned,
    /// It met layers that it was not planned for: the next ones are traced.
    Departed,
}

/// Where the plan comes from.
#[derive(Debug)]
enum Wanted {
    Budget(Memory),
    File(Box<PlanFile>),
}

/// Keeps a model inside a budget.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ebbtide_candle::{Auto, Heap, Memory, Outcome, Policies, Policy, Swap};
///
/// #[global_allocator]
/// static HEAP: Heap = Heap::new();
///
/// let w: Vec<Var> =
///     (0..4).map(|_| Var::randn(0f32, 0.1, (64, 64), &Device::Cpu)).collect::<Result<_, _>>()?;
/// let x = Tensor::randn(0f32, 1.0, (256, 64), &Device::Cpu)?;
/// let swap = Swap::builder(Policies::uniform(Policy::Swap, 4)).build()?;
/// let mut auto = Auto::start(&swap, &HEAP, "file", Memory::Bytes(64 << 20));
/// for number in 0..4 {
///     let begun = std::time::Instant::now();
///     let mut step = swap.step();
///     let mut h = x.clone();
///     for (i, w) in w.iter().enumerate() {
///         let params = [("w".to_string(), w.clone())];
///         h = step.layer(&format!("h.{i}"), &params, &h, move |h| h.matmul(w)?.gelu())?;
///     }
///     step.backward(&h.sqr()?.mean_all()?)?;
///     drop((step, h));
///     let outcome = auto.after_step(&swap, begun.elapsed())?;
///     assert_eq!(outcome == Outcome::Traced, number == 0);
/// }
/// let settled = auto.settled().unwrap();
/// assert!(settled.prediction.peak_bytes <= settled.memory_bytes);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Auto {
    wanted: Wanted,
    heap: &'static Heap,
    tier: TierRecord,
    settled: Option<Settled>,
    corrections: u32,
    only: Option<Pure>,
}

impl Auto {
    /// Measures the tier, which the trace calls `tier`, and traces the steps to come.
    pub fn start(swap: &Swap, heap: &'static Heap, tier: &str, memory: Memory) -> Self {
        Self::begin(swap, heap, tier, Wanted::Budget(memory))
    }

    /// The same with a plan from a file, which has to fit the model.
    pub fn with_plan(swap: &Swap, heap: &'static Heap, tier: &str, plan: PlanFile) -> Self {
        Self::begin(swap, heap, tier, Wanted::File(Box::new(plan)))
    }

    fn begin(swap: &Swap, heap: &'static Heap, tier: &str, wanted: Wanted) -> Self {
        // A tier that has no room for a measurement may have room for a step.
        let tier = swap.measure_tier(tier).unwrap_or_else(|_| guess(tier, swap.capacity()));
        swap.start_tracing(heap);
        Self { wanted, heap, tier, settled: None, corrections: 0, only: None }
    }

    /// Plans with one means alone, for comparison.
    #[must_use]
    pub fn only(mut self, pure: Pure) -> Self {
        self.only = Some(pure);
        self
    }

    /// What is followed now; `None` while steps are traced.
    pub fn settled(&self) -> Option<&Settled> {
        self.settled.as_ref()
    }

    /// A step is over, optimizer included. It took so long.
    ///
    /// # Errors
    /// No plan fits the budget, or the plan of the file does not fit the model.
    pub fn after_step(&mut self, swap: &Swap, took: Duration) -> Result<Outcome, Error> {
        swap.end_step(took);
        if self.settled.is_none() {
            self.refuse_early(swap)?;
            if swap.traced_steps() < TRACED {
                return Ok(Outcome::Traced);
            }
            self.settle(swap)?;
            return Ok(Outcome::Planned);
        }
        if swap.has_departed() {
            // The old plan stays with the layers that it fits until this step is over.
            swap.start_tracing(self.heap);
            self.settled = None;
            return Ok(Outcome::Departed);
        }
        if !self.correct(swap, took) {
            return Ok(Outcome::AsPlanned);
        }
        self.settle(swap)?;
        Ok(Outcome::Replanned)
    }

    /// The first step tells already whether there can be a plan at all.
    fn refuse_early(&self, swap: &Swap) -> Result<(), Error> {
        let recording = swap.recording()?;
        let trace = swap.trace(self.tier.clone())?;
        let model = trace.model();
        match &self.wanted {
            Wanted::Budget(memory) => self.find(&model, *memory, &recording).map(drop),
            Wanted::File(file) => resolve(file, &model, &recording).map(drop),
        }
    }

    fn settle(&mut self, swap: &Swap) -> Result<(), Error> {
        let recording = swap.recording()?;
        let trace = swap.trace(self.tier.clone())?;
        let model = trace.model();
        let plain_peak_bytes = plain_peak(&recording);
        let (memory_bytes, plan, prediction) = match &self.wanted {
            Wanted::Budget(memory) => {
                let Planned { plan, prediction, budget, .. } =
                    self.find(&model, *memory, &recording)?;
                (budget, plan, prediction)
            }
            Wanted::File(file) => {
                let (plan, prediction) = resolve(file, &model, &recording)?;
                (file.memory_bytes(), plan, prediction)
            }
        };
        swap.follow(prediction.schedule.clone())?;
        self.settled = Some(Settled { trace, memory_bytes, plain_peak_bytes, plan, prediction });
        Ok(())
    }

    /// The plan for so much memory.
    fn find(&self, model: &Model, memory: Memory, recording: &Recording) -> Result<Planned, Error> {
        let mut budget = budget(memory, recording.static_bytes, plain_peak(recording));
        if let Memory::PercentOrLeast(_) = memory {
            budget = budget.max(recording.peak_bytes);
        }
        let search = |budget: u64| match self.only {
            Some(pure) => plan_pure(model, budget, pure),
            None => plan(model, budget, Solver::Fast),
        };
        let mut planned = search(budget);
        if let (Err(error), Memory::PercentOrLeast(_)) = (&planned, memory) {
            planned = search(error.least.bytes);
        }
        let planned = planned.map_err(|error| {
            // Two runs differ by a few kilobytes: what is named as enough has to be so in both.
            let mut spare = model.clone();
            spare.static_bytes += SPARE;
            let error = plan(&spare, budget, Solver::Fast).err().unwrap_or(error);
            let (message, hint) = (error.to_string(), error.hint());
            Error::new(Kind::NoPlan { message, hint })
        })?;
        within(planned.budget, recording.peak_bytes)?;
        Ok(planned)
    }

    /// Compares the step with what was predicted of it. Whether the machine has drifted; what is
    /// known of it is corrected then.
    fn correct(&mut self, swap: &Swap, took: Duration) -> bool {
        let Some(settled) = &self.settled else { return false };
        let Some(expected) = settled.prediction.tiers.first() else { return false };
        let (times, model) = (swap.last_step(), settled.trace.model());
        let drift = |expected: u64, found: u64| {
            let known = expected > 0 && found > 0;
            if known { found as f64 / expected as f64 } else { 1.0 }
        };
        let out = drift(expected.out.busy_ns, times.out.busy_ns);
        let back = drift(expected.back.busy_ns, times.back.busy_ns);
        let layers = settled.prediction.compute_ns - model.fixed_ns;
        let compute = drift(layers, times.compute_ns);
        let has_drifted = |ratio: f64| !(1.0 - DRIFT..=1.0 + DRIFT).contains(&ratio);
        if ![out, back, compute].into_iter().any(has_drifted) {
            self.corrections = 0;
            return false;
        }
        if self.corrections == CORRECTIONS {
            return false;
        }
        self.corrections += 1;
        for (link, ratio) in [(&mut self.tier.out, out), (&mut self.tier.back, back)] {
            link.bytes_per_s = scaled(link.bytes_per_s, ratio);
            link.bytes_per_s_busy = scaled(link.bytes_per_s_busy, ratio);
        }
        let beside = took.saturating_sub(Duration::from_nanos(times.compute_ns + times.waited_ns));
        swap.correct_times(compute, beside);
        true
    }
}

/// An ordinary disk. Steps correct it.
fn guess(name: &str, capacity_bytes: u64) -> TierRecord {
    let link = LinkRecord { bytes_per_s: 1 << 29, bytes_per_s_busy: 0, latency_ns: 200_000 };
    TierRecord {
        name: name.to_string(),
        capacity_bytes,
        out: link,
        back: link,
        compute_slowdown_permille: 1000,
        shared_duplex: false,
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are positive")]
fn scaled(rate: u64, slower: f64) -> u64 {
    (rate as f64 / slower).max(1.0) as u64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between two sizes")]
fn budget(memory: Memory, base: u64, plain: u64) -> u64 {
    match memory {
        Memory::Bytes(bytes) => bytes,
        Memory::Percent(percent) | Memory::PercentOrLeast(percent) => {
            base + (plain.saturating_sub(base) as f64 * percent.max(0.0) / 100.0) as u64
        }
    }
}

/// The plan of a file, if it fits this model.
fn resolve(
    file: &PlanFile,
    model: &Model,
    recording: &Recording,
) -> Result<(Plan, Prediction), Error> {
    let plan = file.plan(model).map_err(|error| {
        let (message, hint) = (error.to_string(), error.hint().to_string());
        Error::new(Kind::Setting { message, hint })
    })?;
    let prediction = predict(model, &plan, file.memory_bytes())
        .map_err(|error| Error::new(Kind::Misfit(error)))?;
    within(file.memory_bytes(), recording.peak_bytes)?;
    Ok((plan, prediction))
}

/// The traced steps have to be inside the budget as well.
fn within(budget: u64, traced: u64) -> Result<(), Error> {
    if traced <= budget {
        return Ok(());
    }
    let (budget, least) = (size::format(budget), size::format_up(traced + SPARE));
    let message = format!(
        "no plan fits {budget}: the least found is {least} (the first step, which looks at what \
         layers save)"
    );
    let hint = format!("give at least {least}, or make the batch smaller");
    Err(Error::new(Kind::NoPlan { message, hint }))
}
