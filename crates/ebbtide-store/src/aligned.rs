//! Page-aligned memory outside the Rust heap. One of the modules of this crate with
//! `unsafe` in it.
//!
//! On a CPU machine the Rust heap *is* the device memory that ebbtide measures and bounds, so the
//! tiers' own buffers come straight from the kernel and are counted apart.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;

use ebbtide_core::{BackendError, Bytes};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

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
        let start = map(mapped).map_err(|e| refused(len).with_source(io::Error::from(e)))?;
        Ok(Self { start, len, mapped })
    }

    /// Keeps the mapping out of processes that this one forks.
    ///
    /// A fork makes the pages of parent and child one, until either writes: then the writer gets a
    /// copy. During direct I/O the disk goes on with the page that was there before. If the parent
    /// is the one with the copy, what the disk reads into the page never reaches it, and what it
    /// writes next into its copy never reaches the disk (open(2), on `O_DIRECT`; kernels since 6.5
    /// copy pages that are in use at the fork). Without the mapping in the child there is nothing
    /// to share. The child must not touch the buffer.
    ///
    /// # Errors
    /// The kernel refuses the advice.
    pub(crate) fn keep_from_children(&self) -> Result<(), BackendError> {
        if self.mapped == 0 {
            return Ok(());
        }
        // SAFETY: the range is exactly the mapping that this value owns, and the advice changes
        // nothing in this process.
        let advised =
            unsafe { madvise(self.start.as_ptr().cast(), self.mapped, Advice::LinuxDontFork) };
        advised.map_err(|e| {
            let message = format!("can't keep {} bytes of memory from child processes", self.len);
            BackendError::new(message).with_source(io::Error::from(e))
        })
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
    fn c25_children_do_not_get_a_buffer_that_is_kept_from_them() {
        // A length that no other mapping of this process has.
        let buf = AlignedBuf::zeroed(0x0123_4000).unwrap();
        let start = buf.as_slice().as_ptr().addr();
        let flags = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            // Neighbours with the same flags are one line: the buffer is in it.
            let mut inside = false;
            maps.lines()
                .find_map(|line| {
                    let range = line.split(' ').next()?.split_once('-');
                    if let Some((from, to)) = range {
                        let parse = |hex| usize::from_str_radix(hex, 16);
                        if let (Ok(from), Ok(to)) = (parse(from), parse(to)) {
                            inside = (from..to).contains(&start);
                        }
                    }
                    line.strip_prefix("VmFlags: ").filter(|_| inside).map(String::from)
                })
                .unwrap()
        };
        let kept = |flags: &str| flags.split(' ').any(|flag| flag == "dc");
        assert!(!kept(&flags()));
        buf.keep_from_children().unwrap();
        assert!(kept(&flags()), "{}", flags());
        AlignedBuf::zeroed(0).unwrap().keep_from_children().unwrap();
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
