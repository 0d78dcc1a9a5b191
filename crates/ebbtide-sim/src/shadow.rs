//! Who touched which bytes last: the memory of the checker.
//!
//! One map for each address space, not for each allocation, so that an access of freed memory still
//! conflicts with what happens at the same address afterwards.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::call::Call;
use crate::clock::Clock;

/// What an access does to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Use,
    Allocate,
    Free,
}

/// An operation and all that is ordered in front of it.
#[derive(Clone, Debug)]
pub(crate) struct Op {
    pub(crate) actor: usize,
    /// Includes the operation itself.
    pub(crate) clock: Clock,
    pub(crate) call: Call,
    pub(crate) role: Role,
}

/// What is remembered of an operation.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    actor: usize,
    time: u64,
    pub(crate) call: Call,
    pub(crate) role: Role,
}

impl Mark {
    fn of(op: &Op) -> Self {
        let time = op.clock.of(op.actor);
        Self { actor: op.actor, time, call: op.call.clone(), role: op.role }
    }

    fn is_before(&self, op: &Op) -> bool {
        op.clock.of(self.actor) >= self.time
    }
}

/// Bytes with one history, as a read sees them.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) range: Range<u64>,
    pub(crate) written: bool,
    /// The last write, an allocation included.
    pub(crate) write: Option<Call>,
}

/// Two operations without an order.
#[derive(Clone, Debug)]
pub(crate) struct Conflict {
    pub(crate) with: Mark,
    pub(crate) range: Range<u64>,
}

#[derive(Clone, Debug, Default)]
struct Cell {
    end: u64,
    written: bool,
    write: Option<Mark>,
    reads: Vec<Mark>,
}

/// The history of one address space.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    cells: BTreeMap<u64, Cell>,
}

impl Shadow {
    /// A read: conflicts with writes only.
    pub(crate) fn read(&mut self, range: &Range<u64>, op: &Op) -> (Vec<Piece>, Vec<Conflict>) {
        let (mut pieces, mut conflicts) = (Vec::new(), Vec::new());
        if range.is_empty() {
            return (pieces, conflicts);
        }
        self.cut(range);
        for (start, cell) in self.cells.range_mut(range.clone()) {
            let range = *start..cell.end;
            if let Some(write) = cell.write.as_ref().filter(|write| !write.is_before(op)) {
                conflicts.push(Conflict { with: write.clone(), range: range.clone() });
            }
            let write = cell.write.as_ref().map(|write| write.call.clone());
            pieces.push(Piece { range, written: cell.written, write });
            // What the actor read earlier is in front of this read.
            cell.reads.retain(|read| read.actor != op.actor);
            cell.reads.push(Mark::of(op));
        }
        (pieces, conflicts)
    }

    /// A write, an allocation or a freeing: conflicts with everything.
    pub(crate) fn write(&mut self, range: &Range<u64>, op: &Op, written: bool) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        if range.is_empty() {
            return conflicts;
        }
        self.cut(range);
        for (start, cell) in self.cells.range(range.clone()) {
            for mark in cell.write.iter().chain(&cell.reads).filter(|mark| !mark.is_before(op)) {
                conflicts.push(Conflict { with: mark.clone(), range: *start..cell.end });
            }
        }
        let starts: Vec<u64> = self.cells.range(range.clone()).map(|(start, _)| *start).collect();
        for start in starts {
            self.cells.remove(&start);
        }
        let cell = Cell { end: range.end, written, write: Some(Mark::of(op)), reads: Vec::new() };
        self.cells.insert(range.start, cell);
        conflicts
    }

    /// Notes that a part of what was written is as undefined as its source.
    pub(crate) fn unwrite(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.cut(range);
        for cell in self.cells.range_mut(range.clone()).map(|(_, cell)| cell) {
            cell.written = false;
        }
    }

    /// Makes cells begin and end with the range, and cover it.
    fn cut(&mut self, range: &Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        let mut at = range.start;
        let mut holes = Vec::new();
        for (start, cell) in self.cells.range(range.clone()) {
            if at < *start {
                holes.push((at, *start));
            }
            at = cell.end;
        }
        if at < range.end {
            holes.push((at, range.end));
        }
        for (start, end) in holes {
            self.cells.insert(start, Cell { end, ..Cell::default() });
        }
    }

    fn split(&mut self, at: u64) {
        if let Some((start, cell)) = self.cells.range_mut(..at).next_back()
            && *start < at
            && at < cell.end
        {
            let rest = cell.clone();
            cell.end = at;
            self.cells.insert(at, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;

    fn op(actor: usize, number: u64, seen: &[&Op]) -> Op {
        let mut clock = Clock::default();
        for earlier in seen {
            clock.join(&earlier.clock);
        }
        clock.tick(actor);
        let call = Call::new(number, format!("op {number}"), Location::caller());
        Op { actor, clock, call, role: Role::Use }
    }

    fn numbers(conflicts: &[Conflict]) -> Vec<(u64, Range<u64>)> {
        conflicts.iter().map(|c| (c.with.call.number(), c.range.clone())).collect()
    }

    #[test]
    fn only_what_overlaps_without_order_conflicts() {
        let mut shadow = Shadow::default();
        let first = op(1, 1, &[]);
        assert!(shadow.write(&(0..100), &first, true).is_empty());
        let stranger = op(2, 2, &[]);
        let (pieces, conflicts) = shadow.read(&(50..150), &stranger);
        assert_eq!(numbers(&conflicts), [(1, 50..100)]);
        let seen: Vec<_> = pieces.iter().map(|p| (p.range.clone(), p.written)).collect();
        assert_eq!(seen, [(50..100, true), (100..150, false)]);
        let third = op(3, 3, &[&first]);
        assert!(shadow.read(&(0..100), &third).1.is_empty());
        let last = op(1, 4, &[&first, &third]);
        assert_eq!(numbers(&shadow.write(&(0..200), &last, true)), [(2, 50..100), (2, 100..150)]);
    }

    #[test]
    fn undefined_parts_stay_undefined() {
        let mut shadow = Shadow::default();
        let first = op(1, 1, &[]);
        shadow.write(&(0..30), &first, true);
        shadow.unwrite(&(10..20));
        let (pieces, _) = shadow.read(&(0..30), &op(1, 2, &[&first]));
        assert_eq!(pieces.iter().map(|p| p.written).collect::<Vec<_>>(), [true, false, true]);
    }
}
