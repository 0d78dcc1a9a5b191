//! How much memory there is, how much this process may use, and how fast it copies.

use std::fs;

use ebbtide_store::measure::memory_copy_gbps;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::failure::Failure;
use crate::memory::kib_field;

/// Bytes of memory. What the system does not tell is `None`.
#[derive(Debug, Serialize)]
pub(super) struct Memory {
    pub(super) machine_bytes: Option<u64>,
    /// What the system could hand out now without swapping.
    pub(super) available_bytes: Option<u64>,
    /// The smallest of the machine's memory, the limits of the control groups, and the limit on the
    /// process's address space.
    pub(super) may_use_bytes: Option<u64>,
    /// Bytes that one thread copies, in 10^9 a second.
    pub(super) copy_gb_per_s: f64,
}

impl Memory {
    pub(super) fn measure() -> Result<Self, Failure> {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let limits = [ebbtide_store::memory_limit(), getrlimit(Resource::As).current];
        Ok(Self {
            machine_bytes: kib_field(&meminfo, "MemTotal:"),
            available_bytes: kib_field(&meminfo, "MemAvailable:"),
            may_use_bytes: limits.into_iter().flatten().min(),
            copy_gb_per_s: memory_copy_gbps()?,
        })
    }

    /// Whether something other than the size of the machine bounds this process.
    pub(super) fn is_limited(&self) -> bool {
        matches!((self.may_use_bytes, self.machine_bytes), (Some(may), Some(has)) if may < has)
    }
}
