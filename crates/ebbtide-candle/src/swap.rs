//! The engine of one model: settings, what is known of its layers, totals.

use std::cell::{RefCell, RefMut};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Storage, Tensor};
use ebbtide_core::{
    Config, Direct, Engine, Event, GroupId, LayerId, Pass, Policies, Policy, Registered, Saved,
};
use ebbtide_store::{
    AnyStore, FileConfig, FileStore, HostConfig, HostStore, Row, Throttle, Timeline, free_space,
    host_bound, spill_dir,
};

use crate::error::{Error, Kind};
use crate::exchange::{Block, CandleCpu, Held};
use crate::graph::{Owned, Signature};
use crate::overlap::Copies;
use crate::probe::{Budget, Form};
use crate::run::{Course, Run};
use crate::step::Step;

/// Where swapped bytes go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tier {
    /// A spill file in this folder, without a name, gone with the process.
    File {
        /// The folder. It should be on a disk: a folder in RAM saves nothing.
        dir: PathBuf,
    },
    /// Host memory. On a CPU machine the device is host memory too, so this saves nothing; it is
    /// for tests.
    Host,
}

/// Settings of a [`Swap`].
#[derive(Clone, Debug)]
pub struct SwapBuilder {
    policies: Policies,
    tier: Tier,
    host_bytes: Option<u64>,
    prefetch: usize,
    throttle: Option<Throttle>,
    probe: bool,
    timeline: Option<Timeline>,
}

impl SwapBuilder {
    /// Where swapped bytes go. Default: a file in [`ebbtide_store::spill_dir`].
    #[must_use]
    pub fn tier(mut self, tier: Tier) -> Self {
        self.tier = tier;
        self
    }

    /// Bytes of host memory that the tier may use: the capacity of [`Tier::Host`], and of
    /// [`Tier::File`] what may wait in its queue. Default: no limit, and 256 MiB.
    #[must_use]
    pub fn host_bytes(mut self, bytes: u64) -> Self {
        self.host_bytes = Some(bytes);
        self
    }

    /// How many layers ahead of backward are brought home. Default: 1. 0 loads on demand.
    #[must_use]
    pub fn prefetch(mut self, layers: usize) -> Self {
        self.prefetch = layers;
        self
    }

    /// Holds the file tier to so many gigabytes a second out and in, to try out what a slower one
    /// does. Default: as fast as it goes.
    #[must_use]
    pub fn throttle_gbps(mut self, out: f64, back: f64) -> Self {
        let throttle = Throttle { out_bytes_per_s: out * 1e9, in_bytes_per_s: back * 1e9 };
        self.throttle = Some(throttle);
        self
    }

    /// Whether to find and drop the bytes that backward never reads. Default: yes. Without it, all
    /// bytes are kept or moved, and the closure of a layer that is kept or swapped runs once a step
    /// and never else.
    #[must_use]
    pub fn probe(mut self, probe: bool) -> Self {
        self.probe = probe;
        self
    }

    /// Where to remember when what ran. Default: nowhere.
    #[must_use]
    pub fn timeline(mut self, timeline: &Timeline) -> Self {
        self.timeline = Some(timeline.clone());
        self
    }

