//! Which bytes of the spill file are taken.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use crate::GRAIN;

/// A range of the file that is taken. It has no copies, so it can be given back only once.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    offset: u64,
    len: u64,
}

impl Extent {
    /// A range of no bytes, which nobody has to give back.
    pub(crate) const NONE: Self = Self { offset: 0, len: 0 };

    /// First byte, a multiple of 4096.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes, a multiple of 4096. 0 only if 0 bytes were asked for.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The file would have to grow beyond its capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Bytes needed, a multiple of 4096.
    pub needed: u64,
    /// Bytes in use.
    pub in_use: u64,
    /// The largest length the file may have, in bytes.
    pub capacity: u64,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, in_use, capacity } = self;
        write!(f, "{needed} bytes needed, {in_use} of {capacity} bytes in use")
    }
}

impl std::error::Error for NoRoom {}

/// Hands out ranges of a file that grows as needed: best fit, neighbours coalesced.
///
/// Training asks for the same sizes step after step, so best fit finds the very holes that the
/// previous step left, and the file stops growing after the first step.
///
/// ```
/// use ebbtide_store::extent::Extents;
/// let mut extents = Extents::new(None);
/// let a = extents.allocate(10_000)?;
/// let b = extents.allocate(1)?;
/// assert_eq!((a.offset(), a.len(), b.offset(), b.len()), (0, 12_288, 12_288, 4096));
/// extents.free(a);
/// assert_eq!(extents.allocate(8192)?.offset(), 0);
/// assert_eq!((extents.in_use(), extents.high_water()), (12_288, 16_384));
/// # Ok::<(), ebbtide_store::extent::NoRoom>(())
/// ```
#[derive(Debug, Default)]
pub struct Extents {
    /// Offset → length. No two are neighbours and none is empty.
    holes: BTreeMap<u64, u64>,
    /// The same holes as (length, offset): the first that fits is the best and the lowest.
    by_len: BTreeSet<(u64, u64)>,
    /// Offset → length of what is handed out.
    taken: BTreeMap<u64, u64>,
    in_use: u64,
    high_water: u64,
    capacity: Option<u64>,
}

impl Extents {
    /// An empty file that may grow to `capacity` bytes (`None`: without a bound).
    pub fn new(capacity: Option<u64>) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Takes `bytes`, rounded up to 4096.
    ///
    /// # Errors
    /// No hole is large enough and the file may not grow that far. Nothing changed.
    pub fn allocate(&mut self, bytes: u64) -> Result<Extent, NoRoom> {
        if bytes == 0 {
            return Ok(Extent::NONE);
        }
        let len =
            bytes.checked_next_multiple_of(GRAIN as u64).ok_or_else(|| self.no_room(bytes))?;
        let hole = self.by_len.range((len, 0)..).next().copied();
        let offset = match hole {
            Some((hole_len, offset)) => {
                self.remove_hole(offset, hole_len);
                if hole_len > len {
                    self.insert_hole(offset + len, hole_len - len);
                }
                offset
            }
            None => self.grow(len)?,
        };
        self.taken.insert(offset, len);
        self.in_use += len;
        Ok(Extent { offset, len })
    }

    /// Makes the file longer, using a hole at its end as the beginning of the new range.
    fn grow(&mut self, len: u64) -> Result<u64, NoRoom> {
        let last = self.holes.last_key_value().map(|(&offset, &len)| (offset, len));
        let tail = last.filter(|&(offset, len)| offset + len == self.high_water);
        let offset = tail.map_or(self.high_water, |(offset, _)| offset);
        let limit = self.capacity.unwrap_or(i64::MAX as u64);
        let end = offset.checked_add(len).filter(|&end| end <= limit);
        let end = end.ok_or_else(|| self.no_room(len))?;
        if let Some((offset, len)) = tail {
            self.remove_hole(offset, len);
        }
        self.high_water = end;
        Ok(offset)
    }

    fn no_room(&self, needed: u64) -> NoRoom {
        NoRoom { needed, in_use: self.in_use, capacity: self.capacity.unwrap_or(i64::MAX as u64) }
    }

