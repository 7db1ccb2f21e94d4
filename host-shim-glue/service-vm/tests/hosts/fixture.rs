//! Directories with the content of a host's `/sys`, `/proc` and `/dev`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use firstlight_devices::HostRoots;
use firstlight_devices::Topology;
use firstlight_image::BootFiles;
use firstlight_pci::Address;
use firstlight_service_vm::members::{PassthroughSet, Selection, select};
use firstlight_service_vm::xml::{Console, Domain, Hardware};
use firstlight_vm::Accelerator;
use tempfile::TempDir;

pub(crate) const SWITCH: (u16, u16, u32) = (0x10de, 0x22a3, 0x06_8000);
pub(crate) const GPU: (u16, u16, u32) = (0x10de, 0x2330, 0x03_0200);
pub(crate) const CX7: (u16, u16, u32) = (0x15b3, 0x1021, 0x02_0700);
pub(crate) const PORT: (u16, u16, u32) = (0x11f8, 0x4128, 0x06_0400);
pub(crate) const ENDPOINT: (u16, u16, u32) = (0x11f8, 0x4128, 0x05_8000);
pub(crate) const NVME: (u16, u16, u32) = (0x144d, 0xa824, 0x01_0802);

/// Builds the VPD of a ConnectX-7 with this model.
pub(crate) fn vpd(model: &str) -> Vec<u8> {
    let name = b"Nvidia ConnectX-7";
    let text = format!("MLX:MN=MLNX:CSKU=V2:UUID=V3:PCI=V0:MODL=CX71343DA{model}");
    let value = [b"VU".as_slice(), &[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let length = |bytes: &[u8]| u16::try_from(bytes.len()).unwrap().to_le_bytes();
    [&[0x82], &length(name)[..], name, &[0x90], &length(&value), &value, &[0x78]].concat()
}

/// A simulated host.
pub(crate) struct Fixture(TempDir);

impl Fixture {
    pub(crate) fn new() -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        for dir in ["sys/bus/pci/devices", "sys/kernel/iommu_groups", "proc", "dev"] {
            fs::create_dir_all(fixture.path().join(dir)).unwrap();
        }
        fixture
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn host(&self) -> HostRoots {
        HostRoots { sysfs: self.path().join("sys"), proc: self.path().join("proc"), dev: self.path().join("dev") }
    }

    pub(crate) fn dir(&self, address: &str) -> PathBuf {
        self.path().join("sys/bus/pci/devices").join(address)
    }

    /// Adds a function with its group and driver.
    pub(crate) fn plug(&self, address: &str, id: (u16, u16, u32), group: Option<u32>, driver: Option<&str>) {
        let (vendor, device, class) = id;
        let [_, base, sub, interface] = class.to_be_bytes();
        let dir = self.dir(address);
        fs::create_dir_all(&dir).unwrap();
        let text =
            format!("pci:v{vendor:08X}d{device:08X}sv000010DEsd00001643bc{base:02X}sc{sub:02X}i{interface:02X}\n");
        fs::write(dir.join("modalias"), text).unwrap();
        if let Some(group) = group {
            symlink(format!("../../../../kernel/iommu_groups/{group}"), dir.join("iommu_group")).unwrap();
            fs::create_dir_all(self.path().join(format!("sys/kernel/iommu_groups/{group}"))).unwrap();
        }
        self.bind(address, driver);
    }

    /// Binds another driver.
    pub(crate) fn bind(&self, address: &str, driver: Option<&str>) {
        let link = self.dir(address).join("driver");
        let _ = fs::remove_file(&link);
        if let Some(driver) = driver {
            symlink(format!("../../../../bus/pci/drivers/{driver}"), link).unwrap();
        }
    }

    pub(crate) fn named(&self, address: &str, kind: &str, name: &str) {
        fs::create_dir_all(self.dir(address).join(kind).join(name)).unwrap();
    }

    pub(crate) fn model(&self, address: &str, vpd: &[u8]) {
        fs::write(self.dir(address).join("vpd"), vpd).unwrap();
    }

    /// GPUs in separate groups, as on every board.
    fn gpus(&self) {
        for at in 0..8 {
            self.plug(&format!("0000:{:02x}:00.0", 0x90 + at), GPU, Some(100 + at), Some("vfio-pci"));
        }
    }

    /// An HGX H100: the switches, the PCIe switch's ports and its endpoint in one group.
    pub(crate) fn hgx_h100() -> Self {
        let host = Self::new();
        host.gpus();
        host.plug("0000:00:01.0", (0x8086, 0x352a, 0x06_0400), Some(1), Some("pcieport"));
        host.plug("0000:03:00.0", PORT, Some(30), Some("pcieport"));
        host.plug("0000:03:00.1", ENDPOINT, Some(30), None);
        for at in 0..4 {
            host.plug(&format!("0000:04:{at:02x}.0"), PORT, Some(30), Some("pcieport"));
            host.plug(&format!("0000:{:02x}:00.0", 5 + at), SWITCH, Some(30), None);
        }
        host
    }

    /// A DGX H100: each switch has a group of its own.
    pub(crate) fn dgx_h100() -> Self {
        let host = Self::new();
        host.gpus();
        for at in 0..4 {
            host.plug(&format!("0000:{:02x}:00.0", 5 + at), SWITCH, Some(40 + at), Some("vfio-pci"));
        }
        host
    }

    /// An HGX B200: a management bridge of four functions, and cards of the same chip.
    pub(crate) fn hgx_b200() -> Self {
        let host = Self::new();
        host.gpus();
        for at in 0..4 {
            let address = format!("0000:05:00.{at}");
            host.plug(&address, CX7, Some(50 + at), Some("mlx5_core"));
            host.model(&address, &vpd(",SMDL=SW_MNG"));
        }
        let hostile: [&[u8]; 4] = [&vpd(""), &vpd(",SMDL=SW_MN"), b"SW_M\0NG\x90\xff\xff", &[0xff; 70_000]];
        for (at, bytes) in hostile.iter().enumerate() {
            let address = format!("0000:{:02x}:00.0", 0x18 + at);
            host.plug(&address, CX7, Some(60 + u32::try_from(at).unwrap()), Some("mlx5_core"));
            host.model(&address, bytes);
        }
        // One whose VPD cannot be read.
        host.plug("0000:1f:00.0", CX7, Some(70), Some("mlx5_core"));
        host
    }

    pub(crate) fn select(&self, selection: &Selection) -> Result<PassthroughSet, Vec<String>> {
        let topology = Topology::read(&self.host().sysfs).unwrap();
        select(&topology, selection).map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    /// Returns the domain of this host, with a disk image or an initial RAM file system.
    pub(crate) fn domain(&self, disk: bool) -> Domain {
        let passthrough = self.select(&Selection::default()).unwrap();
        let functions: Vec<Address> = passthrough.passed.iter().map(|function| function.address).collect();
        let image = Path::new("/var/lib/firstlight/service-vm");
        let command_line = " root=/dev/dm-0 ro dm-mod.create=\"vroot,,,ro,0 2048 verity 1 /dev/vda1 /dev/vda2 4096 4096 256 1 \
                    sha256 00ff aa\"";
        Domain {
            name: "firstlight-service-vm".parse().unwrap(),
            boot_files: BootFiles {
                kernel: image.join("vmlinux"),
                initrd: (!disk).then(|| image.join("initrd.cpio.zst")),
                disk: disk.then(|| image.join("rootfs.img")),
                verity: disk,
                extensions: Vec::new(),
                command_line: format!("console=hvc0 quiet panic=-1{}", if disk { command_line } else { "" }),
            },
            append: String::new(),
            memory_mib: 4096,
            cpus: 2,
            huge_pages: disk,
            accelerator: Accelerator::Kvm,
            emulator: None,
            console: Console::File("/var/log/libvirt/qemu/firstlight-service-vm-console.log".into()),
            state_disk: Some("/var/lib/firstlight/service-vm-state.img".into()),
            hardware: Hardware::Host { functions, managed: true, cid: 100 },
        }
    }
}
