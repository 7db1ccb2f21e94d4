//! Prepares one start of a daemon: directory, configuration, command line.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use super::config;
use super::guid;
use super::table::{Account, Arg, DaemonContext, DaemonSpec, EnabledBy};
use crate::driver_paths;
use crate::mode::NvLinkGeneration;
use crate::root::Root;

/// The whole environment of every daemon.
pub const ENVIRONMENT: &[&CStr] =
    &[c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", c"HOME=/", c"LANG=C.UTF-8"];

/// The `oom_score_adj` of daemons: containers are killed before them, the agent (-997) after them.
pub const OOM_SCORE: &CStr = c"-900";

/// A user of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// The user id.
    pub user: u32,
    /// The group id.
    pub group: u32,
}

/// A prepared start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The program.
    pub program: CString,
    /// The arguments, starting with `argv[0]`.
    pub arguments: Vec<CString>,
    /// Whether it is to resume from the previous state: [`Arg::Resume`].
    pub resumed: bool,
    /// The user it is started as, if not root.
    pub user: Option<User>,
    /// Why it runs as root although its account is another user.
    pub warning: Option<String>,
}

/// Looks `name` up in the image's `/etc/passwd`.
#[must_use]
pub fn user(root: &Root, name: &str) -> Option<User> {
    let text = fs::read_to_string(root.path("/etc/passwd")).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (found, _) = (fields.next()?, fields.next()?);
        let (user, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        (found == name).then_some(User { user, group })
    })
}

/// Returns which program or configuration file the image lacks.
#[must_use]
pub fn missing(spec: &DaemonSpec, root: &Root) -> Option<String> {
    let config = spec.config.as_ref().map(|config| config.from).into_iter();
    std::iter::once(spec.programs).chain(config).find_map(|paths| driver_paths::find_first(root, paths).err())
}

/// Prepares a start: the daemon's directory, its configuration, its command line.
/// `resume` permits it to resume from the previous state.
///
/// # Errors
/// A file is missing or a step failed; the text names it and what to do.
pub fn prepare(spec: &DaemonSpec, root: &Root, context: DaemonContext, resume: bool) -> Result<Launch, String> {
    let program = driver_paths::find_first(root, spec.programs)?;
    let account = spec.account.name().and_then(|name| user(root, name));
    let warning = spec
        .account
        .name()
        .filter(|_| account.is_none())
        .map(|name| format!("runs as root: the image has no user {name}; add a line for it to /etc/passwd"));
    if let Some((dir, mode)) = spec.dir {
        make_directory(&root.path(dir), mode, account)
            .map_err(|error| format!("failed to create its directory {dir}: {error}"))?;
    }
    if let Some(config) = &spec.config {
        config::write(root, config, &spec.settings_in(context))?;
    }
    remove_stale_files(spec, root, context);
    let command = driver_paths::command(root, &program);
    // Without an explicit loader, argv[0] is the plain path.
    let mut arguments = if command.len() > 1 { command.clone() } else { vec![program] };
    let mut resumed = false;
    for arg in spec.arguments {
        match *arg {
            Arg::Word(word) => arguments.push(word.to_owned()),
            Arg::File(path) => {
                arguments.push(driver_paths::find_first(root, &[path]).unwrap_or_else(|_| path.to_owned()));
            }
            Arg::Account(option) => {
                if let (Some(name), Some(_)) = (spec.account.name(), account) {
                    arguments.extend([option.to_owned(), name.to_owned()]);
                }
            }
            Arg::Guid(option) => {
                if context.fabric.is_some_and(|fabric| fabric.generation == NvLinkGeneration::NvLink5) {
                    arguments.extend([option.to_owned(), guid::of_switches(root)?]);
                }
            }
            Arg::Resume(word, file) => {
                if resume && context.is_service() && root.path(file).is_file() {
                    arguments.push(word.to_owned());
                    resumed = true;
                }
            }
        }
    }
    let word = |text: &str| CString::new(text).map_err(|_| format!("{text:?} contains a NUL byte"));
    Ok(Launch {
        program: word(command.first().map_or("", String::as_str))?,
        arguments: arguments.iter().map(|text| word(text)).collect::<Result<_, _>>()?,
        resumed,
        user: account.filter(|_| matches!(spec.account, Account::User(_))),
        warning,
    })
}

fn make_directory(path: &PathBuf, mode: u32, owner: Option<User>) -> std::io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    match owner {
        Some(owner) => std::os::unix::fs::chown(path, Some(owner.user), Some(owner.group)),
        None => Ok(()),
    }
}

/// Removes the stale socket and the log file of the previous instance.
fn remove_stale_files(spec: &DaemonSpec, root: &Root, context: DaemonContext) {
    if let super::table::Ready::Unix(path) = spec.ready_in(context) {
        // It may not exist; if it cannot be removed, the daemon reports the error.
        let _ = fs::remove_file(root.path(path));
    }
    if let Some(path) = spec.log {
        let _ = fs::remove_file(root.path(path));
    }
}

