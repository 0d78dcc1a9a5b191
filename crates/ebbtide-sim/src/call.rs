//! One call into the world, as a report names it.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// One call: what was asked for, its number in the world, and where in the source it was made.
///
/// A drop has no place of its own; it names the place where the dropped object was made.
#[derive(Clone, PartialEq, Eq)]
pub struct Call(Arc<Inner>);

#[derive(PartialEq, Eq)]
struct Inner {
    number: u64,
    what: String,
    place: &'static Location<'static>,
}

impl Call {
    pub(crate) fn new(number: u64, what: String, place: &'static Location<'static>) -> Self {
        Self(Arc::new(Inner { number, what, place }))
    }

    /// Number of the call in its world, from 0.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// What was asked for, such as `copy host#3[0..64] -> storage#7[0..64] on in`.
    pub fn what(&self) -> &str {
        &self.0.what
    }

    /// Where the call was made.
    pub fn place(&self) -> &'static Location<'static> {
        self.0.place
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { number, what, place } = &*self.0;
        write!(f, "{what} (call {number}, {}:{})", place.file(), place.line())
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
