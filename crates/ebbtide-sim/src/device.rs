//! The device, as an engine sees it.

use std::panic::Location;
use std::sync::Arc;

use ebbtide_core::{Accelerator, BackendError, Direction, End, Facts};

use crate::call::Call;
use crate::handles::{Mark, SimBlock, SimEvent, SimHost, SimStorage, SimStream};
use crate::memory::Space;
use crate::objects::{Buffer, Name};
use crate::options::Function;
use crate::report::Kind;
use crate::schedule::Owner;
use crate::shadow::Role;
use crate::state::{COMPUTE, State};
use crate::world::{World, out_of_device};

/// The device of a [`World`].
#[derive(Debug)]
pub struct SimDevice {
    world: World,
}

/// One end of a copy without the handle.
#[derive(Clone, Copy)]
struct Side {
    name: Name,
    offset: u64,
    /// Whether it belongs to the device's world.
    ours: bool,
}

impl SimDevice {
    pub(crate) fn new(world: World) -> Self {
        Self { world }
    }

    fn side(&self, end: End<'_, Self>) -> Side {
        let (name, offset, world) = match end {
            End::Storage(storage, offset) => (storage.name(), offset, &storage.0.world),
            End::Block(block, offset) => (block.name(), offset, &block.world),
            End::Host(host, offset) => (host.name(), offset, &host.world),
        };
        Side { name, offset, ours: world.is(&self.world) }
    }
}

impl Accelerator for SimDevice {
    type Storage = SimStorage;
    type Block = SimBlock;
    type Host = SimHost;
    type Stream = SimStream;
    type Event = SimEvent;

    fn key(&self, storage: &SimStorage) -> usize {
        storage.0.number
    }

    fn facts(&self, storage: &SimStorage) -> Option<Facts> {
        Some(Facts { bytes: storage.bytes(), version: storage.version() })
    }

    fn compute(&self) -> SimStream {
        self.world.compute()
    }

    #[track_caller]
    fn copy_stream(&mut self, direction: Direction) -> Result<SimStream, BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        state.attempt(Function::CopyStream, format!("copy_stream {direction:?}"), place)?;
        Ok(SimStream { world: state.world, number: state.copy_stream(direction) })
    }

    #[track_caller]
    fn record(&mut self, stream: SimStream) -> Result<SimEvent, BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let id = state.object();
        let what = format!("record event#{id} on {}", state.stream_name(stream));
        let call = state.attempt(Function::Record, what, place)?;
        let (now, host) = (state.now, state.host.clone());
        let (time, clock) = match state.stream(stream, &call) {
            Some(number) => {
                let stream = &state.streams[number];
                (stream.end.max(now), stream.clock.clone())
            }
            None => (now, host),
        };
        Ok(SimEvent(Arc::new(Mark { world: state.world, id, time, clock, call })))
    }

    #[track_caller]
    fn wait(&mut self, stream: SimStream, event: &SimEvent) -> Result<(), BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("{} waits for event#{}", state.stream_name(stream), event.0.id);
        let call = state.attempt(Function::Wait, what, place)?;
        if let Some(number) = state.stream(stream, &call)
            && state.knows(event, &call)
        {
            let stream = &mut state.streams[number];
            stream.clock.join(&event.0.clock);
            stream.end = stream.end.max(event.0.time);
        }
        Ok(())
    }

    #[track_caller]
    fn is_done(&mut self, event: &SimEvent) -> bool {
        let place = Location::caller();
        let mut state = self.world.lock();
        let call = state.begin(format!("is_done event#{}", event.0.id), place);
        if !state.knows(event, &call) {
            return true;
        }
        let done = state.injector.is_lost() || event.0.time <= state.now;
        if done {
            state.host.join(&event.0.clock);
        }
        state.note(|| done.to_string());
        done
    }

    #[track_caller]
    fn sync(&mut self, event: &SimEvent) -> Result<(), BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let call = state.attempt(Function::Sync, format!("sync event#{}", event.0.id), place)?;
        if state.knows(event, &call) {
            state.host.join(&event.0.clock);
            state.advance(event.0.time);
        }
        Ok(())
    }

    #[track_caller]
    fn sync_stream(&mut self, stream: SimStream) -> Result<(), BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("sync {}", state.stream_name(stream));
        let call = state.attempt(Function::SyncStream, what, place)?;
        if let Some(number) = state.stream(stream, &call) {
            let clock = state.streams[number].clock.clone();
            state.host.join(&clock);
            let end = state.streams[number].end;
            state.advance(end);
        }
        Ok(())
    }

    #[track_caller]
    fn free(&mut self, storage: &mut SimStorage) -> Result<(), BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let call = state.attempt(Function::Free, format!("free {storage:?}"), place)?;
        if !storage.0.world.is(&self.world) {
            state.report(Kind::OtherWorld, &call, &call, String::new());
            return Ok(());
        }
        let Some(object) = state.storages[storage.0.number].as_mut() else { return Ok(()) };
        let last = std::mem::replace(&mut object.last, call.clone());
        match object.memory.take() {
            Some(memory) => state.deallocate(memory, &call),
            None => state.report(Kind::DoubleFree, &last, &call, String::new()),
        }
        Ok(())
    }

    #[track_caller]
    fn restore(&mut self, storage: &mut SimStorage, bytes: u64) -> Result<(), BackendError> {
        let place = Location::caller();
        let mut state = self.world.lock();
        let what = format!("restore {storage:?} to {bytes} bytes");
        let call = state.attempt(Function::Restore, what, place)?;
        if !storage.0.world.is(&self.world) {
            state.report(Kind::OtherWorld, &call, &call, String::new());
            return Ok(());
        }
        let Some(object) = state.storages[storage.0.number].as_ref() else { return Ok(()) };
        if object.memory.is_some() {
            let last = object.last.clone();
            state.report(Kind::NotEmpty, &last, &call, String::new());
            return Ok(());
        }
        let memory = state.allocate(bytes, &call).ok_or_else(|| out_of_device(bytes))?;
        if let Some(object) = state.storages[storage.0.number].as_mut() {
            object.memory = Some(memory);
            object.last = call;
        }
        Ok(())
    }

    #[track_caller]
    fn stage(&mut self, bytes: u64) -> Result<SimBlock, BackendError> {
        let made = Location::caller();
        let mut state = self.world.lock();
        let id = state.object();
        let what = format!("stage block#{id} of {bytes} bytes");
        let call = state.attempt(Function::Stage, what, made)?;
        let memory = state.allocate(bytes, &call).ok_or_else(|| out_of_device(bytes))?;
        state.buffers.insert(id, Buffer { memory, made: call });
        Ok(SimBlock { world: self.world.clone(), id, bytes, made })
    }

    #[track_caller]
    fn pin(&mut self, bytes: u64) -> Result<SimHost, BackendError> {
        let made = Location::caller();
        let mut state = self.world.lock();
        let id = state.object();
        let what = format!("pin host#{id} of {bytes} bytes");
        let call = state.attempt(Function::Pin, what, made)?;
        let memory = state
            .take(Space::Host, bytes, &call)
            .ok_or_else(|| BackendError::new(format!("can't pin {bytes} bytes of host memory")))?;
        state.stats.pins += 1;
        state.buffers.insert(id, Buffer { memory, made: call });
        Ok(SimHost { world: self.world.clone(), id, memory, made })
    }

    #[track_caller]
    fn copy(
        &mut self,
        stream: SimStream,
        from: End<'_, Self>,
        to: End<'_, Self>,
        bytes: u64,
    ) -> Result<(), BackendError> {
        let place = Location::caller();
        let (from, to) = (self.side(from), self.side(to));
        let mut state = self.world.lock();
        let what = format!(
            "copy {} -> {} on {}",
            state.side(from, bytes),
            state.side(to, bytes),
            state.stream_name(stream)
        );
        let call = state.attempt(Function::Copy, what, place)?;
        state.copy(stream, from, to, bytes, &call);
        Ok(())
    }

    fn gathers(&self) -> bool {
        self.world.lock().options.gathers
    }
}

