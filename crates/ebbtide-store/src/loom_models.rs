//! Models of what threads share, run by loom through the orders in which the threads can meet
//! (`scripts/loom`). Each is a queue, a worker or two, and a
//! caller or two.

use ebbtide_core::{Done, Failed, Ticket, Timing};
use loom::sync::Arc;
use loom::thread;

use crate::file::FileSlot;
use crate::queue::{Job, Queue, Task};

/// Blocks are numbers here.
type Numbers = Queue<u32>;

fn queue(bound: u64) -> Arc<Numbers> {
    Arc::new(Queue::new(bound, None))
}

/// Asks for a write of so many bytes.
fn put(queue: &Numbers, number: u32, bytes: u64) -> Ticket {
    let extent = queue.reserve(bytes).unwrap();
    queue.push(Task::Write(extent), number, bytes)
}

/// Runs jobs as a worker does, but without a file. Returns the numbers in the order they came.
fn work(queue: &Numbers) -> Vec<u32> {
    let mut seen = Vec::new();
    while let Some(Job { ticket, task, block, bytes }) = queue.pop(None) {
        seen.push(block);
        let done = match task {
            Task::Write(extent) => Done::Stored(FileSlot { extent, bytes, sum: None }, Some(block)),
            Task::Read { .. } => Done::Loaded(block),
        };
        queue.finish(ticket, bytes, Ok((done, Timing::default())), None);
    }
    seen
}

/// Waits for a write and gives its room back.
fn wait(queue: &Numbers, ticket: Ticket) -> u32 {
    let Ok((Done::Stored(slot, Some(number)), _)) = queue.wait(ticket) else {
        panic!("the write is done")
    };
    queue.release(slot.extent);
    number
}

#[test]
fn two_producers_hand_over_to_one_worker() {
    loom::model(|| {
        let queue = queue(u64::MAX);
        let worker = thread::spawn({
            let queue = Arc::clone(&queue);
            move || work(&queue)
        });
        let other = thread::spawn({
            let queue = Arc::clone(&queue);
            move || {
                let ticket = put(&queue, 2, 4096);
                assert_eq!(wait(&queue, ticket), 2);
            }
        });
        let ticket = put(&queue, 1, 4096);
        assert_eq!(wait(&queue, ticket), 1);
        other.join().unwrap();
        assert!(queue.close().is_empty());
        let mut seen = worker.join().unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [1, 2], "each once");
        let stats = queue.stats();
        assert_eq!((stats.bytes_out, stats.bytes_held), (8192, 0));
    });
}

#[test]
fn waiting_ends_when_the_job_is_finished() {
    loom::model(|| {
        let queue = queue(u64::MAX);
        let worker = thread::spawn({
            let queue = Arc::clone(&queue);
            move || {
                let Job { ticket, block, bytes, task } = queue.pop(None).unwrap();
                let Task::Write(extent) = task else { panic!("a write") };
                let error = ebbtide_core::BackendError::new("no");
                queue.finish(ticket, bytes, Err(Failed { error, block }), Some(extent));
            }
        });
        let ticket = put(&queue, 7, 4096);
        let before = queue.is_done(ticket);
        let failed = queue.wait(ticket).unwrap_err();
        assert_eq!(failed.block, 7, "the block comes back");
        assert!(!queue.is_done(ticket), "and is taken, done before or not: {before}");
        assert_eq!(queue.stats().bytes_held, 0, "the room was free before anybody heard");
        worker.join().unwrap();
    });
}

#[test]
fn closing_lets_the_running_job_end_and_gives_back_the_others() {
    loom::model(|| {
        let queue = queue(u64::MAX);
        let worker = thread::spawn({
            let queue = Arc::clone(&queue);
            move || work(&queue)
        });
        put(&queue, 1, 4096);
        put(&queue, 2, 4096);
        let left = queue.close();
        let mut all = worker.join().unwrap();
        all.extend(left.iter().map(|job| job.block));
        assert_eq!(all, [1, 2], "each once, in order, run or given back");
    });
}

#[test]
fn a_full_queue_blocks_and_goes_on() {
    loom::model(|| {
        let queue = queue(4096);
        let worker = thread::spawn({
            let queue = Arc::clone(&queue);
            move || work(&queue)
        });
        let first = put(&queue, 1, 8192);
        // There is room for it only when the first is finished.
        let second = put(&queue, 2, 4096);
        assert!(queue.is_done(first));
        assert_eq!((wait(&queue, second), wait(&queue, first)), (2, 1));
        assert!(queue.close().is_empty());
        assert_eq!(worker.join().unwrap(), [1, 2]);
    });
}

#[test]
fn two_workers_share_the_jobs() {
    loom::model(|| {
        let queue = queue(u64::MAX);
        let workers = [(); 2].map(|()| {
            let queue = Arc::clone(&queue);
            thread::spawn(move || work(&queue))
        });
        let tickets = [1, 2].map(|number| put(&queue, number, 4096));
        assert_eq!(tickets.map(|ticket| wait(&queue, ticket)), [1, 2]);
        queue.close();
        let mut seen: Vec<_> =
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, [1, 2], "each once");
    });
}
