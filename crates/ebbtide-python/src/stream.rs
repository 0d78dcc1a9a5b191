//! Streams of one accelerator, and marks in them, through torch's device-generic interface.
//!
//! # The compute stream
//!
//! A program may compute on several streams, and torch's allocator keeps what each has freed for that
//! one. So what the engine calls the compute stream is the *set* of streams on which the program was
//! seen to compute: a mark in it is a mark in each of them, and when it waits each of them waits. With
//! one stream, as in nearly all programs, that is the stream itself. A stream that is seen for the first
//! time is ordered behind the others once.
//!
//! # Access contract
//!
//! * All of it is used with the GIL and under the hub's lock.
//! * The current stream and device of the thread are as they were after every call, also after an error.
//! * Torch lets go of the GIL by itself where it makes the host wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ebbtide_core::BackendError;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Number of a stream among those that its [`Streams`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StreamId(u32);

/// What has been queued so far: on one stream, or on all of those that compute.
#[derive(Debug)]
pub(crate) struct Mark {
    events: Vec<(StreamId, Py<PyAny>)>,
    /// The host has seen the end of it.
    seen: AtomicBool,
}

/// A stream, by torch's number and as the object.
#[derive(Debug)]
struct Known {
    id: i64,
    stream: Py<PyAny>,
}

/// The streams of one device.
#[derive(Debug)]
pub(crate) struct Streams {
    /// The device, with its index.
    pub(crate) device: Py<PyAny>,
    index: u32,
    calls: Calls,
    known: Vec<Known>,
    /// Those on which the program was seen to compute.
    computing: Vec<StreamId>,
}

/// What is used of torch.
#[derive(Debug)]
struct Calls {
    current_stream: Py<PyAny>,
    set_stream: Py<PyAny>,
    device_index: Py<PyAny>,
    set_device_index: Py<PyAny>,
    stream: Py<PyAny>,
    event: Py<PyAny>,
}

impl Calls {
    fn find(py: Python<'_>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let accelerator = torch.getattr("accelerator")?;
        let get = |name: &str| accelerator.getattr(name);
        Ok(Self {
            current_stream: get("current_stream")?.unbind(),
            set_stream: get("set_stream")?.unbind(),
            // Named differently before torch 2.8.
            device_index: get("current_device_index")
                .or_else(|_| get("current_device_idx"))?
                .unbind(),
            set_device_index: get("set_device_index").or_else(|_| get("set_device_idx"))?.unbind(),
            stream: torch.getattr("Stream")?.unbind(),
            event: torch.getattr("Event")?.unbind(),
        })
    }
}

/// Where streams have nothing to say, at least it must be one.
///
/// # Errors
/// It is neither a stream of torch nor the number of one.
pub(crate) fn is_stream(object: &Bound<'_, PyAny>) -> Result<(), BackendError> {
    let py = object.py();
    let stream = py.import("torch").and_then(|torch| torch.getattr("Stream"));
    let known = stream.is_ok_and(|stream| object.is_instance(&stream).is_ok_and(|is| is));
    if known || object.is_instance_of::<pyo3::types::PyInt>() {
        return Ok(());
    }
    let message = format!("this is no stream: {object:?}");
    Err(BackendError::new(message).with_hint("pass a torch.Stream, or none"))
}

impl Streams {
    /// Those of the accelerator with this name and number.
    ///
    /// # Errors
    /// It is not there, or not the accelerator that torch works with.
    pub(crate) fn open(py: Python<'_>, kind: &str, index: u32) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let accelerator = torch.getattr("accelerator")?.call_method0("current_accelerator")?;
        let current = if accelerator.is_none() { None } else { Some(accelerator.getattr("type")?) };
        let current: Option<String> = current.map(|kind| kind.extract()).transpose()?;
        if current.as_deref() != Some(kind) {
            let has = current.unwrap_or_else(|| "none".into());
            let message = format!("the accelerator that torch works with is {has}, not {kind}");
            return Err(PyValueError::new_err(message));
        }
        let device = torch.call_method1("device", (kind, index))?.unbind();
        let calls = Calls::find(py)?;
        let mut streams = Self { device, index, calls, known: Vec::new(), computing: Vec::new() };
        streams.note(py)?;
        Ok(streams)
    }

