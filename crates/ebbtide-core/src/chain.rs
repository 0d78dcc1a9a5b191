//! Which layer follows which: declared once, for prefetch and for "is it the last one" (row M3).
//!
//! A declaration is a hint about order. Where none is made, [`order`](crate::order) learns one.

use std::collections::HashMap;

use crate::error::{Error, Kind};

/// What a declaration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    /// The two layers are neighbours from now on.
    New,
    /// They were already.
    Known,
    /// A layer can't follow itself. Nothing changed.
    Itself,
}

/// Layers in chains. Several chains may exist side by side.
///
/// ```
/// use ebbtide_core::{Chain, Declared};
/// let mut chain = Chain::default();
/// assert_eq!(chain.follow("h.1", "h.2")?, Declared::New);
/// assert_eq!(chain.follow("h.0", "h.1")?, Declared::New);
/// assert_eq!(chain.next("h.0"), Some("h.1"));
/// assert!(chain.is_last("h.2") && !chain.is_last("h.1"));
/// let error = chain.follow("h.0", "h.2").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "layer `h.0` has the successor `h.1`, `h.2` can't be its successor as well"
/// );
/// # Ok::<(), ebbtide_core::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Chain {
    links: HashMap<String, Link>,
    /// Groups named so far; never counts back, so that names stay unique.
    named: u64,
}

#[derive(Debug)]
struct Link {
    group: String,
    previous: Option<String>,
    next: Option<String>,
}

impl Chain {
    /// Declares that `second` runs right after `first`. Each layer gets a group once. Pairs may come in
    /// any order.
    ///
    /// # Errors
    /// One of them has another neighbour on that side already, or the chain would become a circle.
    /// Nothing changed.
    pub fn follow(&mut self, first: &str, second: &str) -> Result<Declared, Error> {
        if first == second {
            return Ok(Declared::Itself);
        }
        if self.next(first) == Some(second) {
            return Ok(Declared::Known);
        }
        let taken = |layer: &str, side, declared: Option<&str>, wanted: &str| match declared {
            None => Ok(()),
            Some(declared) => Err(Error::new(Kind::Chain {
                layer: layer.into(),
                side,
                declared: declared.into(),
                wanted: wanted.into(),
            })),
        };
        taken(first, "successor", self.next(first), second)?;
        taken(second, "predecessor", self.previous(second), first)?;
        let mut after = self.next(second);
        while let Some(layer) = after {
            if layer == first {
                let (first, second) = (first.into(), second.into());
                return Err(Error::new(Kind::Circle { first, second }));
            }
            after = self.next(layer);
        }
        self.link(first).next = Some(second.into());
        self.link(second).previous = Some(first.into());
        Ok(Declared::New)
    }

    /// Takes a layer out: its neighbours become each other's (row M6). Nothing for one that is not in.
    ///
    /// ```
    /// let mut chain = ebbtide_core::Chain::default();
    /// chain.follow("h.0", "h.1")?;
    /// chain.follow("h.1", "h.2")?;
    /// chain.unlink("h.1");
    /// assert_eq!((chain.next("h.0"), chain.previous("h.2")), (Some("h.2"), Some("h.0")));
    /// # Ok::<(), ebbtide_core::Error>(())
    /// ```
    pub fn unlink(&mut self, layer: &str) {
        let Some(Link { previous, next, .. }) = self.links.remove(layer) else { return };
        if let Some(before) = previous.as_ref().and_then(|before| self.links.get_mut(before)) {
            before.next.clone_from(&next);
        }
        if let Some(after) = next.and_then(|after| self.links.get_mut(&after)) {
            after.previous = previous;
        }
    }

    fn link(&mut self, layer: &str) -> &mut Link {
        let named = &mut self.named;
        self.links.entry(layer.into()).or_insert_with(|| {
            *named += 1;
            Link { group: format!("{layer}#{named}"), previous: None, next: None }
        })
    }

    /// The name of a layer's group, unique for the life of the chain.
    pub fn group(&self, layer: &str) -> Option<&str> {
        self.links.get(layer).map(|link| &*link.group)
    }

    /// The layer that runs right after this one.
    pub fn next(&self, layer: &str) -> Option<&str> {
        self.links.get(layer)?.next.as_deref()
    }

