//! The hub for Python.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{phase, setting};
use crate::group::Group;
use crate::hub::{Hub as Shared, Settings, Tier};
use crate::pool::Pool;
use crate::types::Numbers;

/// One engine: a tier, its bounds, and the groups that are open in it. Opens a unit for each device whose
/// tensors it is given.
///
/// `tier` is `"file"` or `"host"`. Memory of the CPU goes to the file by default; that of an accelerator
/// to pinned host memory first, and to the file when that is full (`"host"`: to host memory only).
/// `spill_dir` is the folder of the file, `host_bytes` the bound of host memory in bytes, `prefetch` how
/// many groups ahead of backward are loaded. With `timeline` what runs when is remembered, for
/// `write_timeline`.
///
/// Raises `SettingError` for a setting that can't be used.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Hub(Arc<Shared>);

#[pymethods]
impl Hub {
    /// Checks the settings. Files and memory are opened with the first tensor, except the folder's.
    #[new]
    #[pyo3(signature = (*, tier: "str | None" = None, spill_dir = None, host_bytes: "int | None" = None, prefetch: "int" = 1, timeline: "bool" = false))]
    fn new(
        tier: Option<&str>,
        spill_dir: Option<PathBuf>,
        host_bytes: Option<u64>,
        prefetch: usize,
        timeline: bool,
    ) -> PyResult<Self> {
        let tier = match tier {
            None | Some("file") => Tier::File,
            Some("host") => Tier::Host,
            Some(other) => {
                let message = format!("there is no tier `{other}`");
                return Err(setting(&message, "use tier=\"file\" or tier=\"host\""));
            }
        };
        if host_bytes == Some(0) {
            return Err(setting(
                "host_bytes=0 leaves no host memory",
                "give a bound in bytes, or None",
            ));
        }
        ebbtide_store::host_bound(host_bytes).map_err(crate::hub::cannot_open)?;
        let spill_dir = spill_dir.unwrap_or_else(ebbtide_store::spill_dir);
        if tier == Tier::File {
            // Opened and closed again: a folder that can't be used is an error now, not in a step.
            drop(ebbtide_store::SpillFile::open(&spill_dir).map_err(crate::hub::cannot_open)?);
        }
        Ok(Self(Arc::new(Shared::new(Settings {
            tier,
            spill_dir,
            host_bytes,
            prefetch,
            timeline,
        }))))
    }

