//! A global allocator for a CPU as device: it counts, and it keeps the process no larger than what
//! was in use at one time.
//!
//! Counting makes "device bytes" what the process really allocated and not what the engine
//! believes.
//!
//! Large blocks are pages of their own. glibc would hand them back one by one at first, and from the
//! first freed one on (it raises its own limit, up to 32 MiB) keep them in a heap that only shrinks
//! at its end; the resident size then says little about what is in use. Handing each block back at
//! once costs a page fault for every page of every temporary, which takes as long as the training.
//! So freed blocks are kept to be taken again, under one rule: *blocks in use and kept ones together
//! never exceed the most that was in use at one time.* Whatever would exceed it, the oldest kept
//! ones, goes back to the kernel.
//!
//! # Access contract
//!
//! | block | made by | freed by |
//! | --- | --- | --- |
//! | [`LARGE`] bytes and more, aligned to a page or less | `mmap`, or a kept block | kept, or `munmap` |
//! | every other | `System` | `System` |
//!
//! Which of the two is a function of the layout alone, so freeing finds the right one. A kept block
//! belongs to nobody else. The books are behind a mutex that is never held while memory is allocated
//! through this allocator.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Smallest block that is mapped, in bytes.
const LARGE: usize = 256 << 10;
/// Most blocks that are kept.
const KEPT_BLOCKS: usize = 4096;
/// What mapped lengths are multiples of: at least a page on every Linux, so that kept runs can be split
/// anywhere and given back in part.
const GRANULE: usize = 64 << 10;
/// Alignment that every page has.
const PAGE: usize = 4096;

/// Counts every byte on the Rust heap, and keeps the process no larger than the most bytes that
/// were in use at one time.
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
    /// A second peak: whoever measures parts of a run does not disturb who measures all of it.
    lap: AtomicU64,
    books: Mutex<Books>,
}

/// The large blocks. Kept ones are in order, the oldest first. Addresses are numbers here: nobody
/// reads through them.
#[derive(Debug)]
struct Books {
    kept: [(usize, usize); KEPT_BLOCKS],
    count: usize,
    kept_bytes: usize,
    used_bytes: usize,
    most_used_bytes: usize,
}

impl Books {
    /// Takes `length` bytes of the smallest kept run that has them; of equal ones, of the one that
    /// was freed last.
    fn take(&mut self, length: usize) -> Option<usize> {
        let runs = self.kept[..self.count].iter().enumerate();
        let fits = runs.filter(|(_, (_, l))| *l >= length);
        let (index, &(address, run)) = fits.rev().min_by_key(|(_, (_, l))| *l)?;
        if run == length {
            self.remove(index);
        } else {
            self.kept[index] = (address + length, run - length);
            self.kept_bytes -= length;
        }
        Some(address)
    }

    fn remove(&mut self, index: usize) -> (usize, usize) {
        let run = self.kept[index];
        self.kept_bytes -= run.1;
        self.kept.copy_within(index + 1..self.count, index);
        self.count -= 1;
        run
    }

    /// Gives kept pages back, the oldest first, until `length` more in use break no rule.
    fn make_room(&mut self, length: usize) {
        let most = self.most_used_bytes.max(self.used_bytes + length);
        let mut excess = (self.used_bytes + length + self.kept_bytes).saturating_sub(most);
        while excess > 0 && self.count > 0 {
            let (address, run) = self.kept[0];
            let given = run.min(excess);
            if given == run {
                self.remove(0);
            } else {
                self.kept[0] = (address + given, run - given);
                self.kept_bytes -= given;
            }
            release(address, given);
            excess -= given;
        }
    }

    /// Keeps a block, joined with kept neighbours: together they serve a larger one.
    fn keep(&mut self, mut address: usize, mut length: usize) {
        if let Some(index) = self.position(|(a, l)| a + l == address) {
            let (before, run) = self.remove(index);
            (address, length) = (before, run + length);
        }
        if let Some(index) = self.position(|(a, _)| a == address + length) {
            length += self.remove(index).1;
        }
        if self.count == KEPT_BLOCKS {
            let (address, length) = self.remove(0);
            release(address, length);
        }
        self.kept[self.count] = (address, length);
        self.count += 1;
        self.kept_bytes += length;
    }

