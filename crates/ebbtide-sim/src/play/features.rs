//! What a run may contain, and how often: drawn anew for each seed ("swarm testing"), since a run in
//! which everything happens all the time reaches less than many that each leave something out.

use std::fmt;

use crate::random::{Random, Ratio};

macro_rules! features {
    ($($(#[doc = $doc:literal])* $feature:ident = $name:literal,)*) => {
        /// Something that a run may contain.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Feature {
            $($(#[doc = $doc])* $feature,)*
        }

        impl Feature {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$feature,)*];

            /// As the command line writes it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$feature => $name,)*
                }
            }
        }
    };
}

features! {
    /// The device says that it gathers.
    Gathers = "gathers",
    /// Tensors allow packing.
    Pack = "pack",
    /// Buckets are small.
    SmallBuckets = "small-buckets",
    /// Several element types.
    Elements = "elements",
    /// Tensors that reach a part of their storage.
    Slices = "slices",
    /// Several tensors of one storage.
    Views = "views",
    /// Tensors registered twice.
    Repeats = "repeats",
    /// Tensors and storages without bytes.
    Empty = "empty",
    /// Pools of host memory that tensors ask for.
    Pools = "pools",
    /// These pools are too small now and then.
    SmallPools = "small-pools",
    /// Host memory holds little more than one group: the rest goes to the disk.
    TightHost = "tight-host",
    /// There is no disk.
    NoDisk = "no-disk",
    /// A storage saved by two layers.
    Skips = "skips",
    /// A storage saved by layers of two passes.
    AcrossPasses = "across-passes",
    /// A storage saved by every layer.
    Tables = "tables",
    /// A layer's output is the next one's input.
    Outputs = "outputs",
    /// A layer runs twice in a pass.
    Twice = "twice",
    /// Several passes in a step.
    MicroBatches = "micro-batches",
    /// Their forwards and backwards are mixed.
    Interleaved = "interleaved",
    /// Layers run again inside backward, saving anew.
    Recompute = "recompute",
    /// Work without groups in between.
    Evaluation = "evaluation",
    /// Steps given up in the middle.
    Abort = "abort",
    /// The engine is dropped with them.
    DropEngine = "drop-engine",
    /// Groups that backward never asks for.
    Unused = "unused",
    /// Backward takes another order than forward's reverse.
    Deviate = "deviate",
    /// Sizes and numbers of tensors that change from step to step.
    Resize = "resize",
    /// Many steps.
    ManySteps = "many-steps",
    /// Storages that stay because somebody uses them.
    Protect = "protect",
    /// Tensors changed in place after they were saved.
    Modify = "modify",
    /// Copies on streams of the caller's choice.
    Streams = "streams",
    /// The user drops its handles right after the offload is started.
    DropHandles = "drop-handles",
    /// Other allocations between start and wait of an offload.
    Pressure = "pressure",
    /// Long kernels.
    LongKernels = "long-kernels",
    /// Offloads are waited for late or never.
    LateWaits = "late-waits",
    /// Loads are started and waited for by hand.
    ByHand = "by-hand",
    /// Calls in a wrong order.
    Misuse = "misuse",
    /// Pools are shrunk after a step.
    Shrink = "shrink",
    /// Everything is on time.
    Punctual = "punctual",
    /// Calls of the device fail now and then.
    DeviceFaults = "device-faults",
    /// Calls of the disk fail now and then.
    DiskFaults = "disk-faults",
    /// One call fails.
    FailCall = "fail-call",
    /// Some calls in a row fail, so that what helps after a failure fails, too.
    FailBurst = "fail-burst",
    /// One call of one function fails.
    FailFunction = "fail-function",
    /// The device is lost.
    Lost = "lost",
    /// The disk is too small.
    DiskFull = "disk-full",
    /// Device memory is too small.
    DeviceFull = "device-full",
    /// Less memory can be pinned than the engine was told.
    PinnedFull = "pinned-full",
}

