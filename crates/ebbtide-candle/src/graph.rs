//! What Candle recorded inside one layer.
//!
//! Candle shows the tracked nodes of a graph in the order of backward, and for each its shape, dtype
//! and storage; the operations are private. That is enough to know which storages a layer saved,
//! and to recognise the same layer again: its [`Signature`].

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Tensor, TensorId, Var};

use crate::error::{Error, Kind};
use crate::exchange::{handle, storage_key, storage_len};

/// One input of a layer, inside and outside.
pub(crate) struct Input {
    /// What the caller passed.
    pub(crate) outer: Tensor,
    /// What the closure got.
    pub(crate) leaf: Tensor,
    pub(crate) role: InputRole,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InputRole {
    /// No gradient: passed as it is.
    Untracked,
    /// A variable: passed as it is, its gradient is a parameter's.
    Variable,
    /// A leaf that borrows the outer tensor's memory while the layer runs.
    Lent,
    /// A leaf with a copy, since the outer tensor is a view of something larger.
    Copied,
    /// The same tensor as the input with this number, and the same leaf.
    Repeats(usize),
}

impl InputRole {
    pub(crate) fn is_leaf(self) -> bool {
        matches!(self, Self::Lent | Self::Copied)
    }
}

/// Whose storage a node points into.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Role {
    /// The layer's own, by index into [`Graph::owned`].
    Own(usize),
    /// Memory lent by this input.
    Lent(usize),
    /// A variable's.
    Variable,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Node {
    rank: usize,
    dtype: DType,
    contiguous: bool,
    leaf: bool,
    role: Role,
}

/// The form of a layer's graph without its sizes: a change of batch or sequence length keeps it,
/// another operation in between changes it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Signature(Vec<Node>);

/// A storage that belongs to the layer.
pub(crate) struct Owned {
    pub(crate) handle: Tensor,
    pub(crate) bytes: u64,
}

pub(crate) struct Graph {
    pub(crate) signature: Signature,
    pub(crate) owned: Vec<Owned>,
    /// For each tracked output, what Candle's walk passes, in the order in which it is left.
    pub(crate) walks: Vec<Vec<Visit>>,
    /// Variables in the order of backward.
    pub(crate) variables: Vec<Tensor>,
    owned_by_key: HashMap<usize, usize>,
}

/// Something that a walk over a graph passes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    pub(crate) id: TensorId,
    pub(crate) kind: VisitKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum VisitKind {
    /// Where the graph is cut: a leaf input with this number, or a guard.
    Border(usize),
    Variable,
    /// A result of an operation.
    Inner,
}

/// What a layer may use, to tell its own nodes from others.
pub(crate) struct Scope<'s> {
    pub(crate) layer: &'s str,
    pub(crate) inputs: &'s [Input],
    pub(crate) params: &'s [(String, Var)],
    /// Tensors made before this one are not the layer's.
    pub(crate) before: u64,
}

/// The running number that Candle gave to a tensor. Candle offers ids for comparison only; their
/// debug form is `TensorId(n)`, with n counting up over the process (0.11).
pub(crate) fn serial(id: TensorId) -> Option<u64> {
    let text = format!("{id:?}");
    text.strip_prefix("TensorId(")?.strip_suffix(')')?.parse().ok()
}

/// Walks what is behind the outputs.
///
/// # Errors
/// A tracked tensor or variable that is neither an input nor listed is in use.
pub(crate) fn trace(outputs: &[Tensor], scope: &Scope<'_>) -> Result<Graph, Error> {
    let mut builder = Builder::new(scope);
    for output in outputs.iter().filter(|o| o.track_op()) {
        let mut walk = Vec::new();
        for node in output.sorted_nodes() {
            if builder.seen.insert(node.id()) {
                builder.add(node)?;
            }
            let kind = match builder.leaves.get(&node.id()) {
                Some(&input) => VisitKind::Border(input),
                None if node.is_variable() => VisitKind::Variable,
                None => VisitKind::Inner,
            };
            walk.push(Visit { id: node.id(), kind });
        }
        walk.reverse();
        builder.graph.walks.push(walk);
    }
    Ok(builder.graph)
}

struct Builder<'s> {
    scope: &'s Scope<'s>,
    seen: HashSet<TensorId>,
    leaves: HashMap<TensorId, usize>,
    listed: HashSet<TensorId>,
    foreign: HashMap<usize, Role>,
    graph: Graph,
}

