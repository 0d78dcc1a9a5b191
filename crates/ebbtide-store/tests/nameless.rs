//! What the rest of the system sees of the spill file: no name, no mode for others, no page cache.

mod common;

use std::fs::{File, OpenOptions};
use std::io::IoSliceMut;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use common::{Block, both_ways, open, put, single};
use ebbtide_core::Store;
use ebbtide_store::IoChoice;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

both_ways! {
    c22_file_is_unlinked_at_once;
    direct_io_leaves_nothing_in_the_page_cache;
}

/// Descriptors of this process whose files are or were in the folder, and their names.
fn descriptors(dir: &Path) -> Vec<(PathBuf, String)> {
    let links = Path::new("/proc/self/fd").read_dir().unwrap();
    let links = links.filter_map(|entry| {
        let path = entry.ok()?.path();
        // A descriptor of another test may be closed by now.
        let target = path.read_link().ok()?.to_string_lossy().into_owned();
        Some((path, target))
    });
    let dir = dir.to_str().unwrap();
    links.filter(|(_, target)| target.starts_with(dir)).collect()
}

fn c22_file_is_unlinked_at_once(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    let slot = put(&mut store, Block::filled(100_000, 0, 1, &alive)).unwrap();

    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    let [(link, target)] = &descriptors(dir.path())[..] else { panic!("one descriptor") };
    assert!(target.ends_with(" (deleted)"), "{target}");
    let metadata = link.metadata().unwrap();
    assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
    assert_eq!(metadata.len(), 102_400);

    store.discard(slot);
    drop(store);
    assert!(descriptors(dir.path()).is_empty(), "closed with the store");
}

/// How many pages of the file are in the page cache: a read that may not wait fails for the others.
fn cached_pages(file: &File) -> usize {
    // No reading ahead, which would bring in what is asked about next.
    fadvise(file, 0, None, Advice::Random).unwrap();
    let mut buf = [0; 4096];
    let offsets = (0..file.metadata().unwrap().len()).step_by(4096);
    let cached = offsets.filter(|&offset| {
        let bufs = &mut [IoSliceMut::new(&mut buf)];
        match preadv2(file, bufs, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => true,
            Err(Errno::AGAIN) => false,
            Err(e) => panic!("{e}"),
        }
    });
    cached.count()
}

fn direct_io_leaves_nothing_in_the_page_cache(io: IoChoice) {
    let dir = tempfile::tempdir().unwrap();
    let alive = Arc::new(AtomicUsize::new(0));
    let mut store = open(&single(&dir, io));
    if !store.is_direct() {
        assert_eq!(store.notices().len(), 1, "buffered, and said so");
        return;
    }
    let aligned = put(&mut store, Block::filled(4 << 20, 0, 1, &alive)).unwrap();
    let odd = put(&mut store, Block::filled((4 << 20) + 1, 1, 2, &alive)).unwrap();
    common::get(&mut store, &aligned, Block::zeroed(4 << 20, 0, &alive)).unwrap();
    common::get(&mut store, &odd, Block::zeroed((4 << 20) + 1, 1, &alive)).unwrap();

    let [(link, _)] = &descriptors(dir.path())[..] else { panic!("one descriptor") };
    let buffered = OpenOptions::new().read(true).write(true).open(link).unwrap();
    // Two pages that are there show that the measure sees them.
    std::os::unix::fs::FileExt::write_all_at(&buffered, &[1; 8192], 0).unwrap();
    assert_eq!(cached_pages(&buffered), 2);
}
