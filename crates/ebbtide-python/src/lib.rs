//! The Python extension `ebbtide._native`.
//!
//! | module | what is there |
//! | --- | --- |
//! | `python`, `group`, `packer`, `handle`, `chain` | what Python sees |
//! | `hub` | the groups of one engine configuration and their lock; `open` makes the unit of a device |
//! | `held`, `claim`, `graveyard` | what the engine knows a storage by, who has a share in it, what was dropped |
//! | `sole` | proof that nothing else uses a storage in place |
//! | `unit` | the engine of one device, whatever it moves with |
//! | `ram` | RAM into a file: torch's memory, lent to the tier's workers |
//! | `gather` | RAM into host memory |
//! | `outside` | storages that an object of Python looks after, of another framework |
//! | `accel` | accelerators, through torch's device-generic interface: `stream`, `pinned`; `quiet` hides it from modes |
//! | `torch`, `view`, `dlpack` | what is used of torch; how a tensor lies in its bytes |
//! | `plan` | traces, plans and the gates of a step |
//! | `pool` | explicit pools of host memory |
//! | `owned` | the lock of all this: beside the GIL, callbacks and forks |
//! | `error`, `log`, `picture`, `types` | exceptions, warnings, the timeline, the types that stubs show |
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]
#![allow(clippy::needless_pass_by_value, reason = "PyO3 hands arguments over by value")]

mod accel;
mod call;
mod chain;
mod claim;
mod dlpack;
mod error;
mod gather;
mod graveyard;
mod group;
mod handle;
mod held;
mod hub;
mod log;
mod malloc;
mod open;
mod outside;
mod owned;
mod packer;
mod picture;
mod pinned;
mod plan;
mod pool;
mod python;
mod quiet;
mod ram;
mod shelf;
mod sole;
mod stream;
mod torch;
mod types;
mod unit;
mod view;
mod waiting;

use pyo3::prelude::pymodule;

/// The engine of ebbtide for Python. Use it through `ebbtide.torch`.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::chain::Chain;
    #[pymodule_export]
    use super::group::{Group, SavedTensor};
    #[pymodule_export]
    use super::handle::{Handle, unpack};
    #[pymodule_export]
    use super::malloc::return_freed_memory;
    #[pymodule_export]
    use super::packer::{Keep, Packer};
    #[pymodule_export]
    use super::plan::{Gates, Plan, Recording, Trace, check_budget, check_plan};
    #[pymodule_export]
    use super::pool::Pool;
    #[pymodule_export]
    use super::python::Hub;

    /// Version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
