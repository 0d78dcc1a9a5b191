//! The host tier: memory of the machine. On a CPU it saves nothing and serves tests; below an
//! accelerator it is the fast tier.

use std::collections::HashMap;
use std::fmt;
use std::time::Instant;

use ebbtide_core::{BackendError, Bytes, Done, Failed, Store, StoreStats, Ticket, Timing};

use crate::clock::nanos;
use crate::limits::memory_limit;
use crate::{AlignedBuf, GRAIN};

/// Settings of a [`HostStore`].
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Bytes that all slots together may hold, each rounded up to 4096. Default: `None`, all the
    /// memory this process may use.
    pub host_bytes: Option<u64>,
    /// Zero of the times in [`Timing`]. Default: the time of the call.
    pub origin: Instant,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { host_bytes: None, origin: Instant::now() }
    }
}

/// A block's bytes in host memory.
#[derive(Debug)]
pub struct HostSlot(AlignedBuf);

impl HostSlot {
    /// Length of the block that was put, in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// A tier in host memory, outside the Rust heap. Jobs are done at once, by the calling thread.
///
/// ```
/// use ebbtide_core::{Done, Store};
/// use ebbtide_store::{AlignedBuf, HostConfig, HostStore};
///
/// let mut store = HostStore::new(&HostConfig { host_bytes: Some(4096), ..Default::default() })?;
/// let ticket = store.put(AlignedBuf::zeroed(4000)?).map_err(|failed| failed.error)?;
/// assert!(store.is_done(ticket));
///
/// let failed = store.put(AlignedBuf::zeroed(1)?).unwrap_err();
/// assert_eq!(failed.block.len(), 1);
/// assert_eq!(
///     failed.error.to_string(),
///     "1 bytes don't fit into the host tier: 4096 bytes needed, 4096 of 4096 bytes in use"
/// );
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub struct HostStore<B> {
    outcomes: HashMap<Ticket, (Done<B, HostSlot>, Timing)>,
    next_ticket: u64,
    host_bytes: u64,
    origin: Instant,
    stats: StoreStats,
}

impl<B: Bytes> HostStore<B> {
    /// An empty tier.
    ///
    /// # Errors
    /// `host_bytes` is more than this process may use (see [`host_bound`]).
    pub fn new(config: &HostConfig) -> Result<Self, BackendError> {
        Ok(Self {
            outcomes: HashMap::new(),
            next_ticket: 0,
            host_bytes: host_bound(config.host_bytes)?,
            origin: config.origin,
            stats: StoreStats::default(),
        })
    }

    fn finish(&mut self, done: Done<B, HostSlot>, started_ns: u64) -> Ticket {
        let timing = Timing { started_ns, finished_ns: nanos(self.origin), worker: 0 };
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.outcomes.insert(ticket, (done, timing));
        ticket
    }

    /// The room that `bytes` take, if there is enough.
    fn room(&self, bytes: usize) -> Result<u64, BackendError> {
        let needed = held(bytes);
        let (in_use, maximum) = (self.stats.bytes_held, self.host_bytes);
        if needed > maximum - in_use {
            return Err(BackendError::new(format!(
                "{bytes} bytes don't fit into the host tier: \
                 {needed} bytes needed, {in_use} of {maximum} bytes in use"
            ))
            .no_room()
            .with_hint("raise --host-bytes or use --tier file"));
        }
        Ok(needed)
    }
}

/// Bytes of host memory that a tier or a pool may use at most: what was requested, or without a
/// request all that this process may use (see [`memory_limit`]; no bound if that is unknown).
///
/// # Errors
/// More was requested than this process may use: the kernel would end it instead of refusing.
///
/// # Examples
/// ```
/// use ebbtide_store::{host_bound, memory_limit};
///
/// assert_eq!(host_bound(Some(4096))?, 4096);
/// assert_eq!(host_bound(None)?, memory_limit().unwrap_or(u64::MAX));
/// if memory_limit().is_some() {
///     assert!(host_bound(Some(u64::MAX)).is_err());
/// }
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
///
/// As the bound of an accelerator's host memory, which respects the container's limit:
/// ```
/// use ebbtide_core::StagedConfig;
/// use ebbtide_store::host_bound;
///
/// let config = StagedConfig::new(host_bound(None)?);
/// assert!(config.host_bytes > 0);
/// # Ok::<(), ebbtide_core::BackendError>(())
/// ```
pub fn host_bound(requested: Option<u64>) -> Result<u64, BackendError> {
    within(requested, memory_limit().unwrap_or(u64::MAX))
}

fn within(host_bytes: Option<u64>, limit: u64) -> Result<u64, BackendError> {
    match host_bytes {
        Some(bytes) if bytes > limit => Err(BackendError::new(format!(
            "a host tier of {bytes} bytes is more than the {limit} bytes this process may use"
        ))
        .with_hint("lower --host-bytes or use --tier file")),
        bytes => Ok(bytes.unwrap_or(limit)),
    }
}

fn held(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(GRAIN as u64)
}

impl<B: Bytes> Store<B> for HostStore<B> {
    type Slot = HostSlot;

    fn put(&mut self, block: B) -> Result<Ticket, Failed<B>> {
        let started_ns = nanos(self.origin);
        let bytes = block.bytes();
        let reserved = self.room(bytes.len()).and_then(|needed| {
            let buf = AlignedBuf::zeroed(bytes.len())?;
            Ok((needed, buf))
        });
        let (needed, mut buf) = match reserved {
            Ok(reserved) => reserved,
            Err(error) => return Err(Failed { error, block }),
        };
        buf.as_mut_slice().copy_from_slice(bytes);
        self.stats.bytes_out += buf.len() as u64;
        self.stats.bytes_held += needed;
        Ok(self.finish(Done::Stored(HostSlot(buf), block.release()), started_ns))
    }

    /// # Panics
    /// The block has not the length of the one that was put.
    fn get(&mut self, slot: &HostSlot, mut block: B) -> Result<Ticket, Failed<B>> {
        let started_ns = nanos(self.origin);
        block.bytes_mut().copy_from_slice(slot.0.as_slice());
        self.stats.bytes_in += slot.bytes();
        Ok(self.finish(Done::Loaded(block), started_ns))
    }

    fn is_done(&mut self, ticket: Ticket) -> bool {
        self.outcomes.contains_key(&ticket)
    }

    /// # Panics
    /// The ticket was waited for already, or is another store's.
    fn wait(&mut self, ticket: Ticket) -> Result<(Done<B, HostSlot>, Timing), Failed<B>> {
        let outcome = self.outcomes.remove(&ticket);
        Ok(outcome.unwrap_or_else(|| panic!("{ticket:?} is not waited for exactly once")))
    }

    fn discard(&mut self, slot: HostSlot) {
        self.stats.bytes_held -= held(slot.0.len());
    }

    fn stats(&self) -> StoreStats {
        self.stats
    }
}

impl<B> fmt::Debug for HostStore<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostStore")
            .field("host_bytes", &self.host_bytes)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c15_the_bound_is_never_above_what_the_process_may_use() {
        assert_eq!(within(None, 1000).unwrap(), 1000);
        assert_eq!(within(Some(1000), 1000).unwrap(), 1000);
        let error = within(Some(1001), 1000).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a host tier of 1001 bytes is more than the 1000 bytes this process may use"
        );
        assert!(error.hint().unwrap().contains("--host-bytes"));
    }
}
