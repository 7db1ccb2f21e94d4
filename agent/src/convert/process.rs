//! Converts processes.

use std::collections::HashSet;

use firstlight_agent_api::oci;
use oci_spec::runtime::{
    Box as OciBox, BoxBuilder, Capability, LinuxCapabilities, LinuxCapabilitiesBuilder, PosixRlimit,
    PosixRlimitBuilder, Process, User,
};
use rustix::termios::Winsize;

use super::{ConvertError, DEFAULT_PATH, Result, parse_name, some};

/// The kernel's range of `oom_score_adj`.
const SCORES: std::ops::RangeInclusive<i64> = -1000..=1000;

/// Converts a process.
///
/// # Errors
/// Arguments are missing, or something is unknown or out of range.
pub fn process(message: &oci::Process) -> Result<Process> {
    if message.Args.first().is_none_or(String::is_empty) {
        return Err(ConvertError::Missing("Process.Args"));
    }
    let score = message.OOMScoreAdj;
    let score = i32::try_from(score)
        .ok()
        .filter(|_| SCORES.contains(&score))
        .ok_or(ConvertError::Range { what: "OOMScoreAdj", value: score })?;
    let mut env = message.Env.clone();
    if !env.iter().any(|entry| entry.starts_with("PATH=")) {
        env.push(DEFAULT_PATH.to_owned());
    }
    let mut user = User::default();
    if let Some(given) = message.User.as_ref() {
        user.set_uid(given.UID).set_gid(given.GID).set_additional_gids(some(&given.AdditionalGids));
    }
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let cwd = if message.Cwd.is_empty() { "/" } else { &message.Cwd };
    let mut process = Process::default();
    process
        .set_terminal(Some(message.Terminal))
        .set_console_size(console_size(message)?)
        .set_user(user)
        .set_args(Some(message.Args.clone()))
        .set_env(Some(env))
        .set_cwd(cwd.into())
        // Always set: without it libcontainer leaves all capabilities.
        .set_capabilities(Some(capabilities(message.Capabilities.as_ref())?))
        .set_rlimits(Some(message.Rlimits.iter().map(rlimit).collect::<Result<_>>()?))
        // libcontainer distinguishes `false` from "not set": with `false` it loads seccomp after
        // dropping the capabilities, which fails.
        .set_no_new_privileges(Some(true).filter(|_| message.NoNewPrivileges))
        .set_apparmor_profile(text(&message.ApparmorProfile))
        // Zero too: otherwise the process inherits the agent's OOM protection.
        .set_oom_score_adj(Some(score))
        .set_selinux_label(None);
    Ok(process)
}

/// Returns the size of the terminal, if it has one and the request sets it.
fn console_size(message: &oci::Process) -> Result<Option<OciBox>> {
    match message.ConsoleSize.as_ref().filter(|_| message.Terminal) {
        Some(size) => Ok(Some(BoxBuilder::default().height(size.Height).width(size.Width).build()?)),
        None => Ok(None),
    }
}

fn capabilities(message: Option<&oci::LinuxCapabilities>) -> Result<LinuxCapabilities> {
    let nothing = oci::LinuxCapabilities::new();
    let message = message.unwrap_or(&nothing);
    Ok(LinuxCapabilitiesBuilder::default()
        .bounding(set(&message.Bounding)?)
        .effective(set(&message.Effective)?)
        .inheritable(set(&message.Inheritable)?)
        .permitted(set(&message.Permitted)?)
        .ambient(set(&message.Ambient)?)
        .build()?)
}

fn set(names: &[String]) -> Result<HashSet<Capability>> {
    names.iter().map(|name| capability(name)).collect()
}

/// Requires the prefix `CAP_`, as the OCI specification does; oci-spec also parses names without
/// it.
fn capability(name: &str) -> Result<Capability> {
    if !name.starts_with("CAP_") {
        return Err(ConvertError::Unknown { what: "capability", text: name.chars().take(60).collect() });
    }
    parse_name("capability", name)
}