impl State {
    fn side(&self, side: Side, bytes: u64) -> String {
        if side.ours {
            self.describe(side.name, side.offset, bytes)
        } else {
            "memory of another world".to_owned()
        }
    }

    fn copy(&mut self, stream: SimStream, from: Side, to: Side, bytes: u64, call: &Call) {
        if !from.ours || !to.ours {
            self.report(Kind::OtherWorld, call, call, String::new());
            return;
        }
        let stream = self.stream(stream, call);
        let source = self.part(from.name, from.offset, bytes, call);
        let target = self.part(to.name, to.offset, bytes, call);
        let (Some(stream), Some(source), Some(target)) = (stream, source, target) else {
            return;
        };
        let speeds = &self.options.speeds;
        let rate = match (source.space, target.space) {
            (Space::Device, Space::Host) => {
                self.stats.copied_out += bytes;
                speeds.copy_out
            }
            (Space::Host, Space::Device) => {
                self.stats.copied_in += bytes;
                speeds.copy_in
            }
            _ => speeds.kernel,
        };
        self.stats.copies += 1;
        let ns = self.duration(speeds.copy_ns, bytes, rate, self.options.lateness.copies);
        let work = self.queue(stream, call, Role::Use, ns);
        self.transfer(source, target, &work, Owner::Device);
    }

    pub(crate) fn stream_name(&self, stream: SimStream) -> &str {
        let ours = stream.world == self.world;
        let stream = self.streams.get(stream.number).filter(|_| ours);
        stream.map_or("a stream of another world", |stream| stream.name.as_str())
    }

    /// The number of a stream; `None`, and a report, if it belongs to another world.
    pub(crate) fn stream(&mut self, stream: SimStream, call: &Call) -> Option<usize> {
        if stream.world == self.world && stream.number < self.streams.len() {
            return Some(stream.number);
        }
        self.report(Kind::OtherWorld, call, call, String::new());
        None
    }

    fn knows(&mut self, event: &SimEvent, call: &Call) -> bool {
        let ours = event.0.world == self.world;
        if !ours {
            self.report(Kind::OtherWorld, &event.0.call, call, String::new());
        }
        ours
    }
}

/// Memory and streams belong to threads that the trait lets them go to.
const fn is_send<T: Send + 'static>() {}
const _: () = {
    is_send::<SimDevice>();
    is_send::<SimStorage>();
    is_send::<SimHost>();
    is_send::<SimEvent>();
    assert!(COMPUTE == 0);
};
