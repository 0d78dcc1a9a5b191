//! Files that are written whole or not at all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::fstat;

use crate::failure::Failure;
use crate::output::{self, Printer};

/// The folder that a file is, or would be, in.
pub(crate) fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// One spelling for one file, whether it exists or not: the file that a link points to.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    // A link to a file that is not there yet. The system follows as many.
    for _ in 0..40 {
        match fs::read_link(&path) {
            Ok(link) if !path.exists() => path = folder(&path).join(link),
            _ => break,
        }
    }
    fs::canonicalize(&path).unwrap_or_else(|_| {
        let folder = folder(&path);
        let folder = fs::canonicalize(&folder).unwrap_or(folder);
        folder.join(path.file_name().unwrap_or_default())
    })
}

/// Whether a file can be made in `folder`: makes one and takes it away again, because permission
/// bits alone say nothing about read-only mounts or the superuser.
pub(crate) fn probe(folder: &Path) -> io::Result<()> {
    let path = folder.join(format!(".ebbtide-probe-{}", std::process::id()));
    File::create_new(&path)?;
    fs::remove_file(&path)
}

/// Whether a path is standard output under another name, such as `/dev/fd/1` or the file that it goes
/// to. Opening it again would write over what the run has printed, and renaming over it would cut it
/// off.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path == Path::new("/dev/stdout") || is_behind(path, io::stdout())
}

/// The same of standard error.
fn is_stderr(path: &Path) -> bool {
    path == Path::new("/dev/stderr") || is_behind(path, io::stderr())
}

/// Whether an open stream is of the file at `path`.
fn is_behind(path: &Path, stream: impl AsFd) -> bool {
    match (fs::metadata(path), fstat(stream)) {
        (Ok(file), Ok(open)) => (file.dev(), file.ino()) == (open.st_dev, open.st_ino),
        _ => false,
    }
}

/// Puts `bytes` into `path`.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    if is_stdout(path) {
        return Printer::raw(bytes);
    }
    if is_stderr(path) {
        return output::raw_to_stderr(bytes).map_err(|error| failed(path, &error));
    }
    // A pipe or a device is written to; renaming over it would replace it.
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return fs::write(path, bytes).map_err(|error| failed(path, &error));
    }
    replace(path, |file| file.write_all(bytes))
}

/// Replaces `path` by what `write` puts into the file it is given, and keeps its permissions. Readers
/// see the old file or the new one, also after a crash.
pub(crate) fn replace(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), Failure> {
    // The file that a link points to is replaced, not the link.
    let target = resolved(path);
    remove_stale(&target);
    let temporary = sibling(&target);
    // The file is locked until it has its name.
    let result = fill(&target, &temporary, write).and_then(|_file| {
        fs::rename(&temporary, &target)?;
        File::open(folder(&target))?.sync_all()
    });
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.map_err(|error| failed(path, &error))
}

/// Makes the temporary file, all of it on the disk, with the permissions of the one it replaces.
fn fill(
    target: &Path,
    temporary: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<File> {
    let kept = fs::metadata(target).ok().map(|metadata| metadata.permissions());
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    if kept.is_some() {
        // Nobody may read what goes into a private file while it has another name.
        options.mode(0o600);
    }
    let mut file = options.open(temporary)?;
    // Tells others that it was not left by a killed process: the system unlocks it at the end of this
    // one, whatever ends it. Where there are no locks nobody gets one to take the file away.
    let _ = file.try_lock();
    write(&mut file)?;
    if let Some(permissions) = kept {
        file.set_permissions(permissions)?;
    }
    file.sync_all()?;
    Ok(file)
}

/// Takes away what processes that were killed in the middle of [`replace`] have left beside
/// `target`. Whatever can't be looked at or taken away stays.
fn remove_stale(target: &Path) {
    for entry in fs::read_dir(folder(target)).into_iter().flatten().flatten() {
        if !is_temporary(&entry.file_name(), target) {
            continue;
        }
        let path = entry.path();
        // Opened for writing, which some network file systems need for a lock; no link is followed.
        let regular = entry.file_type().is_ok_and(|kind| kind.is_file());
        let file = OpenOptions::new().write(true).open(&path);
        if regular && file.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Whether a name is one that [`sibling`] gives, in some process.
fn is_temporary(name: &OsStr, target: &Path) -> bool {
    let process = || {
        let own = target.file_name().unwrap_or_default().as_bytes();
        let rest = name.as_bytes().strip_prefix(b".")?.strip_prefix(own)?;
        rest.strip_prefix(b".")?.strip_suffix(b".tmp")
    };
    process().is_some_and(|id| !id.is_empty() && id.iter().all(u8::is_ascii_digit))
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
        replace(&path, |file| file.write_all(b"old")).unwrap();
        let failure = replace(&path, |file| {
            file.write_all(b"half")?;
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
        replace(&link, |file| file.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
    }

    #[test]
    fn a_link_to_nothing_gets_the_file_that_it_names() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        symlink("sub/second", at("first")).unwrap();
        symlink("../real", at("sub/second")).unwrap();
        replace(&at("first"), |file| file.write_all(b"new")).unwrap();
        for name in ["first", "sub/second"] {
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink());
        }
        assert!(fs::symlink_metadata(at("real")).unwrap().is_file());
        assert_eq!(fs::read_to_string(at("first")).unwrap(), "new");
    }

    #[test]
    fn an_existing_file_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::write(&path, "old").unwrap();
        for mode in [0o600, 0o640, 0o444] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            replace(&path, |file| file.write_all(b"new")).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
        }
    }

    #[test]
    fn what_killed_processes_left_is_taken_away_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let others = [".other.7.tmp", ".state.x.tmp", ".state..tmp", "state.7.tmp", ".state.9.tmp"];
        for name in [".state.7.tmp", ".state.888888.tmp"].iter().chain(&others) {
            fs::write(at(name), "half").unwrap();
        }
        // The last one is being written.
        let busy = File::open(at(".state.9.tmp")).unwrap();
        busy.lock().unwrap();
        replace(&at("state"), |file| file.write_all(b"new")).unwrap();
        let left = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        let mut left: Vec<_> = left.map(|name| name.into_string().unwrap()).collect();
        left.sort();
        let mut expected: Vec<_> = others.into_iter().chain(["state"]).collect();
        expected.sort_unstable();
        assert_eq!(left, expected);
    }
}
