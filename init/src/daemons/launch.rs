//! One start of a daemon: everything that has to be there before it, and its
//! command line.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use super::config;
use super::guid;
use super::table::{Account, Arg, DaemonSpec, Wanted, Wish};
use crate::mode::Generation;
use crate::places;
use crate::root::Root;

/// What every daemon finds in its environment, and nothing else.
pub const ENVIRONMENT: &[&CStr] =
    &[c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", c"HOME=/", c"LANG=C.UTF-8"];

/// What the kernel's out-of-memory killer takes before a daemon: containers, but not the agent.
pub const OOM_SCORE: &CStr = c"-900";

/// A user of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub user: u32,
    /// Its group's.
    pub group: u32,
}

/// A start that is prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The program.
    pub program: CString,
    /// Its arguments, its own name first.
    pub arguments: Vec<CString>,
    /// Whether it is told to go on where the last one was: [`Arg::Again`].
    pub again: bool,
    /// Whom it is started as, if not as root.
    pub user: Option<User>,
    /// That it runs as root although it need not, and why.
    pub warning: Option<String>,
}

/// The entry of `name` in the image's list of users.
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

/// What the image lacks to start it at all.
#[must_use]
pub fn missing(spec: &DaemonSpec, root: &Root) -> Option<String> {
    let config = spec.config.as_ref().map(|config| config.from).into_iter();
    std::iter::once(spec.programs).chain(config).find_map(|paths| places::first_of(root, paths).err())
}