impl Feature {
    /// What makes calls fail.
    pub const FAULTS: &[Self] = &[
        Self::DeviceFaults,
        Self::DiskFaults,
        Self::FailCall,
        Self::FailBurst,
        Self::FailFunction,
        Self::Lost,
        Self::DiskFull,
        Self::DeviceFull,
        Self::PinnedFull,
    ];

    /// The one of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|feature| feature.name() == name)
    }

    fn is_fault(self) -> bool {
        Self::FAULTS.contains(&self)
    }

    /// How often it is on, and how often it happens then, at most.
    fn commonness(self) -> (Ratio, u32) {
        match self {
            Self::Misuse | Self::NoDisk | Self::SmallPools => (Ratio(1, 4), 4),
            Self::Abort | Self::DropEngine | Self::Modify => (Ratio(1, 3), 8),
            Self::ManySteps => (Ratio(1, 12), 1),
            Self::Punctual => (Ratio(1, 6), 1),
            Self::TightHost | Self::Pack | Self::SmallBuckets => (Ratio(2, 3), 1),
            _ => (Ratio(1, 2), 1),
        }
    }
}

/// The features of one run with their rates.
#[derive(Clone, PartialEq, Eq)]
pub struct Mix(Vec<(Feature, Ratio)>);

impl Mix {
    /// Draws a mix; what is forced is on in any case.
    pub fn draw(random: &mut Random, forced: &[Feature]) -> Self {
        let mut mix = Self(Vec::new());
        for &feature in Feature::ALL.iter().filter(|feature| !feature.is_fault()) {
            let (on, rarest) = feature.commonness();
            let drawn = random.chance(on);
            let rate = Ratio(1, rarest.max(1 << random.below(4)));
            if drawn || forced.contains(&feature) {
                mix.0.push((feature, rate));
            }
        }
        let any = random.chance(Ratio(2, 5));
        let kinds = u64::try_from(Feature::FAULTS.len()).unwrap_or(1);
        let kind = usize::try_from(random.below(kinds)).unwrap_or(0);
        let forced_faults: Vec<_> = forced.iter().filter(|feature| feature.is_fault()).collect();
        let drawn = any && forced_faults.is_empty();
        let drawn = drawn.then(|| &Feature::FAULTS[kind]);
        for &fault in forced_faults.into_iter().chain(drawn) {
            mix.0.push((fault, Ratio(1, 1)));
        }
        mix
    }

    /// These features, each at this rate.
    pub fn of(features: &[Feature], rate: Ratio) -> Self {
        Self(features.iter().map(|&feature| (feature, rate)).collect())
    }

    /// Whether the feature is on.
    pub fn has(&self, feature: Feature) -> bool {
        self.0.iter().any(|(on, _)| *on == feature)
    }

    /// Whether it happens now. Always uses one word.
    pub fn roll(&self, feature: Feature, random: &mut Random) -> bool {
        let rate = self.0.iter().find(|(on, _)| *on == feature).map(|(_, rate)| *rate);
        random.chance(rate.unwrap_or(Ratio::NEVER))
    }

    /// Whether calls may fail.
    pub fn has_faults(&self) -> bool {
        self.0.iter().any(|(feature, _)| feature.is_fault())
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (feature, rate)) in self.0.iter().enumerate() {
            let gap = if at > 0 { " " } else { "" };
            write!(f, "{gap}{}", feature.name())?;
            if rate.1 > 1 {
                write!(f, "/{}", rate.1)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for &feature in Feature::ALL {
            assert_eq!(Feature::named(feature.name()), Some(feature));
        }
        assert_eq!(Feature::named("nothing"), None);
    }

    #[test]
    fn what_is_forced_is_on_and_nothing_always() {
        for &feature in Feature::ALL {
            let on = (0..40).filter(|&seed| Mix::draw(&mut Random::new(seed), &[]).has(feature));
            assert!(on.count() < 40, "{feature:?}");
            assert!(Mix::draw(&mut Random::new(3), &[feature]).has(feature));
        }
    }
}
