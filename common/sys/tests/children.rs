//! What children of a process find, with real ones. A program of its own, with
//! one test, because a process with one thread is needed.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on has failed, and panics are what it is about"
)]

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::panic::catch_unwind;

use firstlight_sys::fork::{Side, fork};
use firstlight_sys::own::Own;
use firstlight_sys::spawn::{Program, Stdio, spawn};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, WaitOptions, waitpid};

fn main() {
    a_copy_that_panics_does_not_do_what_the_original_would();
    a_program_finds_three_descriptors_and_no_more();
    println!("children: both hold");
}

fn wait(pid: i32) -> i32 {
    let (_, status) = waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap().unwrap();
    status.exit_status().unwrap_or(-1)
}

/// As PID 1's hook, which would turn the power off.
fn a_copy_that_panics_does_not_do_what_the_original_would() {
    let own = Own::mark().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut said = writer.try_clone().unwrap();
    std::panic::set_hook(Box::new(move |_| {
        if own.is_original() {
            let _ = (&writer).write_all(b"original;");
        }
    }));
    match fork().unwrap() {
        Side::Child => {
            let _ = catch_unwind(|| panic!("in the copy"));
            let _ = said.write_all(b"copy went on;");
            std::process::exit(7);
        }
        Side::Parent(pid) => assert_eq!(wait(pid), 7),
    }
    let _ = catch_unwind(|| panic!("in the original"));
    let _ = std::panic::take_hook();
    drop(said);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "copy went on;original;");
}

fn a_program_finds_three_descriptors_and_no_more() {
    // Kept open across exec: what a library, or a mistake, may do.
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
    assert_eq!(wait(spawn(&program).unwrap()), 0, "it finds descriptors of its parent");
}
