//! Random numbers that are the same everywhere, for a seed.

/// splitmix64: small, and good enough to pick places and bytes.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of run `index` under `seed`. Runs are apart, so that one can be repeated alone.
    pub fn of(seed: u64, index: u64) -> Self {
        let mut both = Self(seed);
        both.0 = both.word() ^ index;
        both.0 = both.word();
        both
    }

    /// Any 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, or 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        let scaled = (u128::from(self.word()) * end as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }

    /// One of them.
    ///
    /// # Panics
    /// There is none.
    pub fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}
