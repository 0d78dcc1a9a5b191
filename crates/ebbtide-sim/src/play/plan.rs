//! A run as data: which layer saves what, in which order things happen, and what is special about it.

use std::ops::Range;

use ebbtide_core::Element;

/// All that a run does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Sizes of the storages that every layer uses.
    pub tables: Vec<u64>,
    /// The steps.
    pub steps: Vec<Step>,
}

/// One training step.
#[derive(Clone, Debug)]
pub struct Step {
    /// Each layer in each pass.
    pub visits: Vec<Visit>,
    /// What happens, in order.
    pub events: Vec<Event>,
    /// Host memory is shrunk to so many bytes at the end.
    pub shrink: Option<u64>,
}

/// One layer in one pass.
#[derive(Clone, Debug, Default)]
pub struct Visit {
    /// Number of the pass within the step.
    pub pass: u64,
    /// Number of the layer.
    pub layer: u32,
    /// The storages it saves.
    pub values: Vec<Value>,
    /// The copies are on this stream of the caller's.
    pub own_stream: Option<usize>,
    /// Which visit's offload is waited for after this one's was started.
    pub waits_for: Vec<usize>,
    /// A value is changed in place.
    pub change: Option<(Moment, usize)>,
    /// Bytes of what is allocated between start and wait.
    pub pressure: Vec<u64>,
    /// How long a kernel runs in front of the others.
    pub busy_ns: u64,
    /// How backward asks for the group.
    pub asks: Asks,
    /// A call that is wrong.
    pub misuse: Option<Misuse>,
}

/// One storage that a visit saves.
#[derive(Clone, Debug)]
pub struct Value {
    /// Where it comes from.
    pub source: Source,
    /// The tensors that are registered, in this order.
    pub views: Vec<View>,
    /// Their type.
    pub element: Element,
    /// They may be packed.
    pub pack: bool,
    /// They go to this pool.
    pub pool: Option<usize>,
    /// When it is protected, if it is.
    pub protect: Option<Moment>,
    /// A later visit saves it too.
    pub reused: bool,
    /// The user's handle goes as soon as the offload is started.
    pub dropped: bool,
}

/// Where a storage comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A kernel of the layer makes it.
    Fresh(u64),
    /// This value of this visit; a new one of the same size if that visit has no handle of it now.
    Of(usize, usize),
    /// This table.
    Table(usize),
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The bytes it reaches.
    pub range: Range<u64>,
    /// It is not contiguous.
    pub strided: bool,
}

/// When something happens to a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the offload is started.
    Before,
    /// Between its start and its wait.
    During,
    /// After its wait.
    After,
    /// Just before backward asks for it, when its load may be under way.
    Loading,
}

/// How backward asks for a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// It tells the engine to prefetch before it asks for the group.
    pub prefetch_first: bool,
    /// It tells the engine to prefetch after it has got the group.
    pub prefetch_then: bool,
    /// It starts and waits for the load by hand; on a stream of its own if the offload was.
    pub by_hand: bool,
    /// It starts the load of this visit's group by hand before.
    pub starts: Option<usize>,
    /// The layer runs again before, as this visit.
    pub recompute: Option<usize>,
}

/// A call in a wrong order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// Waiting for an offload that was not started.
    WaitBeforeStart,
    /// Starting an offload twice.
    StartTwice,
    /// Registering after the start.
    RegisterLate,
    /// Waiting for a load that was not started.
    LoadTooEarly,
    /// Using a group that is closed.
    AfterClose,
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The forward of a visit.
    Forward(usize),
    /// Its backward.
    Backward(usize),
    /// Work on so many bytes without groups.
    Evaluate(u64),
    /// A pass's backward is complete.
    Finish,
    /// The step is given up; with the engine or without.
    Abort(bool),
}

impl Plan {
    /// Bytes of a storage of a step.
    pub fn size(&self, step: &Step, source: Source) -> u64 {
        match source {
            Source::Fresh(bytes) => bytes,
            Source::Table(table) => self.tables[table],
            Source::Of(visit, value) => match step.visits[visit].values[value].source {
                Source::Fresh(bytes) => bytes,
                _ => unreachable!("only what is fresh is used again"),
            },
        }
    }
}
