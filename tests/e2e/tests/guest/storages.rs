//! Storages with real backends: the host's virtiofsd, disks formatted by mkfs,
//! an NFS server; asserted from inside containers.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use firstlight::agent::{Agent, SHARED};
use firstlight_agent_api::agent::{
    CreateContainerRequest, FSGroup, RemoveStaleVirtiofsShareMountsRequest, Storage, UpdateInterfaceRequest,
};
use firstlight_agent_api::oci::Mount;
use firstlight_agent_api::types::{IPAddress, Interface};
use firstlight_e2e::lab;
use firstlight_lab::FileSystem::{self, Erofs, Ext4, Squashfs, Xfs};
use firstlight_lab::toolbox::EXPORT;
use firstlight_vm::{Device, Nvdimm};
use tokio::time::{sleep, timeout};
use ttrpc::context::with_duration;

use crate::hotplug_cpu_memory::sandbox_with_module;
use crate::support::{CALL, Files, booted, ended, output, ready, refused, started};

/// Directory in which shims have volumes mounted.
const VOLUMES: &str = "/run/kata-containers/sandbox/storage";

/// Size of the lab's disks with a file system, MiB.
const DISK: u32 = 320;

fn storage(driver: &str, source: &str, fstype: &str, mount_point: &str, options: &[&str]) -> Storage {
    Storage {
        driver: driver.into(),
        source: source.into(),
        fstype: fstype.into(),
        mount_point: mount_point.into(),
        options: options.iter().map(|option| (*option).into()).collect(),
        ..Default::default()
    }
}

/// Adds a bind mount of the guest's `source` to the container.
fn bind(request: &mut CreateContainerRequest, source: &str, destination: &str, options: &[&str]) {
    request.OCI.mut_or_insert_default().Mounts.push(Mount {
        destination: destination.into(),
        source: source.into(),
        type_: "bind".into(),
        options: ["rbind"].iter().chain(options).map(|option| (*option).into()).collect(),
        ..Default::default()
    });
}

/// Returns the guest's own mount table, read by a container that has the guest's `/proc`.
async fn guest_mounts(agent: &Agent, files: &Files, id: &str) -> String {
    let mut request = files.request(id, "cat /guest/1/mountinfo", &[]);
    bind(&mut request, "/proc", "/guest", &["ro"]);
    output(agent, &request).await
}

/// Waits for a file that the guest creates.
async fn wait_for_file(path: &Path) {
    let begin = Instant::now();
    while !path.exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{} was not created", path.display());
        sleep(Duration::from_millis(50)).await;
    }
}

fn digest(path: &Path) -> String {
    let output = Command::new(&lab().toolbox.busybox).arg("md5sum").arg(path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).split(' ').next().unwrap().to_owned()
}

