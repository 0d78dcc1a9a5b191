//! The bytes of device, host and disk: sparse pages, so that a large buffer costs what is written.
//!
//! A byte that was never written, or that was poisoned, reads as garbage.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::random::write_pattern;

const PAGE: u64 = 4096;
const GARBAGE: u64 = 0xDEAD_BEEF_0BAD_F00D;

/// Three address spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Space {
    Device,
    Host,
    Disk,
}

/// A range of bytes in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) space: Space,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Span {
    pub(crate) fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes
    }

    /// A part of it, if it lies inside.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Option<Self> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        inside.then_some(Self { space: self.space, start: self.start + offset, bytes })
    }
}

/// A length as an index of the machine that runs the simulation.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a simulated object fits into memory")
}

/// All bytes of a world.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pages: BTreeMap<(Space, u64), Box<[u8]>>,
}

impl Memory {
    pub(crate) fn read(&self, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; index(span.bytes)];
        for (page, inside, to) in chunks(span) {
            match self.pages.get(&(span.space, page)) {
                Some(content) => bytes[to].copy_from_slice(&content[inside]),
                None => write_pattern(GARBAGE, page * PAGE + inside.start as u64, &mut bytes[to]),
            }
        }
        bytes
    }

    pub(crate) fn write(&mut self, span: Span, bytes: &[u8]) {
        for (page, inside, from) in chunks(span) {
            self.page(span.space, page)[inside].copy_from_slice(&bytes[from]);
        }
    }

    /// Fills a span with garbage.
    pub(crate) fn poison(&mut self, span: Span) {
        let Range { start, end } = span.range();
        let (first, last) = (start.div_ceil(PAGE), end / PAGE);
        if first < last {
            let whole = (span.space, first)..(span.space, last);
            let gone: Vec<_> = self.pages.range(whole).map(|(key, _)| *key).collect();
            for key in gone {
                self.pages.remove(&key);
            }
        }
        let edges = if first < last {
            [start..first * PAGE, last * PAGE..end]
        } else {
            [start..end, end..end]
        };
        for edge in edges {
            let part = Span { start: edge.start, bytes: edge.end - edge.start, ..span };
            for (page, inside, _) in chunks(part) {
                if let Some(content) = self.pages.get_mut(&(span.space, page)) {
                    let at = page * PAGE + inside.start as u64;
                    write_pattern(GARBAGE, at, &mut content[inside]);
                }
            }
        }
    }

    fn page(&mut self, space: Space, page: u64) -> &mut [u8] {
        self.pages.entry((space, page)).or_insert_with(|| {
            let mut content = vec![0; index(PAGE)].into_boxed_slice();
            write_pattern(GARBAGE, page * PAGE, &mut content);
            content
        })
    }
}

/// The pages of a span: number, range inside the page, range inside the span.
fn chunks(span: Span) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let Range { start, end } = span.range();
    let pages = if start < end { start / PAGE..end.div_ceil(PAGE) } else { 0..0 };
    pages.map(move |page| {
        let from = start.max(page * PAGE);
        let to = end.min((page + 1) * PAGE);
        let inside = index(from - page * PAGE)..index(to - page * PAGE);
        (page, inside, index(from - start)..index(to - start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, bytes: u64) -> Span {
        Span { space: Space::Device, start, bytes }
    }

    #[test]
    fn bytes_come_back_across_pages_and_spaces_are_apart() {
        let mut memory = Memory::default();
        let bytes: Vec<u8> = (0..10_000u32).map(|n| (n & 0xFF) as u8).collect();
        memory.write(span(4000, 10_000), &bytes);
        assert_eq!(memory.read(span(4000, 10_000)), bytes);
        assert_eq!(memory.read(span(4096, 4096)), bytes[96..4192]);
        assert_ne!(memory.read(Span { space: Space::Disk, ..span(4000, 10_000) }), bytes);
    }

    #[test]
    fn poison_changes_its_span_and_nothing_else() {
        let mut memory = Memory::default();
        memory.write(span(0, 20_000), &vec![7; 20_000]);
        memory.poison(span(100, 15_000));
        memory.poison(span(16_000, 10));
        assert_eq!(memory.read(span(0, 100)), [7; 100]);
        assert_eq!(memory.read(span(15_100, 900)), [7; 900]);
        assert_eq!(memory.read(span(16_010, 3_990)), [7; 3_990]);
        let mut garbage = memory.read(span(100, 15_000));
        garbage.retain(|byte| *byte == 7);
        assert!(garbage.len() < 200);
    }
}