    /// Gives a range back.
    ///
    /// # Panics
    /// The extent is not one that this allocator has handed out and not yet got back.
    #[expect(clippy::needless_pass_by_value, reason = "taking the only copy is the point")]
    pub fn free(&mut self, extent: Extent) {
        let Extent { mut offset, mut len } = extent;
        if len == 0 {
            return;
        }
        // Checked before anything changes: the caller may survive the panic.
        let taken = self.taken.get(&offset).copied();
        assert_eq!(taken, Some(len), "free of an extent at {offset} that is not taken");
        self.taken.remove(&offset);
        self.in_use -= len;
        if let Some(after) = self.holes.get(&(offset + len)).copied() {
            self.remove_hole(offset + len, after);
            len += after;
        }
        let before = self.holes.range(..offset).next_back().map(|(&offset, &len)| (offset, len));
        if let Some((start, before)) = before.filter(|&(start, before)| start + before == offset) {
            self.remove_hole(start, before);
            offset = start;
            len += before;
        }
        self.insert_hole(offset, len);
    }

    fn insert_hole(&mut self, offset: u64, len: u64) {
        self.holes.insert(offset, len);
        self.by_len.insert((len, offset));
    }

    fn remove_hole(&mut self, offset: u64, len: u64) {
        self.holes.remove(&offset);
        self.by_len.remove(&(len, offset));
    }

    /// Bytes handed out and not given back, a multiple of 4096.
    pub fn in_use(&self) -> u64 {
        self.in_use
    }

    /// Forgets the hole at the end of the file, if there is one, and tells the length that the file
    /// has to have now.
    pub fn trim(&mut self) -> u64 {
        let last = self.holes.last_key_value().map(|(&offset, &len)| (offset, len));
        if let Some((offset, len)) = last.filter(|&(offset, len)| offset + len == self.high_water) {
            self.remove_hole(offset, len);
            self.high_water = offset;
        }
        self.high_water
    }

    /// Ranges below [`high_water`](Self::high_water) that are not taken, in order. No two are
    /// neighbours.
    pub fn holes(&self) -> impl Iterator<Item = Range<u64>> {
        self.holes.iter().map(|(&offset, &len)| offset..offset + len)
    }

