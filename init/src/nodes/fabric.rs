//! The nodes of an NVLink fabric: NVSwitches, and the IMEX channels with which programs on several
//! nodes share memory.

use std::fs;
use std::io;

use firstlight_pci::Address;

use super::{CONTROL_MINOR, MakeNode, Maker, NodesError, field, mode_in};

const SWITCH: &str = "nvidia-nvswitch";
const LINK: &str = "nvidia-nvlink";
const IMEX: &str = "nvidia-caps-imex-channels";

/// Directory with a subdirectory for each NVSwitch, named by PCI address.
const SWITCHES: &str = "/proc/driver/nvidia-nvswitch/devices";

/// Number of IMEX channels if the driver does not publish it: the driver's default.
const CHANNELS: u32 = 2048;

/// Creates the nodes of the NVSwitches and of the first `channels` IMEX channels; returns the
/// errors. `mode` is the mode of the GPUs' nodes.
pub(super) fn make(maker: &mut Maker<'_, impl MakeNode>, channels: u32, mode: u32) -> Vec<NodesError> {
    [switches(maker), imex(maker, channels, mode)].into_iter().filter_map(Result::err).collect()
}

/// Returns the number of NVSwitches that the driver has bound. The driver assigns minor numbers
/// from 0 in probe order and does not publish them.
fn count(maker: &Maker<'_, impl MakeNode>) -> Result<u32, NodesError> {
    let dir = maker.root.path(SWITCHES);
    let entries = match fs::read_dir(&dir).and_then(Iterator::collect::<io::Result<Vec<_>>>) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(NodesError::Driver { path: dir, reason: error.to_string() }),
    };
    if let Some(entry) = entries.iter().find(|entry| {
        let name = entry.file_name();
        name.to_str().is_none_or(|name| name.parse::<Address>().is_err())
    }) {
        return Err(NodesError::Driver { path: entry.path(), reason: "its name is not a PCI address".to_owned() });
    }
    u32::try_from(entries.len()).ok().filter(|count| *count <= CONTROL_MINOR).ok_or_else(|| NodesError::Driver {
        path: dir,
        reason: format!("it has {} switches; the driver has numbers for {CONTROL_MINOR}", entries.len()),
    })
}

fn switches(maker: &mut Maker<'_, impl MakeNode>) -> Result<(), NodesError> {
    let count = count(maker)?;
    if count == 0 {
        return Ok(());
    }
    let major = maker.major(&[SWITCH]).ok_or(NodesError::NoMajor(SWITCH))?;
    let mode = mode_in(maker.root, "/proc/driver/nvidia-nvswitch/permissions")?;
    maker.make("nvidia-nvswitchctl", major, CONTROL_MINOR, mode)?;
    for minor in 0..count {
        maker.make(&format!("nvidia-nvswitch{minor}"), major, minor, mode)?;
    }
    if let Some(major) = maker.major(&[LINK]) {
        let mode = mode_in(maker.root, "/proc/driver/nvidia-nvlink/permissions")?;
        maker.make("nvidia-nvlink", major, 0, mode)?;
    }
    Ok(())
}