/// Returns what enabled the daemon, for a message.
#[must_use]
pub fn enabled_by(spec: &DaemonSpec) -> String {
    match spec.enabled_by {
        EnabledBy::Parameter(name, _) => format!("{name}=on"),
        EnabledBy::Fabric | EnabledBy::Fabric5 | EnabledBy::Service => "the guest's mode".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemons::table::daemon_spec;
    use crate::mode::Fabric;
    use crate::unit_id::DaemonId;

    fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, text) in files {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        fs::create_dir_all(root.path("/run")).unwrap();
        (dir, root)
    }

    fn words(launch: &Launch) -> Vec<&str> {
        launch.arguments.iter().map(|word| word.to_str().unwrap()).collect()
    }

    #[test]
    fn missing_program_is_reported_with_all_search_paths() {
        let (_directory, root) = root(&[]);
        let error = prepare(daemon_spec(DaemonId::Nvlsm), &root, DaemonContext::default(), false).unwrap_err();
        assert_eq!(missing(daemon_spec(DaemonId::Nvlsm), &root).unwrap(), error);
        assert_eq!(error, "/usr/sbin/nvlsm, or /opt/nvidia/nvlsm/sbin/nvlsm is not in the image; add it");
    }

    #[test]
    fn account_missing_in_image_falls_back_to_root_with_warning() {
        let own = rustix::process::getuid().as_raw();
        let passwd = format!("root:x:0:0::/:\nbad line\nnvidia-dcgm:x:{own}:{own}::/:\n");
        let spec = daemon_spec(DaemonId::DcgmExporter);
        let (_directory, with) = root(&[("/usr/bin/dcgm-exporter", ""), ("/etc/passwd", &passwd)]);
        let launch = prepare(spec, &with, DaemonContext::default(), false).unwrap();
        assert_eq!((launch.user, launch.warning), (Some(User { user: own, group: own }), None));
        let (_directory, without) = root(&[("/usr/bin/dcgm-exporter", "")]);
        let launch = prepare(spec, &without, DaemonContext::default(), false).unwrap();
        assert_eq!(launch.user, None);
        assert!(launch.warning.unwrap().contains("no user nvidia-dcgm"));
        let engine = daemon_spec(DaemonId::HostEngine);
        let (_directory, with) = root(&[("/usr/bin/nv-hostengine", ""), ("/etc/passwd", &passwd)]);
        let launch = prepare(engine, &with, DaemonContext::default(), false).unwrap();
        assert!(words(&launch).ends_with(&["--service-account", "nvidia-dcgm"]), "{launch:?}");
        assert_eq!(launch.user, None, "it drops to that user itself");
    }

    #[test]
    fn fabric_manager_resumes_in_service_vm_only() {
        let files =
            [("/usr/bin/nv-fabricmanager", ""), ("/usr/share/nvidia/nvswitch/fabricmanager.cfg", "FABRIC_MODE=2\n")];
        let (_directory, root) = root(&files);
        let spec = daemon_spec(DaemonId::FabricManager);
        let context = |shared| DaemonContext { fabric: Some(Fabric { generation: NvLinkGeneration::NvLink4, shared }) };
        assert_eq!(missing(spec, &root), None);
        let first = prepare(spec, &root, context(true), false).unwrap();
        assert_eq!(words(&first), ["/usr/bin/nv-fabricmanager", "-c", "/run/fabricmanager.cfg"]);
        assert!(fs::read_to_string(root.path("/run/fabricmanager.cfg")).unwrap().starts_with("FABRIC_MODE=1\n"));
        let plain = prepare(spec, &root, context(true), true).unwrap();
        assert_eq!(plain, first, "no state file, so no resume");
        fs::write(root.path("/run/nvidia-fabricmanager/fabricmanager.state"), "").unwrap();
        let resumed = prepare(spec, &root, context(true), true).unwrap();
        assert_eq!((words(&resumed).last(), resumed.resumed, first.resumed), (Some(&"--restart"), true, false));
        assert_eq!(prepare(spec, &root, context(false), true).unwrap(), first);
    }

    #[test]
    fn daemon_in_extension_uses_extension_loader_and_files() {
        let place = |path: &str| format!("{}{path}", driver_paths::EXTENSION);
        let files = ["/usr/sbin/nvlsm", "/usr/share/nvidia/nvlsm/nvlsm.conf", "/lib64/ld-linux-x86-64.so.2"].map(place);
        let (dir, root) = root(&files.each_ref().map(|path| (path.as_str(), "")));
        let spec = daemon_spec(DaemonId::Nvlsm);
        let at = |path: &str| dir.path().join(path.trim_start_matches('/')).display().to_string();
        let [program, config, loader] = files.each_ref().map(String::as_str);
        // An empty file has no ELF interpreter.
        let launch = prepare(spec, &root, DaemonContext::default(), false).unwrap();
        assert_eq!(launch.program.to_str().unwrap(), at(program));
        assert_eq!(words(&launch), [program, "-F", config, "-f", "stdout"]);
        fs::write(root.path(program), driver_paths::interpreter::sample(b"/lib64/ld-linux-x86-64.so.2\0")).unwrap();
        let launch = prepare(spec, &root, DaemonContext::default(), false).unwrap();
        assert_eq!(launch.program.to_str().unwrap(), at(loader));
        let words = words(&launch);
        assert_eq!(
            (words[0], words[1], words[3], &words[4..6]),
            (&*at(loader), "--library-path", &*at(program), &["-F", config][..])
        );
        assert!(words[2].split(':').all(|path| path.contains("/run/kata-extensions/gpu/")), "{words:?}");
    }

    #[test]
    fn stale_socket_is_removed_before_start() {
        let stale = "/run/nvidia-dcgm/socket";
        let (_directory, root) = root(&[("/usr/bin/nv-hostengine", ""), (stale, "")]);
        prepare(daemon_spec(DaemonId::HostEngine), &root, DaemonContext::default(), false).unwrap();
        assert!(!root.path(stale).exists());
        let mode = root.path("/run/nvidia-dcgm").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
