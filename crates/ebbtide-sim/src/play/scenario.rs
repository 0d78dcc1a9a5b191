//! One run: what is played, on what machine, with which bounds. All of it follows from the seed.

use ebbtide_core::{StagedConfig, class};

use crate::options::{Faults, Function, Lateness, Options, Speeds};
use crate::play::draw;
use crate::play::features::{Feature, Mix};
use crate::play::outcome::Outcome;
use crate::play::plan::{Plan, Source, Step};
use crate::play::player;
use crate::random::{Random, Ratio};

const AMPLE: u64 = 1 << 40;

/// A run, drawn and ready to be played.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where it comes from.
    pub seed: u64,
    /// What it contains.
    pub mix: Mix,
    /// What happens.
    pub plan: Plan,
    /// The machine.
    pub machine: Options,
    /// The engine's bounds.
    pub bounds: StagedConfig,
    /// Bounds of the pools that tensors ask for.
    pub pools: Vec<u64>,
    /// How many groups ahead are loaded.
    pub prefetch: usize,
    /// A bound of host memory may be too small for a group.
    pub may_be_full: bool,
    /// After a failed call the step goes on as long as it can, instead of being given up.
    pub stubborn: bool,
}

/// Runs of one seed: each draws another mix, so that one seed already meets most of what there is.
const ROUNDS: u64 = 32;

impl Scenario {
    /// The runs of a seed, with some features forced on. The first is [`Scenario::draw`]'s.
    pub fn rounds(seed: u64, forced: &[Feature]) -> impl Iterator<Item = Self> {
        (0..ROUNDS).map(move |round| Self::draw(seed + (round << 40), forced))
    }

    /// Draws one run, with some features forced on.
    pub fn draw(seed: u64, forced: &[Feature]) -> Self {
        let mut random = Random::new(seed);
        let mix = Mix::draw(&mut random.fork(1), forced);
        Self::with(seed, mix)
    }

    /// Draws a run with this mix.
    pub fn with(seed: u64, mix: Mix) -> Self {
        let mut random = Random::new(seed).fork(2);
        let plan = draw::plan(&mix, &mut random.fork(1));
        let mut scenario = Self {
            seed,
            plan,
            machine: Options { max_calls: 400_000, ..Options::default() },
            bounds: StagedConfig::new(AMPLE),
            pools: Vec::new(),
            prefetch: usize::try_from(random.below(5)).unwrap_or(1),
            may_be_full: false,
            stubborn: random.chance(draw::HALF),
            mix,
        };
        scenario.bound_memory(&mut random);
        scenario.draw_times(&mut random);
        scenario.draw_faults(&mut random);
        scenario
    }

    /// Plays it. The same scenario always gives the same outcome.
    pub fn play(&self) -> Outcome {
        player::play(self)
    }

    /// The longest that anything which a call queues can take.
    pub(super) fn longest_ns(&self) -> u64 {
        let speeds = &self.machine.speeds;
        let slowest = [speeds.copy_out, speeds.copy_in, speeds.disk_write, speeds.disk_read]
            .into_iter()
            .fold(speeds.kernel, u64::min);
        let largest = self.total().max(1 << 20);
        let busy = 400_000 + speeds.disk_ns + speeds.copy_ns + speeds.kernel_ns + speeds.call_ns;
        let ns = busy + largest.saturating_mul(1_000_000_000) / slowest.max(1);
        ns.saturating_mul(2 * self.machine.lateness.times.max(1))
    }

    /// At most one call fails.
    pub(super) fn has_one_fault(&self) -> bool {
        let faults = &self.machine.faults;
        let rare = faults.device.0 == 0 && faults.disk.0 == 0 && faults.fail_calls.is_empty();
        let full = [Feature::DiskFull, Feature::DeviceFull, Feature::PinnedFull];
        rare && faults.lost_at.is_none() && !full.into_iter().any(|full| self.mix.has(full))
    }

