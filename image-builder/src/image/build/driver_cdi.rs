//! The CDI specification of the driver's files, generated at build time: only
//! device nodes are unknown before a guest runs.

use std::ffi::OsString;
use std::path::Path;

use firstlight_cdi::{DRIVER_KIND, Spec};
use firstlight_driver_files::{Files, HEAD, spec, spec_path};
use firstlight_verity::extension;

use super::Error;
use crate::tree::closure::{self, read_start, resolve};
use crate::tree::{Content, Node, Tree};

/// An image's files and its mount point in a guest.
struct Image<'a> {
    tree: &'a Tree,
    mount_point: String,
}

impl Image<'_> {
    /// Finds a path, following links. Links of an extension are relative, or point into the guest's root.
    fn find(&self, path: &str) -> Option<(String, &Node)> {
        let path = resolve(self.tree, path.strip_prefix(&self.mount_point)?)?;
        let node = self.tree.get(&path)?;
        Some((path, node))
    }

    fn content(&self, path: &str) -> Option<&Content> {
        match self.find(path)?.1 {
            Node::File { content, .. } => Some(content),
            _ => None,
        }
    }
}

impl Files for Image<'_> {
    fn names(&self, dir: &str) -> Vec<OsString> {
        let found = self.find(dir);
        found.iter().flat_map(|(path, _)| self.tree.names(path)).map(OsString::from).collect()
    }

    fn is_file(&self, path: &str) -> bool {
        self.content(path).is_some()
    }

    fn head(&self, path: &str) -> Option<[u8; HEAD]> {
        // The closure check reports unreadable files.
        read_start(self.content(path)?, HEAD).ok()?.try_into().ok()
    }
}

/// Adds the CDI specification for this driver version to the tree of a root file
/// system or of the named extension. Returns its path, or `None` if the tree has no
/// driver files for containers or the manifest supplies a specification.
pub(super) fn add(tree: &mut Tree, extension: Option<&str>, version: &str) -> Result<Option<String>, Error> {
    let path = spec_path(version).trim_start_matches('/').to_owned();
    if let Some(node) = tree.get(&path) {
        return check_supplied(node, &path).map(|()| None);
    }
    let mount_point = extension.map_or_else(String::new, |name| format!("{}/{name}", extension::DIRECTORY));
    let image = Image { tree, mount_point };
    let Some(spec) = spec(&image, &[&image.mount_point], version) else { return Ok(None) };
    let reason = |error: serde_json::Error| Error::DriverFiles { path: path.clone(), reason: error.to_string() };
    let bytes = serde_json::to_vec(&spec).map_err(reason)?;
    tree.add(&path, Node::File { mode: 0o644, content: Content::Bytes(bytes) })?;
    Ok(Some(path))
}

/// Validates a specification that the manifest supplies.
fn check_supplied(node: &Node, path: &str) -> Result<(), Error> {
    let invalid = |reason: String| Error::DriverFiles { path: path.to_owned(), reason };
    let Node::File { content, .. } = node else { return Err(invalid("not a regular file".to_owned())) };
    let text = String::from_utf8(closure::read_file(content)?).map_err(|error| invalid(error.to_string()))?;
    let spec = Spec::from_json(&text, Path::new(path)).map_err(|error| invalid(error.to_string()))?;
    if spec.kind == DRIVER_KIND {
        Ok(())
    } else {
        Err(invalid(format!("its kind is {}, not {DRIVER_KIND}", spec.kind)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "550.163.01";

    fn tree(entries: &[(&str, Node)]) -> Tree {
        let mut tree = Tree::default();
        entries.iter().for_each(|(path, node)| tree.add(path, node.clone()).unwrap());
        tree
    }

    fn file(bytes: &[u8]) -> Node {
        Node::File { mode: 0o644, content: Content::Bytes(bytes.to_vec()) }
    }

    fn link(target: &str) -> Node {
        Node::Symlink { target: target.to_owned() }
    }

    /// Returns host and container paths of the generated mounts.
    fn mounts(tree: &mut Tree, extension: Option<&str>) -> Vec<(String, String)> {
        let path = add(tree, extension, VERSION).unwrap().unwrap();
        let Some(Node::File { mode: 0o644, content }) = tree.get(&path) else { panic!("{path}") };
        let text = String::from_utf8(closure::read_file(content).unwrap()).unwrap();
        let spec = Spec::from_json(&text, Path::new("x")).unwrap();
        let mounts = spec.devices.into_iter().flat_map(|device| device.container_edits.mounts);
        mounts.map(|mount| (mount.host_path, mount.container_path)).collect()
    }

    #[test]
    fn libraries_behind_links_are_listed_with_the_mount_point() {
        let entries = [
            ("lib", link("usr/lib")),
            ("usr/lib64", link("lib/x86_64-linux-gnu")),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01", file(b"\x7fELF\x02...")),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.1", link("libcuda.so.550.163.01")),
            ("usr/bin/nvidia-smi", link("../lib/nvidia/nvidia-smi")),
            ("usr/lib/nvidia/nvidia-smi", file(b"")),
            ("usr/bin/nvidia-debugdump", link("/run/nowhere")),
        ];
        for (extension, mount_point) in [(None, ""), (Some("gpu"), "/run/kata-extensions/gpu")] {
            let found = mounts(&mut tree(&entries), extension);
            let library = "/usr/lib/x86_64-linux-gnu/libcuda.so";
            assert!(
                found.contains(&(format!("{mount_point}{library}.550.163.01"), format!("{library}.1"))),
                "{found:?}"
            );
            assert!(found.contains(&(format!("{mount_point}/usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi".to_owned())));
            assert!(
                found.iter().all(|(from, _)| from.starts_with(mount_point) && !from.contains("debugdump")),
                "{found:?}"
            );
        }
    }

    #[test]
    fn empty_tree_has_no_specification_and_the_manifests_takes_precedence() {
        assert_eq!(add(&mut tree(&[("usr/bin/sh", file(b""))]), None, VERSION).unwrap(), None);
        let path = "etc/cdi/nvidia-driver-550.163.01.json";
        let own = |text: &str| {
            add(&mut tree(&[("usr/bin/nvidia-smi", file(b"")), (path, file(text.as_bytes()))]), None, VERSION)
        };
        let good = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/driver","devices":[]}"#;
        assert_eq!(own(good).unwrap(), None);
        for (text, reason) in [
            (good.replace("driver", "gpu"), "nvidia.com/gpu"),
            ("{".to_owned(), "EOF"),
            ("\u{fffd}".to_owned(), "expected value"),
        ] {
            let error = own(&text).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(reason), "{error}");
        }
        assert!(
            add(&mut tree(&[(path, link("x"))]), None, VERSION).unwrap_err().to_string().contains("not a regular file")
        );
    }
}
