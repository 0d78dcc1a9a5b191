//! The error type of the engine.
//!
//! One opaque type, one pointer wide, with predicates for the few distinctions a caller needs.
//! Kinds are private, so that a new one breaks nobody. The [`hint`](Error::hint) is apart from the
//! message: a program prints it on a line of its own.

use std::error::Error as StdError;
use std::fmt;

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
}

impl BackendError {
    /// An error with this message and no cause.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, source: None }
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
    /// A copy out failed; the bytes are still on the device.
    Offload { group: String, label: String, bytes: u64 },
    /// A copy in failed; the bytes are still in the tier.
    Load { group: String, label: String, bytes: u64 },
    /// The device refused to give up or to take back a storage.
    Device { group: String, label: String, bytes: u64 },
}

impl Error {
    pub(crate) fn new(kind: Kind) -> Self {
        Self(Box::new(Inner { kind, hint: None, source: None }))
    }

    pub(crate) fn caused_by(kind: Kind, mut source: BackendError) -> Self {
        let hint = source.hint.take();
        Self(Box::new(Inner { kind, hint, source: Some(source) }))
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
        matches!(self.0.kind, Kind::Setting(_))
    }

    /// The calls came in an order that the group's phase does not allow; nothing changed.
    pub fn is_phase(&self) -> bool {
        matches!(self.0.kind, Kind::Phase { .. } | Kind::UnknownGroup(_))
    }

    /// A copy failed. After a failed offload the bytes are on the device; after a failed load they
    /// are still in the tier and the load can be tried again.
    pub fn is_copy(&self) -> bool {
        matches!(self.0.kind, Kind::Offload { .. } | Kind::Load { .. })
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
            Kind::Offload { group, label, bytes } => {
                write!(f, "offload of {label} ({bytes} bytes, group {group}) failed")
            }
            Kind::Load { group, label, bytes } => {
                write!(f, "load of {label} ({bytes} bytes, group {group}) failed")
            }
            Kind::Device { group, label, bytes } => {
                write!(f, "the device refused to move {label} ({bytes} bytes, group {group})")
            }
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