impl<'s> Builder<'s> {
    fn new(scope: &'s Scope<'s>) -> Self {
        let (mut leaves, mut listed, mut foreign) =
            (HashMap::new(), HashSet::new(), HashMap::new());
        for (index, input) in scope.inputs.iter().enumerate() {
            match input.role {
                InputRole::Lent => {
                    leaves.insert(input.leaf.id(), index);
                    foreign.insert(storage_key(&input.leaf), Role::Lent(index));
                }
                InputRole::Copied => {
                    leaves.insert(input.leaf.id(), index);
                }
                InputRole::Variable => {
                    listed.insert(input.leaf.id());
                    foreign.insert(storage_key(&input.leaf), Role::Variable);
                }
                InputRole::Untracked | InputRole::Repeats(_) => {}
            }
        }
        for (_, var) in scope.params {
            listed.insert(var.id());
            foreign.insert(storage_key(var), Role::Variable);
        }
        let graph = Graph {
            signature: Signature(Vec::new()),
            owned: Vec::new(),
            walks: Vec::new(),
            variables: Vec::new(),
            owned_by_key: HashMap::new(),
        };
        Self { scope, seen: HashSet::new(), leaves, listed, foreign, graph }
    }

    fn add(&mut self, node: &Tensor) -> Result<(), Error> {
        let leaf = self.leaves.get(&node.id()).copied();
        match leaf {
            Some(_) => {}
            None if node.is_variable() => {
                self.check(self.listed.contains(&node.id()), "a variable", node)?;
                self.graph.variables.push(node.clone());
            }
            None => {
                let own = serial(node.id()).is_some_and(|n| n > self.scope.before);
                self.check(own, "a tracked tensor", node)?;
            }
        }
        let role = self.role(node)?;
        self.graph.signature.0.push(Node {
            rank: node.rank(),
            dtype: node.dtype(),
            contiguous: node.is_contiguous(),
            leaf: leaf.is_some(),
            role,
        });
        Ok(())
    }

    fn check(&self, fine: bool, what: &str, node: &Tensor) -> Result<(), Error> {
        if fine {
            return Ok(());
        }
        let layer = self.scope.layer.to_string();
        let what = format!("{what} of shape {:?}", node.dims());
        Err(Error::new(Kind::UnlistedCapture { layer, what }))
    }

    fn role(&mut self, node: &Tensor) -> Result<Role, Error> {
        let key = storage_key(node);
        if let Some(role) = self.foreign.get(&key) {
            return Ok(*role);
        }
        let graph = &mut self.graph;
        if let Some(&index) = graph.owned_by_key.get(&key) {
            return Ok(Role::Own(index));
        }
        let index = graph.owned.len();
        graph.owned_by_key.insert(key, index);
        let handle = handle(node).map_err(Error::in_layer(self.scope.layer))?;
        let bytes = storage_len(node).map_or(0, |(_, bytes)| bytes);
        graph.owned.push(Owned { handle, bytes });
        Ok(Role::Own(index))
    }
}

impl Graph {
    /// The layer's own storage that this tensor points into.
    pub(crate) fn owner_of(&self, tensor: &Tensor) -> Option<usize> {
        self.owned_by_key.get(&storage_key(tensor)).copied()
    }

    fn reaches(&self, input: usize) -> bool {
        let mut visits = self.walks.iter().flatten();
        visits.any(|visit| matches!(visit.kind, VisitKind::Border(number) if number == input))
    }

    /// Names of the parameters and numbers of the inputs that no output depends on: they will get
    /// no gradient.
    pub(crate) fn without_gradient(&self, scope: &Scope<'_>) -> Vec<String> {
        let reached: HashSet<TensorId> = self.variables.iter().map(Tensor::id).collect();
        let params = scope.params.iter().filter(|(_, var)| !reached.contains(&var.id()));
        let inputs = scope.inputs.iter().enumerate().filter(|(index, input)| match input.role {
            InputRole::Untracked | InputRole::Repeats(_) => false,
            InputRole::Variable => !reached.contains(&input.leaf.id()),
            InputRole::Lent | InputRole::Copied => !self.reaches(*index),
        });
        let params = params.map(|(name, _)| format!("parameter `{name}`"));
        params.chain(inputs.map(|(index, _)| format!("input {index}"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// The captures check leans on the debug form of Candle's ids.
    #[test]
    fn ids_count_up() {
        let first = Tensor::new(1f32, &Device::Cpu).unwrap();
        let second = Tensor::new(1f32, &Device::Cpu).unwrap();
        assert!(serial(first.id()).unwrap() < serial(second.id()).unwrap());
    }
}
