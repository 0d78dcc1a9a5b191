//! Backward over pieces of Candle's graph and segments, in the order of one walk over everything.
//!
//! Between the segments lies ordinary Candle graph: the embedding, a residual sum, the head with the
//! loss. Each *piece* of it hangs on a root: the loss, or a tracked tensor that was passed to a layer
//! and is not a layer's output. Candle's own backward runs over one piece or one segment at a time;
//! its sums are continued from one to the next (see [`crate::guard::deliver`]), so every sum is added
//! up in the order of a single backward over the whole model. That order is found by walking the cut
//! graph as Candle walks the whole one: depth first, arguments from left to right.
//!
//! # Limits
//!
//! * A tensor computed outside the layers may hang on one root only. If it reaches two (say, an
//!   embedding that feeds the first layer and is added again before the head), its gradient can't be
//!   completed before it is needed, and backward is an error that says what to do.
//! * A segment or piece is one step of the walk, where Candle would interleave its nodes with what
//!   lies behind its inputs. That matters where operations stand left of an input, as in
//!   `a.matmul(w)? + b` with two inputs: Candle finishes what is behind `b` before it goes into
//!   `matmul`. If `w` or `a` is used behind `b` too, and three or more contributions meet in its sum,
//!   the last bits may differ. [`Walk::close`] finds every such case, and a notice names it.
//! * An output that another output of the same layer is made from gets what is outside first, as one
//!   sum, and then what is inside, where Candle may take turns. A notice names the layer.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use ebbtide_core::{Op, Phase};
use ebbtide_store::Row;

use crate::error::{Error, Kind};
use crate::graph::{Visit, VisitKind};
use crate::guard::{Given, deliver};
use crate::run::Run;
use crate::segment::{Loans, Saved, Segment};
use crate::step::Step;

/// One thing to run Candle's backward over.
enum Item {
    /// Ordinary graph behind this root.
    Piece(Tensor),
    /// A segment, with the outputs that are used, by position, in the order of the walk.
    Segment(usize, Vec<usize>),
}

/// Sums of gradients begun so far: of variables, of roots and of guarded outputs.
type Sums = HashMap<TensorId, Tensor>;

