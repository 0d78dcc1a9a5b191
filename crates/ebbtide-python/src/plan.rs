//! Traces, plans and the byte gates of a running step, for Python.
//!
//! A [`Trace`] is put together by Python, layer by layer. A [`Plan`] belongs to one. A [`Gates`] is one step
//! under a plan: Python says which operation comes next and which group leaves or was freed, and is told
//! whether it has to wait and which groups may be loaded. A group is what moves of a layer: what it saves
//! itself and what it saves of the layer before, so its loads start together, when the last of them may.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebbtide_core::gate::{Gate, Load};
use ebbtide_core::{MemoryBudget, Op, Phase};
use ebbtide_plan::trace::{LayerRecord, LinkRecord, StorageRecord, TierRecord, TraceBuilder};
use ebbtide_plan::{Model, PlanFile, Planned, Pure, Solver, predict, range};
use pyo3::prelude::*;

use crate::error::setting;

/// A step of a model as it was recorded: what each layer takes and saves. `ebbtide.trace` 1.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Trace {
    trace: ebbtide_plan::Trace,
    model: Model,
}

/// An error with its hint.
macro_rules! refused {
    ($what:expr, $error:expr) => {{
        let hint = $error.hint().to_string();
        setting(&format!("{}: {}", $what, $error), &hint)
    }};
}

/// Collects a `Trace`.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Recording(Mutex<TraceBuilder>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[pymethods]
impl Recording {
    /// A step of this program, with so many bytes on the device all the time.
    #[new]
    fn new(source: &str, static_bytes: u64, created_unix_s: u64) -> Self {
        let mut builder = TraceBuilder::new(source);
        builder.static_bytes(static_bytes).created(created_unix_s);
        Self(Mutex::new(builder))
    }

    /// The tier, as measured: what it holds (0: unknown), bytes a second out and in, nanoseconds a transfer.
    fn tier(&self, name: &str, capacity: u64, out_per_s: u64, in_per_s: u64, latency_ns: u64) {
        let link = |bytes_per_s| LinkRecord { bytes_per_s, bytes_per_s_busy: 0, latency_ns };
        locked(&self.0).tier(TierRecord {
            name: name.into(),
            capacity_bytes: capacity,
            out: link(out_per_s),
            back: link(in_per_s),
            compute_slowdown_permille: 1000,
            shared_duplex: false,
        });
    }

    /// The next layer: nanoseconds of its forward and backward, bytes that they need besides, and what it
    /// saves as `(name, bytes, kind)`. The kinds are `inner` (made again if the layer is), `fixed` (not),
    /// `output` (the next layer saves it) and `passed` (the next layer reads it, its backward does not).
    #[expect(clippy::too_many_arguments, reason = "named by keyword in Python")]
    fn layer(
        &self,
        name: &str,
        forward_ns: u64,
        backward_ns: u64,
        forward_temp_bytes: u64,
        backward_temp_bytes: u64,
        storages: Vec<(String, u64, String)>,
        why_not: Option<String>,
    ) -> PyResult<()> {
        let storages = storages.into_iter().map(record).collect::<PyResult<Vec<_>>>()?;
        locked(&self.0).layer(LayerRecord {
            name: name.into(),
            forward_ns,
            backward_ns,
            recompute_ns: forward_ns,
            forward_temp_bytes,
            backward_temp_bytes,
            recompute_temp_bytes: forward_temp_bytes,
            why_not,
            storages,
        });
        Ok(())
    }

    /// Nanoseconds of a step outside of its layers.
    fn fixed(&self, ns: u64) {
        locked(&self.0).step_fixed_ns(ns);
    }

    /// The trace.
    ///
    /// Raises `SettingError` if what was recorded makes no sense.
    fn finish(&self) -> PyResult<Trace> {
        let trace = locked(&self.0).clone().build();
        trace.map(Trace::of).map_err(|error| refused!("the recorded step can't be planned", error))
    }
}

fn record((name, bytes, kind): (String, u64, String)) -> PyResult<StorageRecord> {
    Ok(match kind.as_str() {
        "inner" => StorageRecord::inner(name, bytes),
        "fixed" => StorageRecord { recomputable: false, ..StorageRecord::inner(name, bytes) },
        "output" => StorageRecord::output(name, bytes, true),
        "passed" => StorageRecord::output(name, bytes, false),
        _ => {
            return Err(setting(&format!("{kind:?} is no kind of storage"), "see Recording.layer"));
        }
    })
}

