//! One layer in one step: its forward, what is saved of it, its backward.
//!
//! A segment is a piece of graph cut out of the model. Inside, Candle records as always, from leaf
//! inputs that borrow the outer tensors' memory. Outside there is one guarded tensor for each output,
//! which has taken the inner output's memory. Nothing is copied at the border.
//!
//! # Who has which memory when
//!
//! | time | inputs' memory | outputs' memory | the layer's own storages |
//! | --- | --- | --- | --- |
//! | forward of the layer | in the leaf (lent) | in the inner output | on the device |
//! | between | outside | outside | kept, away, or gone (dead or recomputed) |
//! | backward of the layer | in the leaf (lent) | in the inner output (lent) | on the device |
//! | after backward | outside | outside | freed |

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use ebbtide_core::{GroupId, LayerId, Policy};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Kind};
use crate::exchange::{Loan, bytes_of, empty_leaf, handle, storage_key, storage_len, take};
use crate::graph::{Graph, Input, InputRole, Scope, Signature, Visit, trace};
use crate::guard::{Given, GuardCell, deliver, guard};
use crate::probe::{Function, marker};

/// An output of a segment, inside and outside.
pub(crate) struct Output {
    /// The guarded tensor's id in the outer graph.
    pub(crate) outer: TensorId,
    /// A handle on the guarded tensor's storage.
    outer_handle: Tensor,
    /// The node inside. Absent while the inner graph is dropped (recompute).
    inner: Option<Tensor>,
    /// Number among the closure's outputs.
    number: usize,
    /// The inner storage whose memory went outside; it is lent back for backward.
    pub(crate) taken: Option<usize>,
    pub(crate) cell: Arc<GuardCell>,
}

/// What is left of the inner graph between forward and backward.
pub(crate) enum Saved {
    /// Everything that backward reads, on the device or in this group's hands.
    Graph,
    /// Nothing: the closure is run again, and must give these bits.
    Recompute { signature: Signature, hash: u128 },
}

pub(crate) struct Segment<'a> {
    pub(crate) name: String,
    pub(crate) group: GroupId,
    pub(crate) inputs: Vec<Input>,
    pub(crate) outputs: Vec<Output>,
    /// For each of `outputs`, what Candle's walk passes inside.
    pub(crate) walks: Vec<Vec<Visit>>,
    /// The leaves that the closure got. A tensor put aside by it leads back to them.
    pub(crate) leaves: Vec<TensorId>,
    pub(crate) saved: Saved,
    pub(crate) dead: Vec<bool>,
    function: Box<Function<'a>>,
    params: Vec<(String, Var)>,
}

/// A forward that has just run: the inner graph is whole, the inputs are still lent.
pub(crate) struct Ran {
    pub(crate) inputs: Vec<Input>,
    pub(crate) outputs: Vec<Tensor>,
    pub(crate) graph: Graph,
}

/// Borrowed memory; dropping it gives the memory back.
pub(crate) type Loans = Vec<Loan>;

/// Runs a closure on leaves that borrow the inputs' memory.
///
/// # Errors
/// The closure fails, returns nothing, or uses what it does not list.
pub(crate) fn run(
    name: &str,
    params: &[(String, Var)],
    inputs: &[&Tensor],
    function: &Function<'_>,
) -> Result<(Ran, Loans), Error> {
    let (inputs, loans) = lend_inputs(inputs).map_err(Error::in_layer(name))?;
    let before = marker().map_err(Error::in_layer(name))?;
    let leaves: Vec<Tensor> = inputs.iter().map(|input| input.leaf.clone()).collect();
    let outputs = function(&leaves).map_err(Error::in_layer(name))?;
    if outputs.is_empty() {
        return Err(Error::new(Kind::NoOutput { layer: name.to_string() }));
    }
    let graph = trace(&outputs, &Scope { layer: name, inputs: &inputs, params, before })?;
    Ok((Ran { inputs, outputs, graph }, loans))
}