impl Step<'_> {
    /// The gradients of all variables behind `loss`, bit for bit those of `loss.backward()` on the
    /// same model without layers; where the order of a sum can't be the same, which may show in its
    /// last bits, [`Swap::notices`](crate::Swap::notices) names the layer. Other than there,
    /// untracked operands get none.
    ///
    /// A `loss` that is not a scalar counts as its sum.
    ///
    /// # Errors
    /// Called a second time; the loss tracks nothing or belongs to another step; the policies name
    /// layers that no step has run yet; a recomputed layer differs from its forward; a copy failed;
    /// Candle fails. The step is then abandoned: nothing of it is left in the tier, and the next
    /// step works.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore, Error> {
        if self.done {
            return Err(Error::new(Kind::SecondBackward));
        }
        self.done = true;
        for output in self.segments.iter().flat_map(|segment| &segment.outputs) {
            output.cell.set_open(true);
        }
        let result = self.run_all(loss);
        {
            let inner = &mut *self.swap.inner();
            match &result {
                Ok(_) => inner.engine.finish_backward(),
                Err(_) => inner.engine.abandon_backward(),
            }
            self.run.finish(inner, result.is_ok(), self.compute);
        }
        self.release();
        result
    }

    fn run_all(&mut self, loss: &Tensor) -> Result<GradStore, Error> {
        if !loss.track_op() {
            return Err(Error::new(Kind::NotTracked));
        }
        self.swap.check_all_layers_seen()?;
        // What the walk reaches of each segment is known only at its end, and decides its order.
        let reached = Walk::over(self, loss, None)?.reached;
        let Walk { mut items, mut reached, variables, displaced, .. } =
            Walk::over(self, loss, Some(reached))?;
        for notice in displaced {
            self.swap.inner().notice(notice);
        }
        for item in &mut items {
            if let Item::Segment(index, outputs) = item {
                *outputs = reached.remove(index).unwrap_or_default();
            }
        }
        let mut sums = Sums::from([(loss.id(), loss.ones_like()?)]);
        for item in items.into_iter().rev() {
            match item {
                Item::Piece(root) => self.run_piece(&root, &mut sums)?,
                Item::Segment(index, outputs) => self.run_segment(index, &outputs, &mut sums)?,
            }
        }
        let mut gradients = GradStore::default();
        for id in variables {
            if let Some(sum) = sums.remove(&id) {
                gradients.insert_id(id, sum);
            }
        }
        Ok(gradients)
    }

    fn run_piece(&mut self, root: &Tensor, sums: &mut Sums) -> Result<(), Error> {
        let Some(gradient) = sums.remove(&root.id()) else { return Ok(()) };
        let started = Instant::now();
        let nodes = root.sorted_nodes();
        let ends = nodes.iter().filter(|n| n.is_variable() || self.guards.contains_key(&n.id()));
        let ends: Vec<Tensor> = ends.map(|&n| n.clone()).collect();
        let begun = ends.iter().filter(|end| end.id() != root.id()).filter_map(|end| {
            let gradient = sums.get(&end.id())?.clone();
            Some(Given { to: end.clone(), gradient })
        });
        let begun = begun.collect();
        let found = deliver(vec![Given { to: root.clone(), gradient }], begun)?;
        for end in ends {
            let sum = match self.guards.get(&end.id()) {
                Some(&(segment, output)) => {
                    self.segments[segment].outputs[output].cell.take_gradient()
                }
                None => found.get(&end).cloned(),
            };
            sums.extend(sum.map(|sum| (end.id(), sum.detach())));
        }
        self.swap.inner().span(Row::Compute, || "outside the layers, backward".into(), started);
        Ok(())
    }

    fn run_segment(
        &mut self,
        index: usize,
        outputs: &[usize],
        sums: &mut Sums,
    ) -> Result<(), Error> {
        let segment = &self.segments[index];
        let given = outputs.iter().filter_map(|&position| {
            Some((position, sums.remove(&segment.outputs[position].outer)?))
        });
        let given: Vec<(usize, Tensor)> = given.collect();
        let ran = !given.is_empty();
        if ran {
            let loans = self.bring_home(index)?;
            let started = Instant::now();
            let segment = &self.segments[index];
            let found = segment.backward(&given, sums);
            drop((loans, given));
            let (found, left) = found.map_err(Error::in_layer(&segment.name))?;
            sums.extend(found);
            match self.run.recorder() {
                Some(recorder) => recorder.leave(index, left),
                None => drop(left),
            }
            self.compute += started.elapsed();
            let name = &segment.name;
            self.swap.inner().span(Row::Compute, || format!("{name} backward"), started);
        }
        self.close_segment(index, ran)
    }

    /// From here on nothing of this layer is needed: neither its bytes nor its border.
    fn close_segment(&mut self, index: usize, ran: bool) -> Result<(), Error> {
        let segment = &mut self.segments[index];
        segment.drop_graph();
        segment.close();
        let inner = &mut *self.swap.inner();
        inner.engine.close(segment.group);
        if let Some(recorder) = self.run.recorder().filter(|_| ran) {
            recorder.backward_done(index);
        }
        if let Some(traffic) = self.run.traffic() {
            traffic.close(inner, index);
        }
        match index.checked_sub(1) {
            Some(next) => self.run.before_backward(inner, next),
            None => Ok(()),
        }
    }

    /// Makes the inner graph of a segment whole, and starts bringing the next ones home.
    fn bring_home(&mut self, index: usize) -> Result<Loans, Error> {
        let segment = &mut self.segments[index];
        let mut inner = self.swap.inner();
        if let Some(recorder) = self.run.recorder() {
            recorder.before_backward(index);
        }
        let started = Instant::now();
        inner.engine.need(segment.group)?;
        inner.waited("wait for load", started);
        match &mut self.run {
            Run::Policies => inner.engine.prefetch(segment.group),
            Run::Trace(recorder) => {
                recorder.aside(started);
                recorder.backward();
            }
            Run::Plan(traffic) => traffic.come_home(&mut inner, index)?,
        }
        drop(inner); // The closure of a recomputed layer may ask for a report.
        let Saved::Recompute { signature, hash } = &segment.saved else {
            return segment.lend_for_backward().map_err(Error::in_layer(&segment.name));
        };
        let (signature, hash) = (signature.clone(), *hash);
        let started = Instant::now();
        let (graph, loans) = segment.recompute(&signature, hash)?;
        self.compute += started.elapsed();
        let mut inner = self.swap.inner();
        inner.recomputed(&segment.name, started);
        inner.save(&graph.owned, &segment.dead, &[], |_| None)?;
        if let Some(traffic) = self.run.traffic() {
            traffic.reach(&mut inner, Op::new(Phase::Backward, index))?;
        }
        Ok(loans)
    }
}

/// The walk over the cut graph. Items come out in the order in which they are left, which reversed
/// is the order of backward.
struct Walk<'s, 'a> {
    step: &'s Step<'a>,
    /// Outputs of each segment that are used, from a walk before, by position.
    known: Option<HashMap<usize, Vec<usize>>>,
    items: Vec<Item>,
    segments: HashSet<usize>,
    /// Outputs reached, by segment, in order.
    reached: HashMap<usize, Vec<usize>>,
    roots: HashSet<TensorId>,
    /// Which root an inner node of a piece hangs on.
    hangs_on: HashMap<TensorId, String>,
    variables: HashSet<TensorId>,
    /// For each of `items`, the variables and borders to whose sums it contributes.
    uses: Vec<HashSet<TensorId>>,
    /// What to say about sums whose contributions come in another order than Candle's.
    displaced: Vec<String>,
}

/// What a walk passes inside one item, and how many items were complete by then.
type Passed = Vec<(Visit, usize)>;

