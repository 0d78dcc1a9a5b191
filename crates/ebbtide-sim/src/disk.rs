//! The disk, as an engine sees it: a store of host buffers.

use std::collections::BTreeMap;
use std::panic::Location;

use ebbtide_core::{BackendError, Done, Failed, Outcome, Store, StoreStats, Ticket, Timing};

use crate::call::Call;
use crate::handles::{SimHost, SimSlot};
use crate::memory::{Space, Span};
use crate::objects::{Job, Slot, Task};
use crate::options::Function;
use crate::report::Kind;
use crate::schedule::Owner;
use crate::shadow::Role;
use crate::state::{Queued, State};
use crate::world::World;

/// The disk of a [`World`].
///
/// From the call on, a job reads or writes its buffer as an actor of its own; the host is ordered
/// behind it when it has waited for the ticket. Dropping the store waits for what is under way.
#[derive(Debug)]
pub struct SimDisk {
    world: World,
    buffers: BTreeMap<u64, SimHost>,
    stats: StoreStats,
}

impl SimDisk {
    pub(crate) fn new(world: World) -> Self {
        Self { world, buffers: BTreeMap::new(), stats: StoreStats::default() }
    }

    fn accept(&mut self, ticket: Result<Ticket, BackendError>, block: SimHost) -> Accepted {
        match ticket {
            Ok(ticket) => {
                self.buffers.insert(ticket.0, block);
                Ok(ticket)
            }
            Err(error) => Err(Failed { error, block }),
        }
    }

    /// What a wait for nothing leaves.
    fn nothing(&self, state: &mut State, call: &Call) -> Failed<SimHost> {
        let error = BackendError::new(format!("{}: no such ticket", call.what()));
        let id = state.object();
        let memory = Span { space: Space::Host, start: 0, bytes: 0 };
        let block = SimHost { world: self.world.clone(), id, memory, made: call.place() };
        Failed { error, block }
    }
}

type Accepted = Result<Ticket, Failed<SimHost>>;

impl Store<SimHost> for SimDisk {
    type Slot = SimSlot;

    #[track_caller]
    fn put(&mut self, block: SimHost) -> Accepted {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("put {block:?} of {} bytes", block.bytes());
        let ticket = state.attempt(Function::Put, what, place).and_then(|call| {
            state.check_world(&self.world, &block, &call)?;
            state.put(block.memory, call)
        });
        drop(state);
        self.accept(ticket, block)
    }

    #[track_caller]
    fn get(&mut self, slot: &SimSlot, block: SimHost) -> Accepted {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("get slot#{} into {block:?}", slot.id);
        let ticket = state.attempt(Function::Get, what, place).and_then(|call| {
            state.check_world(&self.world, &block, &call)?;
            state.get(slot, block.memory, call)
        });
        drop(state);
        self.accept(ticket, block)
    }

    #[track_caller]
    fn is_done(&mut self, ticket: Ticket) -> bool {
        let place = Location::caller();
        let mut state = self.world.lock();
        state.begin(format!("is_done ticket {}", ticket.0), place);
        let now = state.now;
        state.jobs.get(&ticket.0).is_none_or(|job| job.end <= now)
    }

    #[track_caller]
    fn wait(&mut self, ticket: Ticket) -> Outcome<SimHost, SimSlot> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("wait for ticket {}", ticket.0);
        let function = state.jobs.get(&ticket.0).map(|job| match job.task {
            Task::Put(_) => Function::WaitPut,
            Task::Get(_) => Function::WaitGet,
        });
        let (Some(function), Some(block)) = (function, self.buffers.remove(&ticket.0)) else {
            let call = state.begin(what, place);
            let first = state.gone.tickets.get(&ticket.0).unwrap_or(&call).clone();
            state.report(Kind::NoSuchTicket, &first, &call, String::new());
            return Err(self.nothing(&mut state, &call));
        };
        let number = state.next_call();
        let verdict = state.attempt(function, what.clone(), place);
        let call = match &verdict {
            Ok(call) => call.clone(),
            Err(_) => Call::new(number, what, place),
        };
        let before = state.now;
        let (job, done) = state.end_job(ticket.0, &call, verdict);
        self.stats.blocked_ns += state.now - before;
        drop(state);
        let timing = Timing { started_ns: job.start, finished_ns: job.end, worker: 0 };
        match done {
            Err(error) => Err(Failed { error, block }),
            Ok(Some(slot)) => {
                self.stats.bytes_out += slot.bytes;
                self.stats.bytes_held += slot.bytes;
                Ok((Done::Stored(slot, Some(block)), timing))
            }
            Ok(None) => {
                self.stats.bytes_in += block.bytes();
                Ok((Done::Loaded(block), timing))
            }
        }
    }

    #[track_caller]
    fn discard(&mut self, slot: SimSlot) {
        let place = Location::caller();
        let mut state = self.world.lock();
        let call = state.begin(format!("discard slot#{}", slot.id), place);
        if let Some(memory) = state.slot(&slot, &call) {
            state.slots.remove(&slot.id);
            state.gone.slots.insert(slot.id, call.clone());
            state.give(memory, &call);
            self.stats.bytes_held = self.stats.bytes_held.saturating_sub(slot.bytes);
        }
    }

    fn stats(&self) -> StoreStats {
        self.stats
    }
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        for ticket in self.buffers.keys() {
            state.join_job(*ticket);
        }
    }
}

