//! A quick hash for keys that are addresses or small numbers, made by the program itself: nobody can
//! choose them to collide.

use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type Quick = BuildHasherDefault<Mix>;

/// Multiplies by an odd constant and folds the high half in (Fibonacci hashing, Knuth, TAOCP 6.4).
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}
