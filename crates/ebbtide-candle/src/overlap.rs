//! When copies ran and when the training thread waited: how much of a step's copying was hidden.

use std::time::Instant;

use ebbtide_core::Timing;

/// A time from and to, in nanoseconds since the origin.
type Span = (u64, u64);

/// One direction of a tier during one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTime {
    /// Bytes that were copied.
    pub bytes: u64,
    /// In how many copies.
    pub copies: u64,
    /// Nanoseconds in which at least one copy ran.
    pub busy_ns: u64,
    /// Nanoseconds of those in which the training thread computed.
    pub hidden_ns: u64,
    /// Nanoseconds of those in which it waited for the tier.
    pub exposed_ns: u64,
}

/// What is written down during a step.
#[derive(Debug)]
pub(crate) struct Copies {
    origin: Instant,
    out: Link,
    back: Link,
    waits: Vec<Span>,
}

#[derive(Debug, Default)]
struct Link {
    spans: Vec<Span>,
    bytes: u64,
}

impl Link {
    fn add(&mut self, bytes: u64, timing: Timing) {
        self.spans.push((timing.started_ns, timing.finished_ns));
        self.bytes += bytes;
    }

    fn time(&mut self, waits: &[Span]) -> LinkTime {
        let copies = self.spans.len() as u64;
        let busy = merged(std::mem::take(&mut self.spans));
        let busy_ns = length(&busy);
        let exposed_ns = overlap(&busy, waits);
        let bytes = std::mem::take(&mut self.bytes);
        LinkTime { bytes, copies, busy_ns, hidden_ns: busy_ns - exposed_ns, exposed_ns }
    }
}

impl Copies {
    /// Nothing has been copied. Times of copies count from `origin`.
    pub(crate) fn new(origin: Instant) -> Self {
        Self { origin, out: Link::default(), back: Link::default(), waits: Vec::new() }
    }

    pub(crate) fn out(&mut self, bytes: u64, timing: Timing) {
        self.out.add(bytes, timing);
    }

    pub(crate) fn back(&mut self, bytes: u64, timing: Timing) {
        self.back.add(bytes, timing);
    }

    /// The training thread waited for the tier from then until now.
    pub(crate) fn waited(&mut self, since: Instant) {
        let at = |instant: Instant| instant.saturating_duration_since(self.origin).as_nanos();
        let ns = |nanos: u128| u64::try_from(nanos).unwrap_or(u64::MAX);
        self.waits.push((ns(at(since)), ns(at(Instant::now()))));
    }

    /// All waits since the last call of [`Copies::finish`], in nanoseconds.
    pub(crate) fn waited_ns(&self) -> u64 {
        self.waits.iter().map(|(from, to)| to - from).sum()
    }

    /// What the step came to, out and back. The next one begins.
    pub(crate) fn finish(&mut self) -> (LinkTime, LinkTime) {
        let waits = merged(std::mem::take(&mut self.waits));
        (self.out.time(&waits), self.back.time(&waits))
    }
}

/// The same times in order, without overlaps.
fn merged(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable();
    let mut all: Vec<Span> = Vec::with_capacity(spans.len());
    for (from, to) in spans {
        match all.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => all.push((from, to)),
        }
    }
    all
}

fn length(spans: &[Span]) -> u64 {
    spans.iter().map(|(from, to)| to - from).sum()
}

/// How long two orderly lists of times have in common.
fn overlap(a: &[Span], b: &[Span]) -> u64 {
    let (mut common, mut at) = (0, 0);
    for &(from, to) in a {
        while at < b.len() && b[at].1 <= from {
            at += 1;
        }
        let inside = b[at..].iter().take_while(|other| other.0 < to);
        common += inside.map(|other| to.min(other.1) - from.max(other.0)).sum::<u64>();
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_both_workers_count_once_and_waits_are_taken_off() {
        let busy = merged(vec![(20, 30), (0, 10), (5, 12), (30, 31)]);
        assert_eq!(busy, [(0, 12), (20, 31)]);
        assert_eq!(length(&busy), 23);
        assert_eq!(overlap(&busy, &[(8, 22), (25, 26), (40, 50)]), 4 + 2 + 1);
        assert_eq!(overlap(&busy, &[]), 0);
    }
}
