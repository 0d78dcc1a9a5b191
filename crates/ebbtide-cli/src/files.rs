//! Files that are written whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::output::Printer;

/// The folder that a file is, or would be, in.
pub(crate) fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Whether a file can be made in `folder`: makes one and takes it away again, because permission
/// bits alone say nothing about read-only mounts or the superuser.
pub(crate) fn probe(folder: &Path) -> io::Result<()> {
    let path = folder.join(format!(".ebbtide-probe-{}", std::process::id()));
    File::create_new(&path)?;
    fs::remove_file(&path)
}

/// Whether a path is standard output under another name. Opening it again would write over what
/// the run has printed, and renaming over it would cut it off.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path == Path::new("/dev/stdout")
}

/// Puts `bytes` into `path`.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    if is_stdout(path) {
        return Printer::raw(bytes);
    }
    // A pipe or a device is written to; renaming over it would replace it.
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return fs::write(path, bytes).map_err(|error| failed(path, &error));
    }
    replace(path, |temporary| fs::write(temporary, bytes))
}

/// Replaces `path` by what `write` puts into the path it is given. Readers see the old file or the
/// new one, also after a crash.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&Path) -> io::Result<()>,
) -> Result<(), Failure> {
    // The file that a link points to is replaced, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let temporary = sibling(&target);
    let result = write(&temporary).and_then(|()| {
        File::open(&temporary)?.sync_all()?;
        fs::rename(&temporary, &target)?;
        File::open(folder(&target))?.sync_all()
    });
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let hint = "free some space there, or name another file";
    Failure::run_time(format!("can't write {}: {error}", path.display()), hint)
}

fn sibling(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    folder(path).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        replace(&path, |p| fs::write(p, "old")).unwrap();
        let failure = replace(&path, |p| {
            fs::write(p, "half")?;
            Err(io::Error::other("disk full"))
        })
        .unwrap_err();
        assert!(failure.message.ends_with("state: disk full"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn links_stay_links() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::write(&real, "old").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        replace(&link, |p| fs::write(p, "new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
    }
}
