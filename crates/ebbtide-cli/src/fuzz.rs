//! Entry points for the fuzz targets. No promise is made for them.

use candle_core::Device;

use crate::memory;
use crate::optim::AdamW;
use crate::params;
use crate::state::Saved;

/// Parses `bytes` as a saved run and, if they are one, restores it. Whether they are one.
///
/// # Panics
/// What was accepted can't be restored: a fault of the check.
pub fn resume(bytes: &[u8]) -> bool {
    let Ok(saved) = Saved::parse(bytes.to_vec()) else {
        return false;
    };
    let shape = &saved.header.shape;
    let params = params::create(shape, 1, &Device::Cpu).expect("the model of an accepted file");
    let adamw = AdamW::new(&params).expect("the moments of an accepted file");
    saved.restore(&adamw, &Device::Cpu).expect("the tensors of an accepted file");
    true
}

/// Bytes that `f` had on the heap at once, beyond those that were there before it.
pub fn heap_peak(f: impl FnOnce()) -> u64 {
    memory::peak_of(f)
}