impl Trace {
    fn of(trace: ebbtide_plan::Trace) -> Self {
        Self { model: trace.model(), trace }
    }
}

#[pymethods]
impl Trace {
    /// Reads the text of a trace file.
    ///
    /// Raises `SettingError` if it is none.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Self> {
        let trace = ebbtide_plan::Trace::parse(text);
        trace.map(Self::of).map_err(|error| refused!("this is no trace", error))
    }

    /// The text of its file.
    fn json(&self) -> String {
        self.trace.to_json()
    }

    /// Bytes that make a difference as a budget: those always there, the least that a plan was found for,
    /// what keeping everything takes, and what plain training takes.
    fn range(&self) -> (u64, u64, u64, u64) {
        let range = range(&self.model);
        (range.base, range.least, range.most, range.plain)
    }

    /// A budget in bytes, of a text such as `1.5GiB` or `40%`. Percents are of what plain training needs
    /// above what is always there.
    ///
    /// Raises `SettingError` for any other text.
    fn budget(&self, memory: &str) -> PyResult<u64> {
        budget(memory, || range(&self.model))
    }
}

/// A budget as a user writes it.
fn budget(memory: &str, range: impl FnOnce() -> ebbtide_plan::Range) -> PyResult<u64> {
    let hint = "memory takes bytes, or a text as \"1.5GiB\" or \"40%\"";
    match MemoryBudget::parse(memory) {
        Ok(MemoryBudget::Bytes(bytes)) => Ok(bytes),
        Ok(MemoryBudget::Percent(percent)) => Ok(range().percent(percent)),
        Err(error) => Err(setting(&format!("memory={memory:?}: {error}"), hint)),
    }
}

/// Checks a budget before there is a trace.
///
/// Raises `SettingError` for a text that is none.
#[pyfunction]
pub(crate) fn check_budget(memory: &str) -> PyResult<()> {
    let none = ebbtide_plan::Range { base: 0, least: 0, most: 0, plain: 0 };
    budget(memory, || none).map(drop)
}

/// Checks a plan's text before there is a trace.
///
/// Raises `SettingError` if it is none.
#[pyfunction]
pub(crate) fn check_plan(text: &str) -> PyResult<()> {
    PlanFile::parse(text).map(drop).map_err(|error| refused!("this is no plan", error))
}

/// What is done with each layer and each storage of a trace. `ebbtide.plan` 1.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Plan {
    planned: Planned,
    names: Vec<(String, Vec<String>)>,
    text: String,
}

impl Plan {
    fn of(trace: &Trace, planned: Planned) -> Self {
        let names = trace.model.layers.iter().map(|layer| {
            let storages = layer.storages.iter().map(|storage| storage.name.clone());
            (layer.name.clone(), storages.collect())
        });
        let text = PlanFile::new(&trace.model, trace.trace.sha256(), &planned).to_json();
        Self { planned, names: names.collect(), text }
    }
}

#[pymethods]
impl Plan {
    /// The fastest plan found that fits so many bytes. With `only` (`swap` or `recompute`) that which uses
    /// this alone.
    ///
    /// Raises `NoRoomError` if none fits: it names the least that one was found for.
    #[staticmethod]
    #[pyo3(signature = (trace, memory, only = None))]
    fn make(py: Python<'_>, trace: &Trace, memory: u64, only: Option<&str>) -> PyResult<Self> {
        let found = py.detach(|| match only {
            Some("swap") => ebbtide_plan::plan_pure(&trace.model, memory, Pure::Swap),
            Some(_) => ebbtide_plan::plan_pure(&trace.model, memory, Pure::Recompute),
            None => ebbtide_plan::plan(&trace.model, memory, Solver::Fast),
        });
        let planned = found.map_err(|none| {
            let (what, hint) = (none.to_string(), none.hint());
            crate::error::exception(crate::error::Class::NoRoom, &what, Some(&hint))
        })?;
        Ok(Self::of(trace, planned))
    }

