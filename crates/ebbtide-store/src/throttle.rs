//! A tier that is slower than it could be, to see what a slower machine would do with a plan.

use std::thread;
use std::time::{Duration, Instant};

use crate::config::Throttle;
use crate::sync::{Mutex, lock};

/// One direction of a tier that is held to a rate. Its transfers follow one another.
pub(crate) struct Pace {
    bytes_per_s: f64,
    free: Mutex<Instant>,
}

impl Pace {
    fn new(bytes_per_s: f64) -> Self {
        Self { bytes_per_s, free: Mutex::new(Instant::now()) }
    }

    /// Both directions: out, then in.
    pub(crate) fn both(throttle: Throttle) -> (Self, Self) {
        (Self::new(throttle.out_bytes_per_s), Self::new(throttle.in_bytes_per_s))
    }

    /// When a transfer of so many bytes that begins now may be over.
    pub(crate) fn end(&self, bytes: u64) -> Instant {
        let mut free = lock(&self.free);
        let took = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s.max(1.0));
        *free = (*free).max(Instant::now()) + took;
        *free
    }
}

/// Goes on at that time.
pub(crate) fn sleep_until(end: Instant) {
    thread::sleep(end.saturating_duration_since(Instant::now()));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn transfers_follow_one_another() {
        let (out, _) = Pace::both(Throttle { out_bytes_per_s: 1e6, in_bytes_per_s: 1e6 });
        let first = out.end(1000);
        assert_eq!(out.end(500) - first, Duration::from_micros(500));
    }
}