    fn position(&self, wanted: impl Fn((usize, usize)) -> bool) -> Option<usize> {
        self.kept[..self.count].iter().position(|&run| wanted(run))
    }
}

impl Heap {
    /// An allocator that has counted nothing yet.
    #[allow(clippy::new_without_default)] // It is of use as a static only.
    pub const fn new() -> Self {
        // A static is made at compile time: this array is never on a stack.
        #[allow(clippy::large_stack_arrays)]
        let books = Books {
            kept: [(0, 0); KEPT_BLOCKS],
            count: 0,
            kept_bytes: 0,
            used_bytes: 0,
            most_used_bytes: 0,
        };
        Self {
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            lap: AtomicU64::new(0),
            books: Mutex::new(books),
        }
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

    /// Ends a lap and begins the next: the most bytes allocated at one time since the last call.
    ///
    /// ```
    /// # use ebbtide_candle::Heap;
    /// # #[global_allocator]
    /// # static HEAP: Heap = Heap::new();
    /// HEAP.lap();
    /// drop(vec![0u8; 1 << 20]);
    /// assert!(HEAP.lap() >= 1 << 20);
    /// assert!(HEAP.lap() <= HEAP.peak_bytes());
    /// ```
    pub fn lap(&self) -> u64 {
        self.lap.swap(self.live_bytes(), Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(live, Ordering::Relaxed);
        self.lap.fetch_max(live, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.live.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // Nothing in a critical section can panic: indices are within `count`.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages for a block, and whether they are known to be zero. Null if there is no memory.
    fn map(&self, size: usize) -> (*mut u8, bool) {
        let length = length(size);
        let mut books = self.books();
        let (block, zero) = if let Some(address) = books.take(length) {
            (ptr::with_exposed_provenance_mut(address), false)
        } else {
            books.make_room(length);
            (fresh(length), true)
        };
        if !block.is_null() {
            books.used_bytes += length;
            books.most_used_bytes = books.most_used_bytes.max(books.used_bytes);
        }
        (block, zero)
    }

    fn unmap(&self, block: *mut u8, size: usize) {
        let length = length(size);
        let mut books = self.books();
        books.used_bytes -= length;
        books.keep(block.expose_provenance(), length);
    }
}

/// Bytes that are mapped for a block: eight steps for each doubling, so that blocks of nearly the
/// same size can take each other's place. What a block does not touch takes no memory.
fn length(size: usize) -> usize {
    let step = (size.next_power_of_two() / 16).max(GRANULE);
    size.next_multiple_of(step)
}

fn fresh(length: usize) -> *mut u8 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no other.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    mapped.cast()
}

fn is_mapped(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE
}

fn release(address: usize, length: usize) {
    let block: *mut u8 = ptr::with_exposed_provenance_mut(address);
    // SAFETY: every page of the run came from mmap in `fresh`, and its owner has freed it; lengths are
    // multiples of whole pages, so no part of another block is in it.
    let status = unsafe { libc::munmap(block.cast(), length) };
    debug_assert_eq!(status, 0, "the kernel refused pages it gave");
}

// SAFETY: a block is either fresh or cached pages that nobody else has, or `System`'s; `is_mapped`
// sends both ends of its life to the same place. Mapped blocks start at a page, which is at least
// the alignment asked for. `realloc` is the default one: allocate, copy, free.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let block = if is_mapped(layout) {
            self.map(layout.size()).0
        } else {
            // SAFETY: the caller keeps `alloc`'s contract, which is `System`'s.
            unsafe { System.alloc(layout) }
        };
        if !block.is_null() {
            self.add(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let block = if is_mapped(layout) {
            let (block, zero) = self.map(layout.size());
            if !block.is_null() && !zero {
                // SAFETY: the block has at least this size and is nobody else's yet.
                unsafe { block.write_bytes(0, layout.size()) };
            }
            block
        } else {
            // SAFETY: as in `alloc`.
            unsafe { System.alloc_zeroed(layout) }
        };
        if !block.is_null() {
            self.add(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_mapped(layout) {
            self.unmap(block, layout.size());
        } else {
            // SAFETY: the caller got `block` from us with this layout, and we got it from `System`.
            unsafe { System.dealloc(block, layout) };
        }
        self.sub(layout.size());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    /// Blocks of all sizes are aligned, distinct, zero when asked for, and counted.
    #[test]
    fn blocks_are_distinct_and_counted() {
        let heap = Heap::new();
        let mut held: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..400usize {
            let size = [100, LARGE - 1, LARGE, LARGE + 1, 3 << 20, 7 << 20][round % 6];
            let layout = layout(size, [1, 8, 64, 4096, 8192][round % 5]);
            let fill = u8::try_from(round % 200).unwrap();
            // SAFETY: sizes are not zero; each block is written and read within its size, and freed
            // once with its layout.
            unsafe {
                let block = heap.alloc_zeroed(layout);
                assert!(!block.is_null() && block.addr().is_multiple_of(layout.align()));
                let bytes = std::slice::from_raw_parts_mut(block, size);
                assert!(bytes.iter().all(|&b| b == 0), "round {round}");
                bytes.fill(fill);
                held.push((block, layout, fill));
                if held.len() > 20 {
                    let (block, layout, fill) = held.swap_remove(round % 20);
                    let bytes = std::slice::from_raw_parts(block, layout.size());
                    assert!(bytes.iter().all(|&b| b == fill), "round {round}");
                    heap.dealloc(block, layout);
                }
            }
            let live: usize = held.iter().map(|(_, layout, _)| layout.size()).sum();
            assert_eq!(heap.live_bytes(), live as u64);
            let books = heap.books();
            assert!(books.used_bytes + books.kept_bytes <= books.most_used_bytes);
        }
        for (block, layout, _) in held {
            // SAFETY: as above.
            unsafe { heap.dealloc(block, layout) };
        }
        assert_eq!(heap.live_bytes(), 0);
        give_all_back(&heap);
    }

    fn kept(heap: &Heap) -> (usize, usize) {
        let books = heap.books();
        (books.count, books.kept_bytes)
    }

    fn give_all_back(heap: &Heap) {
        let mut books = heap.books();
        while books.count > 0 {
            let (address, length) = books.remove(0);
            release(address, length);
        }
        assert_eq!((books.kept_bytes, books.used_bytes), (0, 0));
    }

    /// Freed neighbours are joined, split for smaller blocks, and never exceed, with those in use, the
    /// most used at once.
    #[test]
    fn kept_blocks_are_joined_split_and_bounded() {
        let heap = Heap::new();
        let (small, big) = (layout(1 << 20, 8), layout(3 << 20, 8));
        // SAFETY: each block is freed once with its layout.
        unsafe {
            let first = heap.alloc(big);
            heap.dealloc(first, big);
            assert_eq!(kept(&heap), (1, 3 << 20));
            let parts = [heap.alloc(small), heap.alloc(small), heap.alloc(small)];
            assert_eq!(parts.map(|p| p.addr() - first.addr()), [0, 1 << 20, 2 << 20]);
            heap.dealloc(parts[0], small);
            heap.dealloc(parts[2], small);
            assert_eq!(kept(&heap), (2, 2 << 20));
            // 1 MiB in use, 2 kept, at most 3: 2 MiB in one piece need both kept ones to go.
            let middle = layout(2 << 20, 8);
            let other = heap.alloc(middle);
            assert_eq!(kept(&heap), (0, 0));
            heap.dealloc(parts[1], small);
            heap.dealloc(other, middle);
            assert_eq!(kept(&heap).1, 3 << 20);
        }
        give_all_back(&heap);
    }

    #[test]
    fn lengths_waste_at_most_an_eighth() {
        for size in (LARGE..64 << 20).step_by(100_001) {
            let length = length(size);
            assert!(length >= size && (length - size) * 8 <= size + 8 * GRANULE, "{size} {length}");
            assert!(length.is_multiple_of(GRANULE));
        }
        assert_eq!([length(2 << 20), length(8 << 20)], [2 << 20, 8 << 20]);
    }
}
