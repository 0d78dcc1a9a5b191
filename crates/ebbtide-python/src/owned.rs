//! A lock that is safe beside Python: beside the GIL, beside callbacks, and beside a fork.
//!
//! # Access contract
//!
//! * It is taken with the GIL held, and while it is held the GIL may be released (a copy is waited for).
//!   Whoever wants it meanwhile lets go of the GIL first, so nobody waits for the one while holding the
//!   other.
//! * A thread that has it gets an error instead of waiting for itself: Python code that runs while the
//!   lock is held must not call back.
//! * A child made by a fork has a copy, which another thread may have held at that moment. In there it is
//!   an error for ever, and what is behind it is never dropped: it belongs to the parent (case C25).

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::error::phase;

/// Something of this process behind a lock.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<Mutex<T>>,
    /// The thread that has the lock, as a number; 0 for none.
    thread: AtomicU64,
    process: Process,
}

/// The lock, held.
pub(crate) struct Locked<'a, T> {
    value: MutexGuard<'a, T>,
    thread: &'a AtomicU64,
}

/// A process. Asked for with every tensor, so the system isn't: the C library tells of forks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    id: u32,
    forks: u32,
}

/// Forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Whether the C library tells.
#[expect(unsafe_code, reason = "a function of C")]
fn forks_are_counted() -> bool {
    static COUNTED: OnceLock<bool> = OnceLock::new();
    // SAFETY: what is called in the child does nothing that is forbidden there, and is never unloaded:
    // Python keeps extensions.
    *COUNTED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 })
}

impl Process {
    /// This one.
    pub(crate) fn here() -> Self {
        forks_are_counted();
        Self { id: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }

    pub(crate) fn is_here(self) -> bool {
        if forks_are_counted() {
            self.forks == FORKS.load(Ordering::Relaxed)
        } else {
            self.id == std::process::id()
        }
    }

    /// An error in any other process.
    fn check(self) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let (owner, here) = (self.id, std::process::id());
        let message = format!("the engine belongs to process {owner}, this is process {here}");
        Err(phase(
            &message,
            "after a fork, open a session of its own in the child, or use threads instead",
        ))
    }
}

fn this_thread() -> u64 {
    thread_local!(static ID: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    });
    ID.with(|id| *id)
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        let value = ManuallyDrop::new(Mutex::new(value));
        Self { value, thread: AtomicU64::new(0), process: Process::here() }
    }

    /// Whether this process may use it.
    pub(crate) fn is_here(&self) -> bool {
        self.process.is_here()
    }

    /// Takes the lock, letting go of the GIL while another thread has it.
    ///
    /// # Errors
    /// This thread has it already, or this is a forked child.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Locked<'_, T>> {
        self.process.check()?;
        let me = this_thread();
        if self.thread.load(Ordering::Relaxed) == me {
            let hint = "don't use a session in a finalizer or a callback of the session itself";
            return Err(phase("the engine is at work in this very thread", hint));
        }
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.value.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
            }
        };
        self.thread.store(me, Ordering::Relaxed);
        Ok(Locked { value, thread: &self.thread })
    }
}

#[expect(unsafe_code, reason = "drops in one of two processes only")]
impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process.is_here() {
            // SAFETY: nobody uses it after this, and it is dropped nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Locked<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Locked<'_, T> {
    fn drop(&mut self) {
        self.thread.store(0, Ordering::Relaxed);
    }
}
