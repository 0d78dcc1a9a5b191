//! Which bytes backward never reads.
//!
//! About half of what Candle keeps is never read again: `add`, `sum`, `reshape`, casts and others
//! need shapes only. Operations are private, so the answer is found by trying: the layer is run once
//! more on a batch of one, one storage at a time is poisoned, and backward either fails (it reads
//! the storage) or gives the same gradients bit for bit (it does not). A dropped storage is poisoned
//! in the same way, so if the answer were ever wrong, backward would fail and not lie.
//!
//! The answer belongs to the form of the graph ([`Signature`]). A layer with a form seen before is
//! verified with one backward in which everything thought dead is poisoned at once. Storages too
//! small to matter are not tried.
//!
//! A layer that is to be recomputed is also run again on the same few samples, at least twice, to see
//! whether it draws random numbers.

use std::ops::Range;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor, Var};
use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::exchange::{bytes_of, exchange, take};
use crate::graph::{Graph, Input, InputRole, Owned, Scope, Signature, serial, trace};
use crate::guard::{Given, deliver};
use crate::segment::fingerprint;

/// A layer's computation.
pub(crate) type Function<'a> = dyn Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + 'a;

/// What is known of one form of graph.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Form {
    pub(crate) signature: Signature,
    /// For each storage of the layer's own, whether backward never reads it.
    pub(crate) dead: Vec<bool>,
}

impl Form {
    /// What is known without a probe: every byte may be read.
    pub(crate) fn all_alive(graph: &Graph) -> Self {
        let dead = vec![false; graph.owned.len()];
        Self { signature: graph.signature.clone(), dead }
    }
}

/// A storage smaller than the layer's largest by more than this factor is not tried: it counts as
/// alive.
const TOO_SMALL: u64 = 64;

/// What probing may cost: as long as two plain steps, over all layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Layers in the model.
    pub(crate) layers: usize,
    /// What all probes have taken so far.
    pub(crate) spent: Duration,
    /// A plain step as estimated from the layers probed so far.
    pub(crate) step: Duration,
}

impl Budget {
    fn is_spent(&self) -> bool {
        self.step > Duration::ZERO && self.spent >= 2 * self.step
    }

    /// Whether one more storage may be tried. `once` is this layer's forward and backward on the
    /// small batch; as much is set aside for each other layer, which may have to be verified.
    fn allows(&self, step: Duration, once: Duration, here: Duration) -> bool {
        let others = u32::try_from(self.layers).unwrap_or(u32::MAX);
        self.spent + here + once.saturating_mul(others) < 2 * step
    }
}

/// A small run of the layer, ready for any number of backwards.
struct Trial {
    layer: String,
    outputs: Vec<Tensor>,
    graph: Graph,
    inputs: Vec<Input>,
}

/// Finds out what is dead in a layer with this real graph. `known` are the forms seen before with the
/// same signature. If no small run takes the same form, or backward fails anyway (the real one will
/// say why), every byte counts as alive.
pub(crate) fn probe(
    function: &Function<'_>,
    scope: &Scope<'_>,
    real: &Graph,
    known: &[Form],
    budget: &mut Budget,
) -> Result<Form, Error> {
    let start = Instant::now();
    if budget.is_spent() {
        return Ok(Form::all_alive(real));
    }
    match small_trial(function, scope, &real.signature, 1)? {
        Some((trial, batch)) => trial.examine(batch, &real.owned, known, budget, start),
        None => Ok(Form::all_alive(real)),
    }
}

/// The same for a layer that has not run yet: a small run takes the place of the real one. `None`
/// if there is no small run; then the real one has to be looked at.
pub(crate) fn probe_ahead(
    function: &Function<'_>,
    scope: &Scope<'_>,
    known: impl Fn(&Signature) -> Vec<Form>,
    budget: &mut Budget,
) -> Result<Option<Form>, Error> {
    let start = Instant::now();
    let batch = batch_of(scope);
    // What a closure says of a batch that it was not made for is no error of the step.
    let Ok(trial) = Trial::run(function, scope, batch, 0..1) else { return Ok(None) };
    if budget.is_spent() {
        return Ok(Some(Form::all_alive(&trial.graph)));
    }
    let known = known(&trial.graph.signature);
    trial.examine(batch, &trial.graph.owned, &known, budget, start).map(Some)
}

