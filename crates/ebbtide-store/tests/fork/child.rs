//! A real fork. The one module of the tests with `unsafe` in it.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// A child that hangs is ended after this.
const PATIENCE: Duration = Duration::from_secs(20);

/// The child, as its parent sees it.
#[must_use = "somebody has to wait for it"]
pub(crate) struct Child(libc::pid_t);

/// Forks. `None` is the answer in the child, which has to call [`end`].
pub(crate) fn fork() -> Option<Child> {
    // SAFETY: the child calls `end`, so it never returns to the harness of the tests. Until then it
    // uses the allocator, which the C library keeps in order across forks, and the code that is
    // tested; what else another thread may have held at this moment, it does not touch.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    (pid > 0).then_some(Child(pid))
}

/// What the child does. Its copies of what the parent has end with it.
pub(crate) fn end(job: impl FnOnce()) -> ! {
    let ended = catch_unwind(AssertUnwindSafe(job));
    // SAFETY: ends the process at once, without the destructors and handlers that it has from its
    // parent.
    unsafe { libc::_exit(i32::from(ended.is_err())) }
}

impl Child {
    /// Waits for its end. Panics if it panicked or hung.
    pub(crate) fn join(self) {
        let status = wait(self.0);
        assert!(libc::WIFEXITED(status), "the child hung, or died of a signal: {status:#x}");
        assert_eq!(libc::WEXITSTATUS(status), 0, "the child panicked");
    }
}

/// The status of the child's end, by force if need be.
fn wait(pid: libc::pid_t) -> libc::c_int {
    let begin = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for the answer; `pid` is a child of this process that
        // nobody else waits for.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        assert!(ended >= 0, "waitpid: {}", std::io::Error::last_os_error());
        if ended == pid {
            return status;
        }
        if begin.elapsed() > PATIENCE {
            // SAFETY: sends a signal to the child that was not waited for yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
