//! The world: one device, its host and its disk, shared by all handles.

use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebbtide_core::BackendError;

use crate::device::SimDevice;
use crate::disk::SimDisk;
use crate::handles::{Object, SimStorage, SimStream};
use crate::options::{Faults, Options};
use crate::report::Report;
use crate::shadow::Role;
use crate::state::{COMPUTE, State};
use crate::stats::Stats;

static WORLDS: AtomicU64 = AtomicU64::new(0);

/// A simulated machine. A clone is another handle of the same one.
#[derive(Clone)]
pub struct World(Arc<Mutex<State>>);

impl World {
    /// A new world. The same seed, options and calls always give the same times and bytes.
    pub fn new(seed: u64, options: Options) -> Self {
        let number = WORLDS.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Mutex::new(State::new(number, seed, options))))
    }

    /// Never drop a handle while holding it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The device, for an engine to own.
    pub fn device(&self) -> SimDevice {
        SimDevice::new(self.clone())
    }

    /// A tier below pinned memory, for an engine to own.
    pub fn disk(&self) -> SimDisk {
        SimDisk::new(self.clone())
    }

    /// The stream that the framework computes on.
    pub fn compute(&self) -> SimStream {
        let world = self.lock().world;
        SimStream { world, number: COMPUTE }
    }

    /// One more stream.
    pub fn stream(&self, name: &str) -> SimStream {
        let mut state = self.lock();
        SimStream { world: state.world, number: state.add_stream(name) }
    }

    /// The framework makes a storage; its memory is allocated on the compute stream.
    ///
    /// # Errors
    /// Out of device memory, or the device is lost.
    #[track_caller]
    pub fn storage(&self, bytes: u64) -> Result<SimStorage, BackendError> {
        let made = Location::caller();
        let mut state = self.lock();
        let id = state.object();
        let call = state.begin(format!("make storage#{id} of {bytes} bytes"), made);
        if state.injector.is_lost() {
            return Err(BackendError::new("the device is lost"));
        }
        let memory = state.allocate(bytes, &call).ok_or_else(|| out_of_device(bytes))?;
        let number = state.add_storage(id, memory, &call);
        drop(state);
        Ok(SimStorage(Arc::new(Object { world: self.clone(), number, id, made })))
    }

    /// The host is busy with other things for so long.
    pub fn host_works(&self, ns: u64) {
        let mut state = self.lock();
        let time = state.now.saturating_add(ns);
        state.advance(time);
    }

    /// The host's time, in nanoseconds since the world began.
    pub fn now(&self) -> u64 {
        self.lock().now
    }

    /// When all that is queued now will be complete.
    pub fn end(&self) -> u64 {
        let state = self.lock();
        let streams = state.streams.iter().map(|stream| stream.end);
        let jobs = state.jobs.values().map(|job| job.end);
        streams.chain(jobs).fold(state.now, u64::max)
    }

    /// How many calls that can fail were made so far: the number of the next one.
    pub fn calls(&self) -> u64 {
        self.lock().injector.calls()
    }

    /// How many calls of any kind were made so far.
    pub fn all_calls(&self) -> u64 {
        self.lock().next_call()
    }

    /// Other faults from now on. Calls keep their numbers.
    pub fn inject(&self, faults: Faults) {
        self.lock().injector.set(faults);
    }

    /// Switches all faults off and gives all memory room. A device that is lost stays lost.
    pub fn heal(&self) {
        self.lock().heal();
    }

    /// Whether the device is lost.
    pub fn is_lost(&self) -> bool {
        self.lock().injector.is_lost()
    }

    /// What is in use, and what has moved.
    pub fn stats(&self) -> Stats {
        self.lock().stats()
    }

    /// What was found so far. A wrong value is found when its kernel runs.
    pub fn reports(&self) -> Vec<Report> {
        self.lock().reports.clone()
    }

    /// Every call so far with the times of its work, if [`Options::trace`] is set.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.clone()
    }

    /// Lets all work end, looks for what was never given back, and takes the reports.
    ///
    /// Storages that live belong to the framework and are no leak.
    #[track_caller]
    #[must_use]
    pub fn finish(&self) -> Vec<Report> {
        let place = Location::caller();
        let mut state = self.lock();
        let call = state.begin("finish".to_owned(), place);
        if let Some(end) = state.schedule.end() {
            state.advance(end);
        }
        state.leaks(&call);
        std::mem::take(&mut state.reports)
    }

    /// A kernel that takes exactly so long and touches nothing.
    #[track_caller]
    pub fn busy(&self, stream: SimStream, ns: u64) {
        let place = Location::caller();
        let mut state = self.lock();
        let call = state.begin(format!("kernel of {ns} ns"), place);
        if let Some(number) = state.stream(stream, &call) {
            state.queue(number, &call, Role::Use, ns);
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

pub(crate) fn out_of_device(bytes: u64) -> BackendError {
    BackendError::new(format!("out of device memory: {bytes} bytes"))
}