    /// Opens the tier.
    ///
    /// # Errors
    /// The policies name no layer; the folder of the spill file can't be used.
    pub fn build(self) -> Result<Swap, Error> {
        if self.policies.is_empty() {
            let message = "the policies name no layer".to_string();
            let hint = "make them for as many layers as the model calls".to_string();
            return Err(Error::new(Kind::Setting { message, hint }));
        }
        let origin = self.timeline.as_ref().map_or_else(Instant::now, Timeline::origin);
        let store = self.open_tier(origin).map_err(|e| Error::new(Kind::Tier(e)))?;
        let notices = store.notices().to_vec();
        let capacity = match &self.tier {
            Tier::File { dir } => free_space(dir),
            Tier::Host => host_bound(self.host_bytes).ok(),
        };
        let config = Config { prefetch: self.prefetch };
        let mut engine = Engine::new(config, Direct::new(CandleCpu, store));
        let names: Arc<Mutex<Vec<String>>> = Arc::default();
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let copies = Arc::new(Mutex::new(Copies::new(origin)));
        engine.observe({
            let (timeline, names) = (self.timeline.clone(), Arc::clone(&names));
            let (told, copies) = (Arc::clone(&told), Arc::clone(&copies));
            move |event: &Event| {
                lock(&told).extend(trouble(event));
                count(&mut lock(&copies), event);
                record(timeline.as_ref(), &lock(&names), event);
            }
        });
        let inner = Inner {
            engine,
            probe: self.probe,
            names,
            policies: self.policies,
            forms: Vec::new(),
            by_layer: HashMap::new(),
            repeats: HashMap::new(),
            notices,
            noticed: HashSet::new(),
            told,
            passes: 0,
            form_time: Duration::ZERO,
            repeat_time: Duration::ZERO,
            plain_step: Duration::ZERO,
            recompute_time: Duration::ZERO,
            timeline: self.timeline,
            copies,
            missed: 0,
            course: Course::default(),
            capacity,
        };
        let anchor = Storage::Cpu(CpuStorage::F32(vec![0.0]));
        let anchor = Tensor::from_storage(anchor, (), BackpropOp::none(), true);
        Ok(Swap { anchor, inner: RefCell::new(inner) })
    }

    fn open_tier(&self, origin: Instant) -> Result<AnyStore<Block>, ebbtide_core::BackendError> {
        match &self.tier {
            Tier::File { dir } => {
                let throttle = self.throttle;
                let mut config = FileConfig { origin, throttle, ..FileConfig::new(dir) };
                config.queue_bytes = self.host_bytes.unwrap_or(config.queue_bytes);
                Ok(FileStore::open(&config)?.into())
            }
            Tier::Host => {
                let config = HostConfig { origin, host_bytes: self.host_bytes };
                Ok(HostStore::new(&config)?.into())
            }
        }
    }
}

/// What a user should know of an event that is no error of the step.
fn trouble(event: &Event) -> Option<String> {
    match event {
        Event::PrefetchFailed { error, .. } => Some(format!("a prefetch failed: {error}")),
        Event::AbandonedCopyFailed { error, .. } => {
            Some(format!("while a step was abandoned, a copy failed: {error}"))
        }
        _ => None,
    }
}

/// Counts a copy that has ended.
fn count(copies: &mut Copies, event: &Event) {
    match event {
        Event::Stored { bytes, timing: Some(timing), .. } => copies.out(*bytes, *timing),
        Event::Loaded { bytes, timing: Some(timing), .. } => copies.back(*bytes, *timing),
        _ => {}
    }
}

/// Writes an engine's event into the timeline.
fn record(timeline: Option<&Timeline>, names: &[String], event: &Event) {
    let Some(timeline) = timeline else { return };
    let name = |layer: &LayerId| names.get(layer.0 as usize).cloned().unwrap_or_default();
    match event {
        Event::Stored { layer, timing: Some(timing), .. } => {
            let row = Row::Out(timing.worker);
            timeline.copy(row, name(layer), timing.started_ns, timing.finished_ns);
        }
        Event::Loaded { layer, timing: Some(timing), .. } => {
            let row = Row::In(timing.worker);
            timeline.copy(row, name(layer), timing.started_ns, timing.finished_ns);
        }
        _ => {}
    }
}

/// Totals since the [`Swap`] was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Bytes that went to the tier.
    pub moved_out_bytes: u64,
    /// Bytes that came back.
    pub moved_in_bytes: u64,
    /// Bytes freed because backward never reads them.
    pub dropped_bytes: u64,
    /// Layers whose backward came before their load had been started.
    pub missed_prefetches: u64,
    /// Milliseconds spent finding out what backward reads, and, for layers that are to be recomputed,
    /// whether they draw random numbers.
    pub probe_ms: f64,
    /// Milliseconds spent running layers a second time.
    pub recompute_ms: f64,
    /// Milliseconds in which the training thread waited for the tier.
    pub wait_ms: f64,
}

