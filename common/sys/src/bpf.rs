//! BPF device programs of cgroups v2: loading, attaching, querying.

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

const BPF_PROG_LOAD: c_long = 5;
const BPF_PROG_ATTACH: c_long = 8;
const BPF_PROG_DETACH: c_long = 9;
const BPF_OBJ_GET_INFO_BY_FD: c_long = 15;
const BPF_PROG_QUERY: c_long = 16;

const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;

/// Child cgroups may attach programs too, and all of them must allow an access.
/// Without it a service manager in a container could not attach any.
const BPF_F_ALLOW_MULTI: u32 = 2;

/// The kernel's limit of programs per cgroup (`BPF_CGROUP_MAX_PROGS`).
const MAX_ATTACHED: usize = 64;

/// Size of the verifier's log buffer, bytes.
const LOG_SIZE: usize = 64 * 1024;

/// Bytes of the log in an error: its end, which has the reason.
const LOG_TAIL: usize = 600;

/// Attempts of a load that signals interrupt (`EAGAIN`), as in libbpf.
const ATTEMPTS: usize = 5;

/// Why the kernel refused a program.
#[derive(Debug, thiserror::Error)]
#[error("failed to load a BPF device program of {length} instructions: {source}{}", log_suffix(log))]
pub struct LoadError {
    /// Length of the program, instructions.
    pub length: usize,
    /// The end of the verifier's log; empty if it was not requested.
    pub log: String,
    /// The system call's error.
    pub source: io::Error,
}

fn log_suffix(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; verifier log: {log}") }
}

/// `union bpf_attr` for `BPF_PROG_LOAD`, as far as it is used.
#[repr(C)]
struct Load {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

/// For `BPF_PROG_ATTACH` and `BPF_PROG_DETACH`.
#[repr(C)]
struct Attach {
    group: RawFd,
    program: RawFd,
    kind: u32,
    flags: u32,
}

/// For `BPF_PROG_QUERY`.
#[repr(C)]
struct Query {
    group: RawFd,
    kind: u32,
    flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
}

/// For `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct Info {
    program: RawFd,
    length: u32,
    info: u64,
}

/// Calls `bpf` with an attribute.
///
/// # Safety
/// `T` is the beginning of `union bpf_attr` for `command`, has no padding, and
/// each address in it is that of live memory as long as the attribute says,
/// writable where the command writes.
unsafe fn bpf<T>(command: c_long, attribute: &mut T) -> io::Result<c_long> {
    // SAFETY: the kernel reads and writes no more of the attribute than its size, which is that of
    // `T`, live and exclusively borrowed; the caller guarantees what it points to.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn number(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn try_load(instructions: &[[u8; 8]], log: &mut [u8]) -> io::Result<OwnedFd> {
    let mut name = [0; 16];
    name[..10].copy_from_slice(b"fl_devices");
    let mut attribute = Load {
        kind: BPF_PROG_TYPE_CGROUP_DEVICE,
        instruction_count: number(instructions.len()),
        instructions: instructions.as_ptr() as u64,
        // This project's license. GPL-only helper functions are not used.
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: (!log.is_empty()).into(),
        log_size: number(log.len()),
        log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
        kernel_version: 0,
        flags: 0,
        name,
    };
    // SAFETY: `Load` is that attribute's beginning without padding. The instructions are as many as
    // counted, of 8 bytes each as the kernel's are, and only read; the licence is NUL-terminated; the
    // log has the size given and is exclusively borrowed.
    let fd = unsafe { bpf(BPF_PROG_LOAD, &mut attribute) }?;
    let fd = RawFd::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the kernel just returned this descriptor, and it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Loads a program of type `BPF_PROG_TYPE_CGROUP_DEVICE`. It lives as long as the
/// descriptor, which is closed on exec, or its attachment. The caller needs
/// `CAP_BPF` and, for long programs, `CAP_PERFMON`.
///
/// # Errors
/// The kernel refuses the program; the verifier's log is requested only then.
pub fn load_device_program(instructions: &[[u8; 8]]) -> Result<OwnedFd, LoadError> {
    let mut last = io::Error::from(io::ErrorKind::Interrupted);
    for _ in 0..ATTEMPTS {
        match try_load(instructions, &mut []) {
            Ok(program) => return Ok(program),
            Err(error) => last = error,
        }
        if last.raw_os_error() != Some(libc::EAGAIN) {
            break;
        }
    }
    let mut log = vec![0; LOG_SIZE];
    let log = match try_load(instructions, &mut log) {
        Ok(program) => return Ok(program),
        Err(_) => {
            let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
            let said = &said[said.len().saturating_sub(LOG_TAIL)..];
            String::from_utf8_lossy(said).split_whitespace().collect::<Vec<_>>().join(" ")
        }
    };
    Err(LoadError { length: instructions.len(), log, source: last })
}

fn attach_or_detach(command: c_long, program: RawFd, group: RawFd, flags: u32) -> io::Result<()> {
    let mut attribute = Attach { group, program, kind: BPF_CGROUP_DEVICE, flags };
    // SAFETY: `Attach` is that attribute's beginning without padding or addresses.
    unsafe { bpf(command, &mut attribute) }.map(|_| ())
}

/// Attaches a program to a cgroup, in addition to its other programs and those of
/// its ancestors: all of them must allow a device access. `group` is the cgroup's
/// directory.
///
/// # Errors
/// `EBADF` if it is not a cgroup v2, `EINVAL` if the program is already attached,
/// `EPERM` if the caller lacks privileges or an ancestor forbids it.
pub fn attach(program: impl AsFd, group: impl AsFd) -> io::Result<()> {
    let (program, group) = (program.as_fd().as_raw_fd(), group.as_fd().as_raw_fd());
    attach_or_detach(BPF_PROG_ATTACH, program, group, BPF_F_ALLOW_MULTI)
}

/// Detaches a program from a cgroup.
///
/// # Errors
/// `ENOENT` if it is not attached to that cgroup.
pub fn detach(program: impl AsFd, group: impl AsFd) -> io::Result<()> {
    attach_or_detach(BPF_PROG_DETACH, program.as_fd().as_raw_fd(), group.as_fd().as_raw_fd(), 0)
}

/// Returns the ids of the device programs attached to this cgroup itself.
///
/// # Errors
/// It is not a cgroup v2, or the caller lacks `CAP_NET_ADMIN`.
pub fn attached(group: impl AsFd) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; MAX_ATTACHED];
    let mut attribute = Query {
        group: group.as_fd().as_raw_fd(),
        kind: BPF_CGROUP_DEVICE,
        flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: number(ids.len()),
        padding: 0,
    };
    // SAFETY: `Query` is that attribute's beginning without padding of the compiler's; the kernel
    // writes at most `count` numbers, and the buffer holds that many.
    unsafe { bpf(BPF_PROG_QUERY, &mut attribute) }?;
    ids.truncate(usize::try_from(attribute.count).unwrap_or_default());
    Ok(ids)
}

