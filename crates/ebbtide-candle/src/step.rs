//! One training step: the layers run so far, in order.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use candle_core::{Tensor, TensorId, Var};
use ebbtide_core::{GroupId, LayerId, Pass, Policy};
use ebbtide_store::Row;

use crate::ahead::look_ahead;
use crate::error::{Error, Kind};
use crate::graph::{InputRole, Scope};
use crate::probe::{Form, Function, is_repeatable, probe};
use crate::record::StorageNote;
use crate::run::Run;
use crate::segment::{Call, Output, Ran, Segment, cut_outputs, fingerprint, run};
use crate::swap::Swap;

/// One run of the forward, and its backward.
///
/// Made by [`Swap::step`]. Any number of steps of one [`Swap`] may be in flight (micro-batches), and
/// the model may be run without one in between (evaluation). Dropping a step without backward
/// abandons it: copies in flight are waited for and everything is given back.
#[must_use = "a step that is dropped is abandoned"]
pub struct Step<'a> {
    pub(crate) swap: &'a Swap,
    pub(crate) pass: Pass,
    pub(crate) segments: Vec<Segment<'a>>,
    /// Which segment and which of its outputs a guarded tensor is.
    pub(crate) guards: HashMap<TensorId, (usize, usize)>,
    /// The group that is on its way out; the next layer waits for it (row M4).
    offloading: Option<GroupId>,
    pub(crate) done: bool,
    /// What decides about its layers.
    pub(crate) run: Run,
    /// What its layers computed.
    pub(crate) compute: Duration,
}

impl std::fmt::Debug for Step<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layers: Vec<&str> = self.segments.iter().map(|s| s.name.as_str()).collect();
        f.debug_struct("Step").field("pass", &self.pass).field("layers", &layers).finish()
    }
}

impl<'a> Step<'a> {
    pub(crate) fn new(swap: &'a Swap, pass: Pass, run: Run) -> Self {
        let (segments, guards) = (Vec::new(), HashMap::new());
        let (offloading, done, compute) = (None, false, Duration::ZERO);
        Self { swap, pass, segments, guards, offloading, done, run, compute }
    }

    /// Runs a layer with one input and one output: [`Step::layer_many`] has the details.
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use ebbtide_candle::{Policies, Policy, Swap, Tier};
    ///
    /// let swap = Swap::builder(Policies::uniform(Policy::Swap, 1)).tier(Tier::Host).build()?;
    /// let w = Var::new(&[[2f32]], &Device::Cpu)?;
    /// let x = Tensor::new(&[[3f32]], &Device::Cpu)?;
    ///
    /// let mut step = swap.step();
    /// let y = step.layer("square", &[("w".into(), w.clone())], &x, |x| x.matmul(&w)?.sqr())?;
    /// let gradients = step.backward(&y.sum_all()?)?;
    /// // d/dw (3 w)² = 18 w
    /// assert_eq!(gradients.get(&w).unwrap().to_vec2::<f32>()?, [[36.0]]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Step::layer_many`].
    pub fn layer<F>(
        &mut self,
        name: &str,
        params: &[(String, Var)],
        input: &Tensor,
        function: F,
    ) -> Result<Tensor, Error>
    where
        F: Fn(&Tensor) -> candle_core::Result<Tensor> + 'a,
    {
        let many = move |inputs: &[Tensor]| Ok(vec![function(&inputs[0])?]);
        let mut outputs = self.layer_many(name, params, &[input], many)?;
        // `run` has refused a closure without outputs, and this one returns exactly one.
        Ok(outputs.remove(0))
    }

