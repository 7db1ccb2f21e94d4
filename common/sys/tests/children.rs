//! Tests of forked and spawned children. Without the test harness, because `fork`
//! needs a process with one thread.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on has failed, and panics are what it is about"
)]

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::panic::catch_unwind;

use firstlight_sys::fork::{Side, fork};
use firstlight_sys::process_mark::ProcessMark;
use firstlight_sys::spawn::{Program, Stdio, spawn};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, WaitOptions, waitpid};

fn main() {
    panic_in_a_forked_child_does_not_run_the_original_hook();
    spawned_program_has_only_three_descriptors();
    println!("children: both tests passed");
}

fn wait(pid: i32) -> i32 {
    let (_, status) = waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap().unwrap();
    status.exit_status().unwrap_or(-1)
}

/// Like PID 1's panic hook, which would power off.
fn panic_in_a_forked_child_does_not_run_the_original_hook() {
    let mark = ProcessMark::mark().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut output = writer.try_clone().unwrap();
    std::panic::set_hook(Box::new(move |_| {
        if mark.is_original() {
            let _ = (&writer).write_all(b"original;");
        }
    }));
    match fork().unwrap() {
        Side::Child => {
            let _ = catch_unwind(|| panic!("in the child"));
            let _ = output.write_all(b"child continued;");
            std::process::exit(7);
        }
        Side::Parent(pid) => assert_eq!(wait(pid), 7),
    }
    let _ = catch_unwind(|| panic!("in the original"));
    let _ = std::panic::take_hook();
    drop(output);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "child continued;original;");
}

fn spawned_program_has_only_three_descriptors() {
    // Left open across exec, as by a library or a bug.
    let leak = std::fs::File::open("/dev/null").unwrap();
    fcntl_setfd(&leak, FdFlags::empty()).unwrap();
    let (other, _end) = std::io::pipe().unwrap();
    fcntl_setfd(other.as_fd(), FdFlags::empty()).unwrap();
    // The shell has the directory itself open while it reads it.
    let code = c"for f in /proc/self/fd/*; do case ${f##*/} in 0|1|2) ;; *) [ -e $f ] && exit 1 ;; esac; done; exit 0";
    let null = Stdio::Open(c"/dev/null");
    let program = Program {
        path: c"/bin/sh",
        arguments: &[c"sh", c"-c", code],
        environment: &[],
        stdio: [null, Stdio::Inherit, Stdio::Inherit],
    };
    assert_eq!(wait(spawn(&program).unwrap()), 0, "the program inherited descriptors of its parent");
}
