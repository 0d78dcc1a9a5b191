//! What a run leaves.

use std::fmt;

/// The result of playing one scenario.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What went wrong. Empty for a good run.
    pub reports: Vec<String>,
    /// Calls that can fail, of the engine into the world.
    pub calls: u64,
    /// How many faults reached the player as errors.
    pub errors: u64,
    /// Every call, if the scenario's machine keeps a trace.
    pub trace: Vec<String>,
}

impl Outcome {
    /// Nothing went wrong.
    pub fn is_good(&self) -> bool {
        self.reports.is_empty()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        for report in self.reports.iter().take(SHOWN) {
            writeln!(f, "  {report}")?;
        }
        let more = self.reports.len().saturating_sub(SHOWN);
        if more > 0 { writeln!(f, "  and {more} more") } else { Ok(()) }
    }
}