impl State {
    fn check_world(
        &mut self,
        world: &World,
        block: &SimHost,
        call: &Call,
    ) -> Result<(), BackendError> {
        if block.world.is(world) {
            return Ok(());
        }
        self.report(Kind::OtherWorld, call, call, String::new());
        Err(BackendError::new("the buffer belongs to another world"))
    }

    fn put(&mut self, host: Span, call: Call) -> Result<Ticket, BackendError> {
        let Some(extent) = self.take(Space::Disk, host.bytes, &call) else {
            let error = BackendError::new(format!("no room on the disk for {} bytes", host.bytes));
            return Err(error.no_room());
        };
        let ns = self.disk_ns(host.bytes, self.options.speeds.disk_write);
        let work = self.start_job(&call, ns);
        self.transfer(host, extent, &work, Owner::Disk);
        Ok(self.add_job(Task::Put(extent), host, &work, call))
    }

    fn get(&mut self, slot: &SimSlot, host: Span, call: Call) -> Result<Ticket, BackendError> {
        let Some(extent) = self.slot(slot, &call) else {
            return Err(BackendError::new("no such slot"));
        };
        if extent.bytes != host.bytes {
            let detail = format!("a buffer of {} bytes, a slot of {}", host.bytes, extent.bytes);
            self.report(Kind::OutOfBounds, &self.slots[&slot.id].made.clone(), &call, detail);
        }
        let bytes = extent.bytes.min(host.bytes);
        let ns = self.disk_ns(bytes, self.options.speeds.disk_read);
        let work = self.start_job(&call, ns);
        if let (Some(from), Some(to)) = (extent.part(0, bytes), host.part(0, bytes)) {
            self.transfer(from, to, &work, Owner::Disk);
        }
        Ok(self.add_job(Task::Get(bytes), host, &work, call))
    }

    fn disk_ns(&mut self, bytes: u64, rate: u64) -> u64 {
        self.duration(self.options.speeds.disk_ns, bytes, rate, self.options.lateness.disk)
    }

    fn add_job(&mut self, task: Task, host: Span, work: &Queued, call: Call) -> Ticket {
        let ticket = self.object();
        let (actor, clock) = (work.op.actor, work.op.clock.clone());
        let job = Job { task, host, call, actor, clock, start: work.start, end: work.end };
        self.jobs.insert(ticket, job);
        Ticket(ticket)
    }

    /// The host has waited for a job. A `put` that went well leaves its slot.
    fn end_job(
        &mut self,
        ticket: u64,
        call: &Call,
        verdict: Result<Call, BackendError>,
    ) -> (Job, Result<Option<SimSlot>, BackendError>) {
        self.join_job(ticket);
        let job = self.jobs.remove(&ticket).expect("the caller has seen the job");
        self.free_actors.push(job.actor);
        self.gone.tickets.insert(ticket, call.clone());
        let done = match (job.task, verdict) {
            (Task::Put(memory), Ok(_)) => {
                let (id, made) = (self.object(), job.call.clone());
                self.slots.insert(id, Slot { memory, made });
                self.stats.disk_out += memory.bytes;
                Ok(Some(SimSlot { world: self.world, id, bytes: memory.bytes }))
            }
            (Task::Get(bytes), Ok(_)) => {
                self.stats.disk_in += bytes;
                Ok(None)
            }
            (Task::Put(memory), Err(error)) => {
                self.give(memory, call);
                Err(error)
            }
            (Task::Get(_), Err(error)) => {
                let op = self.by_host(call, Role::Use);
                self.writes(job.host, &op, false);
                self.memory.poison(job.host);
                Err(error)
            }
        };
        (job, done)
    }

    /// The extent of a slot; `None`, and a report, if it was given back.
    fn slot(&mut self, slot: &SimSlot, call: &Call) -> Option<Span> {
        if slot.world != self.world {
            self.report(Kind::OtherWorld, call, call, String::new());
            return None;
        }
        if let Some(found) = self.slots.get(&slot.id) {
            return Some(found.memory);
        }
        let first = self.gone.slots.get(&slot.id).unwrap_or(call).clone();
        self.report(Kind::NoSuchSlot, &first, call, String::new());
        None
    }
}