/// The engine of one model. Made once, used for every step.
///
/// It belongs to one thread at a time (it is `Send`, not `Sync`); two models in two threads have
/// one each.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ebbtide_candle::{Policies, Swap, Tier};
///
/// let device = Device::Cpu;
/// let weights: Vec<Var> =
///     (0..3).map(|_| Var::randn(0f32, 0.1, (64, 64), &device)).collect::<Result<_, _>>()?;
/// let x = Tensor::randn(0f32, 1.0, (8, 64), &device)?;
///
/// let dir = std::env::temp_dir();
/// let swap = Swap::builder(Policies::parse("swap", 3)?).tier(Tier::File { dir }).build()?;
/// for _ in 0..2 {
///     let mut step = swap.step();
///     let mut h = x.clone();
///     for (i, w) in weights.iter().enumerate() {
///         let params = [("w".to_string(), w.clone())];
///         h = step.layer(&format!("h.{i}"), &params, &h, move |h| h.matmul(w)?.gelu()? + h)?;
///     }
///     let gradients = step.backward(&h.sqr()?.mean_all()?)?;
///     for w in &weights {
///         w.set(&(w.as_tensor() - (gradients.get(w).unwrap() * 0.1)?)?)?;
///     }
/// }
/// assert!(swap.report().moved_out_bytes > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Swap {
    pub(crate) anchor: Tensor,
    inner: RefCell<Inner>,
}

impl std::fmt::Debug for Swap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = self.inner.borrow();
        f.debug_struct("Swap")
            .field("policies", &inner.policies)
            .field("engine", &inner.engine)
            .finish_non_exhaustive()
    }
}

impl Swap {
    /// Starts the settings of an engine for a model with as many layers as `policies` has.
    pub fn builder(policies: Policies) -> SwapBuilder {
        SwapBuilder {
            policies,
            tier: Tier::File { dir: spill_dir() },
            host_bytes: None,
            prefetch: Config::default().prefetch,
            throttle: None,
            probe: true,
            timeline: None,
        }
    }

    /// Begins a training step.
    pub fn step(&self) -> Step<'_> {
        let mut inner = self.inner();
        inner.passes += 1;
        let run = Run::begin(&mut inner);
        Step::new(self, Pass(inner.passes), run)
    }

    /// Changes what happens to each layer from the next call of [`Step::layer`] on. Layers that a
    /// step in flight has run keep what they were run with.
    ///
    /// # Errors
    /// The number of layers is another one.
    pub fn set_policies(&self, policies: Policies) -> Result<(), Error> {
        let inner = &mut *self.inner();
        if policies.len() != inner.policies.len() {
            let (new, old) = (policies.len(), inner.policies.len());
            let message = format!("policies for {new} layers, where the model has {old}");
            let hint = "make them for as many layers as the model calls".to_string();
            return Err(Error::new(Kind::Setting { message, hint }));
        }
        inner.policies = policies;
        Ok(())
    }

    /// Totals so far.
    pub fn report(&self) -> Report {
        let inner = self.inner();
        let counters = inner.engine.counters();
        Report {
            moved_out_bytes: counters.moved_out_bytes,
            moved_in_bytes: counters.moved_in_bytes,
            dropped_bytes: counters.dropped_bytes,
            missed_prefetches: counters.missed_prefetches + inner.missed,
            probe_ms: (inner.form_time + inner.repeat_time).as_secs_f64() * 1e3,
            recompute_ms: inner.recompute_time.as_secs_f64() * 1e3,
            wait_ms: inner.engine.store_stats().blocked_ns as f64 / 1e6,
        }
    }

    /// What a user should know, one sentence each, each once: a spill folder in RAM, a file system
    /// without direct I/O, a parameter that gets no gradient, a storage that can't be moved.
    pub fn notices(&self) -> Vec<String> {
        let mut inner = self.inner();
        let told = std::mem::take(&mut *lock(&inner.told));
        for notice in told {
            inner.notice(notice);
        }
        inner.notices.clone()
    }

    /// Bytes that the tier holds now. 0 between steps.
    pub fn bytes_held(&self) -> u64 {
        self.inner().engine.store_stats().bytes_held
    }

    /// Number of layers, over all steps in flight, that the engine has a group for. 0 between steps.
    pub fn active_groups(&self) -> usize {
        self.inner().engine.active_groups()
    }

    pub(crate) fn inner(&self) -> RefMut<'_, Inner> {
        self.inner.borrow_mut()
    }

    /// Number and policy of a layer; a new name gets the next number.
    pub(crate) fn layer_of(&self, name: &str) -> Result<(LayerId, Policy), Error> {
        let mut inner = self.inner();
        let seen = Arc::clone(&inner.names);
        let mut names = lock(&seen);
        let index = names.iter().position(|n| n == name).unwrap_or(names.len());
        if index == inner.policies.len() {
            let (layer, known) = (name.to_string(), inner.policies.len());
            return Err(Error::new(Kind::TooManyLayers { layer, known }));
        }
        if index == names.len() {
            names.push(name.to_string());
        }
        let layer = LayerId(u32::try_from(index).unwrap_or(u32::MAX));
        drop(names);
        inner.engine.name_layer(layer, name);
        Ok((layer, inner.policies.get(layer)))
    }

    pub(crate) fn check_all_layers_seen(&self) -> Result<(), Error> {
        let inner = self.inner();
        let (seen, known) = (lock(&inner.names).len(), inner.policies.len());
        if seen < known {
            return Err(Error::new(Kind::UnusedPolicies { seen, known }));
        }
        Ok(())
    }
}

