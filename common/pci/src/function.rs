//! PCI functions listed in sysfs.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::{Address, Kind, kind_of};

/// A PCI function as listed in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// PCI address.
    pub address: Address,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Base class, sub-class and programming interface: 24 bits.
    pub class: u32,
    /// Name of the bound driver. Read only for functions that have a
    /// [`kind`](Self::kind); use [`driver`] for others.
    pub driver: Option<String>,
    /// Whether its VPD marks it as an NVSwitch manager (`SW_MNG`).
    pub nvlink_bridge: bool,
}

impl Function {
    /// Returns the role of this function, if Firstlight uses it.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        match kind_of(self.vendor, self.class) {
            Some(Kind::Mellanox) if self.nvlink_bridge => Some(Kind::NvLinkBridge),
            kind => kind,
        }
    }
}

/// Why the PCI bus could not be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The directory or a file in it could not be read.
    #[error("PCI scan: failed to read {path}: {source}; is sysfs mounted?")]
    Read {
        /// The directory or file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A `modalias` is not that of a PCI function.
    #[error("PCI scan: unexpected content {text:?} of {path}; expected pci:v...d...sv...sd...")]
    Modalias {
        /// The file.
        path: PathBuf,
        /// Its content, truncated.
        text: String,
    },
}

/// Ids and class of a function from its `modalias`: `pci:v000010DEd00002330sv...sd...bc03sc02i00`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    vendor: u16,
    device: u16,
    class: u32,
}

/// Parses `mark` and `digits` upper-case hexadecimal digits; returns the number and the remaining text.
fn hexadecimal<'a>(text: &'a str, mark: &str, digits: usize) -> Option<(u32, &'a str)> {
    let (number, rest) = text.strip_prefix(mark)?.split_at_checked(digits)?;
    let good = number.bytes().all(|byte| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte));
    Some((u32::from_str_radix(number, 16).ok().filter(|_| good)?, rest))
}

impl Identity {
    fn from_modalias(text: &str) -> Option<Self> {
        let (vendor, rest) = hexadecimal(text.trim_end().strip_prefix("pci:")?, "v", 8)?;
        let (device, rest) = hexadecimal(rest, "d", 8)?;
        let (_, rest) = hexadecimal(rest, "sv", 8)?;
        let (_, rest) = hexadecimal(rest, "sd", 8)?;
        let (base, rest) = hexadecimal(rest, "bc", 2)?;
        let (sub, rest) = hexadecimal(rest, "sc", 2)?;
        let (interface, rest) = hexadecimal(rest, "i", 2)?;
        let class = base << 16 | sub << 8 | interface;
        let ids = (vendor.try_into().ok()?, device.try_into().ok()?);
        rest.is_empty().then_some(Self { vendor: ids.0, device: ids.1, class })
    }

    /// Reads `modalias`: one open instead of three for `vendor`, `device` and
    /// `class`. `uevent` also has the driver, but it keeps naming a driver that is
    /// being unbound, and on some kernels the read blocks until the unbind ends,
    /// while the driver may be waiting for the reader.
    fn read(dir: &Path) -> Result<Self, ScanError> {
        let path = dir.join("modalias");
        let mut bytes = [0; 128];
        // One read returns the whole attribute.
        let len = fs::File::open(&path).and_then(|mut file| file.read(&mut bytes));
        let len = len.map_err(|source| ScanError::Read { path: path.clone(), source })?;
        let text = String::from_utf8_lossy(&bytes[..len]);
        let shown = || text.trim().chars().take(MAX_SHOWN).collect();
        Self::from_modalias(&text).ok_or_else(|| ScanError::Modalias { path, text: shown() })
    }
}

/// Characters of unexpected content shown in an error.
const MAX_SHOWN: usize = 64;

fn read(dir: &Path, address: Address) -> Result<Function, ScanError> {
    let Identity { vendor, device, class } = Identity::read(dir)?;
    let kind = kind_of(vendor, class);
    // A guest has a root port per device, and each lookup allocates two kernel objects.
    let driver = kind.and_then(|_| bound(dir));
    // Reading a VPD takes milliseconds, so only candidates are read.
    let nvlink_bridge = kind == Some(Kind::Mellanox) && vpd_contains(dir, SWITCH_MANAGER);
    Ok(Function { address, vendor, device, class, driver, nvlink_bridge })
}

