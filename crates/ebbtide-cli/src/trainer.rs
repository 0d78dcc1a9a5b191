//! One run in one mode, step by step, with what each step cost.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, Device, Storage, Tensor};
use ebbtide_candle::Timeline;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::config::{Config, Mode, Setup};
use crate::curve::Curve;
use crate::data::{Batches, Corpus};
use crate::engine::{Engine, Totals};
use crate::failure::Failure;
use crate::figures::{Overlap, PlanFigures};
use crate::memory::Meter;
use crate::model::Model;
use crate::optim::AdamW;
use crate::params;
use crate::planned::Planner;
use crate::state::{self, Header, Saved};

const WARM_UP_STEPS: f64 = 20.;

/// What one step gave and cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Number of the step in the whole training, from one.
    pub(crate) step: u64,
    /// The loss as bits, so that it survives JSON whatever it is.
    loss_bits: u32,
    /// Forward, backward and optimizer; hashing the gradients is not part of a step.
    pub(crate) ms: f64,
    pub(crate) gradients: Gradients,
    /// Most device bytes of all steps from the first of the run to this one.
    pub(crate) peak_bytes: u64,
    /// Most device bytes of this step.
    #[serde(default)]
    pub(crate) step_peak_bytes: u64,
}

impl Record {
    pub(crate) fn loss(&self) -> f32 {
        f32::from_bits(self.loss_bits)
    }

    /// Same loss and same gradients, to the bit.
    pub(crate) fn same_result(&self, other: &Self) -> bool {
        self.loss_bits == other.loss_bits && self.gradients == other.gradients
    }
}

/// The gradients of one step, in order of name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gradients {
    pub(crate) xxh3: u64,
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
}

/// A run and all its figures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) mode: Mode,
    /// None for plain.
    pub(crate) tier: Option<String>,
    pub(crate) records: Vec<Record>,
    pub(crate) base_bytes: u64,
    pub(crate) peak_bytes: u64,
    pub(crate) peak_rss_bytes: Option<u64>,
    pub(crate) totals: Totals,
    /// Of a run under a plan.
    #[serde(default)]
    pub(crate) plan: Option<PlanFigures>,
    /// Of the steps under it.
    #[serde(default)]
    pub(crate) overlap: Option<Overlap>,
}

/// A run that is going on.
pub(crate) struct Trainer {
    setup: Setup,
    engine: Engine,
    model: Model,
    adamw: AdamW,
    corpus: Corpus,
    batches: Batches,
    device: Device,
    /// The state after the last complete step.
    header: Header,
    meter: Option<Meter>,
    timeline: Option<Timeline>,
    /// Runs from the first step on, if there is a timeline.
    curve: Option<Curve>,
    records: Vec<Record>,
}

impl Trainer {
    pub(crate) fn new(setup: Setup) -> Result<Self, Failure> {
        // First, since a tier that can't be opened should be found before anything is made.
        let timeline = setup.tier.timeline.then(Timeline::new);
        let engine = Engine::new(&setup, timeline.as_ref())?;
        let Config { shape, seed, lr, text, resume } = setup.config.clone();
        let device = Device::Cpu;
        let corpus = Corpus::load(&text, shape.seq)?;
        let params = params::create(&shape, seed, &device)?;
        let adamw = AdamW::new(&params)?;
        let model = Model::new(&shape, &params)?;
        let mut batches = Batches::new(seed, shape.batch, shape.seq);
        let mut header = Header::new(shape, seed, lr, corpus.fingerprint());
        if let Some(path) = &resume {
            let saved = Saved::open(path)?;
            saved.restore(&adamw, &device)?;
            batches.seek(saved.header.position());
            header = header.at(saved.header.step, saved.header.position());
        }
        let (meter, curve, records) = (None, None, Vec::new());
        Ok(Self {
            setup,
            engine,
            model,
            adamw,
            corpus,
            batches,
            device,
            header,
            meter,
            timeline,
            curve,
            records,
        })
    }