    /// The tier that was asked for.
    #[getter]
    fn tier(&self) -> &'static str {
        match self.0.settings.tier {
            Tier::File => "file",
            Tier::Host => "host",
        }
    }

    /// Bytes that the tier can hold: the free space of its folder, or the bound of host memory. 0: unknown.
    #[getter]
    fn capacity_bytes(&self) -> u64 {
        let settings = &self.0.settings;
        let capacity = match settings.tier {
            Tier::File => ebbtide_store::free_space(&settings.spill_dir),
            Tier::Host => ebbtide_store::host_bound(settings.host_bytes).ok(),
        };
        capacity.map_or(0, |bytes| bytes.max(1))
    }

    /// Opens a group for one layer in one pass. The same name may have any number of groups.
    ///
    /// Raises `PhaseError` if the hub is closed.
    #[pyo3(signature = (name, pass_: "int"))]
    fn open(&self, py: Python<'_>, name: &str, pass_: u64) -> PyResult<Group> {
        Group::open(py, &self.0, name, pass_)
    }

    /// Totals since the hub was made, in bytes, tensors and milliseconds; `live_bytes`, `active_groups` and
    /// what the tiers hold are of now.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Numbers<'py>> {
        let inner = self.0.lock(py)?;
        let (counters, store, host) = inner.counters();
        let tally = &self.0.tally;
        let stats = PyDict::new(py);
        let numbers = [
            ("bytes_out", counters.moved_out_bytes),
            ("bytes_in", counters.moved_in_bytes),
            ("tensors_out", tally.tensors_out.load(Ordering::Relaxed)),
            ("live_bytes", inner.live_bytes()),
            ("missed_prefetches", counters.missed_prefetches),
            ("not_freed_bytes", tally.not_freed_bytes.load(Ordering::Relaxed)),
            ("not_freed_tensors", tally.not_freed.load(Ordering::Relaxed)),
            ("active_groups", inner.groups.len() as u64),
            ("merged_views", counters.merged_views + inner.merged),
            ("bytes_held", store.bytes_held),
            ("host_allocated_bytes", host.0),
            ("host_in_use_bytes", host.1),
        ];
        for (name, number) in numbers {
            stats.set_item(name, number)?;
        }
        stats.set_item("wait_ms", self.0.waited_ns() as f64 / 1e6)?;
        Ok(Numbers(stats.into_any()))
    }

    /// What the engine noticed since the last call: one sentence each.
    #[pyo3(signature = () -> "list[str]")]
    fn take_warnings(&self) -> Vec<String> {
        self.0.log.take()
    }

    /// Waits for all copies out and lets their memory go.
    ///
    /// Raises as `Group.wait_offload`, for the first that failed.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.0.lock(py)?;
        let groups: Vec<u64> = inner.groups.keys().copied().collect();
        let mut first = Ok(());
        for group in groups
            .into_iter()
            .filter(|group| inner.phase(*group) == "offloading")
            .collect::<Vec<_>>()
        {
            inner.entry(group)?.phase = "away";
            crate::sole::keep_what_is_used(py, &self.0, &mut inner, group)?;
            let done = self
                .0
                .waiting("synchronize", || inner.each(group, |unit, id| unit.wait_offload(id)));
            first = first.and(done);
        }
        first
    }

    /// Acts on handles that were dropped meanwhile.
    fn collect(&self, py: Python<'_>) -> PyResult<()> {
        self.0.lock(py).map(drop)
    }

    /// Gives all groups up, or those of a pass: waits for their copies and gives everything back. Tensors
    /// that are away then can't be had any more; those on the device can.
    #[pyo3(signature = (pass_: "int | None" = None))]
    fn abandon(&self, py: Python<'_>, pass_: Option<u64>) -> PyResult<()> {
        let mut inner = self.0.lock(py)?;
        self.0.waiting("abandon", || inner.close_all(pass_));
        Ok(())
    }

    /// Gives host memory back that is not in use. Returns bytes.
    fn shrink(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.0.lock(py)?.units().map(|unit| unit.shrink()).sum())
    }

    /// Something begins on this thread, such as the forward of a layer, for the timeline. Returns its number;
    /// 0 without a timeline.
    fn mark_begin(&self, name: String) -> u64 {
        self.0.picture.as_ref().map_or(0, |picture| picture.begin(name))
    }

    /// What `mark_begin` gave this number ends now. Does nothing the second time, nor for 0.
    #[pyo3(signature = (number: "int"))]
    fn mark_end(&self, number: u64) {
        if let Some(picture) = &self.0.picture {
            picture.end(number);
        }
    }

    /// What `mark_begin` gave this number was given up, nobody knows when: it is not shown. Does nothing the
    /// second time, nor for 0.
    #[pyo3(signature = (number: "int"))]
    fn mark_give_up(&self, number: u64) {
        if let Some(picture) = &self.0.picture {
            picture.give_up(number);
        }
    }

    /// Writes what ran when, as JSON for the trace viewers of Perfetto and Chrome: what was marked, waits,
    /// copies of the file tier, and how many bytes were on the device and away. The file is replaced as a
    /// whole. Returns the number of events.
    ///
    /// Raises `SettingError` if the hub was made without `timeline`, or the file can't be written.
    fn write_timeline(&self, py: Python<'_>, path: PathBuf) -> PyResult<usize> {
        let Some(picture) = self.0.picture.clone() else {
            let hint = "open the session with timeline=True";
            return Err(setting("there is no timeline", hint));
        };
        py.detach(|| picture.write(&path)).map_err(|error| {
            let message = format!("can't write the timeline to {}: {error}", path.display());
            setting(&message, "name a file in a folder that exists and can be written to")
        })
    }

    /// A pool of at most `max_host_bytes` bytes of host memory, to take buffers from by hand, or for groups
    /// whose tensors go to host memory (`Group.add`).
    ///
    /// Raises `SettingError` for a bound of 0.
    #[pyo3(signature = (max_host_bytes: "int"))]
    #[expect(clippy::unused_self, reason = "a pool by hand needs nothing of the hub yet")]
    fn pool(&self, py: Python<'_>, max_host_bytes: u64) -> PyResult<Pool> {
        Pool::new(py, max_host_bytes)
    }

    /// Number of groups that are open.
    #[getter]
    fn active_groups(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.lock(py)?.groups.len())
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.0.lock(py)?.closed)
    }

    /// Gives everything up and back. Does nothing the second time, nor in a forked child, where nothing is the
    /// child's to give back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.0.is_here() {
            return Ok(());
        }
        let units = self.0.lock(py)?.shut();
        // Threads end and files close here.
        py.detach(|| drop(units));
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let inner = self.0.lock(py).map_err(|_| phase("the engine is at work", ""))?;
        Ok(format!("Hub({:?}, {} groups)", self.0.settings.tier, inner.groups.len()))
    }
}
