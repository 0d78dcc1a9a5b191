//! Opening the one spill file of a store.
//!
//! The file has no name: whatever ends the process, `kill -9` included, ends the file, and no
//! folder ever needs to be cleaned by hand.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use ebbtide_core::BackendError;
use rustix::fs::{
    AtFlags, Mode, OFlags, StatFs, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, statfs, statx,
};
use rustix::io::Errno;

use crate::{AlignedBuf, GRAIN};

/// What the user can do about a folder that does not serve.
const HINT: &str = "name another folder";

/// What the user can do where a file can't grow, though the disk may have room.
pub(crate) const LIMITED: &str =
    "raise the limit on the size of files (ulimit -f), or name another folder";

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// An open file without a name in a folder of the user's choice. Mode 0600, closed on exec.
#[derive(Debug)]
pub struct SpillFile {
    pub(crate) file: File,
    pub(crate) dir: PathBuf,
    /// What addresses of memory must be a multiple of for direct I/O. `None`: I/O is buffered.
    pub(crate) mem_align: Option<usize>,
    pub(crate) notices: Vec<String>,
}

impl SpillFile {
    /// Opens a file in `dir` and unlinks it at once. Direct I/O is tried out by writing and reading
    /// 4096 bytes; if the file system refuses it, the file is buffered and a notice says so.
    ///
    /// # Errors
    /// The folder does not exist, is not a folder, or no file can be made or written in it.
    pub fn open(dir: &Path) -> Result<Self, BackendError> {
        let metadata = dir.metadata().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => unusable(dir, ": the folder doesn't exist"),
            _ => unusable(dir, "").with_source(e),
        })?;
        if !metadata.is_dir() {
            return Err(unusable(dir, ": it is not a folder"));
        }
        let wrap = |e: io::Error| match e.kind() {
            io::ErrorKind::FileTooLarge => unusable(dir, "").with_hint(LIMITED).with_source(e),
            _ => unusable(dir, "").with_source(e),
        };
        let file = nameless(dir).map_err(wrap)?;
        let mut spill = Self { file, dir: dir.into(), mem_align: None, notices: Vec::new() };
        if spill.is_ram().map_err(wrap)? {
            let dir = dir.display();
            spill.notices.push(format!("{dir} is RAM, not disk: swapping there saves nothing"));
            spill.probe(1).map_err(wrap)?;
        } else {
            spill.mem_align = spill.try_direct().map_err(wrap)?;
        }
        spill.file.set_len(0).map_err(wrap)?;
        Ok(spill)
    }

    /// Whether reads and writes bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.mem_align.is_some()
    }

    /// What the user should know about the folder, one sentence each, without a full stop.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    fn is_ram(&self) -> io::Result<bool> {
        Ok(is_ram(&fstatfs(&self.file)?))
    }

    /// Switches direct I/O on, if it works, and tells the alignment it needs in memory.
    fn try_direct(&mut self) -> io::Result<Option<usize>> {
        if self.set_direct(true).is_ok() {
            for align in [self.reported_align(), GRAIN] {
                match self.probe(align) {
                    Ok(()) => return Ok(Some(align)),
                    Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
                    Err(e) => return Err(e),
                }
            }
            self.set_direct(false)?;
        }
        self.probe(1)?;
        self.notices.push(format!(
            "{} refuses direct I/O: spilled bytes pass through the page cache, which is slower \
             and uses memory until the kernel writes them out",
            self.dir.display()
        ));
        Ok(None)
    }

    fn set_direct(&self, on: bool) -> io::Result<()> {
        let mut flags = fcntl_getfl(&self.file)?;
        flags.set(OFlags::DIRECT, on);
        Ok(fcntl_setfl(&self.file, flags)?)
    }

    /// The alignment that the file system asks for, often that of the disk's DMA: 512
    /// bytes, or 4. With 16 or less the memory of any allocator will do.
    fn reported_align(&self) -> usize {
        let Ok(stat) = statx(&self.file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
            return GRAIN;
        };
        let known = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
        match usize::try_from(stat.stx_dio_mem_align) {
            Ok(align) if known && align.is_power_of_two() && align <= GRAIN => align,
            _ => GRAIN,
        }
    }

    /// Writes and reads back one grain, at a memory address of exactly this alignment.
    fn probe(&self, align: usize) -> io::Result<()> {
        let mut buf = AlignedBuf::zeroed(2 * GRAIN).map_err(io::Error::other)?;
        let bytes = &mut buf.as_mut_slice()[align % GRAIN..][..GRAIN];
        bytes.fill(0xEB);
        self.file.write_all_at(bytes, 0)?;
        bytes.fill(0);
        self.file.read_exact_at(bytes, 0)?;
        if bytes.iter().any(|&byte| byte != 0xEB) {
            return Err(io::Error::other("4096 bytes were written and others were read back"));
        }
        Ok(())
    }
}

