//! The inputs to start from.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder of a target.
pub fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// The files of a target in order of name, which a seed relies on.
///
/// # Errors
/// The folder or a file can't be read, or there is none.
pub fn load(target: &str) -> io::Result<Vec<Vec<u8>>> {
    let folder = folder(target);
    let mut paths =
        fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    if paths.is_empty() {
        return Err(io::Error::other(format!("{} is empty", folder.display())));
    }
    paths.iter().map(fs::read).collect()
}
