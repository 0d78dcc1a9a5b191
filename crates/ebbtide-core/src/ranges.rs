//! Which bytes of a storage its registered tensors reach.
//!
//! Identity is the storage, not the tensor (row T13): any mix of overlapping views of one storage is
//! one union of byte ranges, saved once. A view is described by the bytes between its first and its
//! last element, so a strided one also covers the gaps in between; they are part of the storage and
//! cost a copy, never a value.

use std::ops::Range;

/// A sorted list of byte ranges, neither empty nor touching. One range, the common case, takes no
/// memory of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    first: Range<u64>,
    rest: Vec<Range<u64>>,
}

impl Ranges {
    /// These bytes.
    pub fn of(range: Range<u64>) -> Self {
        let mut ranges = Self::default();
        let _ = ranges.insert(range);
        ranges
    }

    /// Adds bytes. Returns whether any of them is new.
    ///
    /// ```
    /// use ebbtide_core::Ranges;
    /// let mut ranges = Ranges::of(0..8);
    /// assert!(ranges.insert(4..16));
    /// assert!(!ranges.insert(2..16));
    /// assert_eq!(ranges.bytes(), 16);
    /// ```
    #[must_use = "tells whether the bytes are to be saved as well"]
    pub fn insert(&mut self, range: Range<u64>) -> bool {
        if range.is_empty() || self.contains(&range) {
            return false;
        }
        if self.first.is_empty() {
            self.first = range;
            return true;
        }
        let mut all: Vec<Range<u64>> = self.iter().cloned().chain([range]).collect();
        all.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::with_capacity(all.len());
        for next in all {
            match merged.last_mut() {
                Some(last) if next.start <= last.end => last.end = last.end.max(next.end),
                _ => merged.push(next),
            }
        }
        self.rest = merged.split_off(1);
        self.first = merged.remove(0);
        true
    }

    /// Whether all of these bytes are covered. Nothing is always covered.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.iter().any(|r| r.start <= range.start && range.end <= r.end)
    }

    /// The ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = &Range<u64>> + '_ {
        std::iter::once(&self.first).filter(|first| !first.is_empty()).chain(&self.rest)
    }

    /// Number of bytes covered.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether every byte of a storage of this size is covered.
    pub fn is_whole(&self, storage_bytes: u64) -> bool {
        self.rest.is_empty() && self.first == (0..storage_bytes)
    }
}

/// The bytes from the first to the last element of a strided view, within its storage: the range that
/// a copy of the view has to move (row T16). A stride of 0 repeats an element and adds nothing; a view
/// without elements reaches no byte.
///
/// `offset` and `strides` are in elements, `item` is the size of one in bytes.
///
/// ```
/// use ebbtide_core::view_bytes;
/// // `x[2:5]` of floats, and a 1000 × 3 broadcast of the same three numbers.
/// assert_eq!(view_bytes(2, &[3], &[1], 4), 8..20);
/// assert_eq!(view_bytes(2, &[1000, 3], &[0, 1], 4), 8..20);
/// assert_eq!(view_bytes(7, &[0, 3], &[3, 1], 4), 28..28);
/// ```
///
/// # Panics
/// The view reaches in front of its storage, or beyond 2⁶⁴ bytes: no framework makes such a view.
pub fn view_bytes(offset: u64, shape: &[u64], strides: &[i64], item: u64) -> Range<u64> {
    let start = offset * item;
    if shape.contains(&0) {
        return start..start;
    }
    let (mut low, mut high) = (i128::from(offset), i128::from(offset));
    for (&length, &stride) in shape.iter().zip(strides) {
        let reach = i128::from(length - 1) * i128::from(stride);
        if reach < 0 { low += reach } else { high += reach }
    }
    let bytes = |elements: i128| {
        let bytes = elements.checked_mul(i128::from(item)).and_then(|b| u64::try_from(b).ok());
        bytes.expect("a view lies within its storage")
    };
    bytes(low)..bytes(high + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// T13, C1: `x[:2]` and `x[:4]`, three chunks, a matrix and its transpose.
    #[test]
    fn t13_c1_overlapping_views_are_one_union() {
        let mut ranges = Ranges::of(view_bytes(0, &[2], &[1], 4));
        assert!(ranges.insert(view_bytes(0, &[4], &[1], 4)));
        assert_eq!(ranges, Ranges::of(0..16));

        let mut chunks = Ranges::default();
        for chunk in [2, 0, 1] {
            assert!(chunks.insert(view_bytes(chunk * 4, &[4], &[1], 2)));
        }
        assert!(chunks.is_whole(24));

        let matrix = view_bytes(0, &[8, 8], &[8, 1], 4);
        assert_eq!(matrix, view_bytes(0, &[8, 8], &[1, 8], 4));
    }

    /// T16: broadcast, empty, 0-d, with an offset, backwards, overlapping windows.
    #[test]
    fn t16_every_kind_of_view_moves_its_real_bytes_only() {
        assert_eq!(view_bytes(5, &[1 << 40], &[0], 2), 10..12);
        assert_eq!(view_bytes(5, &[], &[], 8), 40..48);
        assert_eq!(view_bytes(5, &[0], &[1], 8), 40..40);
        assert_eq!(view_bytes(7, &[8], &[-1], 4), 0..32);
        assert_eq!(view_bytes(1, &[3, 2], &[1, 1], 1), 1..5);
    }

    proptest::proptest! {
        /// The union is that of a set of single bytes, and stays sorted and apart.
        #[test]
        fn t13_ranges_are_a_set_of_bytes(parts in proptest::collection::vec((0..64u64, 0..16u64), 0..12)) {
            let (mut ranges, mut set) = (Ranges::default(), BTreeSet::new());
            for (start, len) in parts {
                let before = set.len();
                set.extend(start..start + len);
                proptest::prop_assert_eq!(ranges.insert(start..start + len), set.len() > before);
            }
            let covered: Vec<u64> = ranges.iter().flat_map(Clone::clone).collect();
            proptest::prop_assert_eq!(covered, set.into_iter().collect::<Vec<_>>());
            let list: Vec<_> = ranges.iter().cloned().collect();
            proptest::prop_assert!(list.windows(2).all(|w| w[0].end < w[1].start));
        }

        /// A view's range is that of its elements, one by one.
        #[test]
        fn t16_a_views_range_covers_each_element(
            offset in 100..200u64, shape in proptest::collection::vec(0..4u64, 0..4),
            strides in proptest::collection::vec(-8..8i64, 4), item in 1..9u64,
        ) {
            let range = view_bytes(offset, &shape, &strides, item);
            let mut elements = vec![i64::try_from(offset).unwrap()];
            for (length, stride) in shape.iter().zip(&strides) {
                elements = elements.iter().flat_map(|e| (0..*length).map(move |i| e + i.cast_signed() * stride)).collect();
            }
            let first = elements.iter().min().map(|e| e.cast_unsigned() * item);
            let end = elements.iter().max().map(|e| (e.cast_unsigned() + 1) * item);
            let wanted = first.zip(end).map_or(offset * item..offset * item, |(a, b)| a..b);
            proptest::prop_assert_eq!(range, wanted);
        }
    }
}
