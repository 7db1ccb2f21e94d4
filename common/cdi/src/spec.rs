//! The CDI 0.5.0 specification document.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::name::{device_is_valid, kind_is_valid};

/// The `cdiVersion` that is written.
pub const SPEC_VERSION: &str = "0.5.0";

/// A CDI specification: the changes a runtime makes to containers that request its devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Version of the format.
    #[serde(rename = "cdiVersion")]
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// The devices of this kind.
    pub devices: Vec<Device>,
    /// Edits for every container that has any device of this specification.
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Unique in its specification.
    pub name: String,
    /// Edits for a container that has it.
    pub container_edits: ContainerEdits,
}

/// Changes to a container's OCI configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    /// `NAME=value` entries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes to create and to allow in the device cgroup.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Bind mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Hooks. Firstlight writes none, and the agent refuses them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
}

/// A device node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path in the guest; equal to `path` if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `c` or `b`; looked up if omitted.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub node_type: Option<String>,
    /// Major number; looked up if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number; looked up if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Mode bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Access that the device cgroup allows: any of `r`, `w`, `m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// A bind mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Path in the guest.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
}

/// A hook.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// Its stage, e.g. `createContainer`.
    pub hook_name: String,
    /// The program.
    pub path: String,
    /// Its arguments, `argv[0]` included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

impl ContainerEdits {
    /// Returns whether there are no edits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.env.is_empty() && self.device_nodes.is_empty() && self.mounts.is_empty() && self.hooks.is_empty()
    }
}

/// Why a document is not a valid specification.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not JSON, or not of this schema.
    #[error("failed to parse CDI spec {path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A value is invalid.
    #[error("invalid CDI spec {path}: {value:?}: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The value.
        value: String,
        /// Why it is invalid.
        reason: &'static str,
    },
}

impl Spec {
    /// Parses and validates a document; `path` only names it in errors.
    ///
    /// # Errors
    /// It is not JSON of this schema, or a name, path or environment entry is malformed.
    pub fn from_json(text: &str, path: &Path) -> Result<Self, SpecError> {
        let spec: Self =
            serde_json::from_str(text).map_err(|source| SpecError::Json { path: path.to_owned(), source })?;
        match spec.check() {
            Ok(()) => Ok(spec),
            Err((value, reason)) => Err(SpecError::Invalid { path: path.to_owned(), value, reason }),
        }
    }

    fn check(&self) -> Result<(), (String, &'static str)> {
        kind_is_valid(&self.kind).map_err(|reason| (self.kind.clone(), reason))?;
        check_edits(&self.container_edits)?;
        for (at, device) in self.devices.iter().enumerate() {
            device_is_valid(&device.name).map_err(|reason| (device.name.clone(), reason))?;
            if self.devices[..at].iter().any(|other| other.name == device.name) {
                return Err((device.name.clone(), "two devices have this name"));
            }
            check_edits(&device.container_edits)?;
        }
        Ok(())
    }

    /// Returns the device of that name.
    #[must_use]
    pub fn device(&self, name: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.name == name)
    }
}

fn check_edits(edits: &ContainerEdits) -> Result<(), (String, &'static str)> {
    for entry in &edits.env {
        if entry.split_once('=').is_none_or(|(name, _)| name.is_empty()) || entry.contains('\0') {
            return Err((entry.clone(), "not NAME=value"));
        }
    }
    for node in &edits.device_nodes {
        if !node.path.starts_with('/') {
            return Err((node.path.clone(), "not an absolute path"));
        }
        if node.permissions.as_deref().is_some_and(|p| p.is_empty() || !p.chars().all(|c| "rwm".contains(c))) {
            return Err((node.path.clone(), "permissions are not of r, w, m"));
        }
    }
    for mount in &edits.mounts {
        if !mount.host_path.starts_with('/') || !mount.container_path.starts_with('/') {
            return Err((mount.container_path.clone(), "not an absolute path"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Spec, SpecError> {
        Spec::from_json(text, Path::new("x.json"))
    }

    #[test]
    fn published_example_is_parsed() {
        let spec = read(
            r#"{"cdiVersion":"0.5.0","kind":"vendor.com/device","devices":[{"name":"myDevice","containerEdits":
            {"deviceNodes":[{"hostPath":"/vendor/dev/card1","path":"/dev/card1","type":"c","major":25,"minor":25,
            "fileMode":384,"permissions":"rw","uid":1000,"gid":1000}]}}],
            "containerEdits":{"env":["FOO=VALID_SPEC"],"mounts":[{"hostPath":"/bin/v","containerPath":"/bin/v"}]}}"#,
        )
        .unwrap();
        let node = &spec.device("myDevice").unwrap().container_edits.device_nodes[0];
        assert_eq!((node.major, node.file_mode, node.permissions.as_deref()), (Some(25), Some(384), Some("rw")));
        assert_eq!(read(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
    }

    #[test]
    fn invalid_value_is_named() {
        let device = |name: &str, edits: &str| {
            format!(
                r#"{{"cdiVersion":"0.5.0","kind":"a.b/c","devices":[{{"name":"{name}","containerEdits":{{{edits}}}}}]}}"#
            )
        };
        for (text, part) in [
            (device("../../x", ""), "../../x"),
            (device("0", r#""env":["=x"]"#), "NAME=value"),
            (device("0", r#""deviceNodes":[{"path":"dev/x"}]"#), "absolute"),
            (device("0", r#""deviceNodes":[{"path":"/dev/x","permissions":"rwx"}]"#), "permissions"),
            (device("0", "").replace("a.b/c", "c"), "kind"),
            ("{".to_owned(), "x.json"),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,120}") {
            let _ = read(&text);
        }
    }
}