/// The engine as it is used here.
pub(crate) type CpuEngine = Engine<Direct<CandleCpu, AnyStore<Block>>>;

/// What the steps of a [`Swap`] share. Borrowed for the time of one call, never while a closure of
/// the user's runs.
pub(crate) struct Inner {
    pub(crate) engine: CpuEngine,
    probe: bool,
    names: Arc<Mutex<Vec<String>>>,
    policies: Policies,
    forms: Vec<Form>,
    /// The form of each layer and signature seen, by index into `forms`.
    by_layer: HashMap<(LayerId, Signature), usize>,
    /// Whether each layer that was to be recomputed gave the same twice.
    repeats: HashMap<(LayerId, Signature), bool>,
    notices: Vec<String>,
    noticed: HashSet<String>,
    /// What the engine's events told.
    told: Arc<Mutex<Vec<String>>>,
    passes: u64,
    /// Time spent on finding dead bytes, which is bounded, and on finding random numbers, which is
    /// not, since a recompute without it might be wrong.
    form_time: Duration,
    repeat_time: Duration,
    /// A plain step, estimated from the layers probed.
    plain_step: Duration,
    recompute_time: Duration,
    timeline: Option<Timeline>,
    copies: Arc<Mutex<Copies>>,
    /// Layers of planned steps whose backward came before all their loads had been started.
    pub(crate) missed: u64,
    /// What the next step does.
    pub(crate) course: Course,
    /// Bytes that the tier could hold when it was opened.
    pub(crate) capacity: Option<u64>,
}

impl Inner {
    pub(crate) fn form(&self, layer: LayerId, signature: &Signature) -> Option<Form> {
        let known = self.by_layer.get(&(layer, signature.clone()))?;
        Some(self.forms[*known].clone())
    }

    pub(crate) fn forms_like(&self, signature: &Signature) -> Vec<Form> {
        self.forms.iter().filter(|form| form.signature == *signature).cloned().collect()
    }

    /// Whether any form of this layer has been seen.
    pub(crate) fn knows(&self, layer: LayerId) -> bool {
        self.by_layer.keys().any(|(known, _)| *known == layer)
    }

