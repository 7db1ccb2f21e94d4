//! Parses libvirt's domain XML, as `virsh dumpxml` prints it.

use std::path::PathBuf;

use firstlight_pci::Address;
use roxmltree::{Document, Node, ParsingOptions};
use serde::Serialize;

/// The XML namespace of QEMU arguments.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

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

/// Maximum length of the XML in bytes; a domain's has a few kilobytes.
const MAX_LENGTH: usize = 4 << 20;

/// Maximum number of elements, texts and comments. It also limits the nesting, which the parser does not recurse on.
const MAX_NODES: u32 = 100_000;

/// Invalid domain XML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DefinitionError {
    /// It is longer than any domain's.
    #[error("failed to parse libvirt's domain XML: it has {0} bytes, more than {MAX_LENGTH}")]
    TooLong(usize),
    /// It is not well-formed, has a DTD or too many elements.
    #[error("failed to parse libvirt's domain XML: {0}")]
    Malformed(#[from] roxmltree::Error),
    /// It has no UUID, or is another document.
    #[error("failed to parse libvirt's domain XML: it has no UUID")]
    NoUuid,
}

/// Returns the elements at a path of element names below `root`.
fn elements<'a>(root: Node<'a, 'a>, path: &[&str]) -> Vec<Node<'a, 'a>> {
    path.iter().fold(vec![root], |parents, name| {
        parents.iter().flat_map(|parent| parent.children().filter(|child| child.has_tag_name(*name))).collect()
    })
}

/// Returns the first element at a path of element names below `root`.
fn element<'a>(root: Node<'a, 'a>, path: &[&str]) -> Option<Node<'a, 'a>> {
    elements(root, path).into_iter().next()
}

/// Returns an attribute that is a decimal or, with `0x`, a hexadecimal number.
fn number(element: Node<'_, '_>, name: &str) -> Option<u32> {
    let text = element.attribute(name)?;
    text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |digits| u32::from_str_radix(digits, 16).ok())
}

fn address(element: Node<'_, '_>) -> Option<Address> {
    Some(Address {
        domain: number(element, "domain")?,
        bus: number(element, "bus")?.try_into().ok()?,
        device: number(element, "slot")?.try_into().ok()?,
        function: number(element, "function")?.try_into().ok()?,
    })
}

/// Returns the PCI functions that a `hostdev` element passes to the domain.
fn passed(hostdev: Node<'_, '_>) -> Vec<PassedFunction> {
    let managed = hostdev.attribute("managed") == Some("yes");
    let sources = elements(hostdev, &["source", "address"]);
    sources.into_iter().filter_map(address).map(|address| PassedFunction { address, managed }).collect()
}

/// Returns the kernel, the initial RAM file system and the disks' files.
fn files(domain: Node<'_, '_>) -> Vec<PathBuf> {
    let boot = elements(domain, &["os"]).into_iter().flat_map(|os| os.children());
    let boot = boot.filter(|child| child.has_tag_name("kernel") || child.has_tag_name("initrd"));
    let disks = elements(domain, &["devices", "disk", "source"]);
    let disks = disks.into_iter().filter_map(|source| source.attribute("file"));
    boot.filter_map(|file| file.text()).chain(disks).map(PathBuf::from).collect()
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
    /// It is not well-formed, too large, or not a domain document.
    pub fn read(xml: &str) -> Result<Self, DefinitionError> {
        if xml.len() > MAX_LENGTH {
            return Err(DefinitionError::TooLong(xml.len()));
        }
        let options = ParsingOptions { allow_dtd: false, nodes_limit: MAX_NODES, entity_resolver: None };
        let document = Document::parse_with_options(xml, options)?;
        let domain = element(document.root(), &["domain"]).ok_or(DefinitionError::NoUuid)?;
        let text = |path: &[&str]| element(domain, path).and_then(|found| found.text()).unwrap_or_default().trim();
        let uuid = text(&["uuid"]).to_owned();
        if uuid.is_empty() {
            return Err(DefinitionError::NoUuid);
        }
        let unit = element(domain, &["memory"]).and_then(|memory| memory.attribute("unit")).unwrap_or("KiB");
        Ok(Self {
            kind: domain.attribute("type").unwrap_or_default().to_owned(),
            uuid,
            cid: element(domain, &["devices", "vsock", "cid"]).and_then(|cid| number(cid, "address")),
            passed: elements(domain, &["devices", "hostdev"]).into_iter().flat_map(passed).collect(),
            files: files(domain),
            huge_pages: element(domain, &["memoryBacking", "hugepages"]).is_some(),
            memory_kib: memory(text(&["memory"]), unit).unwrap_or_default(),
            external_devices: domain.children().any(|child| child.has_tag_name((QEMU, "commandline"))),
        })
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

    fn domain(body: &str) -> String {
        format!("<domain type='kvm'><uuid>u-1</uuid>{body}</domain>")
    }

    #[test]
    fn memory_units_are_converted_to_kib() {
        for (memory, kib) in [
            ("<memory>7</memory>", 7),
            ("<memory unit='MiB'> 2 </memory>", 2 << 10),
            ("<memory unit='GiB'>2</memory>", 2 << 20),
            ("<memory unit='GiB'>99999999999999999999</memory>", 0),
            ("<memory unit='parsec'>2</memory>", 0),
            ("", 0),
        ] {
            assert_eq!(Definition::read(&domain(memory)).unwrap().memory_kib, kib, "{memory}");
        }
    }

    #[test]
    fn qemu_arguments_name_external_devices() {
        let arguments = format!("<q:commandline xmlns:q='{QEMU}'><q:arg value='-a'/></q:commandline>");
        assert!(Definition::read(&domain(&arguments)).unwrap().external_devices);
        assert!(!Definition::read(&domain("<commandline/>")).unwrap().external_devices);
    }

    #[test]
    fn malformed_or_excessive_xml_is_rejected() {
        let long = domain(&" ".repeat(MAX_LENGTH));
        let many = domain(&"<a/>".repeat(MAX_NODES as usize));
        let deep = domain(&"<a>".repeat(MAX_NODES as usize));
        let dtd = format!("<!DOCTYPE d [<!ENTITY a 'b'>]>{}", domain("<title>&a;</title>"));
        let truncated = "<domain type='kvm'><uuid>u-1</uuid><devices>".to_owned();
        for (xml, reason) in [
            (long, "it has 4194348 bytes, more than 4194304"),
            (many, "nodes limit reached"),
            (deep, "nodes limit reached"),
            (dtd, "XML with DTD detected"),
            (truncated, "the root node was opened but never closed"),
            (domain("</b>"), "expected 'domain' tag, not 'b'"),
            (domain("&lol;"), "unknown entity reference"),
            ("<network><uuid>u-1</uuid></network>".to_owned(), "it has no UUID"),
            ("<domain/>".to_owned(), "it has no UUID"),
        ] {
            let error = Definition::read(&xml).unwrap_err().to_string();
            assert!(error.starts_with("failed to parse libvirt's domain XML: "), "{error}");
            assert!(error.contains(reason), "{reason}: {error}");
        }
    }

    #[test]
    fn deeply_nested_xml_does_not_exhaust_the_stack() {
        let depth = MAX_NODES as usize / 2;
        let xml = domain(&format!("{}{}", "<a>".repeat(depth), "</a>".repeat(depth)));
        assert_eq!(Definition::read(&xml).unwrap().uuid, "u-1");
    }

    proptest! {
        #[test]
        fn any_text_is_a_definition_or_an_error(text in ".{0,200}|[<>/='\" a-c]{0,80}") {
            let _ = Definition::read(&text);
        }
    }
}
