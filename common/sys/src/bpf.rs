//! Programs that decide which devices a resource group (cgroup v2) may use.

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

/// Groups below this one may have programs of their own, and all of them must
/// say yes. Without it a service manager in a container could set none up.
const BPF_F_ALLOW_MULTI: u32 = 2;

/// The kernel's own limit of programs of one group (`BPF_CGROUP_MAX_PROGS`).
const MOST_ATTACHED: usize = 64;

/// What the verifier may say, bytes.
const LOG: usize = 64 * 1024;

/// What is told of that: its end, where the reason is, bytes.
const TOLD: usize = 600;

/// A load that a signal interrupts is to be tried again; this often, as others do.
const TRIES: usize = 5;

/// Why the kernel does not take a program.
#[derive(Debug, thiserror::Error)]
#[error("the kernel refuses a program of {length} instructions: {source}{}", of_log(log))]
pub struct Refused {
    /// How long the program is.
    pub length: usize,
    /// The end of what the verifier says; nothing if it was not asked.
    pub log: String,
    /// The system call's error.
    pub source: io::Error,
}

fn of_log(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("; its verifier says: {log}") }
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
    // `T`, live and exclusively borrowed; the caller vouches for what it points to.
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
        // Ours. The functions for which the kernel wants another one are not used.
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: (!log.is_empty()).into(),
        log_size: number(log.len()),
        log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
        kernel_version: 0,
        flags: 0,
        name,
    };
    // SAFETY: `Load` is that attribute's beginning without padding. The instructions are as many as
    // counted, of 8 bytes each as the kernel's are, and only read; the licence ends with a zero; the
    // log is as long as told and exclusively borrowed.
    let fd = unsafe { bpf(BPF_PROG_LOAD, &mut attribute) }?;
    let fd = RawFd::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the kernel just made this descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has the kernel check and translate a program of type
/// `BPF_PROG_TYPE_CGROUP_DEVICE`. It lives as long as the descriptor, which
/// is closed on exec, and where it is attached. The caller needs `CAP_BPF`
/// and, for long programs, `CAP_PERFMON`.
///
/// # Errors
/// The kernel refuses; the verifier is asked for its reasons only then.
pub fn load_device_program(instructions: &[[u8; 8]]) -> Result<OwnedFd, Refused> {
    let mut last = io::Error::from(io::ErrorKind::Interrupted);
    for _ in 0..TRIES {
        match try_load(instructions, &mut []) {
            Ok(program) => return Ok(program),
            Err(error) => last = error,
        }
        if last.raw_os_error() != Some(libc::EAGAIN) {
            break;
        }
    }
    let mut log = vec![0; LOG];
    let log = match try_load(instructions, &mut log) {
        Ok(program) => return Ok(program),
        Err(_) => {
            let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
            let said = &said[said.len().saturating_sub(TOLD)..];
            String::from_utf8_lossy(said).split_whitespace().collect::<Vec<_>>().join(" ")
        }
    };
    Err(Refused { length: instructions.len(), log, source: last })
}

fn attach_or_detach(command: c_long, program: RawFd, group: RawFd, flags: u32) -> io::Result<()> {
    let mut attribute = Attach { group, program, kind: BPF_CGROUP_DEVICE, flags };
    // SAFETY: `Attach` is that attribute's beginning without padding or addresses.
    unsafe { bpf(command, &mut attribute) }.map(|_| ())
}

/// Has a program asked for every device that the group's processes use, beside
/// those of the groups above and those that the group has already: all of them
/// must say yes. `group` is the group's directory.
///
/// # Errors
/// `EBADF` if it is no cgroup v2, `EINVAL` if the program is attached to it
/// already, `EPERM` if the caller or a group above does not let it.
pub fn attach(program: impl AsFd, group: impl AsFd) -> io::Result<()> {
    let (program, group) = (program.as_fd().as_raw_fd(), group.as_fd().as_raw_fd());
    attach_or_detach(BPF_PROG_ATTACH, program, group, BPF_F_ALLOW_MULTI)
}

/// Has it asked no more.
///
/// # Errors
/// `ENOENT` if it is not attached to that group.
pub fn detach(program: impl AsFd, group: impl AsFd) -> io::Result<()> {
    attach_or_detach(BPF_PROG_DETACH, program.as_fd().as_raw_fd(), group.as_fd().as_raw_fd(), 0)
}

/// The numbers of the device programs that are attached to this very group.
///
/// # Errors
/// It is no cgroup v2, or the caller may not know (`CAP_NET_ADMIN`).
pub fn attached(group: impl AsFd) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; MOST_ATTACHED];
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
    // writes at most `count` numbers, and there is room for as many.
    unsafe { bpf(BPF_PROG_QUERY, &mut attribute) }?;
    ids.truncate(usize::try_from(attribute.count).unwrap_or_default());
    Ok(ids)
}

/// A loaded program's number.
///
/// # Errors
/// The descriptor is no program's.
pub fn id(program: impl AsFd) -> io::Result<u32> {
    // `struct bpf_prog_info` begins with type and id; the kernel writes no more than there is room for.
    let mut info = [0_u32; 2];
    let mut attribute = Info {
        program: program.as_fd().as_raw_fd(),
        length: number(size_of_val(&info)),
        info: info.as_mut_ptr() as u64,
    };
    // SAFETY: `Info` is that attribute's beginning without padding; `info` is as long as told, and ours.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attribute) }?;
    if info[0] == BPF_PROG_TYPE_CGROUP_DEVICE { Ok(info[1]) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Where there is no right to load programs the kernel says so before it reads them.
    fn may_load() -> bool {
        rustix::process::geteuid().is_root() && try_load(&YES, &mut []).is_ok()
    }

    const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];
    /// r0 = 1
    const YES: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 1, 0, 0, 0], EXIT];
    /// r0 = 7, which is neither yes nor no.
    const NEITHER: [[u8; 8]; 2] = [[0xb4, 0, 0, 0, 7, 0, 0, 0], EXIT];

    #[test]
    fn the_attributes_have_the_kernels_layout() {
        assert_eq!([size_of::<Load>(), size_of::<Attach>(), size_of::<Query>(), size_of::<Info>()], [64, 16, 32, 16]);
        assert_eq!([std::mem::offset_of!(Load, license), std::mem::offset_of!(Load, name)], [16, 48]);
        assert_eq!([std::mem::offset_of!(Query, ids), std::mem::offset_of!(Query, count)], [16, 24]);
    }

    #[test]
    fn a_refused_program_is_an_error_with_its_length_and_a_reason() {
        let error = load_device_program(&NEITHER).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("2 instructions"), "{text}");
        if may_load() {
            assert!(error.log.contains("R0") && !text.contains('\n'), "{text}");
        } else {
            assert_eq!((error.source.raw_os_error(), error.log.as_str()), (Some(libc::EPERM), ""));
        }
        assert_eq!(load_device_program(&[]).unwrap_err().length, 0);
    }

    #[test]
    fn what_is_no_group_takes_no_program() {
        let (file, dir) = (File::open("/dev/null").unwrap(), File::open("/proc").unwrap());
        assert!(id(&file).is_err() && attached(&dir).is_err());
        assert!(attach(&file, &dir).is_err() && detach(&file, &dir).is_err());
        if may_load() {
            let program = load_device_program(&YES).unwrap();
            assert!(id(&program).unwrap() > 0);
            assert_eq!(attach(&program, &dir).unwrap_err().raw_os_error(), Some(libc::EBADF));
            let flags = rustix::io::fcntl_getfd(&program).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }
}
