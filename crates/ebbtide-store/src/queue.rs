//! Jobs on their way from the caller to the workers and back. Everything shared is in here, behind
//! one lock that is never held during I/O or while a block is dropped.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use ebbtide_core::{Done, Failed, StoreStats, Ticket, Timing};

use crate::clock::nanos;
use crate::extent::{Extent, Extents, NoRoom};
use crate::file::FileSlot;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait_while};

pub(crate) type Outcome<B> = Result<(Done<B, FileSlot>, Timing), Failed<B>>;

/// A direction of the tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Out,
    In,
}

pub(crate) enum Task {
    Write(Extent),
    /// From this offset; the checksum of the bytes that were put, if there is one.
    Read {
        offset: u64,
        sum: Option<u64>,
    },
}

pub(crate) struct Job<B> {
    pub(crate) ticket: Ticket,
    pub(crate) task: Task,
    pub(crate) block: B,
    /// Length of the block.
    pub(crate) bytes: u64,
}

pub(crate) struct Queue<B> {
    state: Mutex<State<B>>,
    /// Signalled when a job comes in, or on closing. Workers wait for it.
    work: Condvar,
    /// Signalled when a job is finished. The caller waits for it.
    finished: Condvar,
    /// Bytes of unfinished jobs, at most (a single larger job excepted).
    bound: u64,
}

struct State<B> {
    loads: VecDeque<Job<B>>,
    writes: VecDeque<Job<B>>,
    /// One entry for every ticket not yet waited for; `None` while its job is unfinished.
    outcomes: HashMap<Ticket, Option<Outcome<B>>>,
    unfinished_bytes: u64,
    unfinished_jobs: usize,
    next_ticket: u64,
    extents: Extents,
    stats: StoreStats,
    closed: bool,
}

impl<B> Queue<B> {
    pub(crate) fn new(bound: u64, capacity: Option<u64>) -> Self {
        let state = State {
            loads: VecDeque::new(),
            writes: VecDeque::new(),
            outcomes: HashMap::new(),
            unfinished_bytes: 0,
            unfinished_jobs: 0,
            next_ticket: 0,
            extents: Extents::new(capacity),
            stats: StoreStats::default(),
            closed: false,
        };
        Self { state: Mutex::new(state), work: Condvar::new(), finished: Condvar::new(), bound }
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        // Nothing that can panic half-way changes the state, so a poisoned lock guards a sound one.
        lock(&self.state)
    }

    pub(crate) fn reserve(&self, bytes: u64) -> Result<Extent, NoRoom> {
        self.lock().extents.allocate(bytes)
    }

    pub(crate) fn release(&self, extent: Extent) {
        self.lock().extents.free(extent);
    }

    /// Ranges of the file that nobody needs, and the length it has to have. The file is made
    /// shorter: the next block that finds no hole begins there.
    pub(crate) fn trim(&self) -> (Vec<Range<u64>>, u64) {
        let mut state = self.lock();
        let end = state.extents.trim();
        (state.extents.holes().collect(), end)
    }

    /// Whether no byte of the file is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().extents.in_use() == 0
    }

    /// Blocks the caller while `blocked` holds, and counts the time.
    fn wait_while<'a>(
        &'a self,
        state: MutexGuard<'a, State<B>>,
        blocked: impl Fn(&State<B>) -> bool,
    ) -> MutexGuard<'a, State<B>> {
        if !blocked(&state) {
            return state;
        }
        let since = Instant::now();
        let mut state = wait_while(&self.finished, state, blocked);
        state.stats.blocked_ns += nanos(since);
        state
    }

    /// Hands a job to the workers, as soon as there is room for it.
    pub(crate) fn push(&self, task: Task, block: B, bytes: u64) -> Ticket {
        let full = |state: &State<B>| {
            let room = self.bound.saturating_sub(state.unfinished_bytes);
            state.unfinished_jobs > 0 && bytes > room
        };
        let mut state = self.wait_while(self.lock(), full);
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        state.unfinished_bytes += bytes;
        state.unfinished_jobs += 1;
        state.outcomes.insert(ticket, None);
        let job = Job { ticket, task, block, bytes };
        match job.task {
            Task::Write(_) => state.writes.push_back(job),
            Task::Read { .. } => state.loads.push_back(job),
        }
        drop(state);
        // Not one: it may be there for the other direction only.
        self.work.notify_all();
        ticket
    }

    /// The next job for a worker: loads first, because somebody will soon wait for them, whereas a
    /// late write only holds memory for longer. A worker may be there for one direction `only`.
    /// `None` once the queue is closed.
    pub(crate) fn pop(&self, only: Option<Way>) -> Option<Job<B>> {
        let (takes_loads, takes_writes) = (only != Some(Way::Out), only != Some(Way::In));
        let idle = |state: &State<B>| {
            let load = takes_loads && !state.loads.is_empty();
            let write = takes_writes && !state.writes.is_empty();
            !state.closed && !load && !write
        };
        let mut state = wait_while(&self.work, self.lock(), idle);
        if state.closed {
            return None;
        }
        let load = if takes_loads { state.loads.pop_front() } else { None };
        if load.is_some() || !takes_writes { load } else { state.writes.pop_front() }
    }

    /// Announces the end of a job. A failed write gives its extent back.
    pub(crate) fn finish(
        &self,
        ticket: Ticket,
        bytes: u64,
        outcome: Outcome<B>,
        extent: Option<Extent>,
    ) {
        let mut state = self.lock();
        match &outcome {
            Ok((Done::Stored(..), _)) => state.stats.bytes_out += bytes,
            Ok((Done::Loaded(_), _)) => state.stats.bytes_in += bytes,
            Err(_) => {}
        }
        if let Some(extent) = extent {
            state.extents.free(extent);
        }
        state.unfinished_bytes -= bytes;
        state.unfinished_jobs -= 1;
        state.outcomes.insert(ticket, Some(outcome));
        drop(state);
        self.finished.notify_all();
    }

    pub(crate) fn is_done(&self, ticket: Ticket) -> bool {
        self.lock().outcomes.get(&ticket).is_some_and(Option::is_some)
    }

    /// Waits for a job and takes what it left.
    ///
    /// Panics if the ticket is unknown: waiting for it would never end.
    pub(crate) fn wait(&self, ticket: Ticket) -> Outcome<B> {
        let state = self.lock();
        assert!(state.outcomes.contains_key(&ticket), "{ticket:?} is not waited for exactly once");
        let unfinished = |state: &State<B>| state.outcomes[&ticket].is_none();
        let mut state = self.wait_while(state, unfinished);
        state.outcomes.remove(&ticket).flatten().expect("the job is finished")
    }

    pub(crate) fn stats(&self) -> StoreStats {
        let state = self.lock();
        StoreStats { bytes_held: state.extents.in_use(), ..state.stats }
    }

    /// Lets the workers end after the jobs they are running. What had not begun comes back.
    pub(crate) fn close(&self) -> Vec<Job<B>> {
        let mut state = self.lock();
        state.closed = true;
        let mut jobs: Vec<_> = state.loads.drain(..).collect();
        jobs.extend(state.writes.drain(..));
        drop(state);
        self.work.notify_all();
        jobs
    }
}