pub(crate) fn lend_inputs(outer: &[&Tensor]) -> candle_core::Result<(Vec<Input>, Loans)> {
    let (mut inputs, mut loans, mut lent) = (Vec::<Input>::new(), Vec::new(), Vec::new());
    for &outer in outer {
        let same = |input: &Input| input.outer.id() == outer.id();
        let (leaf, role) = if let Some(earlier) = inputs.iter().position(same) {
            (inputs[earlier].leaf.clone(), InputRole::Repeats(earlier))
        } else if outer.is_variable() {
            (outer.clone(), InputRole::Variable)
        } else if !outer.track_op() {
            (outer.clone(), InputRole::Untracked)
        } else {
            match (whole(outer) && !is_of_variable(outer))
                .then(|| empty_leaf(outer.shape(), outer.dtype()))
                .flatten()
            {
                Some(leaf) if !lent.contains(&storage_key(outer)) => (leaf, InputRole::Lent),
                _ => (Var::from_tensor(&outer.detach())?.into_inner(), InputRole::Copied),
            }
        };
        if role == InputRole::Lent {
            lent.push(storage_key(outer));
        }
        inputs.push(Input { outer: outer.clone(), leaf, role });
    }
    // An untracked alias of a lent tensor would read the poison.
    for input in inputs.iter_mut().filter(|input| input.role == InputRole::Untracked) {
        if lent.contains(&storage_key(&input.outer)) {
            input.leaf = input.outer.force_contiguous()?;
        }
    }
    // Copies are made before the first loan, since a copy may read a storage that is lent later.
    for input in inputs.iter().filter(|input| input.role == InputRole::Lent) {
        loans.push(Loan::new(handle(&input.outer)?, handle(&input.leaf)?)?);
    }
    Ok((inputs, loans))
}

/// Whether the tensor is a view of a variable, whose memory is not lent: the closure may use it too.
fn is_of_variable(tensor: &Tensor) -> bool {
    let key = storage_key(tensor);
    tensor.sorted_nodes().iter().any(|node| node.is_variable() && storage_key(node) == key)
}

/// Whether the tensor is all of its storage, in order.
fn whole(tensor: &Tensor) -> bool {
    tensor.is_contiguous()
        && tensor.layout().start_offset() == 0
        && storage_len(tensor).is_some_and(|(elements, _)| elements == tensor.elem_count())
}

/// Takes the outputs' memory out of the inner graph and puts a guard around it. Returns what the
/// caller of the layer gets, and the books on the tracked ones.
pub(crate) fn cut_outputs(
    name: &str,
    anchor: &Tensor,
    ran: &Ran,
) -> candle_core::Result<(Vec<Tensor>, Vec<Output>)> {
    let (mut visible, mut books, mut taken) = (Vec::new(), Vec::new(), Vec::new());
    for (number, inner) in ran.outputs.iter().enumerate() {
        let owner = ran.graph.owner_of(inner);
        if !inner.track_op() {
            // A plain value, unless it is a view of what the layer may move away.
            let lent = ran
                .inputs
                .iter()
                .any(|i| i.role == InputRole::Lent && storage_key(&i.leaf) == storage_key(inner));
            let alias = owner.is_some() || lent;
            visible.push(if alias { inner.force_contiguous()?.detach() } else { inner.clone() });
            continue;
        }
        let alone = owner
            .is_some_and(|o| whole(inner) && !taken.contains(&o) && is_only_view(ran, number, o));
        let memory = if alone {
            taken.extend(owner);
            take(&handle(inner)?)?
        } else {
            take(&handle(&inner.detach().force_contiguous()?)?)?
        };
        let cell = GuardCell::new(name, memory, inner.shape().clone());
        let outer = guard(anchor, &cell)?;
        books.push(Output {
            outer: outer.id(),
            outer_handle: handle(&outer)?,
            inner: Some(inner.clone()),
            number,
            taken: if alone { owner } else { None },
            cell,
        });
        visible.push(outer);
    }
    Ok((visible, books))
}

/// No other output, tracked or not, points into the same storage.
fn is_only_view(ran: &Ran, number: usize, owner: usize) -> bool {
    let mut others = ran.outputs.iter().enumerate().filter(|(n, _)| *n != number);
    !others.any(|(_, other)| ran.graph.owner_of(other) == Some(owner))
}

/// A fingerprint of every storage of the layer's own.
pub(crate) fn fingerprint(graph: &Graph) -> u128 {
    let mut hash = Xxh3::new();
    for owned in &graph.owned {
        let (storage, _) = owned.handle.storage_and_layout();
        if let candle_core::Storage::Cpu(cpu) = &*storage {
            hash.update(bytes_of(cpu).unwrap_or_default());
        }
    }
    hash.digest128()
}

impl<'a> Segment<'a> {
    /// The segment of a forward that has run. With `recompute`, the fingerprint of what it computed,
    /// the inner graph is dropped here and made again for backward.
    pub(crate) fn new(
        call: Call<'a>,
        ran: Ran,
        outputs: Vec<Output>,
        dead: Vec<bool>,
        recompute: Option<u128>,
    ) -> Self {
        let Graph { signature, walks, .. } = ran.graph;
        let saved = match recompute {
            Some(hash) => Saved::Recompute { signature, hash },
            None => Saved::Graph,
        };
        let own = ran.inputs.iter().filter(|input| input.role.is_leaf());
        let leaves = own.map(|input| input.leaf.id()).collect();
        let mut segment = Self {
            name: call.name,
            group: call.group,
            inputs: ran.inputs,
            outputs,
            walks,
            leaves,
            saved,
            dead,
            function: call.function,
            params: call.params,
        };
        if recompute.is_some() {
            segment.drop_graph();
        }
        segment
    }