/// Prepares a start: the daemon's directory, its configuration, its command line.
/// `again` is whether it may go on where the last one was.
///
/// # Errors
/// What is missing, and what to do about it.
pub fn prepare(spec: &DaemonSpec, root: &Root, wish: Wish, again: bool) -> Result<Launch, String> {
    let program = places::first_of(root, spec.programs)?;
    let account = spec.account.name().and_then(|name| user(root, name));
    let warning = spec
        .account
        .name()
        .filter(|_| account.is_none())
        .map(|name| format!("runs as root: the image has no user {name}; add a line for it to /etc/passwd"));
    if let Some((dir, mode)) = spec.dir {
        make_directory(&root.path(dir), mode, account)
            .map_err(|error| format!("cannot make its directory {dir}: {error}"))?;
    }
    if let Some(config) = &spec.config {
        config::write(root, config, &spec.settings_in(wish))?;
    }
    forget(spec, root, wish);
    let command = places::command(root, &program);
    // Without a loader before it, a program's own name is the plain path.
    let mut arguments = if command.len() > 1 { command.clone() } else { vec![program] };
    let mut goes_on = false;
    for arg in spec.arguments {
        match *arg {
            Arg::Word(word) => arguments.push(word.to_owned()),
            Arg::File(path) => {
                arguments.push(places::first_of(root, &[path]).unwrap_or_else(|_| path.to_owned()));
            }
            Arg::Account(option) => {
                if let (Some(name), Some(_)) = (spec.account.name(), account) {
                    arguments.extend([option.to_owned(), name.to_owned()]);
                }
            }
            Arg::Guid(option) => {
                if wish.fabric.is_some_and(|fabric| fabric.generation == Generation::NvLink5) {
                    arguments.extend([option.to_owned(), guid::of_switches(root)?]);
                }
            }
            Arg::Again(word, file) => {
                if again && wish.is_service() && root.path(file).is_file() {
                    arguments.push(word.to_owned());
                    goes_on = true;
                }
            }
        }
    }
    let word = |text: &str| CString::new(text).map_err(|_| format!("{text:?} holds a zero byte"));
    Ok(Launch {
        program: word(command.first().map_or("", String::as_str))?,
        arguments: arguments.iter().map(|text| word(text)).collect::<Result<_, _>>()?,
        again: goes_on,
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

/// Takes away what the last one left: a socket that nobody listens at, and messages that were read.
fn forget(spec: &DaemonSpec, root: &Root, wish: Wish) {
    if let super::table::Ready::Unix(path) = spec.ready_in(wish) {
        // What is not there need not go; what cannot go is told by the daemon itself.
        let _ = fs::remove_file(root.path(path));
    }
    if let Some(path) = spec.log {
        let _ = fs::remove_file(root.path(path));
    }
}

/// Who wanted it, for a sentence.
#[must_use]
pub fn reason(spec: &DaemonSpec) -> String {
    match spec.wanted {
        Wanted::Parameter(name, _) => format!("{name}=on"),
        Wanted::Fabric | Wanted::Fabric5 | Wanted::Service => "the guest's mode".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemons::table::{DAEMONS, find};
    use crate::mode::Fabric;

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
    fn a_missing_program_is_named_with_all_its_places() {
        let (_directory, root) = root(&[]);
        let error = prepare(&DAEMONS[find("nvlsm").unwrap()], &root, Wish::default(), false).unwrap_err();
        assert_eq!(missing(&DAEMONS[find("nvlsm").unwrap()], &root).unwrap(), error);
        assert_eq!(error, "/usr/sbin/nvlsm, or /opt/nvidia/nvlsm/sbin/nvlsm is not in the image; add it");
    }

    #[test]
    fn the_account_is_used_if_the_image_has_it_and_missed_if_not() {
        let own = rustix::process::getuid().as_raw();
        let passwd = format!("root:x:0:0::/:\nbad line\nnvidia-dcgm:x:{own}:{own}::/:\n");
        let spec = &DAEMONS[find("dcgm-exporter").unwrap()];
        let (_directory, with) = root(&[("/usr/bin/dcgm-exporter", ""), ("/etc/passwd", &passwd)]);
        let launch = prepare(spec, &with, Wish::default(), false).unwrap();
        assert_eq!((launch.user, launch.warning), (Some(User { user: own, group: own }), None));
        let (_directory, without) = root(&[("/usr/bin/dcgm-exporter", "")]);
        let launch = prepare(spec, &without, Wish::default(), false).unwrap();
        assert_eq!(launch.user, None);
        assert!(launch.warning.unwrap().contains("no user nvidia-dcgm"));
        let engine = &DAEMONS[find("hostengine").unwrap()];
        let (_directory, with) = root(&[("/usr/bin/nv-hostengine", ""), ("/etc/passwd", &passwd)]);
        let launch = prepare(engine, &with, Wish::default(), false).unwrap();
        assert!(words(&launch).ends_with(&["--service-account", "nvidia-dcgm"]), "{launch:?}");
        assert_eq!(launch.user, None, "it becomes that user by itself");
    }

    #[test]
    fn a_fabric_manager_that_served_before_is_told_to_go_on_in_a_service_vm_only() {
        let files =
            [("/usr/bin/nv-fabricmanager", ""), ("/usr/share/nvidia/nvswitch/fabricmanager.cfg", "FABRIC_MODE=2\n")];
        let (_directory, root) = root(&files);
        let spec = &DAEMONS[find("fabricmanager").unwrap()];
        let wish = |shared| Wish { fabric: Some(Fabric { generation: Generation::NvLink4, shared }) };
        assert_eq!(missing(spec, &root), None);
        let first = prepare(spec, &root, wish(true), false).unwrap();
        assert_eq!(words(&first), ["/usr/bin/nv-fabricmanager", "-c", "/run/fabricmanager.cfg"]);
        assert!(fs::read_to_string(root.path("/run/fabricmanager.cfg")).unwrap().starts_with("FABRIC_MODE=1\n"));
        let plain = prepare(spec, &root, wish(true), true).unwrap();
        assert_eq!(plain, first, "without a state there is nothing to go on with");
        fs::write(root.path("/run/nvidia-fabricmanager/fabricmanager.state"), "").unwrap();
        let goes_on = prepare(spec, &root, wish(true), true).unwrap();
        assert_eq!((words(&goes_on).last(), goes_on.again, first.again), (Some(&"--restart"), true, false));
        assert_eq!(prepare(spec, &root, wish(false), true).unwrap(), first);
    }

    #[test]
    fn a_daemon_of_the_extension_is_started_there_with_its_own_files() {
        let place = |path: &str| format!("{}{path}", places::EXTENSION);
        let files = ["/usr/sbin/nvlsm", "/usr/share/nvidia/nvlsm/nvlsm.conf", "/lib64/ld-linux-x86-64.so.2"].map(place);
        let (dir, root) = root(&files.each_ref().map(|path| (path.as_str(), "")));
        let spec = &DAEMONS[find("nvlsm").unwrap()];
        let at = |path: &str| dir.path().join(path.trim_start_matches('/')).display().to_string();
        let [program, config, loader] = files.each_ref().map(String::as_str);
        // No program that names a loader.
        let launch = prepare(spec, &root, Wish::default(), false).unwrap();
        assert_eq!(launch.program.to_str().unwrap(), at(program));
        assert_eq!(words(&launch), [program, "-F", config, "-f", "stdout"]);
        fs::write(root.path(program), places::interpreter::sample(b"/lib64/ld-linux-x86-64.so.2\0")).unwrap();
        let launch = prepare(spec, &root, Wish::default(), false).unwrap();
        assert_eq!(launch.program.to_str().unwrap(), at(loader));
        let words = words(&launch);
        assert_eq!(
            (words[0], words[1], words[3], &words[4..6]),
            (&*at(loader), "--library-path", &*at(program), &["-F", config][..])
        );
        assert!(words[2].split(':').all(|path| path.contains("/run/kata-extensions/gpu/")), "{words:?}");
    }

    #[test]
    fn a_socket_that_was_left_behind_is_taken_away() {
        let left = "/run/nvidia-dcgm/socket";
        let (_directory, root) = root(&[("/usr/bin/nv-hostengine", ""), (left, "")]);
        prepare(&DAEMONS[find("hostengine").unwrap()], &root, Wish::default(), false).unwrap();
        assert!(!root.path(left).exists());
        let mode = root.path("/run/nvidia-dcgm").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
