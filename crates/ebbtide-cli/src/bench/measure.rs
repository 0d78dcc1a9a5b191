//! The measuring of `ebbtide bench`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ebbtide_core::{
    Accelerator, BackendError, Config, Engine, Error, HostPool, LayerId, NoDisk, Pass, PoolId,
    Saved, Staged, StagedConfig,
};

use ebbtide_store::AlignedBuf;

use super::noop::Noop;
use super::ram::Ram;
use super::{STORAGE_BYTES, STORAGES};
use crate::failure::{Failure, with_causes};
use crate::memory;

pub(super) struct Bookkeeping {
    /// Of one storage in one step.
    pub(super) ns: f64,
    /// The most that a step after the first one allocated.
    pub(super) allocated: u64,
}

pub(super) struct Packed {
    pub(super) packed_gbps: f64,
    pub(super) large_gbps: f64,
}

pub(super) struct Pool {
    pub(super) asked: f64,
    pub(super) held: f64,
}

fn failed(error: impl Into<BackendError>) -> Failure {
    let error = error.into();
    Failure::run_time(with_causes(&error), error.hint().unwrap_or("free some memory"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

type Moved<A> = Engine<Staged<A, NoDisk>>;

fn engine<A: Accelerator>(device: A) -> Moved<A> {
    let mover = Staged::new(&StagedConfig::new(1 << 30), device, None);
    Engine::new(Config::default(), mover)
}

/// All storages out and home. Returns how long that took without the registration, which on a real
/// device happens while the layer computes.
fn step<A: Accelerator>(
    engine: &mut Moved<A>,
    storages: impl Iterator<Item = A::Storage>,
) -> Result<Duration, Error> {
    let label = engine.label("h.0 gelu [1024]");
    let group = engine.open(LayerId(0), Pass(0));
    for storage in storages {
        let saved = Saved::whole(storage, STORAGE_BYTES).label(label).pack();
        let _ = engine.register(group, saved)?;
    }
    let begun = Instant::now();
    engine.start_offload(group)?;
    engine.wait_offload(group)?;
    engine.start_load(group)?;
    engine.wait_load(group)?;
    let moved = begun.elapsed();
    engine.close(group);
    engine.finish_backward();
    Ok(moved)
}

pub(super) fn bookkeeping(rounds: usize) -> Result<Bookkeeping, Failure> {
    let mut engine = engine(Noop);
    step(&mut engine, 0..STORAGES).map_err(failed)?;
    let (mut times, mut allocated) = (Vec::with_capacity(rounds), 0);
    for _ in 0..rounds {
        let begun = Instant::now();
        let mut done = Ok(Duration::ZERO);
        let taken = memory::peak_of(|| done = step(&mut engine, 0..STORAGES));
        times.push(begun.elapsed().as_nanos() as f64 / STORAGES as f64);
        done.map_err(failed)?;
        allocated = allocated.max(taken);
    }
    Ok(Bookkeeping { ns: median(times), allocated })
}

pub(super) fn packed(rounds: usize) -> Result<Packed, Failure> {
    let bytes = STORAGES * 4096;
    let mut engine = engine(Ram::new(bytes).map_err(failed)?);
    let mut storages = Vec::with_capacity(STORAGES);
    for _ in 0..STORAGES {
        storages.push(engine.mover_mut().device_mut().storage(STORAGE_BYTES).map_err(failed)?);
    }
    let aligned = || AlignedBuf::zeroed(bytes).map_err(failed);
    let (mut device, mut host) = (aligned()?, aligned()?);
    // Larger than the caches, so that both find theirs cold.
    let mut other = vec![0u8; 256 << 20];
    let (mut packed, mut large) = (Vec::new(), Vec::new());
    // Each byte goes out and comes home.
    let rate = |time: Duration| 2.0 * bytes as f64 / time.as_nanos() as f64;
    for round in 0..=rounds {
        black_box(&mut other[..]).fill(1);
        let moved = step(&mut engine, storages.iter().cloned()).map_err(failed)?;
        black_box(&mut other[..]).fill(2);
        let begun = Instant::now();
        black_box(host.as_mut_slice()).copy_from_slice(black_box(device.as_slice()));
        black_box(device.as_mut_slice()).copy_from_slice(black_box(host.as_slice()));
        let copied = begun.elapsed();
        // The first step takes memory for the first time.
        if round > 0 {
            packed.push(rate(moved));
            large.push(rate(copied));
        }
    }
    Ok(Packed { packed_gbps: median(packed), large_gbps: median(large) })
}

pub(super) fn pool() -> Result<Pool, Failure> {
    let asked = (11 << 30) / 10;
    let mut pool = HostPool::new(PoolId(0), 2 << 30);
    let _buffer = pool.acquire(&mut Noop, asked).map_err(failed)?;
    let held = pool.stats().allocated as f64;
    Ok(Pool { asked: asked as f64, held })
}