impl<'s, 'a> Walk<'s, 'a> {
    fn over(
        step: &'s Step<'a>,
        loss: &Tensor,
        known: Option<HashMap<usize, Vec<usize>>>,
    ) -> Result<Self, Error> {
        let mut walk = Self {
            step,
            known,
            items: Vec::new(),
            segments: HashSet::new(),
            reached: HashMap::new(),
            roots: HashSet::new(),
            hangs_on: HashMap::new(),
            variables: HashSet::new(),
            uses: Vec::new(),
            displaced: Vec::new(),
        };
        walk.piece(loss, "the loss")?;
        Ok(walk)
    }

    fn piece(&mut self, root: &Tensor, name: &str) -> Result<(), Error> {
        if !self.roots.insert(root.id()) {
            return Ok(());
        }
        let mut passed = Passed::new();
        for node in root.sorted_nodes().into_iter().rev() {
            let kind = if let Some(&(segment, output)) = self.step.guards.get(&node.id()) {
                self.output(segment, output)?;
                VisitKind::Border(0)
            } else if node.is_variable() {
                let made = |s: &&Segment<'_>| s.leaves.contains(&node.id());
                if let Some(segment) = self.step.segments.iter().find(made) {
                    let layer = segment.name.clone();
                    return Err(Error::new(Kind::PutAside { layer }));
                }
                VisitKind::Variable
            } else {
                if let Some(first) = self.hangs_on.insert(node.id(), name.to_string()) {
                    let (second, shape) = (name.to_string(), node.dims().to_vec());
                    return Err(Error::new(Kind::SplitGradient { first, second, shape }));
                }
                VisitKind::Inner
            };
            passed.push((Visit { id: node.id(), kind }, self.items.len()));
        }
        self.close(Item::Piece(root.clone()), &passed, name);
        Ok(())
    }

    fn output(&mut self, index: usize, position: usize) -> Result<(), Error> {
        let reached = self.reached.entry(index).or_default();
        if !reached.contains(&position) {
            reached.push(position);
        }
        if !self.segments.insert(index) {
            return Ok(());
        }
        let segment = &self.step.segments[index];
        let all: Vec<usize> = (0..segment.outputs.len()).collect();
        let used = self.known.as_ref().and_then(|known| known.get(&index)).unwrap_or(&all).clone();
        let (mut seen, mut passed) = (HashSet::new(), Passed::new());
        for visit in used.iter().flat_map(|&output| &segment.walks[output]) {
            if !seen.insert(visit.id) {
                continue;
            }
            let mut visit = *visit;
            if let VisitKind::Border(number) = visit.kind {
                let outer = &segment.inputs[number].outer;
                visit.id = outer.id();
                match self.step.guards.get(&outer.id()) {
                    Some(&(segment, output)) => self.output(segment, output)?,
                    None => {
                        self.piece(outer, &format!("input {number} of layer `{}`", segment.name))?;
                    }
                }
            }
            passed.push((visit, self.items.len()));
        }
        self.variables.extend(segment.variables().iter().map(Tensor::id));
        let name = format!("layer `{}`", segment.name);
        // What is outside adds to such an output as a whole, before what is inside.
        let within = |output: &usize| {
            let end = segment.walks[*output].last().map(|visit| visit.id);
            let mut others = used.iter().filter(|other| *other != output);
            others.any(|&other| segment.walks[other].iter().any(|visit| Some(visit.id) == end))
        };
        if used.iter().any(within) {
            self.displaced.push(format!(
                "{name} makes an output from another output: where three and more contributions to \
                 the gradient of that one meet, the last bits may differ from plain Candle"
            ));
        }
        self.close(Item::Segment(index, Vec::new()), &passed, &name);
        Ok(())
    }

    /// Completes an item. Its sums come out of order if something passed before one of its operations
    /// is used by an item that was completed after that operation: Candle would run the operation's
    /// backward after that item's, here the whole of this item's comes before.
    fn close(&mut self, item: Item, passed: &Passed, name: &str) {
        let inner = |visit: &Visit| matches!(visit.kind, VisitKind::Inner);
        let mut early = HashSet::new();
        let mut pending = Vec::new();
        let mut complete = passed.first().map_or(0, |(_, items)| *items);
        for (visit, items) in passed {
            let between = self.uses.get(complete.min(*items)..*items).unwrap_or_default();
            if between.iter().any(|uses| !uses.is_disjoint(&early)) {
                self.displaced.push(format!(
                    "{name} uses a variable or an input left of another input, behind which it is \
                     used too: where three and more contributions to its gradient meet, the last \
                     bits may differ from plain Candle"
                ));
            }
            complete = *items;
            match visit.kind {
                VisitKind::Inner => early.extend(pending.drain(..)),
                VisitKind::Border(_) | VisitKind::Variable => pending.push(visit.id),
            }
        }
        let ends = passed.iter().filter(|(visit, _)| !inner(visit)).map(|(visit, _)| visit.id);
        let variables = passed.iter().filter(|(v, _)| matches!(v.kind, VisitKind::Variable));
        self.variables.extend(variables.map(|(visit, _)| visit.id));
        self.uses.push(ends.collect());
        self.items.push(item);
    }
}