    /// Runs a layer with any number of inputs and outputs, tracked or not, of any shape.
    ///
    /// * `name` tells the layer's place in the model. Layers are numbered from 0 in the order in
    ///   which their names first appear; the [`Policies`](ebbtide_core::Policies) go by number. The
    ///   same name may be called several times in a step.
    /// * `params` are all variables that the closure captures, by name. Untracked tensors (masks,
    ///   indices) may be captured freely; every other tracked tensor must be an input.
    /// * The closure is run again for probing (on a batch of one, the first time) and for
    ///   recompute. It must compute the same from the same inputs, and keep no tensor for itself:
    ///   a tensor that it hands out in another way than as an output reads as an error later.
    /// * While the closure runs, the memory of its tracked inputs is lent to it: another handle on
    ///   the same memory (`x.detach()` of an input `x`) reads as an error inside, so pass it as an
    ///   input too.
    ///
    /// # Errors
    /// The closure fails or returns nothing; a capture is not listed; a tensor is not on the CPU;
    /// the layer draws random numbers and its policy is recompute; there are more layers than
    /// policies; a copy to the tier failed.
    pub fn layer_many<F>(
        &mut self,
        name: &str,
        params: &[(String, Var)],
        inputs: &[&Tensor],
        function: F,
    ) -> Result<Vec<Tensor>, Error>
    where
        F: Fn(&[Tensor]) -> candle_core::Result<Vec<Tensor>> + 'a,
    {
        if self.done {
            return Err(Error::new(Kind::SecondBackward));
        }
        check_device(name, inputs, params)?;
        let (layer, policy) = self.swap.layer_of(name)?;
        let place = self.segments.len();
        self.before_layer(name, layer, params, inputs, &function)?;
        let started = Instant::now();
        let (ran, loans) = run(name, params, inputs, &function)?;
        self.swap.inner().span(Row::Compute, || format!("{name} forward"), started);
        let group = self.swap.inner().engine.open(layer, self.pass);
        let call = Call {
            name: name.to_string(),
            layer,
            group,
            policy: self.run.policy(place, policy),
            params: params.to_vec(),
            function: Box::new(function),
        };
        let finished = self.finish_layer(call, ran);
        drop(loans);
        self.compute += started.elapsed();
        let moved = finished.and_then(|(visible, segment, policy)| {
            self.push(segment);
            self.move_out(group, place, policy)?;
            Ok(visible)
        });
        if moved.is_err() {
            self.swap.inner().engine.close(group);
        }
        moved
    }

    /// Where bytes are bounded, what must be known of a layer is found out before it runs.
    fn before_layer(
        &mut self,
        name: &str,
        layer: LayerId,
        params: &[(String, Var)],
        inputs: &[&Tensor],
        function: &Function<'_>,
    ) -> Result<(), Error> {
        if let Some(recorder) = self.run.recorder() {
            recorder.before_forward(name);
        }
        if self.run.is_bounded() {
            let started = Instant::now();
            look_ahead(self.swap, name, layer, params, inputs, function)?;
            self.run.aside(started);
        }
        if let Some(recorder) = self.run.recorder() {
            recorder.forward();
        }
        Ok(())
    }

    fn finish_layer(
        &mut self,
        call: Call<'a>,
        ran: Ran,
    ) -> Result<(Vec<Tensor>, Segment<'a>, Policy), Error> {
        let scope =
            Scope { layer: &call.name, inputs: &ran.inputs, params: &call.params, before: 0 };
        if call.policy == Policy::Recompute && !self.repeats(&call, &scope, &ran)? {
            return Err(Error::new(Kind::Random { layer: call.name }));
        }
        let form = self.form_of(&call, &scope, &ran)?;
        for what in ran.graph.without_gradient(&scope) {
            self.swap.inner().notice(format!(
                "layer `{}`: {what} gets no gradient (an operation without backward, or not used)",
                call.name
            ));
        }
        let strided = ran.inputs.iter().filter(|i| i.role == InputRole::Copied);
        let strided = strided.map(|input| &input.outer).chain(&ran.outputs);
        if strided.filter(|t| t.track_op()).any(|t| !t.is_contiguous()) {
            self.swap.inner().notice(format!(
                "layer `{}`: an input or output is a strided view, and becomes a contiguous copy: \
                 matrix products with a single row or column may differ from plain Candle in the \
                 last bits",
                call.name
            ));
        }
        let hash = (call.policy == Policy::Recompute).then(|| fingerprint(&ran.graph));
        let (visible, outputs) = cut_outputs(&call.name, &self.swap.anchor, &ran)
            .map_err(Error::in_layer(&call.name))?;
        let mut policy = call.policy;
        if hash.is_none() {
            policy = self.save(&call, &ran, &outputs, &form.dead)?;
        }
        Ok((visible, Segment::new(call, ran, outputs, form.dead, hash), policy))
    }

    /// Deals with what a layer has saved, if it is not made anew. Returns what becomes of it.
    fn save(
        &mut self,
        call: &Call<'a>,
        ran: &Ran,
        outputs: &[Output],
        dead: &[bool],
    ) -> Result<Policy, Error> {
        let taken: Vec<usize> = outputs.iter().filter_map(|output| output.taken).collect();
        let (owned, place) = (&ran.graph.owned, self.segments.len());
        let inner = &mut *self.swap.inner();
        if !self.run.is_bounded() {
            let group = (call.policy == Policy::Swap).then_some(call.group);
            inner.save(owned, dead, &taken, |_| group)?;
            return Ok(call.policy);
        }
        let notes = StorageNote::all(owned, dead, &taken);
        if let Some(traffic) = self.run.traffic() {
            traffic.check(place, &notes);
        }
        let moves_all = self.run.moves_at_once();
        let groups = match self.run.traffic().filter(|_| !moves_all) {
            Some(traffic) => traffic.open(inner, place, call.layer, self.pass),
            None => notes.iter().map(|note| (note.owned, call.group)).collect(),
        };
        let why_not = inner.why_not_recomputed(call.layer, &ran.graph.signature);
        if let Some(recorder) = self.run.recorder() {
            let bytes = |only_alive: bool| {
                let out = outputs.iter().filter_map(|output| output.taken);
                let out = out.filter(|&index| !(only_alive && dead[index]));
                out.map(|index| owned[index].bytes).sum()
            };
            recorder.forward_done(|layer| {
                (layer.storages, layer.why_not) = (notes, why_not);
                (layer.output_bytes, layer.outputs_alive) = (bytes(false), bytes(true));
            });
            let hashing = Instant::now();
            fingerprint(&ran.graph);
            recorder.hashed(hashing);
        }
        inner.save(owned, dead, &taken, |index| {
            groups.iter().find(|(owned, _)| *owned == index).map(|(_, group)| *group)
        })?;
        Ok(if moves_all { Policy::Swap } else { call.policy })
    }

