//! Coverage marks: which transitions and which decisions a run has reached.
//!
//! Tests that claim to try everything check it here. Without the feature `marks` nothing of this is
//! compiled into the engine.

/// A place in the engine that a thorough test reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is named after the place that hits it")]
pub enum Mark {
    // Transitions of a storage (`state.rs`).
    StartOffload,
    FinishOffload,
    KeepOnDevice,
    StartLoad,
    FinishLoad,
    FailLoad,
    AbandonDevice,
    AbandonD2h,
    AbandonHost,
    AbandonH2d,
    // Tiers (`tiers.rs`).
    Spill,
    SpillFailed,
    Fetch,
    FetchFailed,
    Arrived,
    ArriveFailed,
    ParcelLost,
    // Pools (`pool.rs`).
    PoolSameClass,
    PoolNew,
    PoolLarger,
    PoolMadeRoom,
    PoolWaited,
    PoolNoRoom,
    PoolIdle,
    PinFailed,
    // Groups (`engine.rs`, `group.rs`).
    Repeat,
    Merge,
    Shared,
    ProtectedInOffload,
    ProtectedAway,
    NotSaved,
    Changed,
    ChangedInOffload,
    WrongPhase,
    UnknownGroup,
    Missed,
    PrefetchFailed,
    RoomByLoads,
    Repeats,
    // Copies (`staged.rs`, `departure.rs`, `arrival.rs`).
    Bucket,
    BucketGathered,
    Alone,
    Slices,
    OffloadCalledOff,
    OffloadLost,
    FreeRefused,
    LoadUndone,
    LoadInTurns,
    WaitedOnHost,
    FenceByStream,
    FenceLost,
    AbandonedInFlight,
    EndUnproven,
    LostRecovered,
    FilledAlready,
}

#[cfg(feature = "marks")]
thread_local! {
    static SEEN: std::cell::RefCell<std::collections::BTreeSet<Mark>> = const {
        std::cell::RefCell::new(std::collections::BTreeSet::new())
    };
}

/// The run has reached this place.
#[inline]
pub(crate) fn hit(mark: Mark) {
    #[cfg(feature = "marks")]
    SEEN.with_borrow_mut(|seen| seen.insert(mark));
    #[cfg(not(feature = "marks"))]
    let _ = mark;
}

/// What this thread has reached since it began.
#[cfg(feature = "marks")]
pub fn seen() -> std::collections::BTreeSet<Mark> {
    SEEN.with_borrow(Clone::clone)
}

#[cfg(feature = "marks")]
impl Mark {
    /// All of them.
    pub const ALL: [Self; Self::FilledAlready as usize + 1] = [
        Self::StartOffload,
        Self::FinishOffload,
        Self::KeepOnDevice,
        Self::StartLoad,
        Self::FinishLoad,
        Self::FailLoad,
        Self::AbandonDevice,
        Self::AbandonD2h,
        Self::AbandonHost,
        Self::AbandonH2d,
        Self::Spill,
        Self::SpillFailed,
        Self::Fetch,
        Self::FetchFailed,
        Self::Arrived,
        Self::ArriveFailed,
        Self::ParcelLost,
        Self::PoolSameClass,
        Self::PoolNew,
        Self::PoolLarger,
        Self::PoolMadeRoom,
        Self::PoolWaited,
        Self::PoolNoRoom,
        Self::PoolIdle,
        Self::PinFailed,
        Self::Repeat,
        Self::Merge,
        Self::Shared,
        Self::ProtectedInOffload,
        Self::ProtectedAway,
        Self::NotSaved,
        Self::Changed,
        Self::ChangedInOffload,
        Self::WrongPhase,
        Self::UnknownGroup,
        Self::Missed,
        Self::PrefetchFailed,
        Self::RoomByLoads,
        Self::Repeats,
        Self::Bucket,
        Self::BucketGathered,
        Self::Alone,
        Self::Slices,
        Self::OffloadCalledOff,
        Self::OffloadLost,
        Self::FreeRefused,
        Self::LoadUndone,
        Self::LoadInTurns,
        Self::WaitedOnHost,
        Self::FenceByStream,
        Self::FenceLost,
        Self::AbandonedInFlight,
        Self::EndUnproven,
        Self::LostRecovered,
        Self::FilledAlready,
    ];
}
