//! Converts Kata's protobuf messages to OCI configurations.
//!
//! In the messages zero and the empty string mean "not set", and every name (capabilities,
//! namespaces, seccomp actions) is text. Unknown text is rejected and reported; nothing panics, and
//! no default of libcontainer or oci-spec is applied silently.

mod linux;
mod process;
mod resources;
mod seccomp;

use firstlight_agent_api::oci;
use oci_spec::runtime::{Hook, HookBuilder, Hooks, HooksBuilder, Mount, MountBuilder, RootBuilder, Spec};
use serde::de::DeserializeOwned;

pub use process::{process, winsize};
pub use resources::resources;

/// PATH of processes whose configuration has none; libcontainer requires one.
pub const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Timeout of a hook without one, seconds.
const HOOK_TIMEOUT: i64 = 10;

/// Upper bound on mounts: each costs the kernel and every reader of the mount table.
const MAX_MOUNTS: usize = 4096;

/// Why a message is not a valid configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A required part is missing.
    #[error("OCI configuration: {0} is missing")]
    Missing(&'static str),
    /// Unknown name.
    #[error("OCI configuration: unknown {what} {text:?}")]
    Unknown {
        /// What it should name.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// A number is out of range.
    #[error("OCI configuration: {what} {value} is out of range")]
    Range {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: i64,
    },
    /// Too many entries.
    #[error("OCI configuration: {count} {what} exceed the limit of {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// The limit.
        most: usize,
    },
    /// Rejected by oci-spec.
    #[error("OCI configuration: {0}")]
    Invalid(String),
}

impl From<oci_spec::OciSpecError> for ConvertError {
    fn from(error: oci_spec::OciSpecError) -> Self {
        Self::Invalid(error.to_string())
    }
}

type Result<T> = std::result::Result<T, ConvertError>;

/// Parses a name of the OCI specification to oci-spec's value.
fn parse_name<T: DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|_| ConvertError::Unknown { what, text: text.chars().take(60).collect() })
}

fn parse_names<T: DeserializeOwned, C: FromIterator<T>>(what: &'static str, texts: &[String]) -> Result<C> {
    texts.iter().map(|text| parse_name(what, text)).collect()
}

/// Returns `None` for an empty list.
fn some<T: Clone>(list: &[T]) -> Option<Vec<T>> {
    if list.is_empty() { None } else { Some(list.to_vec()) }
}

/// Converts a complete configuration.
///
/// # Errors
/// A part is missing, unknown or out of range.
pub fn spec(message: &oci::Spec) -> Result<Spec> {
    let root = message.Root.as_ref().ok_or(ConvertError::Missing("Root"))?;
    if root.Path.is_empty() {
        return Err(ConvertError::Missing("Root.Path"));
    }
    if message.Mounts.len() > MAX_MOUNTS {
        return Err(ConvertError::TooMany { what: "mounts", count: message.Mounts.len(), most: MAX_MOUNTS });
    }
    let mut spec = Spec::default();
    // libcontainer accepts any 1.x; some clients send none.
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
    // Deprecated; run at the same point as createRuntime, before it.
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

/// Every hook gets an explicit environment: libcontainer passes the container's environment to
/// hooks without one.
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

    /// Returns the smallest valid message.
    pub(crate) fn minimal() -> oci::Spec {
        let mut message = oci::Spec::new();
        message.Root.mut_or_insert_default().Path = "/r".into();
        message.Process.mut_or_insert_default().Args = vec!["true".into()];
        message.Process.mut_or_insert_default().Cwd = "/".into();
        message.Linux.mut_or_insert_default();
        message
    }

    #[test]
    fn minimal_message_gets_no_library_defaults() {
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
    fn missing_part_is_reported() {
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
    fn hooks_without_environment_get_a_default() {
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
        fn any_text_is_a_value_or_an_error(text in "\\PC{0,20}") {
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