    /// Runs one step.
    pub(crate) fn step(&mut self) -> Result<Record, Failure> {
        if self.meter.is_none() {
            self.curve = self.timeline.clone().map(Curve::start);
            self.meter = Some(Meter::start());
        }
        Meter::begin_step();
        let begin = Instant::now();
        let batch = self.batches.draw(&self.corpus, &self.device)?;
        let (loss, grads) = self.engine.gradients(&self.model, &batch)?;
        let number = self.header.step + 1;
        let mut hasher = Hasher::default();
        let lr = warm_up(self.header.lr, number);
        self.adamw.update(number, lr, grads, |grad| hasher.add(grad))?;
        let spent = begin.elapsed().saturating_sub(hasher.spent);
        self.header = self.header.at(number, self.batches.position());
        let step_peak_bytes = Meter::peak_bytes();
        let earlier = self.records.last().map_or(0, |record| record.peak_bytes);
        let record = Record {
            step: number,
            loss_bits: loss.to_bits(),
            ms: spent.as_secs_f64() * 1e3,
            gradients: hasher.finish(),
            peak_bytes: earlier.max(step_peak_bytes),
            step_peak_bytes,
        };
        // Before the step counts: where no plan fits the budget nothing has been trained.
        self.engine.after_step(spent, step_peak_bytes)?;
        self.records.push(record);
        Ok(record)
    }

    pub(crate) fn notices(&self) -> Vec<String> {
        self.engine.notices()
    }

    /// The planner of the run, if it has one.
    pub(crate) fn planner(&self) -> Option<&Planner> {
        self.engine.planner()
    }

    pub(crate) fn mode_name(&self) -> &str {
        self.setup.mode.name()
    }

    pub(crate) fn records(&self) -> &[Record] {
        &self.records
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The figures up to now.
    pub(crate) fn outcome(&self) -> Outcome {
        let plain = self.setup.mode == Mode::Plain;
        Outcome {
            mode: self.setup.mode.clone(),
            tier: (!plain).then(|| self.setup.tier.kind.name().to_owned()),
            records: self.records.clone(),
            base_bytes: self.meter.map_or(0, |meter| meter.base_bytes),
            peak_bytes: self.records.last().map_or(0, |record| record.peak_bytes),
            peak_rss_bytes: Meter::peak_rss_bytes(),
            totals: self.engine.totals(),
            plan: self.engine.planner().and_then(|planner| planner.plan().cloned()),
            overlap: self.engine.planner().map(Planner::overlap),
        }
    }

    /// Writes the state after the last complete step.
    pub(crate) fn save(&self, path: &Path) -> Result<(), Failure> {
        state::save(path, &self.header, &self.adamw)
    }

    /// Ends the curve of device bytes and writes the timeline, if one was asked for.
    pub(crate) fn write_timeline(&mut self, out: impl io::Write) -> io::Result<()> {
        self.curve = None;
        self.timeline.as_ref().map_or(Ok(()), |timeline| timeline.write(out).map(drop))
    }
}

/// The rate of a step: it rises over the first few, because AdamW's moments know too little then
/// and a full step may overshoot.
fn warm_up(lr: f64, step: u64) -> f64 {
    lr * (step as f64 / WARM_UP_STEPS).min(1.)
}

/// Hashes the gradients of a step and keeps the time that takes apart.
#[derive(Default)]
struct Hasher {
    state: Box<Xxh3>,
    tensors: u64,
    bytes: u64,
    spent: Duration,
}

impl Hasher {
    fn add(&mut self, grad: &Tensor) -> Result<(), Failure> {
        let begin = Instant::now();
        let (storage, layout) = grad.storage_and_layout();
        let range = layout.contiguous_offsets().map(|(start, end)| start..end);
        let bytes: Option<&[u8]> = match (&*storage, range) {
            (Storage::Cpu(CpuStorage::F32(values)), Some(range)) => {
                Some(bytemuck::cast_slice(&values[range]))
            }
            (Storage::Cpu(CpuStorage::BF16(values)), Some(range)) => {
                Some(bytemuck::cast_slice(&values[range]))
            }
            _ => None,
        };
        let bytes = bytes.ok_or_else(|| {
            Failure::run_time("a gradient is neither f32 nor bf16", "please report this")
        })?;
        self.state.update(bytes);
        self.tensors += 1;
        self.bytes += bytes.len() as u64;
        self.spent += begin.elapsed();
        Ok(())
    }

    fn finish(&self) -> Gradients {
        Gradients { xxh3: self.state.digest(), tensors: self.tensors, bytes: self.bytes }
    }
}
