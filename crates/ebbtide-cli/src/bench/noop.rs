//! A device that does nothing, to measure what the engine itself costs.

use ebbtide_core::{Accelerator, BackendError, Direction, End, Facts};

pub(crate) struct Noop;

impl Accelerator for Noop {
    /// Its number.
    type Storage = usize;
    type Block = ();
    type Host = ();
    type Stream = ();
    type Event = ();

    /// As far apart as storages of 4 KiB are.
    fn key(&self, storage: &usize) -> usize {
        *storage << 12
    }

    fn facts(&self, _: &usize) -> Option<Facts> {
        Some(Facts { bytes: super::STORAGE_BYTES, version: 0 })
    }

    fn compute(&self) {}

    fn copy_stream(&mut self, _: Direction) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&mut self, (): ()) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&mut self, (): (), (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn is_done(&mut self, (): &()) -> bool {
        true
    }

    fn sync(&mut self, (): &()) -> Result<(), BackendError> {
        Ok(())
    }

    fn sync_stream(&mut self, (): ()) -> Result<(), BackendError> {
        Ok(())
    }

    fn free(&mut self, _: &mut usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn restore(&mut self, _: &mut usize, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn stage(&mut self, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn pin(&mut self, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn copy(
        &mut self,
        (): (),
        _: End<'_, Self>,
        _: End<'_, Self>,
        _: u64,
    ) -> Result<(), BackendError> {
        Ok(())
    }
}