    /// The largest length that the file has needed since the last [`trim`](Self::trim), in bytes.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn takes_the_smallest_hole_that_fits() {
        let mut extents = Extents::new(None);
        let mut taken: Vec<_> =
            [3, 1, 2, 1, 1].iter().map(|n| Some(extents.allocate(n * 4096).unwrap())).collect();
        extents.free(taken[0].take().unwrap());
        extents.free(taken[2].take().unwrap());
        assert_eq!(extents.allocate(5000).unwrap().offset(), 4 * 4096);
        assert_eq!(extents.allocate(5000).unwrap().offset(), 0);
        assert_eq!(extents.high_water(), 8 * 4096);
    }

    #[test]
    fn growing_starts_in_the_hole_at_the_end() {
        let mut extents = Extents::new(Some(4 * 4096));
        let _first = extents.allocate(4096).unwrap();
        let last = extents.allocate(4096).unwrap();
        extents.free(last);
        assert_eq!(extents.allocate(3 * 4096).unwrap().offset(), 4096);
        let no_room = extents.allocate(1).unwrap_err();
        assert_eq!(no_room, NoRoom { needed: 4096, in_use: 4 * 4096, capacity: 4 * 4096 });
        assert_eq!(no_room.to_string(), "4096 bytes needed, 16384 of 16384 bytes in use");
    }

    #[test]
    fn trimming_forgets_the_hole_at_the_end_only() {
        let mut extents = Extents::new(Some(3 * 4096));
        let [a, b, c] = [(); 3].map(|()| extents.allocate(4096).unwrap());
        extents.free(a);
        assert_eq!(extents.trim(), 3 * 4096);
        extents.free(c);
        assert_eq!(extents.holes().collect::<Vec<_>>(), [0..4096, 8192..12_288]);
        assert_eq!((extents.trim(), extents.trim()), (8192, 8192));
        assert!(extents.holes().eq(std::iter::once(0..4096)));
        // What was forgotten can be taken again.
        assert_eq!(extents.allocate(1).unwrap().offset(), 0);
        assert_eq!(extents.allocate(1).unwrap().offset(), 8192);
        assert!(extents.allocate(1).is_err());
        extents.free(b);
        assert_eq!(extents.high_water(), 3 * 4096);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        let mut extents = Extents::new(None);
        assert!(extents.allocate(u64::MAX).is_err());
        assert!(extents.allocate(u64::MAX - 4096).is_err());
        assert_eq!(extents.high_water(), 0);
    }

    #[test]
    fn nothing_takes_nothing() {
        let mut extents = Extents::new(Some(0));
        let empty = extents.allocate(0).unwrap();
        assert!(empty.is_empty());
        extents.free(empty);
        assert_eq!((extents.in_use(), extents.high_water()), (0, 0));
    }

    #[test]
    #[should_panic(expected = "not taken")]
    fn a_double_free_panics() {
        let mut extents = Extents::new(None);
        let extent = extents.allocate(1).unwrap();
        let again = Extent { ..extent };
        extents.free(extent);
        extents.free(again);
    }

    #[test]
    #[should_panic(expected = "not taken")]
    fn a_foreign_free_panics() {
        let mut extents = Extents::new(None);
        let _mine = extents.allocate(8192).unwrap();
        let mut other = Extents::new(None);
        extents.free(other.allocate(4096).unwrap());
    }

    /// The model is one flag for each 4096 bytes.
    fn check(extents: &Extents, live: &[Extent], model: &[bool]) {
        let taken = model.iter().filter(|&&taken| taken).count() as u64 * 4096;
        assert_eq!(extents.in_use(), taken);
        assert_eq!(live.iter().map(Extent::len).sum::<u64>(), taken);
        let runs = model.chunk_by(|a, b| a == b).filter(|run| !run[0]).count();
        assert_eq!(extents.holes.len(), runs, "free neighbours are one hole");
        assert_eq!(extents.by_len.len(), runs);
        assert_eq!(extents.high_water(), model.len() as u64 * 4096);
    }

    fn grains(extent: &Extent) -> std::ops::Range<usize> {
        let grain = |bytes: u64| usize::try_from(bytes / 4096).unwrap();
        grain(extent.offset)..grain(extent.offset + extent.len)
    }

    proptest! {
        #[test]
        fn agrees_with_a_bitmap(
            ops in prop::collection::vec(
                (any::<bool>(), 0_u64..40_000, any::<prop::sample::Index>()),
                1..200,
            )
        ) {
            let (mut extents, mut live) = (Extents::new(None), Vec::new());
            let mut model: Vec<bool> = Vec::new();
            for (take, bytes, pick) in ops {
                if bytes % 16 == 3 {
                    let end = model.iter().rposition(|&taken| taken).map_or(0, |last| last + 1);
                    model.truncate(end);
                    prop_assert_eq!(extents.trim(), end as u64 * 4096);
                }
                if take || live.is_empty() {
                    let fits = model
                        .chunk_by(|a, b| a == b)
                        .any(|run| !run[0] && run.len() as u64 * 4096 >= bytes.max(1));
                    let extent = extents.allocate(bytes).unwrap();
                    prop_assert_eq!(extent.len(), bytes.next_multiple_of(4096));
                    prop_assert_eq!(extent.offset() % 4096, 0);
                    let range = grains(&extent);
                    prop_assert!(!fits || range.end <= model.len(), "grew although a hole fits");
                    model.resize(model.len().max(range.end), false);
                    prop_assert!(model[range.clone()].iter().all(|taken| !taken), "overlap");
                    model[range].fill(true);
                    live.push(extent);
                } else {
                    let extent = live.swap_remove(pick.index(live.len()));
                    model[grains(&extent)].fill(false);
                    extents.free(extent);
                }
                check(&extents, &live, &model);
            }
            live.drain(..).for_each(|extent| extents.free(extent));
            model.fill(false);
            check(&extents, &live, &model);
            // What was fragmented serves one large request again.
            let all = extents.high_water();
            prop_assert_eq!(extents.allocate(all).unwrap(), Extent { offset: 0, len: all });
        }
    }
}
