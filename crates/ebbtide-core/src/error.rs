//! The error type of the engine.
//!
//! One opaque type, one pointer wide, with predicates for the few distinctions a caller needs.
//! Kinds are private, so that a new one breaks nobody. The [`hint`](Error::hint) is apart from the
//! message: a program prints it on a line of its own.

use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;

use crate::mover::Trip;

/// What a device or a store reports: a message, an optional hint, and the cause.
///
/// ```
/// use ebbtide_core::BackendError;
/// let error = BackendError::new("can't write 4096 bytes to a spill file in /spill")
///     .with_hint("free some space, or name another folder with --spill-dir")
///     .with_source(std::io::Error::other("no space left"));
/// assert_eq!(error.to_string(), "can't write 4096 bytes to a spill file in /spill");
/// assert!(std::error::Error::source(&error).is_some());
/// ```
#[derive(Debug)]
pub struct BackendError {
    message: String,
    hint: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
    no_room: bool,
}

impl BackendError {
    /// An error with this message and no cause.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, source: None, no_room: false }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Marks that a bound was reached, so that something smaller, or another tier, may still do.
    #[must_use]
    pub fn no_room(mut self) -> Self {
        self.no_room = true;
        self
    }

    /// Whether a bound was reached.
    pub fn is_no_room(&self) -> bool {
        self.no_room
    }

    /// What the user can do about it, if anything is known.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for BackendError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|e| e as &(dyn StdError + 'static))
    }
}

