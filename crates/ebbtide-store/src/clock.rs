use std::time::Instant;

/// Nanoseconds since `origin`; 584 years fit.
pub(crate) fn nanos(origin: Instant) -> u64 {
    u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
