//! Wire messages into OCI configurations.
//!
//! On the wire zero and the empty string mean "not set", and everything that
//! names something (capabilities, namespaces, seccomp actions) is text. Text
//! that is not known is refused with its name; nothing panics and nothing is
//! silently given libcontainer's or oci-spec's own defaults.

mod linux;
mod process;
mod resources;
mod seccomp;

use firstlight_agent_api::oci;
use oci_spec::runtime::{Hook, HookBuilder, Hooks, HooksBuilder, Mount, MountBuilder, RootBuilder, Spec};
use serde::de::DeserializeOwned;

pub use process::process;
pub use resources::resources;

/// The search path of programs whose configuration has none. libcontainer
/// refuses a process without one.
pub const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The seconds that a hook without a limit of its own gets.
const HOOK_TIMEOUT: i64 = 10;

/// Each mount costs the kernel and every process that looks at its mount table.
const MOST_MOUNTS: usize = 4096;

/// Why a message is no configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A part that must be there is not.
    #[error("OCI configuration: {0} is missing")]
    Missing(&'static str),
    /// Text that names nothing known.
    #[error("OCI configuration: unknown {what} {text:?}")]
    Unknown {
        /// What it should name.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// A number that does not fit.
    #[error("OCI configuration: {what} {value} is out of range")]
    Range {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: i64,
    },
    /// More than anybody needs.
    #[error("OCI configuration: {count} {what} are more than {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// A combination that oci-spec refuses.
    #[error("OCI configuration: {0}")]
    Invalid(String),
}

impl From<oci_spec::OciSpecError> for ConvertError {
    fn from(error: oci_spec::OciSpecError) -> Self {
        Self::Invalid(error.to_string())
    }
}

type Result<T> = std::result::Result<T, ConvertError>;

/// A word of the OCI specification as oci-spec's value for it.
fn word<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|_| ConvertError::Unknown { what, text: text.chars().take(60).collect() })
}

fn words<T: DeserializeOwned, C: FromIterator<T>>(what: &'static str, texts: &[String]) -> Result<C> {
    texts.iter().map(|text| word(what, text)).collect()
}

/// `None` for an empty list.
fn some<T: Clone>(list: &[T]) -> Option<Vec<T>> {
    if list.is_empty() { None } else { Some(list.to_vec()) }
}

/// A whole configuration.
///
/// # Errors
/// Something is missing, unknown or out of range.
pub fn spec(message: &oci::Spec) -> Result<Spec> {
    let root = message.Root.as_ref().ok_or(ConvertError::Missing("Root"))?;
    if root.Path.is_empty() {
        return Err(ConvertError::Missing("Root.Path"));
    }
    if message.Mounts.len() > MOST_MOUNTS {
        return Err(ConvertError::TooMany { what: "mounts", count: message.Mounts.len(), most: MOST_MOUNTS });
    }
    let mut spec = Spec::default();
    // libcontainer takes any 1.x; some callers send none.
    let version = if message.Version.starts_with("1.") { message.Version.as_str() } else { "1.2.0" };
    spec.set_version(version.to_owned())
        .set_root(Some(RootBuilder::default().path(&root.Path).readonly(root.Readonly).build()?))
        .set_process(Some(process(message.Process.as_ref().ok_or(ConvertError::Missing("Process"))?)?))
        .set_hostname(Some(message.Hostname.clone()).filter(|name| !name.is_empty()))
        .set_mounts(Some(message.Mounts.iter().map(mount).collect::<Result<_>>()?))
        .set_hooks(message.Hooks.as_ref().map(hooks).transpose()?.flatten())
        .set_annotations(Some(message.Annotations.clone()))
        .set_linux(Some(linux::linux(message.Linux.as_ref().ok_or(ConvertError::Missing("Linux"))?)?));
    Ok(spec)
}

fn mount(message: &oci::Mount) -> Result<Mount> {
    if message.destination.is_empty() {
        return Err(ConvertError::Missing("the destination of a mount"));
    }
    let mut mount = Mount::default();
    mount
        .set_destination(message.destination.clone().into())
        .set_typ(Some(message.type_.clone()).filter(|kind| !kind.is_empty()))
        .set_source(Some(message.source.clone()).filter(|source| !source.is_empty()).map(Into::into))
        .set_options(some(&message.options));
    Ok(MountBuilder::default().destination(mount.destination()).build().map(|_| mount)?)
}

