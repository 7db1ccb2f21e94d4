//! PCI paths, by which a host names a guest's function without knowing the guest's bus numbers.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::Address;

/// Maximum number of slots in a path; PCI itself is limited to 256 buses.
const MAX_SLOTS: usize = 32;

/// A first number of at least this is not a slot but the bus of an additional root
/// complex (QEMU's `pxb-pcie`), as Kata's shims write it.
const FIRST_ROOT: u8 = 0x20;

/// A PCI path: slots from the root complex to a function, e.g. `02/03`:
/// hexadecimal, each with an optional function number (`02.1/00`). `20/00/02`
/// starts at the root complex with bus 0x20.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PciPath {
    root: u8,
    steps: Vec<Slot>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Slot {
    device: u8,
    function: u8,
}

/// Why a text is not a PCI path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a PCI path: {reason}; expected slots in hexadecimal such as 02/03, 02.1/00 or 20/00/02")]
pub struct ParsePciPathError {
    text: String,
    reason: &'static str,
}

/// The function to which a path was resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedFunction {
    /// Its address.
    pub address: Address,
    /// Its directory in sysfs.
    pub dir: PathBuf,
}

/// The first element of a path that does not exist (yet).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The root complex.
    #[error("no root complex pci0000:{bus:02x}")]
    Root {
        /// Its bus number.
        bus: u8,
    },
    /// A function on a root complex's bus.
    #[error("no function {address} on root complex pci0000:{:02x}", address.bus)]
    OnRoot {
        /// Its expected address.
        address: Address,
    },
    /// A function behind an existing bridge.
    #[error("no function {address} behind bridge {bridge}")]
    Behind {
        /// The last existing bridge.
        bridge: Address,
        /// The function's expected address.
        address: Address,
    },
    /// An existing function has no secondary bus.
    #[error("{bridge} has no bus behind it: not a bridge, or a bridge without devices that is not configured yet")]
    Bus {
        /// The function.
        bridge: Address,
    },
}

impl fmt::Display for PciPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.root != 0 {
            write!(f, "{:02x}/", self.root)?;
        }
        for (at, Slot { device, function }) in self.steps.iter().enumerate() {
            let slash = if at == 0 { "" } else { "/" };
            write!(f, "{slash}{device:02x}")?;
            if *function != 0 {
                write!(f, ".{function:x}")?;
            }
        }
        Ok(())
    }
}

fn hex(text: &str, reason: &'static str) -> Result<u8, &'static str> {
    let digits = (1..=2).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if digits { u8::from_str_radix(text, 16).map_err(|_| reason) } else { Err(reason) }
}

fn slot(text: &str) -> Result<Slot, &'static str> {
    let (device, function) = text.split_once('.').unwrap_or((text, "0"));
    let device = hex(device, "a slot is not one or two hexadecimal digits")?;
    let function = hex(function, "a function is not 0 to 7")?;
    match (device < 32, function < 8) {
        (true, true) => Ok(Slot { device, function }),
        (false, _) => Err("a slot is above 1f"),
        (_, false) => Err("a function is not 0 to 7"),
    }
}

fn parse(text: &str) -> Result<PciPath, &'static str> {
    let mut words = text.split('/').peekable();
    let first = words.peek().and_then(|word| hex(word, "").ok()).filter(|number| *number >= FIRST_ROOT);
    if first.is_some() {
        words.next();
    }
    let steps: Vec<Slot> = words.take(MAX_SLOTS + 1).map(slot).collect::<Result<_, _>>()?;
    match steps.len() {
        0 => Err("a root complex alone is not a function"),
        1..=MAX_SLOTS => Ok(PciPath { root: first.unwrap_or(0), steps }),
        _ => Err("more than 32 slots"),
    }
}

impl FromStr for PciPath {
    type Err = ParsePciPathError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| ParsePciPathError { text: text.chars().take(60).collect(), reason })
    }
}

impl PciPath {
    /// Resolves the path in `sysfs` (normally `/sys`).
    ///
    /// # Errors
    /// The first element that does not exist.
    pub fn resolve(&self, sysfs: &Path) -> Result<ResolvedFunction, ResolveError> {
        let mut dir = root_complex(sysfs, self.root).ok_or(ResolveError::Root { bus: self.root })?;
        let mut bridge: Option<Address> = None;
        let mut bus = self.root;
        for Slot { device, function } in &self.steps {
            if let Some(bridge) = bridge {
                bus = bus_behind(&dir).ok_or(ResolveError::Bus { bridge })?;
            }
            let address = Address { domain: 0, bus, device: *device, function: *function };
            dir.push(address.to_string());
            if !dir.is_dir() {
                return Err(match bridge {
                    Some(bridge) => ResolveError::Behind { bridge, address },
                    None => ResolveError::OnRoot { address },
                });
            }
            bridge = Some(address);
        }
        // The parser rejects paths without a slot.
        bridge.map(|address| ResolvedFunction { address, dir }).ok_or(ResolveError::Root { bus: self.root })
    }
}

