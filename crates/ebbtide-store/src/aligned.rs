//! Page-aligned memory outside the Rust heap. The one module of this crate with `unsafe` in it.
//!
//! On a CPU machine the Rust heap *is* the device memory that ebbtide measures and bounds, so the
//! tiers' own buffers come straight from the kernel and are counted apart.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use ebbtide_core::{BackendError, Bytes};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::GRAIN;

/// A zeroed, page-aligned range of memory of a fixed length, from an anonymous mapping.
///
/// ```
/// let mut buf = ebbtide_store::AlignedBuf::zeroed(10)?;
/// buf.as_mut_slice()[9] = 1;
/// assert_eq!(buf.as_slice(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
/// assert!(buf.as_slice().as_ptr().addr().is_multiple_of(4096));
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub struct AlignedBuf {
    /// Start of the mapping; a dangling, aligned address if `mapped` is 0.
    start: NonNull<u8>,
    /// Bytes the caller asked for, never more than `mapped`.
    len: usize,
    /// Bytes of the mapping: `len` rounded up to [`GRAIN`].
    mapped: usize,
}

// SAFETY: the mapping is owned by this value alone and is plain memory without thread affinity.
unsafe impl Send for AlignedBuf {}
// SAFETY: `&AlignedBuf` gives out `&[u8]` only; writing needs `&mut AlignedBuf`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Maps `len` bytes of zeros. The address is a multiple of 4096 bytes. Memory is used up as
    /// pages are first written. No bytes need no mapping.
    ///
    /// # Errors
    /// The kernel refuses the mapping (address space, overcommit limit, number of mappings), or
    /// `len` rounded up to 4096 bytes exceeds half the address space.
    pub fn zeroed(len: usize) -> Result<Self, BackendError> {
        if len == 0 {
            // Never dereferenced, but aligned, so that the promise about the address holds.
            let start = NonNull::without_provenance(const { NonZeroGrain::GET });
            return Ok(Self { start, len, mapped: 0 });
        }
        let mapped = len
            .checked_next_multiple_of(GRAIN)
            .filter(|&mapped| isize::try_from(mapped).is_ok())
            .ok_or_else(|| refused(len))?;
        let start = map(mapped).map_err(|e| refused(len).with_source(std::io::Error::from(e)))?;
        Ok(Self { start, len, mapped })
    }

    /// Length in bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `zeroed` made `start` valid for `mapped >= len` initialised bytes (or `len` is 0
        // and `start` is aligned and not null), at most `isize::MAX`, until `drop`; writers need
        // `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to be overwritten.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` proves that no other reference is alive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// [`GRAIN`] as the address of an empty buffer.
struct NonZeroGrain;

impl NonZeroGrain {
    const GET: std::num::NonZeroUsize = std::num::NonZeroUsize::new(GRAIN).unwrap();
}

fn map(bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a null hint without MAP_FIXED lets the kernel choose the address, so no existing
    // mapping is touched; `bytes` is not 0 (checked by `zeroed`).
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }?;
    // Without MAP_FIXED the kernel never maps page 0.
    Ok(NonNull::new(start.cast()).expect("mmap gives no null address"))
}

fn refused(len: usize) -> BackendError {
    BackendError::new(format!("can't map {len} bytes of memory"))
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.mapped == 0 {
            return;
        }
        // SAFETY: `start` and `mapped` are exactly what `map` returned, this value owns them, and
        // every slice borrowed from it has ended.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.mapped) };
        // It fails only if splitting a mapping exceeds the limit on mappings: the pages leak then.
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

impl Bytes for AlignedBuf {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zeroed_aligned_and_of_the_length_asked_for() {
        for len in [0, 1, 4095, 4096, 4097, 1 << 20] {
            let mut buf = AlignedBuf::zeroed(len).unwrap();
            assert_eq!((buf.len(), buf.is_empty()), (len, len == 0));
            assert!(buf.as_slice().as_ptr().addr().is_multiple_of(GRAIN));
            assert!(buf.as_slice().iter().all(|&b| b == 0));
            buf.as_mut_slice().fill(0xA5);
            assert!(buf.as_slice().iter().all(|&b| b == 0xA5));
        }
    }

    #[test]
    fn a_refused_mapping_is_an_error() {
        for len in [usize::MAX, isize::MAX as usize - GRAIN] {
            let error = AlignedBuf::zeroed(len).unwrap_err();
            assert_eq!(error.to_string(), format!("can't map {len} bytes of memory"));
        }
    }

    #[test]
    fn the_memory_is_given_back() {
        // 64 GiB in total, 1 GiB at a time: leaking would run into the memory limit.
        for _ in 0..64 {
            let mut buf = AlignedBuf::zeroed(1 << 30).unwrap();
            buf.as_mut_slice()[..16 << 20].fill(1);
        }
    }
}