    /// Reads the text of a plan file, for a model of which this is a trace.
    ///
    /// Raises `SettingError` if it is none, or does not fit.
    #[staticmethod]
    fn parse(trace: &Trace, text: &str) -> PyResult<Self> {
        let file = PlanFile::parse(text).map_err(|error| refused!("this is no plan", error))?;
        let what = "the plan that was given is refused";
        let plan = file.plan(&trace.model).map_err(|error| refused!(what, error))?;
        let budget = file.memory_bytes();
        let prediction =
            predict(&trace.model, &plan, budget).map_err(|error| refused!(what, error))?;
        let (bound_ns, proven, plays) = (0, false, 0);
        Ok(Self::of(trace, Planned { plan, prediction, budget, plays, bound_ns, proven }))
    }

    /// The text of its file.
    fn json(&self) -> &str {
        &self.text
    }

    /// The budget that it was made for, in bytes.
    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.planned.budget
    }

    /// The most bytes on the device at one moment.
    #[getter]
    fn predicted_peak_bytes(&self) -> u64 {
        self.planned.prediction.peak_bytes
    }

    /// How long a step takes, in milliseconds.
    #[getter]
    fn predicted_step_ms(&self) -> f64 {
        self.planned.prediction.step_ns as f64 / 1e6
    }

    /// By layer: its name, whether it is recomputed, and the names of its storages that are swapped.
    fn layers(&self) -> Vec<(String, bool, Vec<String>)> {
        let layers = self.planned.plan.layers.iter().zip(&self.names);
        let layers = layers.map(|(plan, (name, storages))| {
            let swapped = plan.swap.iter().map(|&at| storages[at].clone()).collect();
            (name.clone(), plan.recompute, swapped)
        });
        layers.collect()
    }

    /// The gates of one step.
    fn gates(&self) -> Gates {
        let schedule = &self.planned.prediction.schedule;
        let layers = schedule.recompute.len();
        let mut loads: Vec<Option<Load>> = vec![None; layers];
        for moved in &schedule.moves {
            // The layer that uses it first in backward is the one whose group it is in.
            let group = &mut loads[Op::at(moved.load.first_use, layers).layer];
            *group = Some(match *group {
                None => moved.load,
                Some(one) => Load {
                    bytes: one.bytes + moved.load.bytes,
                    earliest: one.earliest.max(moved.load.earliest),
                    first_use: one.first_use.min(moved.load.first_use),
                    channel: one.channel,
                    trigger: one.trigger.max(moved.load.trigger),
                },
            });
        }
        Gates(Mutex::new(Running { gate: schedule.gate(), loads, layers }))
    }
}

/// One step under a plan. Operations are `F`, `R` and `B` of a layer, by its number.
#[pyclass(frozen, module = "ebbtide._native")]
pub(crate) struct Gates(Mutex<Running>);

struct Running {
    gate: Gate,
    /// What the group of each layer has to load; taken when it starts.
    loads: Vec<Option<Load>>,
    layers: usize,
}

#[pymethods]
impl Gates {
    /// This operation comes next. False if it can't, since a later one was reached or there is no such layer:
    /// the step is another one than was planned.
    fn reach(&self, phase: char, layer: usize) -> bool {
        let mut running = locked(&self.0);
        let phase = match phase {
            'F' => Phase::Forward,
            'R' => Phase::Recompute,
            _ => Phase::Backward,
        };
        if layer >= running.layers {
            return false;
        }
        let op = Op::new(phase, layer).index(running.layers);
        let comes = op >= running.gate.op();
        if comes {
            running.gate.reach(op);
        }
        comes
    }

    /// Whether the operation fits now. If not it waits for a group that is on its way out.
    fn may_start(&self) -> bool {
        locked(&self.0).gate.may_start()
    }

    /// So many bytes have begun to leave.
    fn leaving(&self, bytes: u64) {
        locked(&self.0).gate.offload_pending(bytes);
    }

    /// So many bytes that were leaving are free.
    fn left(&self, bytes: u64) {
        locked(&self.0).gate.offload_done(bytes);
    }

    /// The next layer, from the last one back, whose group has not been loaded and may be now.
    fn next_load(&self) -> Option<usize> {
        let running = locked(&self.0);
        let (at, load) =
            running.loads.iter().enumerate().rev().find_map(|(at, l)| Some((at, l.as_ref()?)))?;
        running.gate.may_load(load).then_some(at)
    }

    /// The load of a layer's group has started, for whatever reason.
    fn loading(&self, layer: usize) {
        let mut running = locked(&self.0);
        if let Some(load) = running.loads.get_mut(layer).and_then(Option::take) {
            running.gate.load_started(&load);
        }
    }
}
