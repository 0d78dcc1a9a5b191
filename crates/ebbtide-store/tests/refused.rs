//! A kernel that refuses `io_uring`, as containers often have it: a filter in front of the call.

mod common;
#[path = "refused/filter.rs"]
mod filter;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use common::{Block, chain, get, noise, put, single};
use ebbtide_core::Bytes;
use ebbtide_store::{FileStore, IoChoice, IoKind, IoReason};

#[test]
fn a_ring_that_is_refused_is_an_error_if_asked_for_and_else_a_reason() {
    if let Err(why) = filter::refuse_rings_for_this_thread() {
        return common::skipped("a_ring_that_is_refused", &format!("no filter: {why}"));
    }
    let refused = ebbtide_store::uring_available().unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);

    let dir = tempfile::tempdir().unwrap();
    let error = FileStore::<Block>::open(&single(&dir, IoChoice::Uring)).unwrap_err();
    let text = "the kernel refuses io_uring, which the settings ask for: \
                Operation not permitted (os error 1)";
    assert_eq!(chain(&error), text);
    assert!(error.hint().unwrap().contains("seccomp"));

    let mut store = FileStore::open(&single(&dir, IoChoice::Auto)).unwrap();
    assert_eq!(store.io().kind, IoKind::Threads);
    let IoReason::Refused(why) = &store.io().reason else { panic!("{}", store.io()) };
    assert_eq!(why, "Operation not permitted (os error 1)");
    let alive = Arc::new(AtomicUsize::new(0));
    let slot = put(&mut store, Block::filled(10_000, 0, 1, &alive)).unwrap();
    let home = get(&mut store, &slot, Block::zeroed(10_000, 0, &alive)).unwrap();
    assert!(home.bytes() == noise(10_000, 1));

    let report = ebbtide_store::measure::file_tier(dir.path(), 8192, 4096, 1).unwrap();
    assert_eq!(report.tiers.len(), 1);
    assert_eq!(report.uring.unwrap_err(), "Operation not permitted (os error 1)");
}