    fn bound_memory(&mut self, random: &mut Random) {
        self.machine.gathers = self.mix.has(Feature::Gathers);
        if self.mix.has(Feature::SmallBuckets) {
            self.bounds.bucket_bytes = 256 << random.below(6);
        }
        if self.mix.has(Feature::TightHost) {
            let (largest, group) = self.largest();
            self.bounds.host_bytes =
                [largest, largest, 2 * largest, group.max(largest)][four(random)];
            self.may_be_full = self.mix.has(Feature::NoDisk);
        }
        for _ in 0..draw::POOLS {
            let small = self.mix.has(Feature::SmallPools);
            self.may_be_full |= small;
            self.pools.push(if small { 512 * (1 + random.below(64)) } else { AMPLE });
        }
    }

    /// What the largest copy and the largest group take of host memory. The engine gets along with room
    /// for one copy.
    fn largest(&self) -> (u64, u64) {
        let class = |bytes| class::bytes(class::of(bytes));
        let (mut copy, mut group) = (0, 0);
        for step in &self.plan.steps {
            for visit in &step.visits {
                let sizes = visit.values.iter().map(|value| self.plan.size(step, value.source));
                let sizes: Vec<u64> = sizes.collect();
                // Pieces of a bucket start at multiples of 64.
                let bucket = sizes.iter().map(|bytes| bytes.next_multiple_of(64)).sum::<u64>();
                let bucket = bucket.min(self.bounds.bucket_bytes);
                let largest = sizes.iter().copied().chain([bucket]).max().unwrap_or(0);
                copy = copy.max(class(largest));
                group = group.max(sizes.into_iter().map(class).sum());
            }
        }
        (copy, group)
    }

    fn draw_times(&mut self, random: &mut Random) {
        let mut speed = |usual: u64| [usual, usual, usual / 10, usual / 100][four(random)];
        let usual = Speeds::default();
        self.machine.speeds = Speeds {
            kernel: speed(usual.kernel),
            copy_out: speed(usual.copy_out),
            copy_in: speed(usual.copy_in),
            disk_write: speed(usual.disk_write),
            disk_read: speed(usual.disk_read),
            ..usual
        };
        if self.mix.has(Feature::Punctual) {
            self.machine.lateness = Lateness::NONE;
            return;
        }
        let mut often = || Ratio(1, [2, 4, 8, 32][four(random)]);
        self.machine.lateness.kernels = often();
        self.machine.lateness.copies = often();
        self.machine.lateness.disk = often();
        self.machine.lateness.host = often();
        self.machine.lateness.times = 1 << random.below(9);
    }

    fn draw_faults(&mut self, random: &mut Random) {
        let most = 4 << random.below(8);
        let call = random.below(most);
        let rate = Ratio(1, [8, 24, 80, 250][four(random)]);
        let functions = u64::try_from(Function::ALL.len()).unwrap_or(1);
        let function = usize::try_from(random.below(functions)).unwrap_or(0);
        let share = 1 + random.below(8);
        let on = |feature| self.mix.has(feature);
        let mut faults = Faults::default();
        if on(Feature::DeviceFaults) {
            faults.device = rate;
        }
        if on(Feature::DiskFaults) {
            faults.disk = rate;
        }
        faults.fail_call = on(Feature::FailCall).then_some(call);
        if on(Feature::FailBurst) {
            faults.fail_calls = call..call + 2 + share;
        }
        let of_function = (Function::ALL[function], call % 64);
        faults.fail_function = on(Feature::FailFunction).then_some(of_function);
        faults.lost_at = on(Feature::Lost).then_some(call);
        self.machine.faults = faults;
        let total = self.total();
        if self.mix.has(Feature::DiskFull) {
            self.machine.disk_bytes = total * share / 32;
        }
        if self.mix.has(Feature::DeviceFull) {
            self.machine.device_bytes = total * share / 8;
        }
        if self.mix.has(Feature::PinnedFull) {
            self.machine.pinned_bytes = self.bounds.host_bytes.min(total) * share / 8;
        }
    }

    /// Bytes of all storages of the largest step.
    fn total(&self) -> u64 {
        let bytes = |step: &Step| -> u64 {
            let values = step.visits.iter().flat_map(|visit| &visit.values);
            let fresh = values.map(|value| match value.source {
                Source::Fresh(bytes) => bytes,
                _ => 0,
            });
            fresh.sum()
        };
        self.plan.steps.iter().map(bytes).max().unwrap_or(0)
    }
}

fn four(random: &mut Random) -> usize {
    usize::try_from(random.below(4)).unwrap_or(0)
}
