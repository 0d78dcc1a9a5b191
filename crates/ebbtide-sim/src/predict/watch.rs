//! What a play tells those who want more than its time.

/// Something that happens in a play, at one moment. Storages are numbered through all layers,
/// operations by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Compute wants to run an operation.
    Reached(usize),
    /// It has the room for it. Until then it has allocated nothing.
    Entered(usize),
    /// Everything it reads is there, and it runs.
    Started(usize),
    /// It is done.
    Ended(usize),
    /// The offload of a storage was queued.
    OutQueued(usize),
    /// A storage's offload is complete, and its bytes are free.
    OutDone(usize),
    /// A storage's load started; its bytes are taken.
    BackStarted(usize),
    /// A storage is back.
    BackDone(usize),
}

/// Out of the device or back to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Out,
    Back,
}

/// Hears of everything in a play. A play for its time alone has `()`, which costs nothing.
pub(crate) trait Watch {
    /// Whether anything is done with what is heard.
    const ON: bool = true;
    /// At this moment, in nanoseconds, with this many bytes counted.
    fn step(&mut self, now: f64, bytes: u64, step: Step);
    /// A queue of a tier copied for so long, while compute ran or not.
    fn copied(&mut self, tier: usize, way: Way, ns: f64, hidden: bool);
}

impl Watch for () {
    const ON: bool = false;
    fn step(&mut self, _: f64, _: u64, _: Step) {}
    fn copied(&mut self, _: usize, _: Way, _: f64, _: bool) {}
}
