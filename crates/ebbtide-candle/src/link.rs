//! How fast the tier is, alone and while something is computed, and how much slower computing is
//! meanwhile.
//!
//! A few blocks make the journey that the storages of a layer make, through the same engine. It
//! takes a fraction of a second; what steps measure later corrects it.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use ebbtide_core::{GroupId, LayerId, Pass, Saved};
use ebbtide_plan::trace::{LinkRecord, TierRecord};

use crate::error::Error;
use crate::exchange::Held;
use crate::swap::{CpuEngine, Swap};

/// Blocks of one journey, and elements of `f32` in each.
const BLOCKS: usize = 6;
const ELEMENTS: usize = 1 << 19;
/// Journeys of each kind; the median counts.
const ROUNDS: usize = 3;
/// Elements of a block whose journey is all latency.
const SMALL: usize = 1 << 10;

/// One journey of a group out and back.
#[derive(Clone, Copy, Debug)]
struct Journey {
    out: Duration,
    back: Duration,
}

impl Swap {
    /// Bytes that the tier could hold when it was opened. 0: unknown, as in [`TierRecord`].
    pub(crate) fn capacity(&self) -> u64 {
        self.inner().capacity.map_or(0, |bytes| bytes.max(1))
    }

    /// Measures the tier, in well under a second where it is a disk of this century. `name` is what
    /// the trace calls it. Uses 12 MiB of memory for the time of the call.
    ///
    /// # Errors
    /// A copy failed.
    pub fn measure_tier(&self, name: &str) -> Result<TierRecord, Error> {
        let small = journeys(self, 1, SMALL, false)?.0;
        // The file grows and pages are touched for the first time: that journey does not count.
        journeys(self, BLOCKS, ELEMENTS, false)?;
        let (alone, quiet) = journeys(self, BLOCKS, ELEMENTS, false)?;
        let (busy, slow) = journeys(self, BLOCKS, ELEMENTS, true)?;
        let bytes = (BLOCKS * ELEMENTS * DType::F32.size_in_bytes()) as u64;
        let link = |part: fn(&Journey) -> Duration| LinkRecord {
            bytes_per_s: rate(bytes, part(&alone)),
            bytes_per_s_busy: rate(bytes, part(&busy).max(part(&alone))),
            latency_ns: u64::try_from(part(&small).as_nanos()).unwrap_or(u64::MAX) / 2,
        };
        let slowdown = if quiet > 0.0 && slow > 0.0 { quiet / slow } else { 1.0 };
        Ok(TierRecord {
            name: name.to_string(),
            capacity_bytes: self.capacity(),
            out: link(|journey| journey.out),
            back: link(|journey| journey.back),
            compute_slowdown_permille: permille(slowdown),
            shared_duplex: false,
        })
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is within bounds")]
fn permille(ratio: f64) -> u32 {
    (ratio.clamp(1.0, 3.0) * 1000.0) as u32
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates are positive")]
fn rate(bytes: u64, time: Duration) -> u64 {
    (bytes as f64 / time.as_secs_f64().max(1e-9)).max(1.0) as u64
}

/// The median journey, and how many units of work a second were done: beside it if `busy`, else
/// alone.
fn journeys(
    swap: &Swap,
    blocks: usize,
    elements: usize,
    busy: bool,
) -> Result<(Journey, f64), Error> {
    let tensors = (0..blocks)
        .map(|_| Tensor::ones(elements, DType::F32, &Device::Cpu))
        .collect::<candle_core::Result<Vec<Tensor>>>()?;
    let work = Tensor::ones((256, 256), DType::F32, &Device::Cpu)?;
    let engine = &mut swap.inner().engine;
    let (mut all, mut units, mut spent) = (Vec::new(), 0u32, Duration::ZERO);
    for _ in 0..ROUNDS {
        let group = engine.open(LayerId(0), Pass(0));
        for tensor in &tensors {
            if let Some((held, bytes)) = Held::new(tensor.clone()) {
                let _ = engine.register(group, Saved::whole(held, bytes))?;
            }
        }
        let journey = travel(engine, group, |engine| {
            let since = Instant::now();
            while busy && !engine.offload_is_complete(group) {
                unit(&work)?;
                units += 1;
            }
            spent += since.elapsed();
            Ok(())
        });
        engine.close(group);
        all.push(journey?);
        if !busy {
            let since = Instant::now();
            for _ in 0..20 {
                unit(&work)?;
            }
            (units, spent) = (units + 20, spent + since.elapsed());
        }
    }
    all.sort_by_key(|journey| journey.out + journey.back);
    Ok((all[ROUNDS / 2], f64::from(units) / spent.as_secs_f64().max(1e-9)))
}

fn travel(
    engine: &mut CpuEngine,
    group: GroupId,
    beside: impl FnOnce(&mut CpuEngine) -> Result<(), Error>,
) -> Result<Journey, Error> {
    let since = Instant::now();
    engine.start_offload(group)?;
    beside(engine)?;
    engine.wait_offload(group)?;
    let out = since.elapsed();
    let since = Instant::now();
    engine.start_load(group)?;
    engine.wait_load(group)?;
    Ok(Journey { out, back: since.elapsed() })
}

/// About what layers do: a matrix product and something element by element.
fn unit(work: &Tensor) -> candle_core::Result<()> {
    work.matmul(work)?.gelu().map(drop)
}