/// Whether a layer that has not run yet computes the same twice, a part of the samples at a time and
/// never two runs beside each other.
pub(crate) fn repeats_ahead(
    function: &Function<'_>,
    scope: &Scope<'_>,
    form: &Form,
) -> Result<bool, Error> {
    let batch = batch_of(scope);
    let samples = batch.min(SAMPLES);
    let part = (samples / 4).max(1);
    for from in (0..samples).step_by(part) {
        let range = from..(from + part).min(samples);
        let run = || Trial::run(function, scope, batch, range.clone());
        let Ok(first) = run() else { return Ok(false) };
        let small = first.graph.owned.iter().map(|owned| owned.bytes).sum::<u64>() < CHEAP;
        let first = first.digest(form)?;
        for _ in 0..if small { ROUNDS } else { 1 } {
            if run()?.digest(form)? != first {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Samples that a layer is repeated on, and how often where a run has few bytes: few random numbers
/// (one for each sample, say) may be the same twice by chance.
const SAMPLES: usize = 8;
const CHEAP: u64 = 1 << 20;
const ROUNDS: usize = 32;

fn batch_of(scope: &Scope<'_>) -> usize {
    scope.inputs.iter().find_map(|i| i.leaf.dims().first().copied()).unwrap_or(1)
}

/// Whether the layer computes the same twice. One whose form changes from run to run does not.
///
/// # Errors
/// The closure fails, on the whole batch too.
pub(crate) fn is_repeatable(
    function: &Function<'_>,
    scope: &Scope<'_>,
    real: &Graph,
) -> Result<bool, Error> {
    // Several samples and, where that is cheap, many rounds.
    let Some((trial, _)) = small_trial(function, scope, &real.signature, SAMPLES)? else {
        return Ok(false);
    };
    let bytes: u64 = trial.graph.owned.iter().map(|owned| owned.bytes).sum();
    let rounds = if bytes < CHEAP { ROUNDS } else { 1 };
    for _ in 0..rounds {
        if !trial.repeats(function, scope)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The layer on the first `smallest` samples, or twice as many, or all: the fewest whose graph has the
/// form of the real one. Also returns how many times larger the real batch is.
fn small_trial(
    function: &Function<'_>,
    scope: &Scope<'_>,
    wanted: &Signature,
    smallest: usize,
) -> Result<Option<(Trial, usize)>, Error> {
    let batch = batch_of(scope);
    for size in [smallest, 2 * smallest, batch] {
        if size > batch {
            continue;
        }
        // A closure may have the batch size built in; then a smaller one fails and the next is tried.
        match Trial::run(function, scope, batch, 0..size) {
            Ok(trial) if trial.graph.signature == *wanted => {
                return Ok(Some((trial, batch.div_ceil(size.max(1)))));
            }
            Err(error) if size == batch => return Err(error),
            _ => {}
        }
    }
    Ok(None)
}

impl Trial {
    fn run(
        function: &Function<'_>,
        scope: &Scope<'_>,
        batch: usize,
        samples: Range<usize>,
    ) -> Result<Self, Error> {
        let inputs = small_inputs(scope.inputs, |leaf| {
            let has_batch = leaf.dims().first() == Some(&batch);
            let cut = has_batch && samples.len() < batch;
            if cut { leaf.narrow(0, samples.start, samples.len()) } else { Ok(leaf.clone()) }
        });
        Self::run_on(function, scope, inputs.map_err(Error::in_layer(scope.layer))?)
    }

    fn run_on(
        function: &Function<'_>,
        scope: &Scope<'_>,
        inputs: Vec<Input>,
    ) -> Result<Self, Error> {
        let failed = || Error::in_layer(scope.layer);
        let before = marker().map_err(failed())?;
        let leaves: Vec<Tensor> = inputs.iter().map(|input| input.leaf.clone()).collect();
        // A closure that has its batch size built in may panic on a small one.
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| function(&leaves)));
        let run = run.unwrap_or_else(|_| candle_core::bail!("the closure panicked"));
        let outputs = run.map_err(failed())?;
        let scope = Scope { inputs: &inputs, before, ..*scope };
        let graph = trace(&outputs, &scope)?;
        Ok(Self { layer: scope.layer.to_string(), outputs, graph, inputs })
    }

    /// Finds out what is dead, where the whole batch has `batch` times as many samples, and storages
    /// of these sizes.
    fn examine(
        &self,
        batch: usize,
        sizes: &[Owned],
        known: &[Form],
        budget: &mut Budget,
        start: Instant,
    ) -> Result<Form, Error> {
        let mut form = Form::all_alive(&self.graph);
        for guess in known {
            // That the gradients are the same with these poisoned has been seen before; what matters
            // is that no operation of this layer reads one.
            if self.poisoned_backward(&guess.dead)?.is_some() {
                return Ok(guess.clone());
            }
        }
        let Ok(baseline) = self.backward() else { return Ok(form) };
        let once = start.elapsed();
        let samples = u32::try_from(batch * budget.layers).unwrap_or(u32::MAX);
        let step = once.saturating_mul(samples);
        budget.step = budget.step.max(step);
        let mut by_size: Vec<usize> = (0..sizes.len()).collect();
        by_size.sort_by_key(|&i| std::cmp::Reverse(sizes[i].bytes));
        let largest = by_size.first().map_or(0, |&i| sizes[i].bytes);
        for index in by_size {
            let small = sizes[index].bytes.saturating_mul(TOO_SMALL) < largest;
            if small || !budget.allows(step, once, start.elapsed()) {
                break; // What was not tried counts as alive.
            }
            let mut alone = vec![false; sizes.len()];
            alone[index] = true;
            form.dead[index] = self.is_dead(&alone, &baseline)?;
        }
        if !self.is_dead(&form.dead, &baseline)? {
            form.dead.fill(false);
        }
        Ok(form)
    }

    /// Fingerprints of what the run computed, and of its gradients if there are any. What is known
    /// to be dead goes before backward, as it does in a step.
    fn digest(self, form: &Form) -> Result<(Signature, u128, Option<u128>), Error> {
        let values = fingerprint(&self.graph);
        if self.graph.signature == form.signature {
            let dead = self.graph.owned.iter().zip(&form.dead).filter(|(_, dead)| **dead);
            for (owned, _) in dead {
                drop(take(&owned.handle).map_err(Error::in_layer(&self.layer))?);
            }
        }
        // No backward, no gradient that could differ; the real one will say what is wrong.
        let gradients = self.backward().ok().map(|gradients| hash_all(&gradients));
        Ok((self.graph.signature, values, gradients))
    }

    /// The gradients of everything that gets one, in a fixed order.
    fn backward(&self) -> candle_core::Result<Vec<Tensor>> {
        let mut roots = Vec::new();
        for output in self.outputs.iter().filter(|o| o.track_op()) {
            roots.push(Given { to: output.clone(), gradient: uneven(output)? });
        }
        let gradients = deliver(roots, Vec::new())?;
        let leaves = self.inputs.iter().filter(|i| i.role.is_leaf()).map(|i| &i.leaf);
        let all = leaves.chain(&self.graph.variables);
        Ok(all.filter_map(|leaf| gradients.get(leaf).cloned()).collect())
    }

    /// Backward with these storages poisoned: `None` if it reads one of them.
    fn poisoned_backward(&self, poisoned: &[bool]) -> Result<Option<Vec<Tensor>>, Error> {
        let failed = || Error::in_layer(&self.layer);
        let chosen = self.graph.owned.iter().zip(poisoned).filter(|(_, poisoned)| **poisoned);
        let handles: Vec<&Tensor> = chosen.map(|(owned, _)| &owned.handle).collect();
        let mut taken = Vec::with_capacity(handles.len());
        for handle in &handles {
            taken.push(take(handle).map_err(failed())?);
        }
        let gradients = self.backward();
        for (handle, memory) in handles.iter().zip(taken) {
            exchange(handle, memory).map_err(failed())?;
        }
        Ok(gradients.ok())
    }

    /// Whether backward gives the same bits with these storages poisoned.
    fn is_dead(&self, storages: &[bool], baseline: &[Tensor]) -> Result<bool, Error> {
        Ok(self.poisoned_backward(storages)?.is_some_and(|gradients| same(&gradients, baseline)))
    }

    /// Runs the layer again on the same small input and compares every storage and every gradient.
    /// Values alone would not do: behind weights that are still zero, a mask shows in gradients only.
    fn repeats(&self, function: &Function<'_>, scope: &Scope<'_>) -> Result<bool, Error> {
        let copies = small_inputs(&self.inputs, |leaf| Ok(leaf.clone()));
        let again = Self::run_on(function, scope, copies.map_err(Error::in_layer(scope.layer))?)?;
        let mut pairs = self.graph.owned.iter().zip(&again.graph.owned);
        if again.graph.signature != self.graph.signature
            || !pairs.all(|(a, b)| same_bits(&a.handle, &b.handle))
        {
            return Ok(false);
        }
        match (self.backward(), again.backward()) {
            (Ok(first), Ok(second)) => Ok(same(&first, &second)),
            // No backward, no gradient that could differ; the real one will say what is wrong.
            (Err(_), Err(_)) => Ok(true),
            _ => Ok(false),
        }
    }
}

/// A new tensor's number, to tell what is made later from what was there before.
pub(crate) fn marker() -> candle_core::Result<u64> {
    let tensor = Tensor::new(0u8, &candle_core::Device::Cpu)?;
    match serial(tensor.id()) {
        Some(number) => Ok(number),
        None => candle_core::bail!("ebbtide: this version of Candle numbers tensors differently"),
    }
}

/// The same inputs with other leaves: `cut` makes the data of each. While a layer runs, a lent
/// input's memory is in its leaf, so that is where the data comes from.
fn small_inputs(
    inputs: &[Input],
    cut: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Vec<Input>> {
    let mut small: Vec<Input> = Vec::with_capacity(inputs.len());
    for input in inputs {
        let leaf = match input.role {
            InputRole::Lent | InputRole::Copied => {
                Var::from_tensor(&cut(&input.leaf.detach())?)?.into_inner()
            }
            InputRole::Untracked => cut(&input.leaf)?.contiguous()?,
            InputRole::Variable => input.leaf.clone(),
            InputRole::Repeats(earlier) => small[earlier].leaf.clone(),
        };
        small.push(Input { outer: leaf.clone(), leaf, role: input.role });
    }
    Ok(small)
}

/// A gradient without symmetry, so that no sum of it cancels a difference.
fn uneven(output: &Tensor) -> candle_core::Result<Tensor> {
    let count = u32::try_from(output.elem_count()).unwrap_or(u32::MAX);
    // sin(0) would be the one zero among them.
    let ramp =
        Tensor::arange(1u32, count.saturating_add(1), output.device())?.to_dtype(DType::F32)?;
    ramp.sin()?.reshape(output.shape())?.to_dtype(output.dtype())
}

fn hash_all(tensors: &[Tensor]) -> u128 {
    let mut hash = Xxh3::new();
    for tensor in tensors {
        let Ok(tensor) = tensor.contiguous() else { continue };
        let (storage, _) = tensor.storage_and_layout();
        if let candle_core::Storage::Cpu(cpu) = &*storage {
            hash.update(bytes_of(cpu).unwrap_or_default());
        }
    }
    hash.digest128()
}

fn same(a: &[Tensor], b: &[Tensor]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_bits(a, b))
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bits = |t: &Tensor| t.contiguous().map(|t| t.detach());
    let (Ok(a), Ok(b)) = (bits(a), bits(b)) else { return false };
    let ((a, la), (b, lb)) = (a.storage_and_layout(), b.storage_and_layout());
    let (candle_core::Storage::Cpu(a), candle_core::Storage::Cpu(b)) = (&*a, &*b) else {
        return false;
    };
    match (bytes_of(a), bytes_of(b)) {
        (Some(a), Some(b)) => la.shape() == lb.shape() && a == b,
        _ => false, // A dtype that is never moved is never called dead either.
    }
}
