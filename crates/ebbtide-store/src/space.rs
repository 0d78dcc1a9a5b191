//! Giving disk space back that no block needs.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// Bytes of the disk that a file takes.
pub(crate) fn allocated(file: &File) -> io::Result<u64> {
    // The unit is 512 bytes, whatever the file system's blocks are (stat(2)).
    Ok(file.metadata()?.blocks() * 512)
}

/// Makes the file `end` bytes long, at most, and punches the holes, which are below that. Tells how
/// many bytes of the disk were given back.
pub(crate) fn give_back(file: &File, holes: &[Range<u64>], end: u64) -> io::Result<u64> {
    let before = allocated(file)?;
    if file.metadata()?.len() > end {
        file.set_len(end)?;
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for hole in holes {
        match fallocate(file, flags, hole.start, hole.end - hole.start) {
            Ok(()) => {}
            // Then it can't punch any.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(before.saturating_sub(allocated(file)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_and_the_end_are_given_back_and_the_rest_stays() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![7; 10 << 16], 0).unwrap();
        file.sync_all().unwrap();
        let before = allocated(&file).unwrap();
        let given = give_back(&file, &[0..1 << 16, 3 << 16..5 << 16], 8 << 16).unwrap();
        // The file system's list of the pieces counts, too, and may get longer or shorter.
        assert!(given.abs_diff(5 << 16) <= 1 << 16, "{given}");
        assert_eq!(allocated(&file).unwrap(), before - given);
        assert_eq!(file.metadata().unwrap().len(), 8 << 16);
        for (part, byte) in [(0, 0), (1, 7), (2, 7), (3, 0), (4, 0), (5, 7), (7, 7)] {
            let mut bytes = vec![1; 1 << 16];
            file.read_exact_at(&mut bytes, part << 16).unwrap();
            assert!(bytes.iter().all(|&found| found == byte), "part {part}");
        }
        assert_eq!(
            give_back(&file, &[0..1 << 16, 3 << 16..5 << 16], 8 << 16).unwrap(),
            0,
            "nothing is left"
        );
    }
}
