//! Large blocks that torch frees on a CPU go back to the system.
#![expect(unsafe_code, reason = "a setting of the C library")]

use pyo3::prelude::*;

/// From this size on a block is a mapping of its own, in bytes.
const THRESHOLD: libc::c_int = 256 << 10;

/// As much free memory stays at the top of the heap, in bytes: small storages that come and go would
/// otherwise make it shrink and grow again with every group.
const TRIM: libc::c_int = 64 << 20;

/// Makes the C library give large freed blocks back at once, for the rest of the process. By default it
/// raises its threshold with every large block that is freed, up to 32 MiB, and keeps blocks below it; the
/// memory of swapped tensors would then stay with the process.
///
/// Returns whether the C library can do it (glibc).
#[pyfunction]
pub(crate) fn return_freed_memory() -> bool {
    set()
}

#[cfg(target_env = "gnu")]
fn set() -> bool {
    // SAFETY: changes how later blocks are allocated, nothing else.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, THRESHOLD) == 1
            && libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM) == 1
    }
}

#[cfg(not(target_env = "gnu"))]
fn set() -> bool {
    let _ = (THRESHOLD, TRIM);
    false
}
