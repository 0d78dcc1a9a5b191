//! Device bytes over time, for the timeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ebbtide_candle::Timeline;

use crate::memory;

/// Fine enough to see each layer come and go, and nothing next to the work of a step.
const INTERVAL: Duration = Duration::from_millis(4);

/// A thread that notes the device bytes until it is dropped.
#[derive(Debug)]
pub(crate) struct Curve {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Curve {
    pub(crate) fn start(timeline: Timeline) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                timeline.counter("device bytes", memory::live_bytes());
                thread::sleep(INTERVAL);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Curve {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It can't panic, and a missing end of the curve would be no reason to.
            let _ = thread.join();
        }
    }
}