    /// The layer that runs right before this one.
    pub fn previous(&self, layer: &str) -> Option<&str> {
        self.links.get(layer)?.previous.as_deref()
    }

    /// Whether a declared layer has none behind it: its backward comes first (row G9).
    pub fn is_last(&self, layer: &str) -> bool {
        self.links.get(layer).is_some_and(|link| link.next.is_none())
    }

    /// Whether the layer of a group has none behind it.
    pub fn is_last_group(&self, group: &str) -> bool {
        self.links.values().any(|link| link.group == group && link.next.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(pairs: &[(&str, &str)]) -> Chain {
        let mut chain = Chain::default();
        for (first, second) in pairs {
            assert_eq!(chain.follow(first, second).unwrap(), Declared::New);
        }
        chain
    }

    /// M3: pairs in any order make the same chain; the last mark moves as it grows.
    #[test]
    fn m3_any_order_of_pairs_and_the_last_mark() {
        let chain = declared(&[("b", "c"), ("a", "b")]);
        assert_eq!((chain.previous("b"), chain.next("b")), (Some("a"), Some("c")));
        let mut chain = declared(&[("a", "b")]);
        assert!(chain.is_last("b"));
        let group = chain.group("b").unwrap().to_string();
        assert!(chain.is_last_group(&group));
        let _ = chain.follow("b", "c").unwrap();
        assert!(!chain.is_last("b") && chain.is_last("c") && !chain.is_last_group(&group));
        assert_eq!(chain.group("b").unwrap(), group, "a layer gets its group once");
        assert_eq!(chain.follow("b", "c").unwrap(), Declared::Known);
        assert!(!chain.is_last("never declared"));
    }

    /// M3: a layer after itself changes nothing; another neighbour is an error with three names.
    #[test]
    fn m3_contradictions_change_nothing() {
        let mut chain = declared(&[("a", "b"), ("b", "c")]);
        assert_eq!(chain.follow("c", "c").unwrap(), Declared::Itself);
        assert!(chain.is_last("c") && chain.group("d").is_none());
        let error = chain.follow("d", "b").unwrap_err().to_string();
        assert_eq!(
            error,
            "layer `b` has the predecessor `a`, `d` can't be its predecessor as well"
        );
        assert!(chain.group("d").is_none());
        let error = chain.follow("c", "a").unwrap_err().to_string();
        assert_eq!(error, "`a` after `c` would make the chain a circle");
        assert!(chain.is_last("c"));
    }
    /// M6: a layer that is taken out leaves its neighbours to each other; at an end the mark moves.
    #[test]
    fn m6_a_layer_that_is_taken_out_joins_its_neighbours() {
        let mut chain = declared(&[("a", "b"), ("b", "c"), ("c", "d")]);
        let group = chain.group("b").unwrap().to_string();
        chain.unlink("b");
        assert_eq!((chain.next("a"), chain.previous("c")), (Some("c"), Some("a")));
        assert!(chain.group("b").is_none() && chain.next("b").is_none() && !chain.is_last("b"));
        assert!(!chain.is_last_group(&group));
        assert_eq!(chain.follow("a", "c").unwrap(), Declared::Known);
        chain.unlink("d");
        assert!(chain.is_last("c"));
        chain.unlink("a");
        assert_eq!(chain.previous("c"), None);
        chain.unlink("never declared");
        assert!(chain.is_last("c"));
    }

    /// M6: what was taken out may be declared again, elsewhere and as the way round that was a circle
    /// before, and gets a new group.
    #[test]
    fn m6_a_layer_that_was_taken_out_may_come_back() {
        let mut chain = declared(&[("a", "b"), ("b", "c")]);
        let group = chain.group("b").unwrap().to_string();
        assert!(chain.follow("c", "a").is_err());
        chain.unlink("b");
        assert_eq!(chain.follow("c", "b").unwrap(), Declared::New);
        assert!(chain.is_last("b") && chain.group("b").unwrap() != group);
        chain.unlink("a");
        chain.unlink("c");
        assert_eq!((chain.previous("b"), chain.next("b")), (None, None));
        assert!(chain.is_last("b"), "alone, it is the last of its chain");
    }
}
