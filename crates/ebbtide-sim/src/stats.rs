//! The world's own bookkeeping of bytes.

/// What is in use, what was at most, and what has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of device memory in use.
    pub device_now: u64,
    /// The most that was in use at once.
    pub device_peak: u64,
    /// Bytes of pinned host memory in use.
    pub pinned_now: u64,
    /// The most that was in use at once.
    pub pinned_peak: u64,
    /// Bytes of the disk in use.
    pub disk_now: u64,
    /// The most that was in use at once.
    pub disk_peak: u64,
    /// How many host buffers were made.
    pub pins: u64,
    /// How many were freed.
    pub unpins: u64,
    /// How many copies were queued.
    pub copies: u64,
    /// Bytes copied from the device to the host.
    pub copied_out: u64,
    /// Bytes copied from the host to the device.
    pub copied_in: u64,
    /// Bytes that finished jobs wrote to the disk.
    pub disk_out: u64,
    /// Bytes that finished jobs read from the disk.
    pub disk_in: u64,
}