fn hooks(message: &oci::Hooks) -> Result<Option<Hooks>> {
    let list = |hooks: &[oci::Hook]| -> Result<Vec<Hook>> { hooks.iter().map(hook).collect() };
    let all = [
        list(&message.CreateRuntime)?,
        list(&message.CreateContainer)?,
        list(&message.StartContainer)?,
        list(&message.Poststart)?,
        list(&message.Poststop)?,
    ];
    // Deprecated, and run at the same point as the first kind, before it.
    let mut create_runtime = list(&message.Prestart)?;
    let [more, create_container, start_container, poststart, poststop] = all;
    create_runtime.extend(more);
    let lists = [&create_runtime, &create_container, &start_container, &poststart, &poststop];
    if lists.iter().all(|list| list.is_empty()) {
        return Ok(None);
    }
    let hooks = HooksBuilder::default()
        .create_runtime(create_runtime)
        .create_container(create_container)
        .start_container(start_container)
        .poststart(poststart)
        .poststop(poststop)
        .build()?;
    Ok(Some(hooks))
}

/// A hook never sees the image's environment: libcontainer hands that to hooks
/// that bring none, so every hook brings one.
fn hook(message: &oci::Hook) -> Result<Hook> {
    let env = if message.Env.is_empty() { vec![DEFAULT_PATH.to_owned()] } else { message.Env.clone() };
    let timeout = if message.Timeout > 0 { message.Timeout } else { HOOK_TIMEOUT };
    let builder = HookBuilder::default().path(&message.Path).env(env).timeout(timeout);
    let builder = if message.Args.is_empty() { builder } else { builder.args(message.Args.clone()) };
    Ok(builder.build()?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The smallest message that is a configuration.
    pub(crate) fn minimal() -> oci::Spec {
        let mut message = oci::Spec::new();
        message.Root.mut_or_insert_default().Path = "/r".into();
        message.Process.mut_or_insert_default().Args = vec!["true".into()];
        message.Process.mut_or_insert_default().Cwd = "/".into();
        message.Linux.mut_or_insert_default();
        message
    }

    #[test]
    fn the_smallest_message_gets_no_defaults_of_others() {
        let spec = spec(&minimal()).unwrap();
        assert_eq!(spec.version(), "1.2.0");
        assert_eq!(spec.mounts().as_deref(), Some(&[][..]));
        let linux = spec.linux().as_ref().unwrap();
        assert_eq!(linux.namespaces().as_deref(), Some(&[][..]));
        assert_eq!(linux.masked_paths(), &None);
        assert!(linux.resources().is_some(), "without resources there would be no device filter");
        assert!(spec.hooks().is_none() && spec.hostname().is_none());
    }

    #[test]
    fn what_is_missing_is_named() {
        for (take, name) in [
            ((|m| m.Root = None.into()) as fn(&mut oci::Spec), "Root"),
            (|m| m.Root.mut_or_insert_default().Path.clear(), "Root.Path"),
            (|m| m.Process = None.into(), "Process"),
            (|m| m.Linux = None.into(), "Linux"),
            (|m| m.Mounts.push(oci::Mount::new()), "mount"),
        ] {
            let mut message = minimal();
            take(&mut message);
            let error = spec(&message).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("missing"), "{error}");
        }
    }

    #[test]
    fn hooks_bring_their_own_environment() {
        let mut message = minimal();
        let hook = oci::Hook { Path: "/h".into(), ..Default::default() };
        let hooks = message.Hooks.mut_or_insert_default();
        hooks.StartContainer.push(hook.clone());
        hooks.Prestart.push(hook);
        let spec = spec(&message).unwrap();
        let hooks = spec.hooks().clone().unwrap();
        let first = &hooks.start_container().clone().unwrap()[0];
        assert_eq!((first.env().clone().unwrap(), first.timeout()), (vec![DEFAULT_PATH.to_owned()], Some(10)));
        assert_eq!(hooks.create_runtime().clone().unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn any_words_are_values_or_errors(text in "\\PC{0,20}") {
            let mut message = minimal();
            let process = message.Process.mut_or_insert_default();
            process.Capabilities.mut_or_insert_default().Bounding = vec![text.clone()];
            prop_assert!(spec(&message).is_err());
            let mut message = minimal();
            message.Linux.mut_or_insert_default().Namespaces =
                vec![oci::LinuxNamespace { Type: text, ..Default::default() }];
            let _ = spec(&message);
        }
    }
}
