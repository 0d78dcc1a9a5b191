//! The plain loop: what one thread gets from a file without any tier around it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ebbtide_core::BackendError;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use crate::spill::LIMITED;
use crate::{AlignedBuf, SpillFile};

/// A spill file without a store.
pub(super) struct PlainFile {
    file: File,
    dir: PathBuf,
    direct: Result<(), String>,
}

impl PlainFile {
    pub(super) fn open(dir: &Path) -> Result<Self, BackendError> {
        let SpillFile { file, dir, mem_align, notices } = SpillFile::open(dir)?;
        let direct = mem_align.map(|_| ()).ok_or_else(|| notices.join("; "));
        Ok(Self { file, dir, direct })
    }

    /// Whether I/O is direct, or why not.
    pub(super) fn direct(&self) -> Result<(), String> {
        self.direct.clone()
    }

    /// Takes the space on the disk, where the file system can do that in advance.
    pub(super) fn preallocate(&self, bytes: u64) -> Result<(), BackendError> {
        match fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(e) => Err(self.failed("make room for", bytes, e.into())),
        }
    }

    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), BackendError> {
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|e| self.failed("write", bytes.len() as u64, e))
    }

    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> Result<(), BackendError> {
        let len = bytes.len() as u64;
        self.file.read_exact_at(bytes, offset).map_err(|e| self.failed("read", len, e))
    }

    fn failed(&self, verb: &str, bytes: u64, error: io::Error) -> BackendError {
        let message = format!("can't {verb} {bytes} bytes in {}", self.dir.display());
        let hint = match error.kind() {
            io::ErrorKind::FileTooLarge => LIMITED,
            _ => "free space there, measure fewer bytes, or name another folder",
        };
        BackendError::new(message).with_hint(hint).with_source(error)
    }
}

/// Memory whose pages are there, with bytes that don't repeat within 64 KiB and differ by `seed`.
pub(super) fn filled(len: usize, seed: u64) -> Result<AlignedBuf, BackendError> {
    let mut block = AlignedBuf::zeroed(len)?;
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in block.as_mut_slice().chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    Ok(block)
}
