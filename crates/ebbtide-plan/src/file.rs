//! What the two kinds of files have in common: a bounded reader, the head, one item a line.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The largest file that is read, in bytes.
pub const MAX_FILE_BYTES: u64 = 64 << 20;

/// The version of both formats.
pub(crate) const VERSION: u32 = 1;

/// A file that is not what it should be, whatever is in it.
#[derive(Debug)]
pub enum FileError {
    /// It can't be read or written.
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is longer than [`MAX_FILE_BYTES`].
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// It is no JSON, or has a key or a value that does not belong there.
    Json {
        /// `ebbtide.trace` or `ebbtide.plan`.
        format: &'static str,
        /// What and where.
        message: String,
    },
    /// It is something else.
    Format {
        /// What it says it is.
        found: String,
        /// What was wanted.
        wanted: &'static str,
    },
    /// It is of a version that this program does not know.
    Version {
        /// `ebbtide.trace` or `ebbtide.plan`.
        format: &'static str,
        /// What it says.
        found: u64,
    },
}

impl FileError {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Io { .. } => "check the path",
            Self::TooLong { .. } => "files of up to 64 MiB are read; is it the right one?",
            Self::Json { .. } => "compare it with a file that this version writes",
            Self::Format { .. } => "traces come from `ebbtide trace`, plans from `ebbtide plan`",
            Self::Version { .. } => "this program knows version 1; make the file again with it",
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, source } => write!(f, "{}: {source}", path.display()),
            Self::TooLong { path } => write!(f, "{} has more than 64 MiB", path.display()),
            Self::Json { format, message } => write!(f, "not a file of format {format}: {message}"),
            Self::Format { found, wanted } => {
                write!(f, "a file of format `{found}`, not {wanted}")
            }
            Self::Version { format, found } => {
                write!(f, "version {found} of {format} is not known")
            }
        }
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Reads a file into memory, however long it claims to be.
pub(crate) fn read(path: &Path) -> Result<String, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(FileError::TooLong { path: path.to_owned() });
    }
    Ok(text)
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), FileError> {
    std::fs::write(path, text).map_err(|source| FileError::Io { path: path.to_owned(), source })
}

/// What is looked at first, so that a file of another version is told as that.
#[derive(serde::Deserialize)]
struct Head {
    format: String,
    version: u64,
}

pub(crate) fn parse<T: DeserializeOwned>(text: &str, format: &'static str) -> Result<T, FileError> {
    let wrong = |error: serde_json::Error| FileError::Json { format, message: error.to_string() };
    let head: Head = serde_json::from_str(text).map_err(wrong)?;
    if head.format != format {
        let found = head.format.chars().take(40).collect();
        return Err(FileError::Format { found, wanted: format });
    }
    if head.version != u64::from(VERSION) {
        return Err(FileError::Version { format, found: head.version });
    }
    serde_json::from_str(text).map_err(wrong)
}

/// A value in one line.
pub(crate) fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers, texts and lists are JSON")
}

/// `"key":[` and one item a line.
pub(crate) fn lines<T: Serialize>(key: &str, items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(|item| format!("  {}", line(item))).collect();
    if items.is_empty() {
        return format!(" \"{key}\":[]");
    }
    format!(" \"{key}\":[\n{}\n ]", items.join(",\n"))
}