fn rlimit(message: &oci::POSIXRlimit) -> Result<PosixRlimit> {
    Ok(PosixRlimitBuilder::default()
        .typ(parse_name::<oci_spec::runtime::PosixRlimitType>("rlimit", &message.Type)?)
        .hard(message.Hard)
        .soft(message.Soft)
        .build()?)
}

/// Converts the size of a terminal; a size with a zero is none.
#[must_use]
pub fn winsize(size: &oci::Box) -> Option<Winsize> {
    let rows = u16::try_from(size.Height).ok().filter(|rows| *rows > 0)?;
    let columns = u16::try_from(size.Width).ok().filter(|columns| *columns > 0)?;
    Some(Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> oci::Process {
        oci::Process { Args: vec!["sh".into()], ..Default::default() }
    }

    #[test]
    fn unset_fields_get_safe_defaults() {
        let process = process(&message()).unwrap();
        assert_eq!(process.env().as_deref(), Some(&[DEFAULT_PATH.to_owned()][..]));
        assert_eq!(process.no_new_privileges(), None);
        assert_eq!(process.oom_score_adj(), Some(0));
        assert_eq!(process.cwd(), std::path::Path::new("/"));
        assert_eq!(process.rlimits().as_deref(), Some(&[][..]));
        let capabilities = process.capabilities().clone().unwrap();
        for set in [capabilities.bounding(), capabilities.effective(), capabilities.permitted()] {
            assert_eq!(set.as_ref().map(HashSet::len), Some(0));
        }
    }

    #[test]
    fn set_fields_are_converted() {
        let mut message = message();
        message.Terminal = true;
        message.NoNewPrivileges = true;
        message.Env = vec!["PATH=/x".into()];
        message.OOMScoreAdj = -998;
        message.User.mut_or_insert_default().UID = 7;
        message.User.mut_or_insert_default().AdditionalGids = vec![1, 2];
        message.Capabilities.mut_or_insert_default().Permitted = vec!["CAP_NET_RAW".into()];
        message.Rlimits.push(oci::POSIXRlimit { Type: "RLIMIT_NOFILE".into(), Hard: 2, Soft: 1, ..Default::default() });
        let process = process(&message).unwrap();
        assert_eq!((process.terminal(), process.no_new_privileges()), (Some(true), Some(true)));
        assert_eq!(process.env().as_deref(), Some(&["PATH=/x".to_owned()][..]));
        assert_eq!(process.oom_score_adj(), Some(-998));
        assert_eq!((process.user().uid(), process.user().additional_gids().clone()), (7, Some(vec![1, 2])));
        let permitted = process.capabilities().clone().unwrap().permitted().clone().unwrap();
        assert!(permitted.contains(&Capability::NetRaw));
        let limit = process.rlimits().clone().unwrap()[0];
        assert_eq!((limit.hard(), limit.soft()), (2, 1));
    }

    #[test]
    fn invalid_value_is_reported() {
        for (spoil, part) in [
            ((|m| m.Args.clear()) as fn(&mut oci::Process), "Args"),
            (|m| m.OOMScoreAdj = 1001, "1001"),
            (|m| m.Capabilities.mut_or_insert_default().Ambient = vec!["CAP_FLY".into()], "CAP_FLY"),
            (|m| m.Rlimits = vec![oci::POSIXRlimit { Type: "RLIMIT_X".into(), ..Default::default() }], "RLIMIT_X"),
        ] {
            let mut message = message();
            spoil(&mut message);
            let error = process(&message).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn invalid_terminal_sizes_are_none() {
        let size = |height, width| winsize(&oci::Box { Height: height, Width: width, ..Default::default() });
        assert_eq!(size(24, 80).map(|size| (size.ws_row, size.ws_col)), Some((24, 80)));
        assert!(size(0, 80).is_none() && size(24, 70_000).is_none());
    }
}
