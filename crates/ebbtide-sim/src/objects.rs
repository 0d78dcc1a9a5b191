//! What the world knows of storages, blocks, host buffers, slots and jobs.

use std::collections::BTreeMap;

use crate::call::Call;
use crate::clock::Clock;
use crate::memory::Span;
use crate::report::Kind;
use crate::shadow::Role;
use crate::state::{Place, Queued, State};

/// A storage object of the framework.
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) id: u64,
    /// `None` while it is empty.
    pub(crate) memory: Option<Span>,
    pub(crate) version: u64,
    /// The call that gave it its memory or took it.
    pub(crate) last: Call,
}

/// A staging block or a host buffer.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) memory: Span,
    pub(crate) made: Call,
}

/// Bytes on the disk.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) memory: Span,
    pub(crate) made: Call,
}

/// What a job of the disk does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Writes the host's bytes to an extent.
    Put(Span),
    /// Reads a slot of so many bytes.
    Get(u64),
}

/// A job that was not waited for yet.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) task: Task,
    pub(crate) host: Span,
    pub(crate) call: Call,
    pub(crate) actor: usize,
    pub(crate) clock: Clock,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Calls that ended something which may not be used again.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    pub(crate) tickets: BTreeMap<u64, Call>,
    pub(crate) slots: BTreeMap<u64, Call>,
}

/// Names one piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    /// By its number in the slab.
    Storage(usize),
    Block(u64),
    Host(u64),
}

impl State {
    /// How a report names a part of it.
    pub(crate) fn describe(&self, name: Name, offset: u64, bytes: u64) -> String {
        let end = offset.saturating_add(bytes);
        format!("{}[{offset}..{end}]", self.title(name))
    }

    pub(crate) fn title(&self, name: Name) -> String {
        match name {
            Name::Storage(number) => {
                let id = self.storages.get(number).and_then(Option::as_ref).map(|s| s.id);
                id.map_or_else(|| "storage".to_owned(), |id| format!("storage#{id}"))
            }
            Name::Block(id) => format!("block#{id}"),
            Name::Host(id) => format!("host#{id}"),
        }
    }

    /// The bytes that a call is about; `None`, and a report, if they are not there.
    pub(crate) fn part(
        &mut self,
        name: Name,
        offset: u64,
        bytes: u64,
        call: &Call,
    ) -> Option<Span> {
        let (memory, last) = match name {
            Name::Storage(number) => {
                let storage = self.storages.get(number)?.as_ref()?;
                (storage.memory, storage.last.clone())
            }
            Name::Block(id) | Name::Host(id) => {
                let buffer = self.buffers.get(&id)?;
                (Some(buffer.memory), buffer.made.clone())
            }
        };
        let Some(memory) = memory else {
            self.report(Kind::UseAfterFree, &last, call, String::new());
            return None;
        };
        let part = memory.part(offset, bytes);
        if part.is_none() {
            let detail = format!("{bytes} bytes from {offset} on, of {}", memory.bytes);
            self.report(Kind::OutOfBounds, &last, call, detail);
        }
        part
    }

    /// A storage object with memory.
    pub(crate) fn add_storage(&mut self, id: u64, memory: Span, call: &Call) -> usize {
        let storage = Storage { id, memory: Some(memory), version: 0, last: call.clone() };
        if let Some(number) = self.free_storages.pop() {
            self.storages[number] = Some(storage);
            number
        } else {
            self.storages.push(Some(storage));
            self.storages.len() - 1
        }
    }

    /// The last handle is gone: the framework frees what is left.
    pub(crate) fn drop_storage(&mut self, number: usize, place: Place) {
        let title = self.title(Name::Storage(number));
        let call = self.begin(format!("drop {title}, made"), place);
        let Some(storage) = self.storages[number].take() else { return };
        self.free_storages.push(number);
        if let Some(memory) = storage.memory {
            self.deallocate(memory, &call);
        }
    }

    pub(crate) fn drop_block(&mut self, id: u64, place: Place) {
        let call = self.begin(format!("drop block#{id}, made"), place);
        if let Some(block) = self.buffers.remove(&id) {
            self.deallocate(block.memory, &call);
        }
    }

    pub(crate) fn drop_host(&mut self, id: u64, place: Place) {
        let call = self.begin(format!("drop host#{id}, made"), place);
        if let Some(buffer) = self.buffers.remove(&id) {
            self.stats.unpins += 1;
            self.give(buffer.memory, &call);
        }
    }

    /// Starts a job of the disk: an actor of its own until the host waits for it.
    pub(crate) fn start_job(&mut self, call: &Call, ns: u64) -> Queued {
        let actor = self.free_actors.pop().unwrap_or_else(|| self.add_actor());
        let mut clock = self.host.clone();
        clock.tick(actor);
        let (start, end) = (self.now, self.now.saturating_add(ns));
        self.note(|| format!("runs {start}..{end}"));
        let op = crate::shadow::Op { actor, clock, call: call.clone(), role: Role::Use };
        Queued { op, start, end }
    }

    /// The host waits for a job.
    pub(crate) fn join_job(&mut self, ticket: u64) {
        if let Some(job) = self.jobs.get(&ticket) {
            self.host.join(&job.clock);
            let end = job.end;
            self.advance(end);
        }
    }

    /// Reports what was never given back.
    pub(crate) fn leaks(&mut self, call: &Call) {
        let mut left: Vec<(Call, String)> = Vec::new();
        for (id, buffer) in &self.buffers {
            left.push((buffer.made.clone(), format!("buffer {id} lives")));
        }
        for (id, slot) in &self.slots {
            left.push((slot.made.clone(), format!("slot {id} was not discarded")));
        }
        for (id, job) in &self.jobs {
            left.push((job.call.clone(), format!("ticket {id} was not waited for")));
        }
        for (made, detail) in left {
            self.report(Kind::Leak, &made, call, detail);
        }
    }
}
