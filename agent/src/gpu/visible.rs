//! Reduces the granted GPUs to those that the environment selects.
//!
//! One GPU has several names, so the comparison is by device nodes: a name from the container's
//! environment is accepted only if all its nodes are nodes of granted GPUs.

use firstlight_cdi::{DeviceName, DeviceNode, Directory};

use super::environment::VISIBLE;
use super::{Visible, gpu_name};

/// Returns the granted GPUs that the environment selects, and a warning for each name that was not
/// granted. Such a name is no error: images set the variable for other environments, and it grants
/// nothing.
pub(super) fn select_visible(
    granted: Vec<DeviceName>,
    visible: &Visible,
    dir: &Directory,
) -> (Vec<DeviceName>, Vec<String>) {
    let only = match visible {
        Visible::All => return (granted, Vec::new()),
        Visible::None => return (Vec::new(), Vec::new()),
        Visible::Only(only) => only,
    };
    let nodes = |name: &DeviceName| -> &[DeviceNode] {
        dir.find(name).map_or(&[], |(_, device)| &device.container_edits.device_nodes)
    };
    let open: Vec<&DeviceNode> = granted.iter().flat_map(nodes).collect();
    let mut left: Vec<DeviceName> = Vec::new();
    let mut warnings = Vec::new();
    for which in only {
        let name = gpu_name(&which.to_string());
        let behind = nodes(&name);
        // A device without nodes would still get the nodes shared by all GPUs.
        if behind.is_empty() || !behind.iter().all(|node| open.contains(&node)) {
            warnings.push(format!("{VISIBLE} names {which}, which the container was not granted; ignored"));
        } else if !left.iter().any(|known| nodes(known) == behind) {
            left.push(name);
        }
    }
    if left.is_empty() && !granted.is_empty() {
        warnings.push(format!("{VISIBLE} leaves none of the GPUs that were granted"));
    }
    (left, warnings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    /// Four GPUs with three names each, `all`, a pair, and a device without nodes.
    fn dir() -> Directory {
        let root = tempfile::tempdir().unwrap();
        let node = |minor: u32| format!(r#"{{"path":"/dev/nvidia{minor}","type":"c","major":195,"minor":{minor}}}"#);
        let device = |name: &str, nodes: &[u32]| {
            let nodes: Vec<String> = nodes.iter().copied().map(node).collect();
            format!(r#"{{"name":"{name}","containerEdits":{{"env":["A=b"],"deviceNodes":[{}]}}}}"#, nodes.join(","))
        };
        let mut devices = vec![device("all", &[0, 1, 2, 3]), device("pair", &[0, 1]), device("empty", &[])];
        for at in 0..4 {
            for name in [at.to_string(), format!("0000:{:02x}:00.0", at + 1), format!("GPU-{at}")] {
                devices.push(device(&name, &[at]));
            }
        }
        let text = format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{}]}}"#, devices.join(","));
        fs::write(root.path().join("a.json"), text).unwrap();
        Directory::read(root.path()).unwrap()
    }

    fn visible(text: &str) -> Visible {
        Visible::of(&[format!("{VISIBLE}={text}")])
    }

    fn left(granted: &[&str], text: &str) -> (Vec<String>, usize) {
        let granted = granted.iter().copied().map(gpu_name).collect();
        let (names, warnings) = select_visible(granted, &visible(text), &dir());
        (names.into_iter().map(|name| name.device).collect(), warnings.len())
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn gpu_is_selected_by_any_of_its_names() {
        for name in ["1", "0000:02:00.0", "GPU-1"] {
            assert_eq!(left(&["0000:01:00.0", "0000:02:00.0"], name), (names(&[name]), 0));
        }
        assert_eq!(left(&["pair"], "1,GPU-1"), (names(&["1"]), 0), "one GPU by two names is one");
        assert_eq!(left(&["0", "1"], "all"), (names(&["0", "1"]), 0));
        assert_eq!(left(&["0", "1"], "none"), (vec![], 0));
    }

    #[test]
    fn mig_instance_does_not_select_its_whole_gpu() {
        let root = tempfile::tempdir().unwrap();
        let device = |name: &str, capabilities: &[u32]| {
            let nodes: Vec<String> = std::iter::once("nvidia0".to_owned())
                .chain(capabilities.iter().map(|minor| format!("nvidia-caps/nvidia-cap{minor}")))
                .map(|node| format!(r#"{{"path":"/dev/{node}"}}"#))
                .collect();
            format!(r#"{{"name":"{name}","containerEdits":{{"deviceNodes":[{}]}}}}"#, nodes.join(","))
        };
        let devices = [device("0", &[1, 2, 3, 4]), device("0:0", &[1, 2]), device("0:1", &[3, 4])].join(",");
        let text = format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{devices}]}}"#);
        fs::write(root.path().join("a.json"), text).unwrap();
        let dir = Directory::read(root.path()).unwrap();
        for (granted, selected, gets) in [
            ("0", "0:1", &["0:1"][..]),
            ("0:0", "0:0", &["0:0"]),
            ("0:0", "0:1", &[]),
            ("0:0", "0", &[]),
            ("0", "0:2", &[]),
        ] {
            let (left, _) = select_visible(vec![gpu_name(granted)], &visible(selected), &dir);
            let left: Vec<&str> = left.iter().map(|name| name.device.as_str()).collect();
            assert_eq!(left, gets, "{selected} of {granted}");
        }
    }

    #[test]
    fn name_that_was_not_granted_is_ignored_with_a_warning() {
        for name in ["2", "GPU-2", "0000:03:00.0", "pair", "9", "GPU-none", "../0", "empty"] {
            assert_eq!(left(&["1"], name), (vec![], 2), "{name}");
        }
        assert_eq!(left(&["1"], "2,1"), (names(&["1"]), 1));
    }

    proptest! {
        #[test]
        fn result_is_always_a_subset_of_the_grant(
            granted in proptest::collection::vec(0usize..14, 0..4),
            words in "((0|1|2|3|all|pair|empty|none|void|GPU-[0-4]|0000:0[1-5]:00\\.0|[a-z]{1,3}),?){0,6}",
        ) {
            let dir = dir();
            let all = ["all", "pair", "0", "1", "2", "3", "GPU-0", "GPU-1", "GPU-2", "GPU-3", "0000:01:00.0", "0000:02:00.0", "nothing", "empty"];
            let granted: Vec<DeviceName> = granted.into_iter().map(|at| gpu_name(all[at])).collect();
            let nodes = |names: &[DeviceName]| -> Vec<String> {
                let devices = names.iter().filter_map(|name| dir.find(name).ok());
                devices.flat_map(|(_, device)| &device.container_edits.device_nodes).map(|node| node.path.clone()).collect()
            };
            let (left, _) = select_visible(granted.clone(), &visible(&words), &dir);
            let open = nodes(&granted);
            prop_assert!(nodes(&left).iter().all(|node| open.contains(node)), "{:?} of {:?}", left, granted);
        }
    }
}