    fn get<'py>(&self, py: Python<'py>, id: StreamId) -> &Bound<'py, PyAny> {
        self.known[id.0 as usize].stream.bind(py)
    }

    fn intern(&mut self, stream: &Bound<'_, PyAny>) -> PyResult<StreamId> {
        let id: i64 = stream.getattr(intern!(stream.py(), "stream_id"))?.extract()?;
        let position = self.known.iter().position(|known| known.id == id);
        let position = position.unwrap_or_else(|| {
            self.known.push(Known { id, stream: stream.clone().unbind() });
            self.known.len() - 1
        });
        Ok(StreamId(u32::try_from(position)?))
    }

    fn current<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.calls.current_stream.bind(py).call1((self.index,))
    }

    /// The stream that is current for the device on this thread: the program computes there.
    ///
    /// # Errors
    /// Torch refuses; the stream is not known then.
    pub(crate) fn note(&mut self, py: Python<'_>) -> PyResult<StreamId> {
        let current = self.current(py)?;
        let current = self.intern(&current)?;
        if !self.computing.contains(&current) {
            if !self.computing.is_empty() {
                let others = self.record(py, self.computing[0])?;
                self.wait_alone(py, current, &others)?;
            }
            self.computing.push(current);
        }
        Ok(current)
    }

    /// The streams beside this one on which the program was seen to compute.
    pub(crate) fn others<'py>(
        &self,
        py: Python<'py>,
        current: StreamId,
    ) -> impl Iterator<Item = Bound<'py, PyAny>> {
        let others = self.computing.iter().filter(move |id| **id != current);
        others.map(move |id| self.get(py, *id).clone())
    }

    /// A new stream.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn make(&mut self, py: Python<'_>) -> PyResult<StreamId> {
        let kwargs = PyDict::new(py);
        kwargs.set_item(intern!(py, "device"), &self.device)?;
        let stream = self.calls.stream.bind(py).call((), Some(&kwargs))?;
        self.intern(&stream)
    }

    /// The stream that the caller has named: a stream of torch, or the number of one.
    ///
    /// # Errors
    /// It is none, or one of another device.
    pub(crate) fn named(&mut self, named: &Bound<'_, PyAny>) -> PyResult<StreamId> {
        let py = named.py();
        if named.is_instance(self.calls.stream.bind(py))? {
            let device = named.getattr(intern!(py, "device"))?;
            if !device.eq(&self.device)? {
                let message = format!("a stream of {device}, the tensors are on {}", self.device);
                return Err(PyValueError::new_err(message));
            }
            return self.intern(named);
        }
        let Ok(handle) = named.extract::<i64>() else {
            let message = format!("neither a torch.Stream nor the number of one: {named:?}");
            return Err(PyTypeError::new_err(message));
        };
        for (number, known) in self.known.iter().enumerate() {
            let native = known.stream.bind(py).getattr(intern!(py, "native_handle"));
            if native
                .is_ok_and(|native| native.extract::<i64>().is_ok_and(|native| native == handle))
            {
                return Ok(StreamId(u32::try_from(number)?));
            }
        }
        let kwargs = PyDict::new(py);
        kwargs.set_item("stream_id", handle)?;
        kwargs.set_item("device_index", self.index)?;
        let kind = self.current(py)?.getattr("device_type")?;
        kwargs.set_item("device_type", kind)?;
        let stream = self.calls.stream.bind(py).call((), Some(&kwargs))?;
        self.intern(&stream)
    }

    /// Runs something with a stream as the current one.
    ///
    /// # Errors
    /// Torch refuses to change the stream, or what `run` returns.
    pub(crate) fn on<T>(
        &self,
        py: Python<'_>,
        stream: StreamId,
        run: impl FnOnce() -> PyResult<T>,
    ) -> PyResult<T> {
        let before = self.current(py)?;
        let id: i64 = before.getattr(intern!(py, "stream_id"))?.extract()?;
        if self.known[stream.0 as usize].id == id {
            return run();
        }
        let device: u32 = self.calls.device_index.bind(py).call0()?.extract()?;
        let set = self.calls.set_stream.bind(py);
        set.call1((self.get(py, stream),))?;
        let done = run();
        // Setting a stream also makes its device the current one.
        let restored = set.call1((before,)).and_then(|_| {
            let set_device = self.calls.set_device_index.bind(py);
            if device == self.index { Ok(()) } else { set_device.call1((device,)).map(drop) }
        });
        done.and_then(|done| restored.map(|()| done))
    }

    /// Marks what is queued on a stream so far; on all that compute, if it is one of them.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn record(&self, py: Python<'_>, stream: StreamId) -> PyResult<Arc<Mark>> {
        let alone = [stream];
        let streams = if self.computing.contains(&stream) { &self.computing[..] } else { &alone };
        let kwargs = PyDict::new(py);
        kwargs.set_item(intern!(py, "device"), &self.device)?;
        let mut events = Vec::with_capacity(streams.len());
        for &stream in streams {
            let event = self.calls.event.bind(py).call((), Some(&kwargs))?;
            event.call_method1(intern!(py, "record"), (self.get(py, stream),))?;
            events.push((stream, event.unbind()));
        }
        Ok(Arc::new(Mark { events, seen: AtomicBool::new(false) }))
    }

    /// Lets a stream go on only behind a mark; all that compute, if it is one of them.
    ///
    /// # Errors
    /// Torch refuses.
    pub(crate) fn wait(&self, py: Python<'_>, stream: StreamId, mark: &Mark) -> PyResult<()> {
        if !self.computing.contains(&stream) {
            return self.wait_alone(py, stream, mark);
        }
        self.computing.iter().try_for_each(|&stream| self.wait_alone(py, stream, mark))
    }

    fn wait_alone(&self, py: Python<'_>, stream: StreamId, mark: &Mark) -> PyResult<()> {
        if mark.seen.load(Ordering::Relaxed) {
            return Ok(());
        }
        for (_, event) in mark.events.iter().filter(|(marked, _)| *marked != stream) {
            event.bind(py).call_method1(intern!(py, "wait"), (self.get(py, stream),))?;
        }
        Ok(())
    }

    /// The host waits for everything on a stream; on all that compute, if it is one of them.
    ///
    /// # Errors
    /// Work on it failed.
    pub(crate) fn synchronize(&self, py: Python<'_>, stream: StreamId) -> PyResult<()> {
        let alone = [stream];
        let streams = if self.computing.contains(&stream) { &self.computing[..] } else { &alone };
        streams.iter().try_for_each(|&stream| {
            self.get(py, stream).call_method0(intern!(py, "synchronize")).map(drop)
        })
    }
}

impl Mark {
    /// Whether all of it is complete.
    pub(crate) fn is_complete(&self, py: Python<'_>) -> bool {
        if !self.seen.load(Ordering::Relaxed) {
            // What can't be asked is waited for, which tells why.
            let complete = self.events.iter().all(|(_, event)| {
                let answer = event.bind(py).call_method0(intern!(py, "query"));
                answer.is_ok_and(|answer| answer.is_truthy().unwrap_or(false))
            });
            self.seen.store(complete, Ordering::Relaxed);
        }
        self.seen.load(Ordering::Relaxed)
    }

    /// The host waits for it.
    ///
    /// # Errors
    /// Work in front of it failed.
    pub(crate) fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        for (_, event) in &self.events {
            event.bind(py).call_method0(intern!(py, "synchronize"))?;
        }
        self.seen.store(true, Ordering::Relaxed);
        Ok(())
    }
}
