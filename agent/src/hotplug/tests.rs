//! Lookups in a fake sysfs; hot-plug is tested in tests/e2e.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

/// A fake `/sys` and `/dev`; nodes are plain files that contain their number.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn hotplug(&self) -> Hotplug {
        let mut hotplug = Hotplug::new(&Paths::below(self.0.path()), Duration::from_millis(30));
        hotplug.check = |node, number| match fs::read_to_string(node) {
            Ok(text) if text == format!("{}:{}", number.major, number.minor) => Ok(()),
            other => Err(format!("{}: {other:?}", node.display())),
        };
        hotplug
    }

    fn dir(&self, path: &str) -> PathBuf {
        let dir = self.0.path().join("sys").join(path);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Adds a disk at a directory, with its node.
    fn disk(&self, dir: &str, name: &str, number: &str) {
        let dir = self.dir(dir).join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), format!("{number}\n")).unwrap();
        symlink(dir, self.dir("class/block").join(name)).unwrap();
        self.node(name, number);
    }

    fn node(&self, name: &str, number: &str) {
        fs::create_dir_all(self.0.path().join("dev")).unwrap();
        fs::write(self.0.path().join("dev").join(name), number).unwrap();
    }

    /// Adds the root port 02 with bus 1 behind it, and a function there.
    fn function(&self, slot: &str) -> String {
        let bridge = "devices/pci0000:00/0000:00:02.0";
        self.dir(&format!("{bridge}/pci_bus/0000:01"));
        let function = format!("{bridge}/0000:01:{slot}.0");
        self.dir(&function);
        function
    }
}

fn run<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn present_disks_are_found_by_pci_path_scsi_address_and_node() {
    let tree = Tree::new();
    let function = tree.function("00");
    tree.disk(&format!("{function}/virtio5/block"), "vda", "254:0");
    let nvme = tree.function("01");
    tree.disk(&format!("{nvme}/nvme/nvme0"), "nvme0n1", "259:1");
    let shown = tree.function("02");
    tree.dir(&format!("{shown}/nvme/nvme1/nvme1c1n1"));
    tree.disk("devices/virtual/nvme-subsystem/nvme-subsys1", "nvme1n1", "259:2");
    let scsi = "devices/x/host2/target2:0:0/2:0:0:1";
    tree.disk(&format!("{scsi}/block"), "sdb", "8:16");
    let device = tree.dir("class/scsi_device/2:0:0:1");
    symlink(tree.dir(scsi), device.join("device")).unwrap();
    tree.disk("devices/x/pmem", "pmem0", "259:9");
    let hotplug = tree.hotplug();
    let dev = |name: &str| tree.0.path().join("dev").join(name);
    run(async {
        assert_eq!(hotplug.block_by_pci("02/00").await.unwrap(), dev("vda"));
        assert_eq!(hotplug.block_by_pci("02/01").await.unwrap(), dev("nvme0n1"));
        assert_eq!(hotplug.block_by_pci("02/02").await.unwrap(), dev("nvme1n1"));
        assert_eq!(hotplug.block_by_scsi("0:1").await.unwrap(), dev("sdb"));
        assert_eq!(hotplug.block_by_node("/dev/pmem0").await.unwrap(), dev("pmem0"));
        assert_eq!(hotplug.pci_function("02/00").await.unwrap().to_string(), "0000:01:00.0");
    });
}

#[test]
fn interfaces_are_found_with_and_without_virtio() {
    let tree = Tree::new();
    let (virtio, other) = (tree.function("00"), tree.function("01"));
    tree.dir(&format!("{virtio}/virtio3/net/eth0"));
    tree.dir(&format!("{other}/net/ens1"));
    let hotplug = tree.hotplug();
    run(async {
        assert_eq!(hotplug.net_by_pci("02/00").await.unwrap(), "eth0");
        assert_eq!(hotplug.net_by_pci("02/01").await.unwrap(), "ens1");
    });
}

