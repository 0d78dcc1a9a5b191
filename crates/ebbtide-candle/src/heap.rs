//! A global allocator that counts, so that "device bytes" on a CPU are what the process really
//! allocated and not what the engine believes.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts every byte on the Rust heap, and hands freed blocks back to the kernel.
///
/// ```
/// use ebbtide_candle::Heap;
///
/// #[global_allocator]
/// static HEAP: Heap = Heap::new();
///
/// HEAP.reset_peak();
/// let before = HEAP.live_bytes();
/// let block = vec![0u8; 1 << 20];
/// assert!(HEAP.live_bytes() >= before + (1 << 20));
/// drop(block);
/// assert!(HEAP.peak_bytes() >= before + (1 << 20));
/// ```
#[derive(Debug)]
pub struct Heap {
    live: AtomicU64,
    peak: AtomicU64,
}

impl Heap {
    /// An allocator that has counted nothing yet.
    #[allow(clippy::new_without_default)] // A default value makes no sense for a static.
    pub const fn new() -> Self {
        Self { live: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    /// Bytes allocated now.
    pub fn live_bytes(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    /// The most bytes allocated at one time since the last [`Heap::reset_peak`].
    pub fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Starts a new peak from what is allocated now.
    pub fn reset_peak(&self) {
        self.peak.store(self.live_bytes(), Ordering::Relaxed);
    }

    /// Makes freed blocks of 256 KiB and more leave the process at once.
    ///
    /// glibc raises its own limit for this (up to 32 MiB) as soon as the first large block is
    /// freed, after which freed activations stay in the process and its RSS does not fall. Call
    /// once at start.
    pub fn return_freed_blocks(&self) {
        #[cfg(target_env = "gnu")]
        // SAFETY: mallopt only stores two numbers under malloc's own lock.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
        }
    }

    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.live.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to `System` with the arguments unchanged; counting touches atomics only.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `alloc`'s contract, which is `System`'s.
        let block = unsafe { System.alloc(layout) };
        if !block.is_null() {
            self.add(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let block = unsafe { System.alloc_zeroed(layout) };
        if !block.is_null() {
            self.add(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller got `block` from us with this layout, and we got it from `System`.
        unsafe { System.dealloc(block, layout) };
        self.sub(layout.size());
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`; `size` is the caller's promise.
        let new = unsafe { System.realloc(block, layout, size) };
        if !new.is_null() {
            self.add(size);
            self.sub(layout.size());
        }
        new
    }
}
