//! Vector clocks: who has seen how much of whom.

/// The host's number among the actors.
pub(crate) const HOST: usize = 0;

/// For every actor, how many of its steps are known to be complete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// How many steps of an actor are known.
    pub(crate) fn of(&self, actor: usize) -> u64 {
        self.0.get(actor).copied().unwrap_or(0)
    }

    /// One more step of an actor.
    pub(crate) fn tick(&mut self, actor: usize) {
        if self.0.len() <= actor {
            self.0.resize(actor + 1, 0);
        }
        self.0[actor] += 1;
    }

    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_knows_what_both_knew() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        a.tick(0);
        a.tick(0);
        b.tick(3);
        a.join(&b);
        assert_eq!((a.of(0), a.of(1), a.of(3), a.of(9)), (2, 0, 1, 0));
        b.join(&a);
        assert_eq!(a, b);
    }
}