/// Anything the engine can report.
///
/// ```
/// let error = ebbtide_core::Policies::parse("0-3:swap,2:keep", 4).unwrap_err();
/// assert!(error.is_setting());
/// assert_eq!(error.to_string(), "policy `0-3:swap,2:keep`: layer 2 is named twice");
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: Kind,
    hint: Option<String>,
    source: Option<BackendError>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A setting that has no effect or makes no sense.
    Setting(String),
    /// A call that the group's phase does not allow: label of the group, phase, call.
    Phase { group: String, found: &'static str, wanted: &'static str, call: &'static str },
    /// A group that is not (or no longer) known.
    UnknownGroup(u64),
    /// A storage's journey failed.
    Trip {
        trip: Trip,
        group: String,
        label: String,
        bytes: u64,
        /// Element type, copy mode and pool, where they can differ.
        how: String,
    },
    /// The copy of a bucket of packed storages failed; all of them are on the device.
    Bucket {
        group: String,
        bucket: usize,
        element: &'static str,
        elements: u64,
        bytes: u64,
        pool: bool,
    },
    /// A call that concerns a whole group failed.
    Whole { trip: Trip, group: String, what: &'static str },
    /// The device refused to drop a storage.
    Drop { label: String, bytes: u64 },
    /// A tensor is not what it was when it was registered.
    Changed { group: String, label: String, what: &'static str, then: u64, now: u64 },
    /// A tensor that does not lie within its storage.
    DoesNotFit { label: String, range: Range<u64>, told: u64, bytes: u64 },
    /// Bytes that nobody saved before their storage was freed.
    NotSaved { label: String, range: Range<u64> },
    /// The value of a tensor is not on the device.
    NotReadable { state: &'static str },
    /// A pool of host memory has no room.
    NoRoom { requested: u64, pooled: u64, maximum: u64 },
    /// A parcel can't be moved from host memory to the tier below.
    Spill { bytes: u64 },
    /// A parcel can't be brought up to host memory.
    Fetch { bytes: u64 },
    /// A pool that was never made.
    UnknownPool(u32),
    /// Host memory can't be allocated.
    Pin { bytes: u64 },
    /// The end of a copy can't be waited for.
    Settle { bytes: u64 },
    /// A buffer that is not this pool's.
    Foreign,
    /// A name that no group has.
    UnknownName(String),
    /// A layer can't run both before and after another one.
    Circle { first: String, second: String },
    /// A layer has another neighbour than was declared before.
    Chain { layer: String, side: &'static str, declared: String, wanted: String },
}

impl Error {
    pub(crate) fn new(kind: Kind) -> Self {
        Self(Box::new(Inner { kind, hint: None, source: None }))
    }

    pub(crate) fn caused_by(kind: Kind, mut source: BackendError) -> Self {
        let hint = source.hint.take();
        Self(Box::new(Inner { kind, hint, source: Some(source) }))
    }

    pub(crate) fn with_hint(mut self, hint: &str) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Adds a hint unless the cause brought one.
    pub(crate) fn or_hint(mut self, hint: &str) -> Self {
        self.0.hint.get_or_insert_with(|| hint.into());
        self
    }

    pub(crate) fn changed(kind: Kind) -> Self {
        let hint = "don't change a tensor in place, or resize it, between forward and backward; \
                    keep a copy or leave the layer unswapped";
        Self(Box::new(Inner { kind, hint: Some(hint.into()), source: None }))
    }

    pub(crate) fn setting(message: impl Into<String>, hint: impl Into<String>) -> Self {
        let kind = Kind::Setting(message.into());
        Self(Box::new(Inner { kind, hint: Some(hint.into()), source: None }))
    }

    /// What the user can do about it, if anything is known.
    pub fn hint(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// A setting is wrong: nothing has been done yet.
    pub fn is_setting(&self) -> bool {
        matches!(self.0.kind, Kind::Setting(_) | Kind::Chain { .. } | Kind::Circle { .. })
    }

    /// The calls came in an order that the group's phase does not allow; nothing changed.
    pub fn is_phase(&self) -> bool {
        let kind = &self.0.kind;
        matches!(kind, Kind::Phase { .. } | Kind::UnknownGroup(_) | Kind::UnknownName(_))
    }

    /// A tensor was resized or modified in place after it was saved.
    pub fn is_changed(&self) -> bool {
        matches!(self.0.kind, Kind::Changed { .. })
    }

    /// Bytes are wanted that were not saved before their storage was freed.
    pub fn is_not_saved(&self) -> bool {
        matches!(self.0.kind, Kind::NotSaved { .. })
    }

    /// A bound was reached: host memory, or the tiers below it.
    pub fn is_no_room(&self) -> bool {
        matches!(self.0.kind, Kind::NoRoom { .. })
            || self.0.source.as_ref().is_some_and(BackendError::is_no_room)
    }

    /// A copy failed. After a failed offload the bytes are on the device; after a failed load they
    /// are still in the tier and the load can be tried again.
    pub fn is_copy(&self) -> bool {
        match self.0.kind {
            Kind::Trip { trip, .. } | Kind::Whole { trip, .. } => trip != Trip::Device,
            Kind::Bucket { .. } => true,
            _ => false,
        }
    }
}

/// For an error that is the cause of another one.
impl From<Error> for BackendError {
    fn from(error: Error) -> Self {
        let (no_room, message) = (error.is_no_room(), error.to_string());
        let Inner { hint, source, .. } = *error.0;
        let source = source.map(|cause| Box::new(cause) as Box<dyn StdError + Send + Sync>);
        Self { message, hint, source, no_room }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.kind {
            Kind::Setting(message) => f.write_str(message),
            Kind::Phase { group, found, wanted, call } => {
                write!(f, "{call} of group {group}: its phase is `{found}`, needs `{wanted}`")
            }
            Kind::UnknownGroup(id) => write!(f, "no group {id} is open"),
            Kind::Trip { trip: Trip::Device, group, label, bytes, .. } => {
                write!(f, "the device refused to move {label} ({bytes} bytes, group {group})")
            }
            Kind::Trip { trip, group, label, bytes, how } => {
                write!(f, "{} of {label} ({bytes} bytes, {how}group {group}) failed", trip.name())
            }
            Kind::Bucket { group, bucket, element, elements, bytes, pool } => {
                let to = if *pool { "explicit pool" } else { "default pool" };
                write!(
                    f,
                    "offload of bucket {bucket} ({elements} elements of {element}, {bytes} bytes, \
                     {to}, group {group}) failed"
                )
            }
            Kind::Whole { trip, group, what } => {
                write!(f, "{} of group {group} failed: {what}", trip.name())
            }
            Kind::Drop { label, bytes } => {
                write!(f, "the device refused to drop {label} ({bytes} bytes)")
            }
            Kind::Changed { group, label, what, then, now } => write!(
                f,
                "{label} (group {group}) changed after it was saved: {what} was {then}, is {now}"
            ),
            Kind::DoesNotFit { label, range, told, bytes } => write!(
                f,
                "{label} reaches bytes {}..{} of a storage of {told} bytes, which has {bytes}",
                range.start, range.end
            ),
            Kind::NotSaved { label, range } => write!(
                f,
                "bytes {}..{} of the storage of {label} were not saved before it was freed",
                range.start, range.end
            ),
            Kind::NotReadable { state } => {
                write!(f, "the value is not on the device: its state is `{state}`")
            }
            Kind::NoRoom { requested, pooled, maximum } => write!(
                f,
                "host memory would exceed its bound: {requested} bytes requested, {pooled} of \
                 {maximum} bytes pooled"
            ),
            Kind::Spill { bytes } => write!(f, "can't move {bytes} bytes below host memory"),
            Kind::Fetch { bytes } => write!(f, "can't bring {bytes} bytes up to host memory"),
            Kind::UnknownPool(pool) => write!(f, "no pool has the number {pool}"),
            Kind::Pin { bytes } => write!(f, "can't allocate a host buffer of {bytes} bytes"),
            Kind::Settle { bytes } => {
                write!(f, "can't wait for the last copy of a host buffer of {bytes} bytes")
            }
            Kind::Foreign => f.write_str("the buffer belongs to another pool"),
            Kind::UnknownName(name) => write!(f, "no group is named `{name}`"),
            Kind::Circle { first, second } => {
                write!(f, "`{second}` after `{first}` would make the chain a circle")
            }
            Kind::Chain { layer, side, declared, wanted } => write!(
                f,
                "layer `{layer}` has the {side} `{declared}`, `{wanted}` can't be its {side} as well"
            ),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("hint", &self.0.hint)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|e| e as &(dyn StdError + 'static))
    }
}

// One pointer, so that `Result<(), Error>` stays in a register on the hot path.
const _: () = assert!(size_of::<Error>() == size_of::<usize>());

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
