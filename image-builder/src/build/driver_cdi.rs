//! The specification of the driver's files, made with the image: only device
//! nodes are not known before a guest runs.

use std::ffi::OsString;
use std::path::Path;

use firstlight_cdi::{DRIVER_KIND, Spec};
use firstlight_driver_files::{Files, HEAD, spec, spec_path};
use firstlight_verity::extension;

use super::Error;
use crate::closure::{self, beginning, resolve};
use crate::tree::{Content, Node, Tree};

/// Where the root of an image is in a guest.
struct Image<'a> {
    tree: &'a Tree,
    place: String,
}

impl Image<'_> {
    /// Follows links; those of an extension are relative, or lead into the guest's root.
    fn find(&self, path: &str) -> Option<(String, &Node)> {
        let path = resolve(self.tree, path.strip_prefix(&self.place)?)?;
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
        // One that cannot be read ends the build when all is judged.
        beginning(self.content(path)?, HEAD).ok()?.try_into().ok()
    }
}

/// Adds the specification for the driver of this version to a tree that is a
/// guest's root, or that is mounted as the extension of that name. Its path; none
/// if no container can have a file of the driver, or the manifest has one itself.
pub(super) fn add(tree: &mut Tree, extension: Option<&str>, version: &str) -> Result<Option<String>, Error> {
    let path = spec_path(version).trim_start_matches('/').to_owned();
    if let Some(node) = tree.get(&path) {
        return checked(node, &path).map(|()| None);
    }
    let place = extension.map_or_else(String::new, |name| format!("{}/{name}", extension::DIRECTORY));
    let image = Image { tree, place };
    let Some(spec) = spec(&image, &[&image.place], version) else { return Ok(None) };
    let why = |error: serde_json::Error| Error::DriverFiles { path: path.clone(), why: error.to_string() };
    let bytes = serde_json::to_vec(&spec).map_err(why)?;
    tree.add(&path, Node::File { mode: 0o644, content: Content::Bytes(bytes) })?;
    Ok(Some(path))
}

/// What the manifest puts there in place of ours.
fn checked(node: &Node, path: &str) -> Result<(), Error> {
    let wrong = |why: String| Error::DriverFiles { path: path.to_owned(), why };
    let Node::File { content, .. } = node else { return Err(wrong("it is no file".to_owned())) };
    let text = String::from_utf8(closure::bytes(content)?).map_err(|error| wrong(error.to_string()))?;
    let spec = Spec::from_json(&text, Path::new(path)).map_err(|error| wrong(error.to_string()))?;
    if spec.kind == DRIVER_KIND { Ok(()) } else { Err(wrong(format!("its kind is {}, not {DRIVER_KIND}", spec.kind))) }
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

    /// What a tree is said to have: where from, and where to.
    fn said(tree: &mut Tree, extension: Option<&str>) -> Vec<(String, String)> {
        let path = add(tree, extension, VERSION).unwrap().unwrap();
        let Some(Node::File { mode: 0o644, content }) = tree.get(&path) else { panic!("{path}") };
        let text = String::from_utf8(closure::bytes(content).unwrap()).unwrap();
        let spec = Spec::from_json(&text, Path::new("x")).unwrap();
        let mounts = spec.devices.into_iter().flat_map(|device| device.container_edits.mounts);
        mounts.map(|mount| (mount.host_path, mount.container_path)).collect()
    }

    #[test]
    fn libraries_are_found_behind_links_and_where_the_image_will_be() {
        let entries = [
            ("lib", link("usr/lib")),
            ("usr/lib64", link("lib/x86_64-linux-gnu")),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01", file(b"\x7fELF\x02...")),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.1", link("libcuda.so.550.163.01")),
            ("usr/bin/nvidia-smi", link("../lib/nvidia/nvidia-smi")),
            ("usr/lib/nvidia/nvidia-smi", file(b"")),
            ("usr/bin/nvidia-debugdump", link("/run/nowhere")),
        ];
        for (extension, place) in [(None, ""), (Some("gpu"), "/run/kata-extensions/gpu")] {
            let said = said(&mut tree(&entries), extension);
            let library = "/usr/lib/x86_64-linux-gnu/libcuda.so";
            assert!(said.contains(&(format!("{place}{library}.550.163.01"), format!("{library}.1"))), "{said:?}");
            assert!(said.contains(&(format!("{place}/usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi".to_owned())));
            assert!(said.iter().all(|(from, _)| from.starts_with(place) && !from.contains("debugdump")), "{said:?}");
        }
    }

    #[test]
    fn nothing_is_said_of_nothing_and_the_manifest_has_the_first_word() {
        assert_eq!(add(&mut tree(&[("usr/bin/sh", file(b""))]), None, VERSION).unwrap(), None);
        let path = "etc/cdi/nvidia-driver-550.163.01.json";
        let own = |text: &str| {
            add(&mut tree(&[("usr/bin/nvidia-smi", file(b"")), (path, file(text.as_bytes()))]), None, VERSION)
        };
        let good = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/driver","devices":[]}"#;
        assert_eq!(own(good).unwrap(), None);
        for (text, why) in [
            (good.replace("driver", "gpu"), "nvidia.com/gpu"),
            ("{".to_owned(), "EOF"),
            ("\u{fffd}".to_owned(), "expected value"),
        ] {
            let error = own(&text).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains(why), "{error}");
        }
        assert!(add(&mut tree(&[(path, link("x"))]), None, VERSION).unwrap_err().to_string().contains("no file"));
    }
}