    /// What is known of this layer's form; found out now if it is new.
    fn form_of(&self, call: &Call<'a>, scope: &Scope<'_>, ran: &Ran) -> Result<Form, Error> {
        let signature = &ran.graph.signature;
        if ran.graph.owned.is_empty() || !self.swap.inner().probes() {
            return Ok(Form::all_alive(&ran.graph));
        }
        if let Some(form) = self.swap.inner().form(call.layer, signature) {
            return Ok(form);
        }
        let known = self.swap.inner().forms_like(signature);
        let mut budget = self.swap.inner().probe_budget();
        let started = Instant::now();
        let form = probe(&*call.function, scope, &ran.graph, &known, &mut budget)?;
        self.swap.inner().learn_form(call.layer, &form, budget.step, started);
        self.swap.inner().span(Row::Compute, || format!("{} probe", call.name), started);
        Ok(form)
    }

    /// Whether the layer can be recomputed; found out now if it is not known.
    fn repeats(&self, call: &Call<'a>, scope: &Scope<'_>, ran: &Ran) -> Result<bool, Error> {
        let signature = &ran.graph.signature;
        if let Some(known) = self.swap.inner().repeats(call.layer, signature) {
            return Ok(known);
        }
        let started = Instant::now();
        let repeats = is_repeatable(&*call.function, scope, &ran.graph)?;
        self.swap.inner().learn_repeats(call.layer, signature, repeats, started);
        self.swap.inner().span(Row::Compute, || format!("{} probe", call.name), started);
        Ok(repeats)
    }

    fn push(&mut self, segment: Segment<'a>) {
        let index = self.segments.len();
        for (position, output) in segment.outputs.iter().enumerate() {
            self.guards.insert(output.outer, (index, position));
        }
        self.segments.push(segment);
    }

    /// Starts this layer's offload and waits for the previous one, so that at most two layers'
    /// bytes are on the device (row M4). A layer that does not move waits for the previous one too.
    /// Under a plan, the bytes that are pending decide who waits.
    fn move_out(&mut self, group: GroupId, place: usize, policy: Policy) -> Result<(), Error> {
        let inner = &mut *self.swap.inner();
        if self.run.moves_at_once() {
            let started = Instant::now();
            if policy == Policy::Swap {
                inner.engine.start_offload(group)?;
                inner.engine.wait_offload(group)?;
                inner.waited("wait for offload", started);
            }
            self.run.aside(started);
        }
        if let Some(traffic) = self.run.traffic() {
            return traffic.after_forward(inner, place);
        }
        let previous = self.offloading.take();
        let swaps = policy == Policy::Swap && !self.run.moves_at_once();
        if swaps {
            inner.engine.start_offload(group)?;
        }
        if let Some(previous) = previous {
            let started = Instant::now();
            inner.engine.wait_offload(previous)?;
            inner.waited("wait for offload", started);
        }
        self.offloading = swaps.then_some(group);
        Ok(())
    }

    /// Gives back everything the step still has.
    pub(crate) fn release(&mut self) {
        self.guards.clear();
        let mut inner = self.swap.inner();
        for mut segment in self.segments.drain(..) {
            segment.close();
            inner.engine.close(segment.group);
        }
        if let Some(traffic) = self.run.traffic() {
            traffic.close_all(&mut inner);
        }
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

fn check_device(name: &str, inputs: &[&Tensor], params: &[(String, Var)]) -> Result<(), Error> {
    let params = params.iter().map(|(_, var)| var.as_tensor());
    match inputs.iter().copied().chain(params).find(|t| !t.device().is_cpu()) {
        None => Ok(()),
        Some(tensor) => {
            let (layer, device) = (name.to_string(), format!("{:?}", tensor.device().location()));
            Err(Error::new(Kind::Device { layer, device }))
        }
    }
}
