//! What a world is made of: capacities, speeds, lateness and faults.

use crate::random::Ratio;

/// How a world is set up. The default is fast, has room, is late now and then and never fails.
#[derive(Clone, Debug)]
pub struct Options {
    /// What [`Accelerator::gathers`](ebbtide_core::Accelerator::gathers) says.
    pub gathers: bool,
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Bytes of host memory that can be pinned.
    pub pinned_bytes: u64,
    /// Size of the file in which slots are.
    pub disk_bytes: u64,
    /// How long things take.
    pub speeds: Speeds,
    /// How far that varies.
    pub lateness: Lateness,
    /// What fails.
    pub faults: Faults,
    /// Whether [`World::trace`](crate::World::trace) has anything to tell.
    pub trace: bool,
    /// After so many calls the world panics: the program does not come to an end.
    pub max_calls: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gathers: false,
            device_bytes: 1 << 40,
            pinned_bytes: 1 << 40,
            disk_bytes: 1 << 40,
            speeds: Speeds::default(),
            lateness: Lateness::default(),
            faults: Faults::default(),
            trace: false,
            max_calls: u64::MAX,
        }
    }
}

/// Bandwidths in bytes per second, and latencies.
#[derive(Clone, Debug)]
pub struct Speeds {
    /// Kernels, and copies inside the device.
    pub kernel: u64,
    /// Copies from the device.
    pub copy_out: u64,
    /// Copies to the device.
    pub copy_in: u64,
    /// Writes to the disk.
    pub disk_write: u64,
    /// Reads from the disk.
    pub disk_read: u64,
    /// What each kernel takes besides.
    pub kernel_ns: u64,
    /// What each copy takes besides.
    pub copy_ns: u64,
    /// What each job of the disk takes besides.
    pub disk_ns: u64,
    /// What each call takes the host.
    pub call_ns: u64,
}

impl Default for Speeds {
    fn default() -> Self {
        Self {
            kernel: 1_000_000_000_000,
            copy_out: 25_000_000_000,
            copy_in: 25_000_000_000,
            disk_write: 3_000_000_000,
            disk_read: 3_000_000_000,
            kernel_ns: 2_000,
            copy_ns: 3_000,
            disk_ns: 40_000,
            call_ns: 1_000,
        }
    }
}

/// How often something takes far longer than it should.
#[derive(Clone, Debug)]
pub struct Lateness {
    /// Kernels.
    pub kernels: Ratio,
    /// Copies to and from the device.
    pub copies: Ratio,
    /// Jobs of the disk.
    pub disk: Ratio,
    /// Calls of the host.
    pub host: Ratio,
    /// The longest that late is, as a multiple.
    pub times: u64,
    /// Whether what is on time varies by half, too.
    pub jitter: bool,
}

impl Lateness {
    /// Everything takes exactly what [`Speeds`] says: for predictions.
    pub const NONE: Self = Self {
        kernels: Ratio::NEVER,
        copies: Ratio::NEVER,
        disk: Ratio::NEVER,
        host: Ratio::NEVER,
        times: 1,
        jitter: false,
    };
}

impl Default for Lateness {
    fn default() -> Self {
        Self {
            kernels: Ratio(1, 5),
            copies: Ratio(1, 4),
            disk: Ratio(1, 4),
            host: Ratio(1, 12),
            times: 60,
            jitter: true,
        }
    }
}

/// A call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Function {
    /// [`Accelerator::copy_stream`](ebbtide_core::Accelerator::copy_stream)
    CopyStream,
    /// [`Accelerator::record`](ebbtide_core::Accelerator::record)
    Record,
    /// [`Accelerator::wait`](ebbtide_core::Accelerator::wait)
    Wait,
    /// [`Accelerator::sync`](ebbtide_core::Accelerator::sync)
    Sync,
    /// [`Accelerator::sync_stream`](ebbtide_core::Accelerator::sync_stream)
    SyncStream,
    /// [`Accelerator::free`](ebbtide_core::Accelerator::free)
    Free,
    /// [`Accelerator::restore`](ebbtide_core::Accelerator::restore)
    Restore,
    /// [`Accelerator::stage`](ebbtide_core::Accelerator::stage)
    Stage,
    /// [`Accelerator::pin`](ebbtide_core::Accelerator::pin)
    Pin,
    /// [`Accelerator::copy`](ebbtide_core::Accelerator::copy)
    Copy,
    /// [`Store::put`](ebbtide_core::Store::put), at the call
    Put,
    /// [`Store::get`](ebbtide_core::Store::get), at the call
    Get,
    /// [`Store::wait`](ebbtide_core::Store::wait) for a put
    WaitPut,
    /// [`Store::wait`](ebbtide_core::Store::wait) for a get
    WaitGet,
}

impl Function {
    /// Every one.
    pub const ALL: [Self; 14] = [
        Self::CopyStream,
        Self::Record,
        Self::Wait,
        Self::Sync,
        Self::SyncStream,
        Self::Free,
        Self::Restore,
        Self::Stage,
        Self::Pin,
        Self::Copy,
        Self::Put,
        Self::Get,
        Self::WaitPut,
        Self::WaitGet,
    ];

    /// Whether it is a call of the device; the others are calls of the disk.
    pub fn is_device(self) -> bool {
        !matches!(self, Self::Put | Self::Get | Self::WaitPut | Self::WaitGet)
    }
}

/// What fails. A failed call has no effect. Calls that can fail are numbered from 0, through all
/// functions of all devices and disks of the world.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The call of this number fails.
    pub fail_call: Option<u64>,
    /// The calls of these numbers fail.
    pub fail_calls: std::ops::Range<u64>,
    /// The call of this number of one function fails, counted from 0 for the function alone.
    pub fail_function: Option<(Function, u64)>,
    /// How often a call of the device fails.
    pub device: Ratio,
    /// How often a call of the disk fails.
    pub disk: Ratio,
    /// From the call of this number on the device is lost: its calls fail, work on its streams has
    /// stopped, every event is done. It stays lost.
    pub lost_at: Option<u64>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            fail_call: None,
            fail_calls: 0..0,
            fail_function: None,
            device: Ratio::NEVER,
            disk: Ratio::NEVER,
            lost_at: None,
        }
    }
}
