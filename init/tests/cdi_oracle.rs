//! Checks the CDI files with an independent reader: the crate that other runtimes and
//! kata-agent use. It must accept them, find the same names in them, and do
//! the same to a container as our agent does.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use container_device_interface::cache::Cache;
use container_device_interface::spec_dirs::with_spec_dirs;
use firstlight_cdi::{DeviceName, Directory, Spec, apply};
use firstlight_init::cdi::{ReadyGpu, ensure_driver, publish};
use firstlight_init::driver_files::VERSION_FILE;
use firstlight_init::nodes::{self, Mknod, NodesError};
use firstlight_init::root::Root;
use oci_spec::runtime::{Process, Spec as Oci, UserBuilder};
use proptest::prelude::*;

const CAPS: &str = "/proc/driver/nvidia/capabilities";

/// A GPU as the driver shows it.
#[derive(Debug, Clone)]
struct Gpu {
    minor: u32,
    uuid: bool,
    ready: bool,
    /// How many compute instances each of its GPU instances has.
    instances: Vec<u32>,
}

impl Gpu {
    fn plain(minor: u32) -> Self {
        Self { minor, uuid: true, ready: true, instances: Vec::new() }
    }
}

/// A guest's files, with the CDI files that PID 1 writes.
struct Guest {
    dir: tempfile::TempDir,
    ready: Vec<ReadyGpu>,
}