/// Writes a directory as the kubelet does for a ConfigMap: its files are behind a symbolic link that is replaced
/// atomically.
fn write_config(dir: &Path, version: &str) {
    use std::os::unix::fs::symlink;
    fs::create_dir_all(dir.join(version)).unwrap();
    fs::write(dir.join(version).join("text"), format!("{version}\n")).unwrap();
    symlink(version, dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    if !dir.join("text").exists() {
        symlink("..data/text", dir.join("text")).unwrap();
    }
}

#[test]
fn container_on_the_host_share_leaves_no_mounts() {
    let files = Files::make();
    let (root, config) = (files.shared().join("c1/rootfs"), files.shared().join("config"));
    let watched = files.shared().join("watched");
    write_config(&config, "..first");
    write_config(&watched, "..first");
    // Every wait has a timeout; after one the output lacks lines.
    let script = "set -u; within() { n=0; until \"$@\" || [ $n -ge 600 ]; do sleep 0.1; n=$((n+1)); done; }; \
        cat /hello /config/text /watched/text; \
        dd if=/dev/urandom of=/large bs=1M count=8 2>/dev/null; \
        echo written > /written; chmod 640 /written; ln -s written /link; mkdir -m 711 /made; mv /moved /made/; \
        echo local > /scratch/file; echo no > /config/new 2>/dev/null || echo refused; \
        touch /waiting; \
        within test -e /go; cat /go; \
        within grep -q second /config/text; cat /config/text; \
        within grep -q second /watched/text; cat /watched/text; \
        md5sum < /large | cut -d ' ' -f 1; grep '/c1/rootfs / ' /proc/self/mountinfo | grep -o 'virtiofs [^ ]*'";
    files.scenario("storages", Vec::new()).watched(async |vm| {
        let agent = ready(vm).await;
        let mut request = files.request("c1", script, &[]);
        fs::write(root.join("hello"), "hello from the host\n").unwrap();
        fs::write(root.join("moved"), "").unwrap();
        bind(&mut request, &format!("{SHARED}config"), "/config", &["ro"]);
        let (from, to) = (format!("{SHARED}watched"), format!("{SHARED}watchable/watched"));
        request.storages.push(storage("watchable-bind", &from, "bind", &to, &[]));
        bind(&mut request, &to, "/watched", &["ro"]);
        let scratch = format!("{SHARED}sandbox/rootfs/local/scratch");
        request.storages.push(storage("local", "local", "local", &scratch, &["mode=0777"]));
        bind(&mut request, &scratch, "/scratch", &[]);
        let memory = "/run/kata-containers/sandbox/ephemeral/c1-memory";
        request.storages.push(storage("ephemeral", "tmpfs", "tmpfs", memory, &[]));
        started(&agent, &request).await;

        // Files that the container writes are visible on the host while it runs, and vice versa.
        wait_for_file(&root.join("waiting")).await;
        assert_eq!(fs::read_to_string(root.join("written")).unwrap(), "written\n");
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &str| fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("written"), mode("made")), (0o640, 0o711));
        assert_eq!(fs::read_link(root.join("link")).unwrap(), Path::new("written"));
        assert!(root.join("made/moved").exists() && !root.join("moved").exists());
        let local = files.shared().join("sandbox/rootfs/local/scratch");
        assert_eq!(fs::read_to_string(local.join("file")).unwrap(), "local\n");
        assert_eq!(fs::metadata(&local).unwrap().permissions().mode() & 0o7777, 0o777);
        let alive = guest_mounts(&agent, &files, "w1").await;
        assert!(alive.contains(" kataShared "), "{alive}");
        assert!(alive.contains(memory) && alive.contains("/watchable "), "{alive}");

        write_config(&config, "..second");
        write_config(&watched, "..second");
        fs::write(root.join("go"), "go on\n").unwrap();
        let said = ended(&agent, "c1").await;
        let sum = digest(&root.join("large"));
        let lines: Vec<&str> = said.lines().collect();
        let expected = ["hello from the host", "..first", "..first", "refused", "go on", "..second", "..second"];
        assert_eq!(lines, [&expected[..], &[sum.as_str(), "virtiofs kataShared"]].concat(), "{said}");

        // As a shim does next: removes the container's directory from the share, then stale mounts from the guest.
        fs::remove_dir_all(files.shared().join("c1")).unwrap();
        let stale = RemoveStaleVirtiofsShareMountsRequest::default();
        agent.calls().remove_stale_virtiofs_share_mounts(with_duration(CALL), &stale).await.unwrap();
        let gone = guest_mounts(&agent, &files, "w2").await;
        assert!(gone.contains(" kataShared "), "{gone}");
        assert!(!gone.contains("c1") && !gone.contains("w1") && !gone.contains("watched"), "{gone}");
        assert!(!fs::exists(files.shared().join("watchable/watched")).unwrap(), "a mount point was left in the share");

        agent.destroy_sandbox().await.unwrap();
        let exit = timeout(Duration::from_secs(60), vm.wait()).await.expect("the guest powers off").unwrap();
        assert!(exit.status.success());
        let record = vm.console().record().unwrap();
        assert!(record.event("power-off").is_some(), "{:?}", record.events);
        // The share is intact on the host, with the local storage as the container wrote it.
        assert_eq!(fs::read_to_string(local.join("file")).unwrap(), "local\n");
    });
}

