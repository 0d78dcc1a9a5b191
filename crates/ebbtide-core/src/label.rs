//! Names of tensors, each text kept once.

use std::collections::HashMap;

/// A name of a tensor, kept by the engine that interned it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Label(u32);

/// The names that an engine knows (row T2: labels are interned).
#[derive(Debug)]
pub struct Labels {
    names: Vec<Box<str>>,
    numbers: HashMap<Box<str>, u32>,
}

impl Default for Labels {
    fn default() -> Self {
        let mut labels = Self { names: Vec::new(), numbers: HashMap::new() };
        // Number 0 is `Label::default()`.
        let _ = labels.intern("a tensor");
        labels
    }
}

impl Labels {
    /// The label of this text, the same one every time.
    ///
    /// ```
    /// let mut labels = ebbtide_core::Labels::default();
    /// let label = labels.intern("h.0 gelu [4, 256]");
    /// assert_eq!(labels.intern("h.0 gelu [4, 256]"), label);
    /// assert_eq!(labels.name(label), "h.0 gelu [4, 256]");
    /// ```
    ///
    /// # Panics
    /// After 2³² different names.
    pub fn intern(&mut self, name: &str) -> Label {
        if let Some(&number) = self.numbers.get(name) {
            return Label(number);
        }
        let number = u32::try_from(self.names.len()).expect("fewer than 2^32 labels");
        self.names.push(name.into());
        self.numbers.insert(name.into(), number);
        Label(number)
    }

    /// The text of a label; of one that another set interned, whatever has its number here.
    pub fn name(&self, label: Label) -> &str {
        self.names.get(label.0 as usize).map_or("a tensor", |name| name)
    }
}
