//! Parses libvirt's domain XML, as `virsh dumpxml` prints it.

use std::path::PathBuf;

use firstlight_pci::Address;
use serde::Serialize;

/// A PCI function that a domain has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PassedFunction {
    /// Its address on the host.
    pub address: Address,
    /// Whether libvirt binds and releases it.
    pub managed: bool,
}

/// The properties of a libvirt domain that matter here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Definition {
    /// `kvm` or `qemu`.
    pub kind: String,
    /// Lower-case, with dashes.
    pub uuid: String,
    /// The vsock context id.
    pub cid: Option<u32>,
    /// The functions of the host that it has.
    pub passed: Vec<PassedFunction>,
    /// Files that have to exist: kernel, initial RAM file system, disks.
    pub files: Vec<PathBuf>,
    /// Whether its memory is backed by huge pages.
    pub huge_pages: bool,
    /// Memory, KiB.
    pub memory_kib: u64,
    /// Whether other processes serve its devices, which QEMU arguments name.
    pub external_devices: bool,
}

/// Invalid domain XML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("failed to parse libvirt's domain XML: {0}")]
pub struct DefinitionError(&'static str);

/// An XML token: a tag, or the text up to the next one.
enum Piece<'a> {
    Open { name: &'a str, attributes: &'a str, empty: bool },
    Close,
    Text(&'a str),
}

/// Splits libvirt's XML into tokens: it uses `<` and `>` only for tags.
fn pieces(mut rest: &str) -> impl Iterator<Item = Piece<'_>> {
    std::iter::from_fn(move || {
        loop {
            if rest.is_empty() {
                return None;
            }
            if !rest.starts_with('<') {
                let end = rest.find('<').unwrap_or(rest.len());
                let (text, after) = rest.split_at(end);
                rest = after;
                return Some(Piece::Text(text));
            }
            if let Some(comment) = rest.strip_prefix("<!--") {
                rest = comment.split_once("-->").map_or("", |(_, after)| after);
                continue;
            }
            let (tag, after) = rest[1..].split_once('>').unwrap_or((&rest[1..], ""));
            rest = after;
            if tag.starts_with('?') || tag.starts_with('!') {
                continue;
            }
            if tag.starts_with('/') {
                return Some(Piece::Close);
            }
            let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
            let (name, attributes) = tag.split_once(|c: char| c.is_ascii_whitespace()).unwrap_or((tag, ""));
            return Some(Piece::Open { name, attributes, empty });
        }
    })
}

fn plain(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
    // Last, or `&amp;lt;` would become a bracket.
    text.replace("&amp;", "&")
}

fn attribute(attributes: &str, key: &str) -> Option<String> {
    let mut rest = attributes;
    while let Some((name, after)) = rest.split_once('=') {
        let quote = after.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
        let (value, after) = after[1..].split_once(quote)?;
        if name.trim() == key {
            return Some(plain(value));
        }
        rest = after;
    }
    None
}

fn number(attributes: &str, name: &str) -> Option<u32> {
    let text = attribute(attributes, name)?;
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
}

fn address(attributes: &str) -> Option<Address> {
    Some(Address {
        domain: number(attributes, "domain")?,
        bus: number(attributes, "bus")?.try_into().ok()?,
        device: number(attributes, "slot")?.try_into().ok()?,
        function: number(attributes, "function")?.try_into().ok()?,
    })
}

/// Converts a memory size to KiB.
fn memory(text: &str, unit: &str) -> Option<u64> {
    let count: u64 = text.parse().ok()?;
    match unit {
        "KiB" => Some(count),
        "MiB" => count.checked_mul(1 << 10),
        "GiB" => count.checked_mul(1 << 20),
        _ => None,
    }
}

impl Definition {
    /// Parses the output of `virsh dumpxml`.
    ///
    /// # Errors
    /// It is not a domain document.
    pub fn read(xml: &str) -> Result<Self, DefinitionError> {
        let mut read = Self::default();
        let mut path: Vec<&str> = Vec::new();
        let (mut managed, mut unit) = (false, String::new());
        for piece in pieces(xml) {
            match piece {
                Piece::Open { name, attributes, empty } => {
                    path.push(name);
                    match path.as_slice() {
                        ["domain"] => read.kind = attribute(attributes, "type").unwrap_or_default(),
                        ["domain", "memory"] => {
                            unit = attribute(attributes, "unit").unwrap_or_else(|| "KiB".to_owned());
                        }
                        ["domain", "memoryBacking", "hugepages"] => read.huge_pages = true,
                        ["domain", "qemu:commandline"] => read.external_devices = true,
                        ["domain", "devices", "hostdev"] => {
                            managed = attribute(attributes, "managed").is_some_and(|it| it == "yes");
                        }
                        ["domain", "devices", "hostdev", "source", "address"] => {
                            read.passed.extend(address(attributes).map(|address| PassedFunction { address, managed }));
                        }
                        ["domain", "devices", "vsock", "cid"] => read.cid = number(attributes, "address"),
                        ["domain", "devices", "disk", "source"] => {
                            read.files.extend(attribute(attributes, "file").map(PathBuf::from));
                        }
                        _ => {}
                    }
                    if empty {
                        path.pop();
                    }
                }
                Piece::Close => {
                    path.pop();
                }
                Piece::Text(text) => match path.as_slice() {
                    ["domain", "uuid"] => text.trim().clone_into(&mut read.uuid),
                    ["domain", "memory"] => read.memory_kib = memory(text.trim(), &unit).unwrap_or_default(),
                    ["domain", "os", "kernel" | "initrd"] => read.files.push(plain(text).into()),
                    _ => {}
                },
            }
        }
        if read.uuid.is_empty() { Err(DefinitionError("it has no UUID")) } else { Ok(read) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn libvirts_xml_is_parsed() {
        let xml = "<?xml version='1.0'?>\n<!--\nWARNING <b>\n-->\n<domain type='qemu' id='1'>\n<uuid>u-1</uuid>
            <memory unit='KiB'>4194304</memory><memoryBacking><hugepages/></memoryBacking>
            <os><kernel>/a&amp;lt;/vmlinux</kernel></os>
            <devices><disk type='file'><source file='/s &apos;x&apos;' index='1'/></disk>
            <hostdev mode='subsystem' type='pci' managed='yes'><driver name='vfio'/><source>
            <address domain='0x0000' bus='0xc1' slot='0x00' function='0x1'/></source><alias name='hostdev0'/>
            <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/></hostdev>
            <vsock model='virtio'><cid auto='no' address='100'/></vsock></devices></domain>";
        let read = Definition::read(xml).unwrap();
        let address = "0000:c1:00.1".parse().unwrap();
        assert_eq!(
            read,
            Definition {
                kind: "qemu".into(),
                uuid: "u-1".into(),
                cid: Some(100),
                passed: vec![PassedFunction { address, managed: true }],
                files: vec!["/a&lt;/vmlinux".into(), "/s 'x'".into()],
                huge_pages: true,
                memory_kib: 4 << 20,
                external_devices: false,
            }
        );
        assert!(Definition::read("error: no domain").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_a_definition_or_an_error(text in ".{0,200}|[<>/='\" a-c]{0,80}") {
            let _ = Definition::read(&text);
        }
    }
}