fn bound(dir: &Path) -> Option<String> {
    let target = fs::read_link(dir.join("driver")).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// Returns the name of the driver bound to a function, of any kind.
#[must_use]
pub fn driver(sysfs: &Path, address: Address) -> Option<String> {
    bound(&sysfs.join("bus/pci/devices").join(address.to_string()))
}

/// The value of `SMDL` in the VPD of an NVLink 5 management bridge.
const SWITCH_MANAGER: &[u8] = b"SW_MNG";

/// Maximum size of a VPD by its format, bytes.
const MAX_VPD: usize = 32 << 10;

/// Returns whether a function's VPD contains these bytes; `false` if the VPD is
/// absent or unreadable.
fn vpd_contains(dir: &Path, bytes: &[u8]) -> bool {
    let Ok(mut file) = fs::File::open(dir.join("vpd")) else { return false };
    let (mut vpd, mut piece) = (Vec::new(), [0; 256]);
    while vpd.len() < MAX_VPD {
        match file.read(&mut piece) {
            Ok(0) | Err(_) => return false,
            Ok(len) => vpd.extend_from_slice(&piece[..len]),
        }
        if vpd.windows(bytes.len()).any(|window| window == bytes) {
            return true;
        }
    }
    false
}

/// Lists all PCI functions below `sysfs` (normally `/sys`), sorted by address.
///
/// Without a PCI bus the list is empty, which is not an error. A function that
/// disappears while it is read (hot-unplug) is omitted.
///
/// # Errors
/// The bus directory or a file in it cannot be read or has unexpected content.
pub fn scan(sysfs: &Path) -> Result<Vec<Function>, ScanError> {
    let bus = sysfs.join("bus/pci/devices");
    let entries = match fs::read_dir(&bus) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ScanError::Read { path: bus, source }),
    };
    let mut functions = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| ScanError::Read { path: bus.clone(), source })?;
        let Ok(address) = entry.file_name().to_string_lossy().parse::<Address>() else { continue };
        match read(&entry.path(), address) {
            Ok(function) => functions.push(function),
            Err(ScanError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    functions.sort_by_key(|function| function.address);
    Ok(functions)
}

/// Lists the functions below `sysfs` whose vendor and class match a kind, sorted
/// by address. Costs one small read per function; unreadable functions are omitted.
#[must_use]
pub fn functions_of_kind(sysfs: &Path, kind: Kind) -> Vec<Address> {
    let entries = fs::read_dir(sysfs.join("bus/pci/devices")).into_iter().flatten().flatten();
    let mut found: Vec<Address> = entries
        .filter(|entry| {
            Identity::read(&entry.path()).is_ok_and(|found| kind_of(found.vendor, found.class) == Some(kind))
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modalias(vendor: u16, device: u16, class: u32) -> String {
        let [_, base, sub, interface] = class.to_be_bytes();
        format!("pci:v{vendor:08X}d{device:08X}sv00001AF4sd00001100bc{base:02X}sc{sub:02X}i{interface:02X}\n")
    }

    fn plant(root: &Path, address: &str, files: &[(&str, &str)]) {
        let dir = root.join("bus/pci/devices").join(address);
        fs::create_dir_all(&dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    #[test]
    fn scan_lists_functions_in_bus_order_with_their_kind() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:0a:00.0", &[("modalias", &modalias(0x10de, 0x2330, 0x030200))]);
        plant(root.path(), "0000:02:00.0", &[("modalias", &modalias(0x10de, 0x22a3, 0x068000))]);
        plant(root.path(), "0000:0b:00.0", &[("modalias", &modalias(0x1b36, 0x000c, 0x060400))]);
        for (address, driver) in [("0000:0a:00.0", "nvidia"), ("0000:0b:00.0", "pcieport")] {
            let link = root.path().join("bus/pci/devices").join(address).join("driver");
            std::os::unix::fs::symlink(Path::new("../../drivers").join(driver), link).unwrap();
        }
        let functions = scan(root.path()).unwrap();
        let kinds: Vec<_> = functions.iter().map(|f| (f.address.to_string(), f.kind(), f.driver.clone())).collect();
        assert_eq!(
            kinds,
            [
                ("0000:02:00.0".to_owned(), Some(Kind::NvSwitch), None),
                ("0000:0a:00.0".to_owned(), Some(Kind::Gpu), Some("nvidia".to_owned())),
                ("0000:0b:00.0".to_owned(), None, None),
            ]
        );
        assert_eq!(driver(root.path(), functions[2].address).as_deref(), Some("pcieport"));
        assert_eq!(driver(root.path(), functions[0].address), None);
        plant(root.path(), "0000:03:00.0", &[("modalias", "rubbish\n")]);
        assert_eq!(functions_of_kind(root.path(), Kind::Gpu), [functions[1].address]);
        assert_eq!(functions_of_kind(&root.path().join("none"), Kind::Gpu), []);
    }

    #[test]
    fn management_bridge_is_detected_by_its_vpd_only() {
        let root = tempfile::tempdir().unwrap();
        let nic_modalias = modalias(0x15b3, 0x1021, 0x02_0700);
        let nic = [("modalias", &nic_modalias[..])];
        let long = format!("{}SMDL=SW_MNG", "x".repeat(1000));
        for (address, vpd) in [("0000:05:00.0", &long[..]), ("0000:05:00.1", "PN MCX75310AAS"), ("0000:05:00.2", "")] {
            plant(root.path(), address, &nic);
            plant(root.path(), address, &[("vpd", vpd)]);
        }
        plant(root.path(), "0000:05:00.3", &nic);
        // The VPD of another vendor's function is not read.
        plant(root.path(), "0000:06:00.0", &[("modalias", &modalias(0x8086, 0x1, 0x020000))]);
        plant(root.path(), "0000:06:00.0", &[("vpd", &long)]);
        let kinds: Vec<_> = scan(root.path()).unwrap().iter().map(Function::kind).collect();
        let (bridge, nic) = (Some(Kind::NvLinkBridge), Some(Kind::Mellanox));
        assert_eq!(kinds, [bridge, nic, nic, nic, None]);
        std::fs::write(root.path().join("bus/pci/devices/0000:05:00.1/vpd"), vec![0; MAX_VPD + 256]).unwrap();
        assert_eq!(scan(root.path()).unwrap()[1].kind(), nic, "an overlong VPD is read up to the limit");
    }

    #[test]
    fn missing_bus_is_an_empty_list() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(scan(root.path()).unwrap(), []);
    }

    #[test]
    fn disappearing_function_is_omitted_and_malformed_modalias_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        plant(root.path(), "0000:01:00.0", &[]);
        assert_eq!(scan(root.path()).unwrap(), []);
        let good = modalias(0x10de, 0x2330, 0x03_0200);
        let wrong = [
            "rubbish",
            "",
            "usb:v1D6Bp0002",
            &good.replace("bc03", "bc3"),
            &good.to_lowercase(),
            &good.replace("000010DE", "010010DE"),
            &good.replace("i00", "i00x"),
            &good.replace("d00002330", "d+0002330"),
            &good[..40],
        ];
        for text in wrong {
            plant(root.path(), "0000:01:00.0", &[("modalias", text)]);
            let error = scan(root.path()).unwrap_err().to_string();
            assert!(error.contains("0000:01:00.0/modalias") && error.contains(text.trim()), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn modalias_round_trips(vendor: u16, device: u16, class in 0u32..1 << 24) {
            let read = Identity::from_modalias(&modalias(vendor, device, class));
            proptest::prop_assert_eq!(read, Some(Identity { vendor, device, class }));
        }

        #[test]
        fn parsing_a_modalias_never_panics(text in ".{0,80}") {
            let _ = Identity::from_modalias(&text);
        }
    }
}