#[test]
fn disks_are_mounted_and_unmounted_with_their_data_intact() {
    let (files, tools) = (Files::make(), lab().toolbox.disk_tools().unwrap());
    let disk = |kind: FileSystem, name: &str| {
        let path = files.path(name);
        tools.make(kind, &path, "name", &format!("{name}\n")).unwrap();
        path
    };
    let late = disk(Ext4, "late");
    let hardware = vec![
        Device::Disk { file: disk(Ext4, "ext4") },
        Device::Disk { file: disk(Xfs, "xfs") },
        Device::Disk { file: disk(Squashfs, "squashfs") },
        Device::Nvme { file: disk(Erofs, "erofs") },
        Device::Scsi { file: disk(Ext4, "scsi"), target: 3, lun: 2 },
        Device::EmptyPort,
        Device::EmptyPort,
    ];
    let paths: Vec<String> = hardware.iter().enumerate().map(|(at, device)| device.pci_path(at)).collect();
    let mut scenario = files.scenario("storages", hardware);
    scenario.guest.persistent = vec![Nvdimm { file: disk(Ext4, "persistent"), mib: DISK }];
    scenario.parameter("agent.hotplug_timeout=5").watched(async |vm| {
        let agent = booted(vm).await;
        // With locked module loading the request fails with the reason, and a sandbox can be created afterwards.
        let error = sandbox_with_module(&agent, "dummy", &[]).await.unwrap_err();
        assert!(error.contains("kernel module dummy") && error.contains("firstlight.lockdown=off"), "{error}");
        agent.create_sandbox("sandbox").await.unwrap();

        let volumes = [
            ("ext4", "blk", paths[0].as_str(), "ext4", &["noatime"][..]),
            ("xfs", "blk", &paths[1], "xfs", &["nouuid"]),
            ("squashfs", "blk", &paths[2], "squashfs", &["ro"]),
            ("erofs", "blk", &paths[3], "erofs", &["ro"]),
            ("scsi", "scsi", "3:2", "ext4", &["ro", "noexec"]),
            ("persistent", "nvdimm", "/dev/pmem0", "ext4", &[]),
        ];
        let script = "for v in ext4 xfs squashfs erofs scsi persistent; do \
            cat /$v/name; echo kept > /$v/new 2>/dev/null && echo written || echo refused; \
            grep \" /$v \" /proc/self/mountinfo | sed 's/ - / /' | cut -d ' ' -f 6,7; done; stat -c %g:%a /ext4 /ext4/name";
        let mut request = files.request("c1", script, &[]);
        for (name, driver, source, fstype, options) in volumes {
            let at = format!("{VOLUMES}/{name}");
            let mut volume = storage(driver, source, fstype, &at, options);
            if name == "ext4" {
                volume.fs_group = Some(FSGroup { group_id: 4711, ..Default::default() }).into();
            }
            request.storages.push(volume);
            bind(&mut request, &at, &format!("/{name}"), &[]);
        }
        let said = output(&agent, &request).await;
        let lines: Vec<&str> = said.lines().collect();
        let expected = [
            ["ext4", "written", "rw,noatime ext4"],
            ["xfs", "written", "rw,relatime xfs"],
            ["squashfs", "refused", "ro,relatime squashfs"],
            ["erofs", "refused", "ro,relatime erofs"],
            ["scsi", "refused", "ro,noexec,relatime ext4"],
            ["persistent", "written", "rw,relatime ext4"],
        ];
        assert_eq!(lines[..18], expected.concat(), "{said}");
        assert_eq!(lines[18..], ["4711:2775", "4711:664"], "{said}");
        // The disks are unmounted: their data is written, and they can be used in other ways.
        let mounts = guest_mounts(&agent, &files, "w1").await;
        assert!(mounts.contains(" kataShared ") && !mounts.contains(VOLUMES), "{mounts}");
        for name in ["ext4", "persistent"] {
            assert_eq!(tools.read_ext4(&files.path(name), "new").unwrap(), "kept\n", "{name}");
        }
        let node = storage("blk", "/dev/vdb", "xfs", &format!("{VOLUMES}/node"), &["ro"]);
        let raw = storage("scsi", "3:2", "bind", &format!("{VOLUMES}/raw"), &["ro"]);
        let mut request = files.request("c2", "cat /node/name /node/new; test -b /raw && echo block", &[]);
        bind(&mut request, &node.mount_point, "/node", &[]);
        bind(&mut request, &raw.mount_point, "/raw", &[]);
        request.storages = vec![node, raw];
        assert_eq!(output(&agent, &request).await, "xfs\nkept\nblock\n");

        // Requested before it is plugged in.
        let mut monitor = vm.monitor().await.unwrap();
        let mut request = files.request("c3", "cat /late/name; echo kept > /late/new", &[]);
        request.storages = vec![storage("blk", &paths[5], "ext4", &format!("{VOLUMES}/late"), &[])];
        bind(&mut request, &format!("{VOLUMES}/late"), "/late", &[]);
        let plugged = async {
            sleep(Duration::from_secs(1)).await;
            monitor.plug(5, &Device::Disk { file: late }).await.unwrap();
        };
        let (said, ()) = tokio::join!(output(&agent, &request), plugged);
        assert_eq!(said, "late\n");
        assert_eq!(tools.read_ext4(&files.path("late"), "new").unwrap(), "kept\n");

        // The error names the failing storage, and storages mounted before it are unmounted.
        for (at, (driver, source, fstype, part)) in [
            ("blk", paths[6].as_str(), "ext4", "behind bridge 0000:00:10.6"),
            ("scsi", "3:9", "ext4", "scanned for it and found none"),
            ("blk", &paths[0], "xfs", "failed to mount xfs"),
            ("blk", &paths[2], "btrfs", "kernel does not support btrfs"),
            ("mmioblk", "/dev/vdz", "ext4", "no block device vdz"),
        ]
        .into_iter()
        .enumerate()
        {
            let mut request = files.request(&format!("m{at}"), "true", &[]);
            request.storages = vec![
                storage("blk", &paths[1], "xfs", &format!("{VOLUMES}/before"), &[]),
                storage(driver, source, fstype, &format!("{VOLUMES}/wrong"), &[]),
            ];
            let error = refused(&agent, &request).await;
            assert!(error.contains(part) && error.contains(source), "{part} in {error}");
        }
        let mounts = guest_mounts(&agent, &files, "w2").await;
        assert!(mounts.contains(" kataShared ") && !mounts.contains(VOLUMES), "{mounts}");
    });
}