    /// Lets go of everything inside: with the last reference to the inner nodes goes their memory.
    pub(crate) fn drop_graph(&mut self) {
        for output in &mut self.outputs {
            output.inner = None;
        }
        for input in &mut self.inputs {
            input.leaf = input.outer.clone();
        }
    }

    /// Lets go of the outer tensors too. A later backward through the guards is an error.
    pub(crate) fn close(&mut self) {
        for output in &self.outputs {
            output.cell.set_open(false);
        }
        self.inputs.clear();
        self.outputs.clear();
    }

    /// Runs the layer again; its inner graph is whole afterwards.
    ///
    /// # Errors
    /// The closure fails, or what it computes differs from its forward.
    pub(crate) fn recompute(
        &mut self,
        signature: &Signature,
        hash: u128,
    ) -> Result<(Graph, Loans), Error> {
        let outer: Vec<Tensor> = self.inputs.iter().map(|input| input.outer.clone()).collect();
        let outer: Vec<&Tensor> = outer.iter().collect();
        let (ran, loans) = run(&self.name, &self.params, &outer, &*self.function)?;
        if ran.graph.signature != *signature || fingerprint(&ran.graph) != hash {
            return Err(Error::new(Kind::RecomputeDiffers { layer: self.name.clone() }));
        }
        for output in &mut self.outputs {
            output.inner = ran.outputs.get(output.number).cloned();
            output.taken = None;
        }
        self.inputs = ran.inputs;
        Ok((ran.graph, loans))
    }

    /// Lends the inputs' and the outputs' memory to the inner graph for the time of its backward.
    pub(crate) fn lend_for_backward(&self) -> candle_core::Result<Loans> {
        let mut loans = Vec::new();
        for input in self.inputs.iter().filter(|input| input.role == InputRole::Lent) {
            loans.push(Loan::new(handle(&input.outer)?, handle(&input.leaf)?)?);
        }
        for output in self.outputs.iter().filter(|output| output.taken.is_some()) {
            let Some(inner) = &output.inner else { continue };
            loans.push(Loan::new(output.outer_handle.clone(), handle(inner)?)?);
        }
        Ok(loans)
    }

    /// Backward inside the segment, from the outputs' gradients (by position in `outputs`, in the
    /// order in which the outer walk reached them) to the leaves. Sums begun elsewhere are continued.
    /// Also returns all that Candle made besides: gradients of untracked operands, and what the sums
    /// were added up from, which their own graph still holds. Plain Candle holds that until its
    /// whole backward is over.
    pub(crate) fn backward(
        &self,
        outputs: &[(usize, Tensor)],
        begun: &HashMap<TensorId, Tensor>,
    ) -> candle_core::Result<(Vec<(TensorId, Tensor)>, GradStore)> {
        let roots = outputs.iter().filter_map(|(position, gradient)| {
            let inner = self.outputs[*position].inner.clone()?;
            Some(Given { to: inner, gradient: gradient.clone() })
        });
        let variables = self.variables();
        let leaves: Vec<(&Tensor, TensorId)> = self
            .inputs
            .iter()
            .filter(|input| input.role.is_leaf())
            .map(|input| (&input.leaf, input.outer.id()))
            .chain(variables.iter().map(|v| (v, v.id())))
            .collect();
        let given = |(leaf, outer): &(&Tensor, TensorId)| {
            let gradient = begun.get(outer)?.clone();
            Some(Given { to: (*leaf).clone(), gradient })
        };
        let continued = leaves.iter().filter_map(given).collect();
        let found = deliver(roots.collect(), continued)?;
        let sums = leaves.iter().filter_map(|(leaf, outer)| {
            let gradient = found.get(leaf)?.detach();
            Some((*outer, gradient))
        });
        Ok((sums.collect(), found))
    }

    /// The variables that the inner graph reaches: listed ones, and inputs that are variables.
    pub(crate) fn variables(&self) -> Vec<Tensor> {
        let inputs = self.inputs.iter().filter(|i| i.role == InputRole::Variable);
        let params = self.params.iter().map(|(_, var)| var.as_tensor().clone());
        let mut all: Vec<Tensor> = params.chain(inputs.map(|i| i.leaf.clone())).collect();
        let mut seen = HashSet::new();
        all.retain(|v| seen.insert(v.id()));
        all
    }
}

/// What a call of a layer brings along.
pub(crate) struct Call<'a> {
    pub(crate) name: String,
    pub(crate) layer: LayerId,
    pub(crate) group: GroupId,
    pub(crate) policy: Policy,
    pub(crate) params: Vec<(String, Var)>,
    pub(crate) function: Box<Function<'a>>,
}