fn plant(root: &Root, path: &str, text: &[u8]) {
    let path = root.path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

impl Guest {
    fn new(gpus: &[Gpu], driver_files: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let devices = "Character devices:\n195 nvidia\n238 nvidia-uvm\n241 nvidia-caps\n\nBlock devices:\n";
        plant(&root, "/proc/devices", devices.as_bytes());
        fs::create_dir(root.path("/dev")).unwrap();
        let mut ready = Vec::new();
        let mut capability = 3;
        for (index, gpu) in (0_u32..).zip(gpus) {
            let pci = format!("0000:{:02x}:00.0", index + 1);
            let uuid = if gpu.uuid { format!("12345678-9abc-def0-1234-{:012x}", gpu.minor) } else { "?".repeat(36) };
            let text = format!("GPU UUID: \t GPU-{uuid}\nDevice Minor: \t {}\n", gpu.minor);
            plant(&root, &format!("/proc/driver/nvidia/gpus/{pci}/information"), text.as_bytes());
            let mut access = |path: String| {
                let text = format!("DeviceFileMinor: {capability}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
                plant(&root, &format!("{CAPS}/gpu{}/mig/{path}/access", gpu.minor), text.as_bytes());
                capability += 1;
            };
            for (at, computes) in gpu.instances.iter().enumerate() {
                access(format!("gi{}", at + 1));
                (0..*computes).for_each(|compute| access(format!("gi{}/ci{compute}", at + 1)));
            }
            if gpu.ready {
                ready.push(ReadyGpu { index, pci: pci.parse().unwrap(), minor: gpu.minor });
            }
        }
        if driver_files {
            plant(&root, VERSION_FILE, b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  x\n");
            plant(&root, "/usr/bin/nvidia-smi", b"");
            for library in ["libcuda", "libnvidia-ml", "libnvidia-encode"] {
                plant(&root, &format!("/usr/lib64/{library}.so.580.159.04"), b"\x7fELF\x02");
            }
        }
        let addresses: Vec<_> = ready.iter().map(|gpu| gpu.pci).collect();
        match nodes::make(&root, &addresses, 1, &mut Mknod) {
            Ok(made) => assert!(made.left_out.is_empty(), "{:?}", made.left_out),
            // Only root may make nodes. Without them the file has the numbers that the driver says.
            Err(NodesError::Node { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() => {}
            Err(error) => panic!("{error}"),
        }
        ensure_driver(&root).unwrap();
        publish(&root, &ready).unwrap();
        Self { dir, ready }
    }

    fn cdi(&self) -> std::path::PathBuf {
        self.dir.path().join("var/run/cdi")
    }

    fn oracle(&self) -> Cache {
        let mut cache = Cache::default();
        with_spec_dirs(&[self.cdi().to_str().unwrap()])(&mut cache);
        cache.refresh().unwrap();
        cache
    }

    /// Every name in the files, as we read them.
    fn names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(self.cdi()).unwrap() {
            let path = entry.unwrap().path();
            let spec = Spec::from_json(&fs::read_to_string(&path).unwrap(), &path).unwrap();
            names.extend(spec.devices.iter().map(|device| format!("{}={}", spec.kind, device.name)));
        }
        names
    }

    /// What the agent does to a container that is granted these.
    fn ours(&self, mut oci: Oci, names: &[String]) -> Oci {
        let dir = Directory::read(&self.cdi()).unwrap();
        for name in names {
            let name: DeviceName = name.parse().unwrap();
            let (spec, device) = dir.find(&name).unwrap();
            for edits in [&spec.container_edits, &device.container_edits] {
                apply(&mut oci, edits, self.dir.path()).unwrap();
            }
        }
        oci
    }

    /// Both do the same to a container.
    fn agree(&self, oracle: &mut Cache, names: &[String]) {
        for base in containers() {
            let mut theirs = base.clone();
            oracle.inject_devices(Some(&mut theirs), names.to_vec()).unwrap();
            let ours = self.ours(base.clone(), names);
            assert_ne!(base, ours, "{names:?} changes nothing");
            assert_eq!(plain(theirs), plain(ours), "{names:?}");
        }
    }
}

/// A container as OCI's defaults are, and one with a user and variables of its own.
fn containers() -> [Oci; 2] {
    let mut own = Oci::default();
    let mut process = Process::default();
    process.set_user(UserBuilder::default().uid(1000_u32).gid(1001_u32).build().unwrap());
    process.set_env(Some(vec!["A=b".to_owned(), "NVIDIA_VISIBLE_DEVICES=all".to_owned()]));
    own.set_process(Some(process));
    [Oci::default(), own]
}

/// With what OCI takes for granted written out, and in one order: the agent
/// says the mode and the owner of a node and that a mount is a bind mount,
/// which the crate leaves to the runtime; and it replaces a variable, where the
/// crate adds another of the same name behind it, which counts.
fn plain(mut oci: Oci) -> Oci {
    if let Some(env) = oci.process_mut().as_mut().and_then(|process| process.env_mut().as_mut()) {
        let name = |entry: &String| entry.split('=').next().unwrap_or_default().to_owned();
        let last: BTreeMap<String, String> = env.drain(..).map(|entry| (name(&entry), entry)).collect();
        env.extend(last.into_values());
    }
    let linux = oci.linux_mut().as_mut().unwrap();
    if let Some(devices) = linux.devices_mut() {
        for device in devices.iter_mut() {
            device.set_file_mode(device.file_mode().or(Some(0o666)));
            device.set_uid(device.uid().or(Some(0)));
            device.set_gid(device.gid().or(Some(0)));
        }
        devices.sort_by(|one, other| one.path().cmp(other.path()));
    }
    if let Some(rules) = linux.resources_mut().as_mut().and_then(|resources| resources.devices_mut().as_mut()) {
        rules.sort_by_key(|rule| (rule.major(), rule.minor(), rule.access().clone()));
        rules.dedup();
    }
    for mount in oci.mounts_mut().iter_mut().flatten() {
        if mount.typ().is_none() {
            mount.set_typ(Some("bind".to_owned()));
        }
    }
    if let Some(mounts) = oci.mounts_mut() {
        mounts.sort_by(|one, other| one.destination().cmp(other.destination()));
    }
    oci
}

fn agree_on_all(gpus: &[Gpu], driver_files: bool, count: usize) {
    let guest = Guest::new(gpus, driver_files);
    let mut oracle = guest.oracle();
    let names = guest.names();
    assert_eq!(oracle.list_devices(), names.iter().cloned().collect::<Vec<_>>());
    assert_eq!(names.len(), count, "{names:?}");
    for name in &names {
        guest.agree(&mut oracle, std::slice::from_ref(name));
    }
    guest.agree(&mut oracle, &names.into_iter().collect::<Vec<_>>());
}

#[test]
fn specification_of_one_gpu_and_the_driver_files_is_valid() {
    // Three names and `all`; compute, utility, video.
    agree_on_all(&[Gpu::plain(0)], true, 4 + 3);
}

#[test]
fn specification_of_gpus_with_other_minor_order_is_valid() {
    let gpus: Vec<Gpu> = [3, 1, 0, 2, 7, 6, 5, 4].into_iter().map(Gpu::plain).collect();
    agree_on_all(&gpus, true, 8 * 3 + 1 + 3);
}

#[test]
fn specification_of_mig_instances_is_valid() {
    let mig = Gpu { instances: vec![1, 2, 0, 1], ..Gpu::plain(1) };
    agree_on_all(&[mig, Gpu::plain(0)], true, 2 * 3 + 4 + 1 + 3);
}

#[test]
fn guest_without_driver_files_is_valid() {
    agree_on_all(&[Gpu::plain(0), Gpu { uuid: false, ..Gpu::plain(1) }], false, 2 * 3 - 1 + 1);
}

#[test]
fn unknown_device_name_is_in_no_specification() {
    let guest = Guest::new(&[Gpu { instances: vec![1], ..Gpu::plain(0) }], false);
    let dir = Directory::read(&guest.cdi()).unwrap();
    for name in ["nvidia.com/gpu=1", "nvidia.com/gpu=0:1", "nvidia.com/driver=compute"] {
        let mut oci = Oci::default();
        assert!(guest.oracle().inject_devices(Some(&mut oci), vec![name.to_owned()]).is_err(), "{name}");
        assert_eq!(oci, Oci::default());
        assert!(!dir.has(&name.parse().unwrap()), "{name}");
    }
}

/// The judge can say no.
#[test]
fn invalid_specification_is_rejected_by_both() {
    let guest = Guest::new(&[Gpu::plain(0)], false);
    let path = guest.cdi().join("nvidia.json");
    let good = fs::read_to_string(&path).unwrap();
    for (from, to) in [("\"0\"", "\"all\""), ("nvidia.com/gpu", "nvidia.com"), ("\"rw\"", "\"rx\""), ("=void", "")] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        fs::write(&path, &bad).unwrap();
        assert!(Spec::from_json(&bad, Path::new("x")).is_err(), "{to}");
        let mut cache = Cache::default();
        with_spec_dirs(&[guest.cdi().to_str().unwrap()])(&mut cache);
        assert!(cache.refresh().is_err() && cache.list_devices().is_empty(), "{to}");
    }
}

fn gpu() -> impl Strategy<Value = Gpu> {
    let instances = prop_oneof![Just(Vec::new()), proptest::collection::vec(0..3_u32, 1..4)];
    (any::<bool>(), any::<bool>(), instances).prop_map(|(uuid, ready, instances)| Gpu {
        minor: 0,
        uuid,
        ready,
        instances,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    #[test]
    fn specifications_of_any_ready_gpus_are_valid(
        gpus in proptest::collection::vec(gpu(), 1..9),
        minors in Just((0..8_u32).collect::<Vec<_>>()).prop_shuffle(),
        driver_files: bool,
        chosen in proptest::collection::vec(any::<prop::sample::Index>(), 1..5),
    ) {
        let mut gpus = gpus;
        gpus.iter_mut().zip(minors).for_each(|(gpu, minor)| gpu.minor = minor);
        // Without a ready GPU PID 1 writes no file.
        prop_assume!(gpus.iter().any(|gpu| gpu.ready));
        let guest = Guest::new(&gpus, driver_files);
        let mut oracle = guest.oracle();
        let names: Vec<String> = guest.names().into_iter().collect();
        prop_assert_eq!(&oracle.list_devices(), &names);
        let has = |device: String| names.contains(&format!("nvidia.com/gpu={device}"));
        prop_assert!(guest.ready.iter().all(|gpu| has(gpu.index.to_string()) && has(gpu.pci.to_string())));
        let chosen: BTreeSet<String> = chosen.iter().map(|index| index.get(&names).clone()).collect();
        guest.agree(&mut oracle, &chosen.into_iter().collect::<Vec<_>>());
    }
}
