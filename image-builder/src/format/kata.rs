//! Writes the configuration of Kata's runtimes for an image, and kernel parameters.

use std::fmt::Write as _;

use firstlight_verity::extension;

use super::verity::Params;
use super::{Format, Plan, Root};

/// Device nodes of the data and hash partitions of a disk that is the first
/// virtio-blk device.
pub(crate) const FIRST_DISK: [&str; 2] = ["/dev/vda1", "/dev/vda2"];

/// Returns the kernel parameter `dm-mod.create=`, with which a kernel with
/// `CONFIG_DM_INIT` creates `/dev/dm-0` from a data device and a hash device, in
/// the form of Kata's runtimes.
#[must_use]
pub(crate) fn dm_mod_create(params: &Params, [data, hashes]: [&str; 2]) -> String {
    let (sectors, target) = (params.sectors(), params.target(data, hashes));
    format!("dm-mod.create=\"dm-verity,,,ro,0 {sectors} verity {target}\"")
}

/// Returns the kernel command line that mounts a disk's file system as root.
#[must_use]
pub(crate) fn command_line(format: Format, verity: Option<&Params>) -> String {
    let format_name = format.name();
    match verity {
        Some(params) => {
            let create = dm_mod_create(params, FIRST_DISK);
            format!("{create} root=/dev/dm-0 ro rootfstype={format_name}")
        }
        None => format!("root={} ro rootfstype={format_name}", FIRST_DISK[0]),
    }
}

/// Returns the kernel parameter that announces an extension to a guest; without a
/// value if the extension has no dm-verity hash tree.
#[must_use]
pub(crate) fn extension_parameter(name: &str, verity: Option<&Params>) -> String {
    let parameter = extension::parameter(name);
    verity.map_or_else(|| parameter.clone(), |params| format!("{parameter}={params}"))
}

