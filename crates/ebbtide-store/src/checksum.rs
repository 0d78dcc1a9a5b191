//! Checksums of blocks: a disk or a cable that changes bytes on the way is noticed.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

/// The sum of a block's bytes: fast (faster than memory can be copied), and good at finding
/// accidents. It is no protection against an adversary.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Other bytes came back from the spill file than were written. It is the source of the error of
/// the job.
///
/// ```
/// let mismatch = ebbtide_store::Mismatch { offset: 4096, bytes: 10, written: 1, read: 2 };
/// assert_eq!(
///     mismatch.to_string(),
///     "10 bytes at offset 4096 are not those that were written: \
///      their checksum is 0000000000000002, was 0000000000000001"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Where the block begins in the spill file.
    pub offset: u64,
    /// Length of the block.
    pub bytes: u64,
    /// XXH3 (64 bits) of the bytes that were put.
    pub written: u64,
    /// XXH3 (64 bits) of the bytes that came back.
    pub read: u64,
}

impl Mismatch {
    /// What the user can do about it.
    pub(crate) const HINT: &str = "the disk, its cable or the memory is faulty: see the kernel log \
                                   (dmesg), test the memory, or name another folder";
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, bytes, written, read } = self;
        write!(
            f,
            "{bytes} bytes at offset {offset} are not those that were written: \
             their checksum is {read:016x}, was {written:016x}"
        )
    }
}

impl std::error::Error for Mismatch {}
