//! The picture of a run: what a hub's timeline shows, and how it is written.
//!
//! | row | what | told by |
//! | --- | --- | --- |
//! | compute | what the front end marks: forward and backward of layers | [`Picture::begin`], [`Picture::end`], [`Picture::give_up`] |
//! | waits | the training thread waits for copies | the hub |
//! | offload, load | copies of the file tier's workers | the engine's events |
//! | live bytes, bytes away | saved tensors on the device, and in the tier | the hub, after each wait |
//!
//! All of it is behind locks that are only held for one entry.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebbtide_core::{Event, LayerId, Timing};
use ebbtide_store::{Row, Timeline};

/// A hub's picture. Clones draw the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    timeline: Timeline,
    /// Names of the layers, by number.
    names: Mutex<Vec<String>>,
    begun: Mutex<Begun>,
    /// Bytes may have moved since the counters were drawn.
    moved: AtomicBool,
    /// The counters as they were drawn last.
    drawn: [AtomicU64; 2],
}

/// What has begun and not ended, by number.
#[derive(Debug, Default)]
struct Begun {
    last: u64,
    open: BTreeMap<u64, (String, Instant)>,
}

/// As many things may be under way; of more, the oldest are taken for given up.
const MOST_BEGUN: usize = 1000;

/// Waits too short to see are left out.
const VISIBLE: Duration = Duration::from_micros(20);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Picture {
    /// Zero of its times, for the tiers that measure some.
    pub(crate) fn origin(&self) -> Instant {
        self.0.timeline.origin()
    }

    /// Layers are numbered in the order in which this is called.
    pub(crate) fn name_layer(&self, name: &str) {
        lock(&self.0.names).push(name.into());
    }

    /// Something begins on the training thread. Returns its number, never 0.
    pub(crate) fn begin(&self, name: String) -> u64 {
        let mut begun = lock(&self.0.begun);
        begun.last += 1;
        let number = begun.last;
        begun.open.insert(number, (name, Instant::now()));
        if begun.open.len() > MOST_BEGUN {
            begun.open.pop_first();
        }
        number
    }

    /// It ends. Nothing for a number that has not begun or has ended.
    pub(crate) fn end(&self, number: u64) {
        let ended = lock(&self.0.begun).open.remove(&number);
        if let Some((name, started)) = ended {
            self.0.timeline.span(Row::Compute, name, started);
        }
    }

    /// It was given up: nothing is drawn of it.
    pub(crate) fn give_up(&self, number: u64) {
        let begun = lock(&self.0.begun).open.remove(&number);
        drop(begun);
    }

    /// The training thread waited for copies until now.
    pub(crate) fn waited(&self, name: &str, started: Instant) {
        self.0.moved.store(true, Ordering::Relaxed);
        if started.elapsed() >= VISIBLE {
            self.0.timeline.wait(name, started);
        }
    }

    /// What the engine tells.
    pub(crate) fn event(&self, event: &Event) {
        match event {
            Event::Stored { layer, timing: Some(timing), .. } => {
                self.copied(Row::Out(timing.worker), *layer, timing);
            }
            Event::Loaded { layer, timing: Some(timing), .. } => {
                self.copied(Row::In(timing.worker), *layer, timing);
            }
            _ => {}
        }
    }

    fn copied(&self, row: Row, layer: LayerId, timing: &Timing) {
        let name = lock(&self.0.names).get(layer.0 as usize).cloned().unwrap_or_default();
        self.0.timeline.copy(row, name, timing.started_ns, timing.finished_ns);
    }

    /// Draws the counters if bytes may have moved since they were last drawn.
    pub(crate) fn draw(&self, counters: impl FnOnce() -> [u64; 2]) {
        if !self.0.moved.swap(false, Ordering::Relaxed) {
            return;
        }
        let names = ["live bytes", "bytes away"];
        for ((name, now), drawn) in names.into_iter().zip(counters()).zip(&self.0.drawn) {
            if drawn.swap(now, Ordering::Relaxed) != now {
                self.0.timeline.counter(name, now);
            }
        }
    }

    /// Writes it to a file: readers see what was there before, or all of it. Returns the number of events.
    ///
    /// # Errors
    /// The file can't be written.
    pub(crate) fn write(&self, path: &Path) -> io::Result<usize> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = Path::new(&temporary);
        let written = self.fill(temporary).and_then(|events| {
            fs::rename(temporary, path)?;
            Ok(events)
        });
        if written.is_err() {
            let _ = fs::remove_file(temporary);
        }
        written
    }

    fn fill(&self, path: &Path) -> io::Result<usize> {
        let mut file = BufWriter::new(File::create(path)?);
        let events = self.0.timeline.write(&mut file)?;
        file.flush()?;
        Ok(events)
    }
}
