//! Many seeds, on several threads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::play::features::Feature;
use crate::play::outcome::Outcome;
use crate::play::scenario::Scenario;

/// What many runs leave.
#[derive(Debug, Default)]
pub struct Sweep {
    /// The seeds with reports: the first run of each that has any.
    pub bad: BTreeMap<u64, (Scenario, Outcome)>,
    /// How many runs had an error to cope with.
    pub with_errors: u64,
    /// Places in the engine that were reached.
    #[cfg(feature = "marks")]
    pub marks: std::collections::BTreeSet<ebbtide_core::mark::Mark>,
}

impl Sweep {
    /// The seeds with reports, each with its options and the command that repeats it.
    pub fn describe(&self, forced: &[Feature]) -> String {
        let with: Vec<_> =
            forced.iter().map(|feature| format!(" --with {}", feature.name())).collect();
        let with = with.concat();
        let describe = |(seed, (scenario, outcome)): (&u64, &(Scenario, Outcome))| {
            let (count, mix) = (outcome.reports.len(), &scenario.mix);
            format!(
                "seed {seed}: {count} reports\n  options: {mix}\n{outcome}  repeat with: scripts/sim \
                 --seeds 1 --first {seed}{with} --verbose\n"
            )
        };
        self.bad.iter().map(describe).collect()
    }
}

/// Plays every seed of a range.
///
/// # Panics
/// Never: a panic of a run is one of its reports.
pub fn sweep(seeds: Range<u64>, forced: &[Feature], threads: usize) -> Sweep {
    let next = AtomicU64::new(seeds.start);
    let result = Mutex::new(Sweep::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    for scenario in Scenario::rounds(seed, forced) {
                        let outcome = scenario.play();
                        let mut all = result.lock().expect("a panic of a run is caught");
                        all.with_errors += u64::from(outcome.errors > 0);
                        if !outcome.is_good() {
                            all.bad.insert(seed, (scenario, outcome));
                            break;
                        }
                    }
                }
                #[cfg(feature = "marks")]
                {
                    let mut all = result.lock().expect("a panic of a run is caught");
                    all.marks.extend(ebbtide_core::mark::seen());
                }
            });
        }
    });
    result.into_inner().expect("a panic of a run is caught")
}