#[test]
fn missing_device_is_reported_with_location_progress_time_and_next_step() {
    let tree = Tree::new();
    let function = tree.function("00");
    fs::write(tree.dir(&function).join("vendor"), "0x1af4\n").unwrap();
    fs::write(tree.dir(&function).join("device"), "0x1042\n").unwrap();
    symlink("../drivers/virtio-pci", tree.dir(&function).join("driver")).unwrap();
    tree.dir(&format!("{function}/virtio5"));
    let hotplug = tree.hotplug();
    run(async {
        let error = hotplug.block_by_pci("02/03").await.unwrap_err().message;
        for part in ["02/03", "no function 0000:01:03.0 behind bridge 0000:00:02.0", " ms", "agent.hotplug_timeout"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let error = hotplug.block_by_pci("02/00").await.unwrap_err().message;
        for part in ["0000:01:00.0 is there", "1af4:1042", "virtio-pci", "virtio device by no driver"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let error = hotplug.block_by_scsi("0:1").await.unwrap_err().message;
        assert!(error.contains("no SCSI host") && error.contains("0:1"), "{error}");
        let error = hotplug.block_by_node("/dev/vdz").await.unwrap_err().message;
        assert!(error.contains("/dev/vdz"), "{error}");
        let error = hotplug.net_by_pci("02/00").await.unwrap_err().message;
        assert!(error.contains("has no interface"), "{error}");
    });
}

#[test]
fn disk_with_a_missing_or_wrong_node_is_waited_for() {
    let tree = Tree::new();
    let function = tree.function("00");
    tree.disk(&format!("{function}/virtio5/block"), "vda", "254:0");
    tree.node("vda", "254:16");
    let hotplug = tree.hotplug();
    run(async {
        let error = hotplug.block_by_pci("02/00").await.unwrap_err().message;
        assert!(error.contains("vda"), "{error}");
    });
}

#[test]
fn several_disks_at_one_pci_path_are_rejected_at_once() {
    let tree = Tree::new();
    let function = tree.function("00");
    tree.disk(&format!("{function}/nvme/nvme0"), "nvme0n1", "259:1");
    tree.disk(&format!("{function}/nvme/nvme0"), "nvme0n2", "259:2");
    let error = run(tree.hotplug().block_by_pci("02/00")).unwrap_err();
    assert_eq!(error.code, ttrpc::Code::INVALID_ARGUMENT);
    assert!(error.message.contains("nvme0n1, nvme0n2"), "{error}");
}

#[test]
fn scsi_host_scans_once() {
    let tree = Tree::new();
    let host = tree.dir("class/scsi_host/host2");
    fs::write(host.join("scan"), "").unwrap();
    let error = run(tree.hotplug().block_by_scsi("3:7")).unwrap_err().message;
    assert!(error.contains("host2 scanned for it"), "{error}");
    assert_eq!(fs::read_to_string(host.join("scan")).unwrap(), "0 3 7");
}

#[test]
fn node_paths_outside_dev_are_rejected() {
    for bad in ["", "/dev/", "vda", "/dev/../etc/passwd", "/dev/disk/by-id/x", "/dev/.", "/dev/a b", "/sys/vda"] {
        assert!(node_name(bad).is_err(), "{bad}");
    }
    assert_eq!(node_name("/dev/nvme0n1p2").unwrap(), "nvme0n1p2");
}

/// Counts this process's uevent sockets.
fn listeners() -> usize {
    let table = fs::read_to_string("/proc/self/net/netlink").unwrap();
    // Protocol 15; the inode is the last column.
    let ours: Vec<String> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|columns| columns.get(1) == Some(&"15"))
        .filter_map(|columns| columns.last().map(|inode| format!("socket:[{inode}]")))
        .collect();
    let targets = fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| ours.iter().any(|socket| target.as_os_str() == socket.as_str())).count()
}

#[test]
fn finished_or_cancelled_wait_leaves_no_descriptor() {
    let tree = Tree::new();
    let hotplug = tree.hotplug();
    run(async {
        let slow = Hotplug { timeout: Duration::from_secs(60), ..hotplug.clone() };
        // Cancelled while it waits, as at a caller's deadline.
        let subscribed = async {
            while listeners() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            _ = slow.pci_function("03") => panic!("there is no such function"),
            () = subscribed => {}
        }
        assert!(hotplug.pci_function("03").await.is_err());
    });
    // Parallel tests open sockets for short times.
    let begin = std::time::Instant::now();
    while listeners() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "a socket stays open");
        std::thread::sleep(Duration::from_millis(5));
    }
}