fn imex(maker: &mut Maker<'_, impl MakeNode>, channels: u32, mode: u32) -> Result<(), NodesError> {
    // A driver that is configured without channels does not register the major number.
    let Some(major) = maker.major(&[IMEX]) else { return Ok(()) };
    let path = maker.root.path(super::PARAMS);
    let text = fs::read_to_string(&path).unwrap_or_default();
    let there = match field(&text, "ImexChannelCount") {
        None => CHANNELS,
        Some(value) => value.parse().map_err(|_| NodesError::Driver {
            path,
            reason: format!("its ImexChannelCount is {value:?}, which is not a number"),
        })?,
    };
    for channel in 0..channels.min(there) {
        maker.make(&format!("{IMEX}/channel{channel}"), major, channel, mode)?;
    }
    if channels > there.max(1) {
        return Err(NodesError::Channels { asked: channels, there });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Node, Written, write};
    use super::*;
    use crate::root::Root;

    const DEVICES: &str = "Character devices:\n195 nvidia\n234 nvidia-caps-imex-channels\n235 nvidia-nvswitch\n\
                           236 nvidia-nvlink\n\nBlock devices:\n";

    fn guest(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        write(&dir, "proc/devices", DEVICES);
        for (path, text) in files {
            write(&dir, &format!("proc/driver/{path}"), text);
        }
        let root = Root::at(dir.path());
        (dir, root)
    }

    fn made(root: &Root, channels: u32) -> (Vec<Node>, Vec<String>) {
        let mut written = Written::default();
        let made = super::super::make(root, &[], channels, &mut written).unwrap();
        written.0.retain(|node| node.0 != "nvidiactl");
        (written.0, made.left_out.iter().map(ToString::to_string).collect())
    }

    fn node(name: &str, major: u32, minor: u32, mode: u32) -> Node {
        (name.to_owned(), major, minor, mode)
    }

    #[test]
    fn service_vm_has_nodes_of_its_switches() {
        let switch = |at: &str| format!("nvidia-nvswitch/devices/0000:{at}:00.0/information");
        let (_directory, root) = guest(&[
            (&switch("05"), "BIOS Version: N/A\n"),
            (&switch("06"), "BIOS Version: N/A\n"),
            ("nvidia-nvswitch/permissions", "DeviceFileMode: 438\n"),
            ("nvidia-nvlink/permissions", "DeviceFileMode: 432\n"),
        ]);
        let nodes = [
            node("nvidia-nvswitchctl", 235, 255, 0o666),
            node("nvidia-nvswitch0", 235, 0, 0o666),
            node("nvidia-nvswitch1", 235, 1, 0o666),
            node("nvidia-nvlink", 236, 0, 0o660),
        ];
        assert_eq!(made(&root, 0), (nodes.to_vec(), vec![]));
    }

    #[test]
    fn switch_errors_are_reported() {
        for (file, text, part) in [
            ("nvidia-nvswitch/devices/..x/information", "", "devices/..x: its name is not a PCI address"),
            ("nvidia-nvswitch/permissions", "DeviceFileMode: rw\n", "nvidia-nvswitch/permissions: its DeviceFileMode"),
        ] {
            let (_directory, root) = guest(&[("nvidia-nvswitch/devices/0000:05:00.0/information", ""), (file, text)]);
            let (nodes, wrong) = made(&root, 0);
            assert!(nodes.is_empty() && wrong.len() == 1 && wrong[0].contains(part), "{wrong:?}");
        }
        let (dir, root) = guest(&[("nvidia-nvswitch/devices/0000:05:00.0/information", "")]);
        write(&dir, "proc/devices", "Character devices:\n195 nvidia\n");
        assert!(made(&root, 0).1[0].contains("named nvidia-nvswitch"));
    }

    #[test]
    fn requested_and_existing_channels_get_nodes() {
        let channel = |number: u32| node(&format!("{IMEX}/channel{number}"), 234, number, 0o660);
        let params = |count: &str| format!("DeviceFileMode: 432\n{count}");
        let (_directory, root) = guest(&[("nvidia/params", &params("ImexChannelCount: 2048\n"))]);
        assert_eq!(made(&root, 1), (vec![channel(0)], vec![]));
        assert_eq!(made(&root, 3).0, [channel(0), channel(1), channel(2)]);
        assert_eq!(made(&root, 0), (vec![], vec![]));
        let (_directory, root) = guest(&[("nvidia/params", &params("ImexChannelCount: 2\n"))]);
        let (nodes, wrong) = made(&root, 3);
        assert_eq!(nodes, [channel(0), channel(1)]);
        assert!(wrong[0].contains("3 channels") && wrong[0].contains("NVreg_ImexChannelCount=3"), "{wrong:?}");
        let (_directory, root) = guest(&[("nvidia/params", &params("ImexChannelCount: many\n"))]);
        let (nodes, wrong) = made(&root, 1);
        assert!(nodes.is_empty() && wrong[0].contains("params: its ImexChannelCount is \"many\""), "{wrong:?}");
        let (_directory, root) = guest(&[("nvidia/params", &params(""))]);
        assert_eq!(made(&root, CHANNELS + 1).0.len(), 2048);
    }
}
