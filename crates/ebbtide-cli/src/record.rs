//! A trace of the model that `train` trains, without training it for long.

use ebbtide_candle::Trace;

use crate::args::{MemoryArgs, ModelArgs, OutputArgs, TrainArgs, TrainingArgs};
use crate::check;
use crate::failure::Failure;
use crate::trainer::Trainer;

/// Steps that are traced: bytes are the most of them, times the least.
const STEPS: u64 = 3;

/// Runs a few steps with everything swapped and returns what they cost.
///
/// # Errors
/// The model can't be made or trained, or its spill file can't be used.
pub(crate) fn record(model: ModelArgs, mut memory: MemoryArgs) -> Result<Trace, Failure> {
    // So much that the plan which ends the tracing always fits.
    (memory.memory, memory.policy, memory.plan) = (Some("1TiB".to_owned()), None, None);
    let training = TrainingArgs { steps: STEPS, ..TrainingArgs::default() };
    let output = OutputArgs::default();
    let plan = check::plan(TrainArgs { model, training, memory, output })?;
    let mut trainer = Trainer::new(plan.setup)?;
    for _ in 0..STEPS {
        trainer.step()?;
    }
    let settled = trainer.planner().and_then(|planner| planner.auto().settled());
    settled
        .map(|settled| settled.trace.clone())
        .ok_or_else(|| Failure::run_time("no step was traced", "please report this"))
}