/// Returns the directory of a root complex: directly below `devices`, or below a
/// platform device on device-tree machines.
fn root_complex(sysfs: &Path, bus: u8) -> Option<PathBuf> {
    let devices = sysfs.join("devices");
    let name = format!("pci0000:{bus:02x}");
    let direct = devices.join(&name);
    if direct.is_dir() {
        return Some(direct);
    }
    let platform = fs::read_dir(devices.join("platform")).ok()?;
    platform.flatten().map(|entry| entry.path().join(&name)).find(|dir| dir.is_dir())
}

/// Returns the secondary bus of a bridge: from `pci_bus`, or else from the addresses of its functions.
fn bus_behind(bridge: &Path) -> Option<u8> {
    let names = |dir: &Path| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let buses = names(&bridge.join("pci_bus"));
    if let [only] = buses.as_slice() {
        let (_, bus) = only.rsplit_once(':')?;
        return u8::from_str_radix(bus, 16).ok();
    }
    names(bridge).iter().find_map(|name| name.parse::<Address>().ok()).map(|child| child.bus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plant(sysfs: &Path, path: &str, bus: Option<&str>) {
        let dir = sysfs.join("devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        if let Some(bus) = bus {
            fs::create_dir_all(dir.join("pci_bus").join(bus)).unwrap();
        }
    }

    fn find(sysfs: &Path, text: &str) -> Result<String, ResolveError> {
        text.parse::<PciPath>().unwrap().resolve(sysfs).map(|found| found.address.to_string())
    }

    #[test]
    fn paths_resolve_through_bridges_to_a_function() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = root.path();
        plant(sysfs, "pci0000:00/0000:00:02.0", Some("0000:01"));
        plant(sysfs, "pci0000:00/0000:00:02.0/0000:01:03.0", None);
        plant(sysfs, "pci0000:00/0000:00:05.1", None);
        // Without pci_bus, the function behind the bridge determines the bus.
        plant(sysfs, "pci0000:00/0000:00:05.1/0000:0a:00.7", None);
        plant(sysfs, "pci0000:20/0000:20:00.0", Some("0000:21"));
        plant(sysfs, "pci0000:20/0000:20:00.0/0000:21:02.0", None);
        plant(sysfs, "platform/4010000000.pcie/pci0000:30/0000:30:01.0", None);
        for (text, address) in [
            ("02", "0000:00:02.0"),
            ("02/03", "0000:01:03.0"),
            ("2/3", "0000:01:03.0"),
            ("05.1/00.7", "0000:0a:00.7"),
            ("20/00/02", "0000:21:02.0"),
            ("30/01", "0000:30:01.0"),
        ] {
            assert_eq!(find(sysfs, text).unwrap(), address, "{text}");
        }
    }

    #[test]
    fn missing_path_element_is_named() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = root.path();
        plant(sysfs, "pci0000:00/0000:00:02.0", Some("0000:01"));
        plant(sysfs, "pci0000:00/0000:00:03.0", None);
        for (text, parts) in [
            ("20/00/02", &["pci0000:20"][..]),
            ("04/00", &["0000:00:04.0", "root complex"][..]),
            ("02/01", &["bridge 0000:00:02.0", "0000:01:01.0"][..]),
            ("03/00", &["0000:00:03.0 has", "no bus"][..]),
        ] {
            let error = find(sysfs, text).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    #[test]
    fn malformed_paths_are_refused() {
        for (text, part) in [
            ("", "slot"),
            ("/", "slot"),
            ("02/", "slot"),
            ("02/20", "above 1f"),
            ("20", "alone"),
            ("02.8", "function"),
            ("02.", "function"),
            ("+2/00", "slot"),
            ("0x2", "slot"),
            ("002/1", "slot"),
            ("../02", "slot"),
            (&["01"; 40].join("/"), "more than 32"),
        ] {
            let error = text.parse::<PciPath>().unwrap_err().to_string();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn parsed_text_round_trips(text in "[0-9a-f./ ]{0,24}|\\PC{0,24}") {
            if let Ok(path) = text.parse::<PciPath>() {
                prop_assert_eq!(path.to_string().parse::<PciPath>(), Ok(path.clone()));
                prop_assert!(path.resolve(Path::new("/nonexistent")).is_err());
            }
        }
    }
}
