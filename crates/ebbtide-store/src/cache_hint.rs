//! Asking the processor for memory before it is needed.
//!
//! Copying many small pieces waits at the start of each: the hardware follows addresses only within a
//! page. Naming the next piece while the current one is copied hides that.

/// Lines of a piece that are asked for; the hardware goes on from there.
#[cfg(target_arch = "x86_64")]
const LINES: usize = 32;
/// Bytes of one.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Brings the beginning of `bytes` closer to the processor, on processors that have an instruction for
/// it. Changes nothing else.
///
/// ```
/// ebbtide_store::prefetch(&[1, 2, 3]);
/// ```
#[inline]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(LINE).take(LINES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program can see and faults on no address; this one
        // lies within a slice anyway. SSE, which has it, is part of every x86-64.
        #[allow(unsafe_code, reason = "the intrinsic takes a pointer")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The same for memory that is about to be written: no other core has it afterwards.
///
/// ```
/// ebbtide_store::prefetch_to_write(&mut [1, 2, 3]);
/// ```
#[inline]
pub fn prefetch_to_write(bytes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks_mut(LINE).take(LINES) {
        // SAFETY: as above: the instruction has no effect that the program can see. Processors of this
        // family without it take it for a no-op.
        #[allow(unsafe_code, reason = "the intrinsic for it needs a feature that is not always on")]
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) line.as_mut_ptr(),
                options(nostack, preserves_flags, readonly)
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}
