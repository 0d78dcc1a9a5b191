//! Which group is current, for each thread or task.
//!
//! The core has no threads: a front end numbers its executing contexts and passes the number in. A new
//! context starts with no group (row M1).

use std::collections::HashMap;

/// The current group of every context that has one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts(HashMap<u64, String>);

impl Contexts {
    /// The current group of a context.
    pub fn current(&self, context: u64) -> Option<&str> {
        self.0.get(&context).map(String::as_str)
    }

    /// Sets it, and returns what it was: who enters a group for a while sets that again at the end,
    /// also when it fails.
    ///
    /// ```
    /// let mut contexts = ebbtide_core::Contexts::default();
    /// let outer = contexts.set(7, Some("h.0".into()));
    /// let inner = contexts.set(7, Some("h.0.attention".into()));
    /// assert_eq!(contexts.current(7), Some("h.0.attention"));
    /// assert_eq!(contexts.current(8), None);
    /// contexts.set(7, inner);
    /// assert_eq!(contexts.current(7), Some("h.0"));
    /// contexts.set(7, outer);
    /// assert_eq!(contexts.current(7), None);
    /// ```
    pub fn set(&mut self, context: u64, group: Option<String>) -> Option<String> {
        match group {
            Some(group) => self.0.insert(context, group),
            None => self.0.remove(&context),
        }
    }
}
