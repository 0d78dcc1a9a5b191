//! Decides which call fails.

use std::collections::BTreeMap;

use crate::options::{Faults, Function};
use crate::random::Random;

/// How a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Works,
    Fails,
    Lost,
}

/// Counts calls that can fail.
#[derive(Debug)]
pub(crate) struct Injector {
    faults: Faults,
    random: Random,
    calls: u64,
    of_function: BTreeMap<Function, u64>,
    lost: bool,
}

impl Injector {
    pub(crate) fn new(faults: Faults, random: Random) -> Self {
        Self { faults, random, calls: 0, of_function: BTreeMap::new(), lost: false }
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    pub(crate) fn set(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Nothing fails from now on, but a lost device stays lost.
    pub(crate) fn heal(&mut self) {
        self.faults = Faults::default();
    }

    /// Takes the number of the next call.
    pub(crate) fn next(&mut self, function: Function) -> Verdict {
        let number = self.calls;
        self.calls += 1;
        let counter = self.of_function.entry(function).or_default();
        let of_function = (function, *counter);
        *counter += 1;
        let faults = &self.faults;
        self.lost |= faults.lost_at.is_some_and(|from| number >= from);
        let rate = if function.is_device() { faults.device } else { faults.disk };
        let unlucky = self.random.chance(rate);
        if self.lost && function.is_device() {
            Verdict::Lost
        } else if unlucky
            || faults.fail_call == Some(number)
            || faults.fail_calls.contains(&number)
            || faults.fail_function == Some(of_function)
        {
            Verdict::Fails
        } else {
            Verdict::Works
        }
    }
}
