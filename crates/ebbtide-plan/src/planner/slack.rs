//! How many bytes an operation has left: the most of a range, and adding to a range, in a tree.

/// Bytes by operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Profile {
    /// Number of leaves, a power of two.
    leaves: usize,
    /// The most below a node, without what was added above it.
    most: Vec<i64>,
    /// What was added to all below a node.
    added: Vec<i64>,
}

impl Profile {
    /// Begins anew with these bytes.
    pub(crate) fn fill(&mut self, bytes: &[u64]) {
        self.leaves = bytes.len().next_power_of_two();
        self.most.clear();
        self.most.resize(2 * self.leaves, i64::MIN / 4);
        self.added.clear();
        self.added.resize(2 * self.leaves, 0);
        for (at, &bytes) in bytes.iter().enumerate() {
            self.most[self.leaves + at] = i64::try_from(bytes).unwrap_or(i64::MAX / 4);
        }
        for node in (1..self.leaves).rev() {
            self.most[node] = self.most[2 * node].max(self.most[2 * node + 1]);
        }
    }

    /// Adds to all operations from `from` on and before `to`.
    pub(crate) fn add(&mut self, from: usize, to: usize, bytes: i64) {
        if from >= to {
            return;
        }
        let (mut low, mut high) = (self.leaves + from, self.leaves + to);
        let (first, last) = (low, high - 1);
        while low < high {
            if low % 2 == 1 {
                self.raise(low, bytes);
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                self.raise(high, bytes);
            }
            (low, high) = (low / 2, high / 2);
        }
        self.repair(first);
        self.repair(last);
    }

    fn raise(&mut self, node: usize, bytes: i64) {
        self.most[node] += bytes;
        self.added[node] += bytes;
    }

    fn repair(&mut self, leaf: usize) {
        let mut node = leaf / 2;
        while node > 0 {
            let below = self.most[2 * node].max(self.most[2 * node + 1]);
            self.most[node] = below + self.added[node];
            node /= 2;
        }
    }

    /// The most of the operations from `from` on and before `to`; very little if there is none.
    pub(crate) fn most(&self, from: usize, to: usize) -> i64 {
        if from >= to {
            return i64::MIN / 4;
        }
        self.most_below(1, 0, self.leaves, from, to)
    }

    fn most_below(&self, node: usize, start: usize, len: usize, from: usize, to: usize) -> i64 {
        if from <= start && start + len <= to {
            return self.most[node];
        }
        if to <= start || start + len <= from {
            return i64::MIN / 4;
        }
        let half = len / 2;
        let left = self.most_below(2 * node, start, half, from, to);
        let right = self.most_below(2 * node + 1, start + half, half, from, to);
        left.max(right) + self.added[node]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A plain list says the same.
        #[test]
        fn as_a_list(
            mut list in prop::collection::vec(0..1000u64, 1..40),
            changes in prop::collection::vec((0..40usize, 0..40usize, 0..50u64), 0..30),
        ) {
            let mut profile = Profile::default();
            profile.fill(&list);
            for (from, to, bytes) in changes {
                let (from, to) = (from.min(list.len()), to.min(list.len()));
                profile.add(from, to, i64::try_from(bytes).unwrap());
                if from < to {
                    list[from..to].iter_mut().for_each(|item| *item += bytes);
                    let most = *list[from..to].iter().max().unwrap();
                    prop_assert_eq!(profile.most(from, to), i64::try_from(most).unwrap());
                }
                let most = *list.iter().max().unwrap();
                prop_assert_eq!(profile.most(0, list.len()), i64::try_from(most).unwrap());
            }
        }
    }
}