fn unusable(dir: &Path, why: &str) -> BackendError {
    let message = format!("can't use {} for a spill file{why}", dir.display());
    BackendError::new(message).with_hint(HINT)
}

fn nameless(dir: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    // O_EXCL: nobody can give the file a name later.
    let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(dir, flags, mode) {
        Ok(fd) => Ok(fd.into()),
        // Overlays and network file systems may not know it. Any other reason will show again.
        Err(_) => named_then_unlinked(dir, mode),
    }
}

fn named_then_unlinked(dir: &Path, mode: Mode) -> io::Result<File> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    for _ in 0..100 {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let path = dir.join(format!(".ebbtide-{}-{count}-{nanos:08x}", std::process::id()));
        match rustix::fs::open(&path, flags, mode) {
            Ok(fd) => {
                rustix::fs::unlink(&path)?;
                return Ok(fd.into());
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(Errno::EXIST.into())
}

fn is_ram(system: &StatFs) -> bool {
    // The type of the field differs between architectures; the magic numbers are 32 bits wide.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    let magic = system.f_type as u64 & 0xFFFF_FFFF;
    magic == TMPFS_MAGIC || magic == RAMFS_MAGIC
}

/// The folder for a spill file where none is named: the system's folder for temporary files, or
/// `/var/tmp` where that one is in RAM (as it is by default on many systems) and `/var/tmp` is not.
/// An empty `TMPDIR` names no folder and counts as unset.
///
/// ```
/// assert!(ebbtide_store::spill_dir().is_absolute());
/// ```
pub fn spill_dir() -> PathBuf {
    let in_ram = |dir: &Path| statfs(dir).is_ok_and(|system| is_ram(&system));
    let temporary = named_or_default(std::env::temp_dir());
    let other = PathBuf::from("/var/tmp");
    if in_ram(&temporary) && other.is_dir() && !in_ram(&other) { other } else { temporary }
}

fn named_or_default(temporary: PathBuf) -> PathBuf {
    if temporary.as_os_str().is_empty() { "/tmp".into() } else { temporary }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn an_empty_name_of_the_temporary_folder_counts_as_none() {
        assert_eq!(named_or_default(PathBuf::new()), Path::new("/tmp"));
        assert_eq!(named_or_default("/spill".into()), Path::new("/spill"));
    }

    #[test]
    fn a_file_made_with_a_name_loses_it_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = named_then_unlinked(dir.path(), Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
    }

    #[test]
    fn the_probe_leaves_an_empty_file() {
        let dir = tempfile::tempdir().unwrap();
        let spill = SpillFile::open(dir.path()).unwrap();
        assert_eq!(spill.file.metadata().unwrap().len(), 0);
        assert_eq!(spill.is_direct(), spill.notices().is_empty());
    }

    #[test]
    fn the_file_is_closed_on_exec() {
        let dir = tempfile::tempdir().unwrap();
        let spill = SpillFile::open(dir.path()).unwrap();
        let flags = rustix::io::fcntl_getfd(&spill.file).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