    /// Why a layer of this form can't be recomputed, if it can't.
    pub(crate) fn why_not_recomputed(
        &self,
        layer: LayerId,
        signature: &Signature,
    ) -> Option<String> {
        match self.repeats(layer, signature) {
            Some(true) => None,
            Some(false) => Some("it draws random numbers, or changes from run to run".into()),
            None if !self.probe => Some("probing is off, so random numbers would be missed".into()),
            None => Some("whether it draws random numbers was not found out".into()),
        }
    }

    pub(crate) fn probes(&self) -> bool {
        self.probe
    }

    pub(crate) fn probe_budget(&self) -> Budget {
        Budget { layers: self.policies.len(), spent: self.form_time, step: self.plain_step }
    }

    pub(crate) fn repeats(&self, layer: LayerId, signature: &Signature) -> Option<bool> {
        self.repeats.get(&(layer, signature.clone())).copied()
    }

    pub(crate) fn learn_repeats(
        &mut self,
        layer: LayerId,
        signature: &Signature,
        repeats: bool,
        started: Instant,
    ) {
        self.repeat_time += started.elapsed();
        self.repeats.insert((layer, signature.clone()), repeats);
    }

    pub(crate) fn learn_form(
        &mut self,
        layer: LayerId,
        form: &Form,
        plain_step: Duration,
        started: Instant,
    ) {
        self.form_time += started.elapsed();
        self.plain_step = plain_step;
        let known = self.forms.iter().position(|known| known == form);
        let index = known.unwrap_or(self.forms.len());
        if index == self.forms.len() {
            self.forms.push(form.clone());
        }
        self.by_layer.insert((layer, form.signature.clone()), index);
    }

    /// Deals with a layer's own storages: drops the dead ones, and registers the others that are to
    /// move, each in the group that `group` names. `taken` ones are outside already.
    pub(crate) fn save(
        &mut self,
        owned: &[Owned],
        dead: &[bool],
        taken: &[usize],
        group: impl Fn(usize) -> Option<GroupId>,
    ) -> Result<(), Error> {
        for (index, storage) in owned.iter().enumerate() {
            if taken.contains(&index) {
                continue;
            }
            let Some((held, bytes)) = Held::new(storage.handle.clone()) else {
                let dtype = storage.handle.dtype();
                self.notice(format!("a storage of type {dtype:?} can't be moved and stays"));
                continue;
            };
            if dead.get(index).copied().unwrap_or(false) {
                self.engine.drop_dead(&held, bytes, "an activation")?;
            } else if let Some(group) = group(index) {
                let label = self.engine.label("an activation");
                let saved = Saved::whole(held, bytes).label(label);
                let (_, registered) = self.engine.register(group, saved)?;
                if let Registered::Shared(_) = registered {
                    self.notice("a storage shared with another layer stays".into());
                }
            }
        }
        Ok(())
    }

    pub(crate) fn copies(&self) -> MutexGuard<'_, Copies> {
        lock(&self.copies)
    }

    /// The training thread has waited for the tier.
    pub(crate) fn waited(&self, name: &str, since: Instant) {
        self.copies().waited(since);
        self.wait_span(name, since);
    }

    pub(crate) fn notice(&mut self, notice: String) {
        if self.noticed.insert(notice.clone()) {
            self.notices.push(notice);
        }
    }

    pub(crate) fn recomputed(&mut self, name: &str, started: Instant) {
        self.recompute_time += started.elapsed();
        self.span(Row::Compute, || format!("{name} recompute"), started);
    }

    pub(crate) fn span(&self, row: Row, name: impl FnOnce() -> String, started: Instant) {
        if let Some(timeline) = &self.timeline {
            timeline.span(row, name(), started);
        }
    }

    /// Waits too short to see are left out of the picture, not out of the report.
    pub(crate) fn wait_span(&self, name: &str, started: Instant) {
        let visible = started.elapsed() >= Duration::from_micros(20);
        if let Some(timeline) = self.timeline.as_ref().filter(|_| visible) {
            timeline.wait(name, started);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only ever locked for one push or read; a panic can't leave it half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
