//! Which process a tier belongs to.
//!
//! A child made by `fork` has a copy of the memory but none of the threads: a lock that a worker
//! held at that moment stays held for ever, jobs in the queue are never done, and yet the file is
//! the parent's own. A tier therefore remembers its process and refuses to work in any other.

use ebbtide_core::BackendError;

/// The process in which a tier was opened, by its number: a child has another one, unless it was
/// made in a namespace of its own and both are number 1 there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    /// This process.
    pub(crate) fn here() -> Self {
        Self(std::process::id())
    }

    /// Whether this process is the owner. One system call that blocks for nothing.
    pub(crate) fn is_here(self) -> bool {
        std::process::id() == self.0
    }

    /// An error in any other process than the owner.
    pub(crate) fn check(self) -> Result<(), BackendError> {
        let (owner, here) = (self.0, std::process::id());
        if owner == here {
            return Ok(());
        }
        let message = format!("the tier belongs to process {owner}, this is process {here}");
        Err(BackendError::new(message)
            .with_hint("after a fork, open a tier of its own in the child, or use threads instead"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c25_another_process_is_refused() {
        let here = Owner::here();
        assert!(here.is_here());
        here.check().unwrap();
        let other = Owner(here.0 + 1);
        assert!(!other.is_here());
        let error = other.check().unwrap_err();
        let text =
            format!("the tier belongs to process {}, this is process {}", here.0 + 1, here.0);
        assert_eq!(error.to_string(), text);
        assert!(error.hint().unwrap().contains("fork"));
    }
}
