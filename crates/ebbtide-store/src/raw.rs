//! Positioned reads and writes: the real file, and the seam where tests inject faults.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// One system call each: may do less than asked for.
pub(crate) trait RawFile: Send + Sync {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize>;

    /// Asked before a read is given to the kernel in another way than by `read_at`: what it is to
    /// answer, if a fault is planned for it.
    fn planned_read(&self, _: &mut [u8], _: u64) -> Option<io::Result<usize>> {
        None
    }

    /// The same for a write.
    fn planned_write(&self, _: &[u8], _: u64) -> Option<io::Result<usize>> {
        None
    }
}

impl RawFile for Arc<File> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(&**self, buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(&**self, buf, offset)
    }
}