/// Returns a drop-in file for Kata's `config.d`, for an image whose files are in
/// `dir` on the host; `None` for a format that Kata does not support.
#[must_use]
pub(crate) fn drop_in(plan: &Plan, root: &Root, dir: &str) -> Option<String> {
    let file = |name: &str| quoted(&format!("{}/{name}", dir.trim_end_matches('/')));
    let verity = root.verity().map(ToString::to_string).unwrap_or_default();
    let mut text =
        format!("# Kata Containers settings for the image {}. Copy this file to the directory config.d\n", plan.name);
    text.push_str("# next to the configuration file to change; see docs/images.md.\n");
    match (&plan.extension, plan.format) {
        (Some(_), format) if format != Format::Erofs => return None,
        (None, Format::Squashfs) => return None,
        (Some(name), _) => {
            text.push_str("# This list replaces the one in the configuration file: repeat other extensions here.\n");
            let _ = writeln!(
                text,
                "[[hypervisor.qemu.guest_extension_images]]\nname = {}\npath = {}\nverity_params = {}",
                quoted(name),
                file(&root.file),
                quoted(&verity),
            );
        }
        (None, Format::Initramfs) => {
            let _ = writeln!(
                text,
                "[hypervisor.qemu]\nkernel = {}\ninitrd = {}\nimage = \"\"",
                file(firstlight_image::KERNEL),
                file(&root.file),
            );
        }
        (None, format) => {
            let _ = writeln!(
                text,
                "[hypervisor.qemu]\nkernel = {}\nimage = {}\ninitrd = \"\"\nrootfs_type = \"{}\"\n\
                 # Use virtio-blk: the first key is for the Go runtime, the second for the Rust runtime.\n\
                 disable_image_nvdimm = true\nvm_rootfs_driver = \"virtio-blk-pci\"",
                file(firstlight_image::KERNEL),
                file(&root.file),
                format.name(),
            );
            if root.verity().is_some() {
                let _ = writeln!(
                    text,
                    "# The runtime passes this as dm-mod.create=: the kernel needs CONFIG_DM_INIT.\n\
                     kernel_verity_params = {}",
                    quoted(&verity)
                );
            }
        }
    }
    Some(text)
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::disk::{Disk, Partition};
    use crate::format::plan::FormatSettings;

    fn params() -> Params {
        Params { root_hash: [0xf2; 32], salt: vec![6, 0x5c], data_blocks: 92041 }
    }

    fn plan(format: Format, extension: Option<&str>) -> Plan {
        let settings = FormatSettings {
            name: "gpu \"x\"",
            format,
            compression: None,
            level: None,
            cluster: None,
            extension,
            verity: None,
        };
        Plan::new(&settings).unwrap()
    }

    fn root(plan: &Plan, verity: bool) -> Root {
        let part = Partition { start: 1 << 20, size: 4096 };
        let disk = Disk { data: part, verity: verity.then(|| (part, params())) };
        Root { file: plan.file_name(), disk: (plan.format != Format::Initramfs).then_some(disk) }
    }

    /// The expected value is the example in a comment of Kata's parser.
    #[test]
    fn kernel_parameter_has_kata_format() {
        let (root, salt) = ("f2".repeat(32), "065c");
        assert_eq!(
            dm_mod_create(&params(), FIRST_DISK),
            format!(
                "dm-mod.create=\"dm-verity,,,ro,0 736328 verity 1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 {root} {salt}\""
            )
        );
        let line = command_line(Format::Erofs, Some(&params()));
        assert!(line.ends_with(" root=/dev/dm-0 ro rootfstype=erofs"), "{line}");
        assert_eq!(command_line(Format::Ext4, None), "root=/dev/vda1 ro rootfstype=ext4");
        let none = dm_mod_create(&Params { salt: Vec::new(), ..params() }, ["a", "b"]);
        assert!(none.ends_with(" -\""), "{none}");
    }

    #[test]
    fn extension_parameter_has_kata_format() {
        let parameter = extension_parameter("gpu", Some(&params()));
        assert!(parameter.starts_with("kata.extension.gpu.verity_params=root_hash=f2f2"), "{parameter}");
        assert_eq!(extension_parameter("gpu", None), "kata.extension.gpu.verity_params");
    }

    fn read(format: Format, extension: Option<&str>, verity: bool) -> toml::Value {
        let plan = plan(format, extension);
        let text = drop_in(&plan, &root(&plan, verity), "/opt/x/").unwrap();
        toml::from_str(&text).unwrap()
    }

    #[test]
    fn drop_in_is_toml_with_kata_keys() {
        let base = read(Format::Erofs, None, true);
        let qemu = &base["hypervisor"]["qemu"];
        assert_eq!(qemu["image"].as_str(), Some("/opt/x/rootfs.img"));
        assert_eq!(qemu["kernel"].as_str(), Some("/opt/x/vmlinux"));
        assert_eq!(qemu["rootfs_type"].as_str(), Some("erofs"));
        assert_eq!(qemu["kernel_verity_params"].as_str(), Some(params().to_string().as_str()));
        let bare = read(Format::Ext4, None, false);
        assert!(bare["hypervisor"]["qemu"].get("kernel_verity_params").is_none());
        let memory = read(Format::Initramfs, None, false);
        let qemu = &memory["hypervisor"]["qemu"];
        assert_eq!((qemu["initrd"].as_str(), qemu["image"].as_str()), (Some("/opt/x/initrd.cpio"), Some("")));
        let extension = read(Format::Erofs, Some("gpu"), true);
        let list = &extension["hypervisor"]["qemu"]["guest_extension_images"][0];
        assert_eq!((list["name"].as_str(), list["path"].as_str()), (Some("gpu"), Some("/opt/x/extension-gpu.img")));
        assert_eq!(list["verity_params"].as_str(), Some(params().to_string().as_str()));
        // Kata does not support squashfs as root.
        let plan = plan(Format::Squashfs, None);
        assert_eq!(drop_in(&plan, &root(&plan, true), "/opt"), None);
    }
}