/// Returns a loaded program's id.
///
/// # Errors
/// The descriptor is not a device program's.
pub fn id(program: impl AsFd) -> io::Result<u32> {
    // `struct bpf_prog_info` starts with type and id; the kernel writes no more than the size given.
    let mut info = [0_u32; 2];
    let mut attribute = Info {
        program: program.as_fd().as_raw_fd(),
        length: number(size_of_val(&info)),
        info: info.as_mut_ptr() as u64,
    };
    // SAFETY: `Info` is that attribute's beginning without padding; `info` has the size given and is exclusively borrowed.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attribute) }?;
    if info[0] == BPF_PROG_TYPE_CGROUP_DEVICE { Ok(info[1]) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Without the privilege to load programs the kernel fails before it reads them.
    fn can_load() -> bool {
        rustix::process::geteuid().is_root() && try_load(&ALLOW, &mut []).is_ok()
    }

    const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];
    /// r0 = 1
    const ALLOW: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 1, 0, 0, 0], EXIT];
    /// r0 = 7, which is neither allow (1) nor deny (0).
    const INVALID: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 7, 0, 0, 0], EXIT];

    #[test]
    fn attributes_have_the_kernels_layout() {
        assert_eq!([size_of::<Load>(), size_of::<Attach>(), size_of::<Query>(), size_of::<Info>()], [64, 16, 32, 16]);
        assert_eq!([std::mem::offset_of!(Load, license), std::mem::offset_of!(Load, name)], [16, 48]);
        assert_eq!([std::mem::offset_of!(Query, ids), std::mem::offset_of!(Query, count)], [16, 24]);
    }

    #[test]
    fn refused_program_is_an_error_with_length_and_reason() {
        let error = load_device_program(&INVALID).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("2 instructions"), "{text}");
        if can_load() {
            assert!(error.log.contains("R0") && !text.contains('\n'), "{text}");
        } else {
            assert_eq!((error.source.raw_os_error(), error.log.as_str()), (Some(libc::EPERM), ""));
        }
        assert_eq!(load_device_program(&[]).unwrap_err().length, 0);
    }

    #[test]
    fn attaching_to_other_than_a_cgroup_fails() {
        let (file, dir) = (File::open("/dev/null").unwrap(), File::open("/proc").unwrap());
        assert!(id(&file).is_err() && attached(&dir).is_err());
        assert!(attach(&file, &dir).is_err() && detach(&file, &dir).is_err());
        if can_load() {
            let program = load_device_program(&ALLOW).unwrap();
            assert!(id(&program).unwrap() > 0);
            assert_eq!(attach(&program, &dir).unwrap_err().raw_os_error(), Some(libc::EBADF));
            let flags = rustix::io::fcntl_getfd(&program).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }
}