#[test]
fn virtio_mmio_disks_are_volumes_and_devices() {
    let (files, tools) = (Files::make(), lab().toolbox.disk_tools().unwrap());
    let volume = files.path("volume");
    tools.make(Ext4, &volume, "name", "volume\n").unwrap();
    let hardware = vec![
        Device::Disk { file: files.disk("pci") },
        Device::MmioDisk { file: volume.clone() },
        Device::MmioDisk { file: files.disk("raw") },
    ];
    let by_place = hardware[0].pci_path(0);
    files.scenario("storages", hardware).parameter("agent.hotplug_timeout=3").watched(async |vm| {
        let agent = ready(vm).await;
        // Disk names follow the bus, not the order of drivers: PCI first, then virtio-mmio in ACPI's order.
        let record = vm.console().record().unwrap();
        let loaded = &record.unit("modules").unwrap().detail;
        let place = |name: &str| loaded.find(name).unwrap_or_else(|| panic!("{name} in {loaded}"));
        assert!(place("virtio_mmio ") < place("virtio_blk "), "{loaded}");
        let script = "for d in a b c; do readlink -f /sys/block/vd$d | grep -o 'pci0000:00\\|LNRO0005:..'; done; \
            head -n 1 /dev/xda; head -n 1 /dev/xdb; mknod /dev/other b 254 16; head -n 1 /dev/other 2>&1; \
            cat /volume/name; echo kept > /volume/new; grep ' /volume ' /proc/self/mountinfo | sed 's/ - / /' | cut -d ' ' -f 6-8";
        let devices = [("mmioblk", "/dev/vdc", "/dev/xda"), ("blk", by_place.as_str(), "/dev/xdb")];
        let mut request = files.request("c1", script, &devices);
        request.storages =
            vec![storage("mmioblk", "/dev/vdb", "ext4", &format!("{VOLUMES}/volume"), &["noatime"])];
        bind(&mut request, &format!("{VOLUMES}/volume"), "/volume", &[]);
        let said = output(&agent, &request).await;
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[..5], ["pci0000:00", "LNRO0005:00", "LNRO0005:01", "raw", "pci"], "{said}");
        assert!(lines[5].contains("Operation not permitted"), "{said}");
        assert_eq!(lines[6..], ["volume", "rw,noatime ext4 /dev/vdb"], "{said}");
        let mounts = guest_mounts(&agent, &files, "w1").await;
        assert!(mounts.contains(" kataShared ") && !mounts.contains(VOLUMES), "{mounts}");
        assert_eq!(tools.read_ext4(&volume, "new").unwrap(), "kept\n");

        let error = refused(&agent, &files.request("c2", "true", &[("mmioblk", "/dev/vdz", "/dev/xda")])).await;
        assert!(error.contains("no block device vdz") && error.contains("/dev/vdz"), "{error}");
        agent.destroy_sandbox().await.unwrap();
        let exit = timeout(Duration::from_secs(60), vm.wait()).await.expect("the guest powers off").unwrap();
        assert!(exit.status.success());
        let record = vm.console().record().unwrap();
        assert!(record.event("power-off").is_some(), "{:?}", record.events);
    });
}

