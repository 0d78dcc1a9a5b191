//! A small deterministic random generator, and the bytes that kernels write.

/// A probability: so many of so many.
///
/// ```
/// use ebbtide_sim::{Random, Ratio};
/// let mut random = Random::new(1);
/// assert!(random.chance(Ratio(1, 1)) && !random.chance(Ratio::NEVER));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(
    /// How many.
    pub u32,
    /// Of how many; 0 means never.
    pub u32,
);

impl Ratio {
    /// It never happens.
    pub const NEVER: Self = Self(0, 1);
}

const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// `SplitMix64`: one word of state, the same sequence on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(STEP)))
    }

    /// The next word.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `limit`; 0 if the limit is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        let word = self.draw();
        if limit == 0 { 0 } else { word % limit }
    }

    /// True with this probability. Always uses one word.
    pub fn chance(&mut self, ratio: Ratio) -> bool {
        self.below(u64::from(ratio.1)) < u64::from(ratio.0) && ratio.1 > 0
    }

    /// Another sequence, which depends on the state of this one and on `label` only.
    #[must_use]
    pub fn fork(&mut self, label: u64) -> Self {
        Self::new(self.draw() ^ mix(label))
    }
}

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn word(seed: u64, index: u64) -> u64 {
    mix(mix(seed.wrapping_add(STEP)).wrapping_add(index.wrapping_mul(STEP)))
}

/// The byte that a kernel with this seed writes at position `position` of a storage.
pub fn pattern(seed: u64, position: u64) -> u8 {
    ((word(seed, position / 8) >> (8 * (position % 8))) & 0xFF) as u8
}

/// [`pattern`] for all of `to`, whose first byte is at `position`.
pub(crate) fn write_pattern(seed: u64, position: u64, to: &mut [u8]) {
    let mut current = (u64::MAX, 0);
    for (byte, at) in to.iter_mut().zip(position..) {
        if current.0 != at / 8 {
            current = (at / 8, word(seed, at / 8));
        }
        *byte = ((current.1 >> (8 * (at % 8))) & 0xFF) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_of_a_range_is_that_of_its_bytes() {
        let mut bytes = [0; 37];
        write_pattern(9, 13, &mut bytes);
        for (byte, at) in bytes.iter().zip(13..) {
            assert_eq!(*byte, pattern(9, at));
        }
    }

    #[test]
    fn chances_are_about_what_they_say() {
        let mut random = Random::new(3);
        let hits = (0..10_000).filter(|_| random.chance(Ratio(1, 4))).count();
        assert!((2_300..2_700).contains(&hits), "{hits}");
    }
}
