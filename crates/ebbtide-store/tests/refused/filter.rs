//! Filtering system calls. The one module of this test with `unsafe` in it.
#![allow(unsafe_code)]

use std::io;

/// From now on the kernel refuses this thread, and those that it starts, a new ring.
pub(crate) fn refuse_rings_for_this_thread() -> io::Result<()> {
    let statement = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: u16::try_from(code).expect("codes are 16 bits"),
        jt,
        jf,
        k,
    };
    let setup = u32::try_from(libc::SYS_io_uring_setup).expect("numbers of calls are small");
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
    let mut filter = [
        // The number of the call is the first field of what is filtered.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, setup),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: takes no pointers; the thread only loses the right to gain rights by an exec.
    let ok = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    if ok != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `program` points to four statements that live until the call has copied them.
    let ok = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0)
    };
    if ok == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