#[test]
fn nfs_volume_keeps_data_between_containers() {
    const MAC: &str = "52:54:00:00:00:07";
    let (files, server) = (Files::make(), lab().toolbox.file_server().unwrap());
    files.scenario("storages", vec![Device::UserNic { mac: MAC.into() }]).watched(async |vm| {
        let agent = ready(vm).await;
        let address = IPAddress { address: "10.0.2.15".into(), mask: "24".into(), ..Default::default() };
        let interface = Interface {
            name: "eth0".into(),
            device: "eth0".into(),
            IPAddresses: vec![address],
            mtu: 1500,
            hwAddr: MAC.into(),
            ..Default::default()
        };
        let request = UpdateInterfaceRequest { interface: Some(interface).into(), ..Default::default() };
        agent.calls().update_interface(with_duration(CALL), &request).await.unwrap();

        let port = format!("port={}", server.port());
        let source = format!("10.0.2.2:{EXPORT}");
        let at = format!("{VOLUMES}/nfs");
        let volume = |source: &str, fstype: &str, options: &[&str]| {
            storage("nfs", source, fstype, &at, &[&[port.as_str()], options].concat())
        };
        let script = "[ -e /nfs/file ] || echo written > /nfs/file; cat /nfs/file; (echo x > /nfs/more) 2>/dev/null || echo refused; grep ' /nfs ' /proc/self/mountinfo | grep -o ' nfs4 [^ ]*'";
        // Not NFS 4.2: with it the data of the host's file is read back as zeros.
        for (id, fstype, options, expected) in [
            ("c1", "nfs4", &["vers=4.1"][..], "written\n"),
            ("c2", "nfs", &["vers=4.1", "ro"], "written\nrefused\n"),
        ] {
            let mut request = files.request(id, script, &[]);
            request.storages = vec![volume(&source, fstype, options)];
            bind(&mut request, &at, "/nfs", &[]);
            let said = output(&agent, &request).await;
            assert_eq!(said, format!("{expected} nfs4 {source}\n"), "{id}");
            let mounts = guest_mounts(&agent, &files, &format!("{id}-witness")).await;
            assert!(mounts.contains(" kataShared ") && !mounts.contains("nfs"), "{mounts}");
        }
    });
}
