//! What threads share is made of these: std's types, or those of loom, which runs a model through
//! every order in which its threads can meet (`scripts/loom`).

use std::sync::PoisonError;

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks. Only for state that a panic cannot leave half-changed: a poisoned lock is taken, too.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the condition as long as `blocked` holds. In a loop, since condition variables wake
/// without a reason, too; loom has no `wait_while` of its own.
pub(crate) fn wait_while<'a, T>(
    condition: &Condvar,
    mut guard: MutexGuard<'a, T>,
    blocked: impl Fn(&T) -> bool,
) -> MutexGuard<'a, T> {
    while blocked(&guard) {
        guard = condition.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
    guard
}
