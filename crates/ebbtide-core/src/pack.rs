//! Which storages share a host buffer (row G2).
//!
//! Thousands of small copies cost more than one large one. What may be packed joins, in order of
//! registration and per element type and pool, a *bucket* of at most the configured size; a bucket that
//! would overflow closes. One storage alone in its bucket gains nothing and goes the ordinary way.

use crate::PoolId;
use crate::mover::{Element, Mover, Record};

/// Pieces of a bucket start at a multiple of this many bytes, so that no copy is slowed down by an odd
/// address.
const ALIGN: u64 = 64;

/// Where the bytes of one record go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Berth {
    /// It does not leave.
    #[default]
    Stays,
    /// Into a buffer of its own.
    Alone,
    /// Into this bucket, from this byte on.
    Bucket { number: u32, offset: u64 },
}

/// Storages that travel together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) element: Element,
    pub(crate) pool: Option<PoolId>,
    pub(crate) bytes: u64,
    /// Of these, what is not padding between pieces.
    pub(crate) payload: u64,
    pub(crate) pieces: u32,
    open: bool,
}

/// The plan of one group, and memory for those of later ones.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// One for each record.
    pub(crate) berths: Vec<Berth>,
    pub(crate) buckets: Vec<Bucket>,
}

impl Plan {
    /// Plans a group anew.
    pub(crate) fn make<M: Mover>(&mut self, records: &[Record<M>], bucket_bytes: u64) {
        self.berths.clear();
        self.buckets.clear();
        for record in records {
            let berth = match record {
                record if !record.leaves() => Berth::Stays,
                record if record.packable && record.bytes < bucket_bytes => {
                    self.join(record.element, record.pool, record.bytes, bucket_bytes)
                }
                _ => Berth::Alone,
            };
            self.berths.push(berth);
        }
        for berth in &mut self.berths {
            if let Berth::Bucket { number, .. } = *berth
                && self.buckets[number as usize].pieces == 1
            {
                *berth = Berth::Alone;
            }
        }
    }

    fn join(&mut self, element: Element, pool: Option<PoolId>, bytes: u64, bound: u64) -> Berth {
        let open =
            self.buckets.iter().rposition(|b| b.open && b.element == element && b.pool == pool);
        if let Some(number) = open {
            let bucket = &mut self.buckets[number];
            let offset = bucket.bytes.next_multiple_of(ALIGN);
            if offset + bytes <= bound {
                bucket.bytes = offset + bytes;
                bucket.payload += bytes;
                bucket.pieces += 1;
                return Berth::Bucket { number: crate::group::number(number), offset };
            }
            bucket.open = false;
        }
        let number = crate::group::number(self.buckets.len());
        self.buckets.push(Bucket { element, pool, bytes, payload: bytes, pieces: 1, open: true });
        Berth::Bucket { number, offset: 0 }
    }
}
