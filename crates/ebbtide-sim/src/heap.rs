//! Hands out addresses, the one that was freed last first.
//!
//! Early reuse is what makes a wrong order visible: real allocators do the same.

use crate::memory::{Space, Span};

/// Addresses of one space.
#[derive(Debug)]
pub(crate) struct Heap {
    space: Space,
    /// Holes, the one that was freed last at the end.
    holes: Vec<(u64, u64)>,
    /// Everything from here on was never handed out.
    top: u64,
    /// What may be in use at once.
    capacity: u64,
    /// Whether the addresses end at the capacity, too, as in a file of fixed size.
    fixed: bool,
    used: u64,
    peak: u64,
}

impl Heap {
    pub(crate) fn new(space: Space, capacity: u64, fixed: bool) -> Self {
        Self { space, holes: Vec::new(), top: 0, capacity, fixed, used: 0, peak: 0 }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    /// Nothing is too large from now on.
    pub(crate) fn grow(&mut self) {
        self.capacity = u64::MAX;
    }

    /// Memory of `bytes` bytes; `None` if there is none left.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<Span> {
        let used = self.used.checked_add(bytes).filter(|used| *used <= self.capacity)?;
        let start = self.find(bytes)?;
        self.used = used;
        self.peak = self.peak.max(used);
        Some(Span { space: self.space, start, bytes })
    }

    fn find(&mut self, bytes: u64) -> Option<u64> {
        if let Some(at) = self.holes.iter().rposition(|hole| hole.1 >= bytes) {
            let (start, length) = self.holes[at];
            if length == bytes {
                self.holes.remove(at);
            } else {
                self.holes[at] = (start + bytes, length - bytes);
            }
            return Some(start);
        }
        let last = self.holes.iter().position(|hole| hole.0 + hole.1 == self.top);
        let start = last.map_or(self.top, |at| self.holes[at].0);
        let top = start.checked_add(bytes).filter(|top| !self.fixed || *top <= self.capacity)?;
        if let Some(at) = last {
            self.holes.remove(at);
        }
        self.top = top;
        Some(start)
    }

    /// Gives memory back.
    pub(crate) fn give(&mut self, span: Span) {
        self.used -= span.bytes;
        let (mut start, mut end) = (span.start, span.start + span.bytes);
        self.holes.retain(|&(from, length)| {
            let touches = from + length == start || from == end;
            if touches {
                start = start.min(from);
                end = end.max(from + length);
            }
            !touches
        });
        if start < end {
            self.holes.push((start, end - start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_last_is_handed_out_first() {
        let mut heap = Heap::new(Space::Device, 1000, false);
        let spans: Vec<_> = (0..5).map(|_| heap.take(100).unwrap()).collect();
        heap.give(spans[0]);
        heap.give(spans[2]);
        assert_eq!(heap.take(60).unwrap().start, spans[2].start);
        assert_eq!(heap.take(100).unwrap().start, spans[0].start);
        assert_eq!((heap.used(), heap.peak()), (460, 500));
        assert_eq!(heap.take(541), None);
        assert!(heap.take(540).is_some());
    }

    #[test]
    fn neighbours_grow_together_and_a_fixed_space_can_be_fragmented() {
        let mut heap = Heap::new(Space::Disk, 300, true);
        let spans: Vec<_> = (0..3).map(|_| heap.take(100).unwrap()).collect();
        heap.give(spans[0]);
        heap.give(spans[2]);
        assert_eq!(heap.take(150), None);
        heap.give(spans[1]);
        assert_eq!(heap.take(300).unwrap().start, 0);
    }
}
