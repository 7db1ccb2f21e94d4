//! The units `extensions` and `extension-disks`.

use super::modules::{TRANSPORT_MODULES, load};
use super::{Inputs, Report, plain};
use crate::disks;
use crate::extensions::{mount_all, unrequested_disks};
use crate::modules::{LoadOrder, Modules, Outcome};

/// Modules that are required to mount an extension.
const MODULES: &[&str] = &["virtio_blk", "dm_verity", "erofs"];

/// Returns the reason why no extension is mounted, if the command line requests none. Does no I/O.
pub(super) fn nothing_requested(inputs: &Inputs) -> Option<String> {
    inputs.params.extensions.is_empty().then(|| "the kernel command line names none".to_owned())
}

/// Returns the reason why no disk is checked, if no disk has a serial number.
pub(super) fn no_disk_to_check(inputs: &Inputs) -> Option<String> {
    (!disks::any_serial(&inputs.root)).then(|| "no disk has a serial number".to_owned())
}

/// Loads those modules of a list that the image has.
fn load_available(modules: &Modules, names: &[&str], order: LoadOrder, inputs: &Inputs) -> Outcome {
    let there: Vec<&str> = names.iter().copied().filter(|name| modules.has(name)).collect();
    load(modules, &there, order, inputs)
}

/// Mounts the requested extensions; fails with the errors of all extensions.
pub(super) fn mount(inputs: &Inputs) -> Report {
    plain(mount_requested(inputs))
}

fn mount_requested(inputs: &Inputs) -> Result<String, String> {
    // Opened before the drivers are loaded, so that the uevents of their disks are received.
    let uevents = firstlight_uevent::open()
        .map_err(|error| format!("failed to open the uevent socket: {error}; does the kernel have netlink?"))?;
    let modules = Modules::read(&inputs.root, &inputs.release);
    // The buses first, so that disks are named in bus order regardless of which unit loads their driver.
    let mut outcome = load_available(&modules, TRANSPORT_MODULES, LoadOrder::InOrder, inputs);
    outcome.add(load_available(&modules, MODULES, LoadOrder::Free, inputs));
    let joined = |words: Vec<String>, more: Option<String>| {
        words.into_iter().chain(more).filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
    };
    match mount_all(&inputs.root, &inputs.params.extensions, &uevents) {
        // The mounts succeeded, so modules that failed to load were not required.
        Ok(mounted) => Ok(joined(mounted, Some(outcome.to_result().unwrap_or_else(|error| error)))),
        Err(errors) => Err(joined(errors, outcome.to_result().err())),
    }
}

/// Fails if an extension disk exists that was not requested.
pub(super) fn check_unrequested(inputs: &Inputs) -> Report {
    plain(no_unrequested_disk(inputs))
}

fn no_unrequested_disk(inputs: &Inputs) -> Result<String, String> {
    let found = unrequested_disks(&inputs.root, &inputs.params.extensions);
    let words: Vec<String> = found.iter().map(ToString::to_string).collect();
    if words.is_empty() { Ok(String::new()) } else { Err(words.join("; ")) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use firstlight_cmdline::CommandLine;

    use super::*;
    use crate::params::Params;
    use crate::root::Root;

    fn inputs(dir: &tempfile::TempDir, line: &str) -> Inputs {
        Inputs {
            root: Root::at(dir.path()),
            release: "6.12".into(),
            params: Arc::new(Params::from_command_line(&CommandLine::parse(line))),
            functions: Arc::default(),
            decision: None,
            gpus: Vec::new(),
            ready: 0,
            units: 1,
        }
    }

    fn write(dir: &tempfile::TempDir, path: &str, text: &str) {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn guest_without_extensions_skips_their_units() {
        let dir = tempfile::tempdir().unwrap();
        let without = inputs(&dir, "quiet");
        assert!(nothing_requested(&without).is_some() && no_disk_to_check(&without).is_some());
        write(&dir, "sys/block/vda/serial", "disk-1");
        assert_eq!((no_disk_to_check(&without), no_unrequested_disk(&without)), (None, Ok(String::new())));
        write(&dir, "sys/block/vdb/serial", "extension-gpu");
        let text = no_unrequested_disk(&without).unwrap_err();
        assert!(text.contains("disk vdb") && text.contains("\"gpu\""), "{text}");
    }

    /// modules.dep lists files that do not exist, so the error names each module that was tried.
    #[test]
    fn rejected_extension_is_reported_with_modules_that_failed_to_load() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "lib/modules/6.12/modules.dep", "virtio_mmio.ko:\ndm-verity.ko:\nother.ko:\n");
        write(&dir, "sys/block/vdb/serial", "extension-gpu");
        let with = inputs(&dir, "kata.extension.gpu.verity_params");
        assert_eq!(nothing_requested(&with), None);
        let text = mount_requested(&with).unwrap_err();
        assert!(text.starts_with("extension gpu: its kernel parameter has no value"), "{text}");
        assert!(text.contains("virtio_mmio.ko") && text.contains("dm-verity.ko") && !text.contains("other"), "{text}");
        assert!(no_unrequested_disk(&with).is_err(), "a rejected extension is not requested");
    }
}
