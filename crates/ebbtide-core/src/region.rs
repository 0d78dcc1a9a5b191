//! The record of one region: what one call of a wrapped piece of code saved, in the structure and the
//! order in which it was saved (row R1).

/// One saved item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item<T, O> {
    /// A tensor.
    Tensor(T),
    /// Anything else. It is handed back as it is.
    Other(O),
    /// Items within one.
    List(Vec<Self>),
}

impl<T, O> Item<T, O> {
    /// The state that the item shows: a tensor's as `of` says, `non_tensor` for anything else, `list` for
    /// a list (row T1).
    pub fn state<'a>(&self, of: impl FnOnce(&T) -> &'a str) -> &'a str {
        match self {
            Self::Tensor(tensor) => of(tensor),
            Self::Other(_) => "non_tensor",
            Self::List(_) => "list",
        }
    }

    /// One line for debugging: a tensor's as `of` says, for anything else the type of the value (row
    /// T15).
    ///
    /// ```
    /// use ebbtide_core::Item;
    /// let item: Item<u32, f64> = Item::Other(0.5);
    /// assert_eq!(item.describe(|_| unreachable!()), "state non_tensor, value of type f64");
    /// ```
    pub fn describe(&self, of: impl FnOnce(&T) -> String) -> String {
        match self {
            Self::Tensor(tensor) => of(tensor),
            Self::Other(_) => {
                format!("state non_tensor, value of type {}", std::any::type_name::<O>())
            }
            Self::List(items) => format!("a list of {} items", items.len()),
        }
    }
}

/// Lists of items by key: the operation that saved them, or a running number.
///
/// ```
/// use ebbtide_core::{Item, Region};
/// let mut region: Region<&str, u32, f64> = Region::default();
/// region.items("attention").push(Item::Tensor(1));
/// region.items("gelu").push(Item::List(vec![Item::Other(0.5), Item::Tensor(2)]));
/// region.items("attention").push(Item::Tensor(3));
/// assert_eq!(region.tensors().copied().collect::<Vec<_>>(), [1, 3, 2]);
/// assert!(region.items("never saved").is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region<K, T, O> {
    entries: Vec<(K, Vec<Item<T, O>>)>,
}

impl<K, T, O> Default for Region<K, T, O> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<K: PartialEq, T, O> Region<K, T, O> {
    /// The items of a key. A new key gets an empty list.
    pub fn items(&mut self, key: K) -> &mut Vec<Item<T, O>> {
        let index = self.entries.iter().position(|(known, _)| *known == key);
        let index = index.unwrap_or_else(|| {
            self.entries.push((key, Vec::new()));
            self.entries.len() - 1
        });
        &mut self.entries[index].1
    }
}

impl<K, T, O> Region<K, T, O> {
    /// Keys and their items, in the order in which the keys were first used.
    pub fn entries(&self) -> impl Iterator<Item = (&K, &[Item<T, O>])> {
        self.entries.iter().map(|(key, items)| (key, &**items))
    }

    /// All tensors, however deep, in order.
    pub fn tensors(&self) -> impl Iterator<Item = &T> {
        let mut tensors = Vec::new();
        self.entries.iter().for_each(|(_, items)| collect(items, &mut tensors));
        tensors.into_iter()
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

fn collect<'a, T, O>(items: &'a [Item<T, O>], tensors: &mut Vec<&'a T>) {
    for item in items {
        match item {
            Item::Tensor(tensor) => tensors.push(tensor),
            Item::Other(_) => {}
            Item::List(items) => collect(items, tensors),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R1: nested and mixed items keep their structure; keys keep the order of their first use.
    #[test]
    fn r1_structure_and_order_are_preserved() {
        let mut region: Region<u32, char, &str> = Region::default();
        let nested = Item::List(vec![Item::Tensor('b'), Item::List(vec![]), Item::Other("x")]);
        region.items(7).push(Item::Tensor('a'));
        region.items(3).push(nested.clone());
        region.items(7).push(Item::Tensor('c'));
        let entries: Vec<_> = region.entries().map(|(key, items)| (*key, items.to_vec())).collect();
        assert_eq!(entries, [(7, vec![Item::Tensor('a'), Item::Tensor('c')]), (3, vec![nested])]);
        assert_eq!(region.tensors().collect::<String>(), "acb");
        region.clear();
        assert_eq!(region.tensors().count(), 0);
    }
}
