//! What a container asks for.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use firstlight_agent_api::agent::Device;
use firstlight_cdi::{Capabilities, DeviceName, GPU_KIND};
use firstlight_pci::{Address, PciPath};

use super::environment::{self, Visible};
use crate::error::{Error, Result};

/// Annotations whose names begin so carry CDI names.
const ANNOTATION: &str = "cdi.k8s.io/";

/// What a shim says a container is. The sandbox's own container (the pause
/// process) carries the pod's annotations and gets no devices.
const CONTAINER_TYPE: &str = "io.katacontainers.pkg.oci.container_type";
const SANDBOX: &str = "pod_sandbox";

/// A GPU or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// Every GPU of the guest.
    All,
    /// By position in PCI order.
    Index(u32),
    /// By address.
    Pci(Address),
    /// By a name that only the CDI file knows, such as a UUID.
    Name(String),
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Index(index) => write!(f, "{index}"),
            Self::Pci(address) => write!(f, "{address}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl From<&str> for Which {
    fn from(device: &str) -> Self {
        if device == "all" {
            return Self::All;
        }
        let index = device.parse().map(Self::Index);
        index.or_else(|_| device.parse().map(Self::Pci)).unwrap_or_else(|_| Self::Name(device.to_owned()))
    }
}

/// Everything a container asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wants {
    /// Its GPUs.
    pub gpus: Vec<Which>,
    /// Devices of other kinds, which nobody has to wait for.
    pub others: Vec<DeviceName>,
    /// Which of its GPUs its environment leaves it.
    pub visible: Visible,
    /// Which of the driver's files come with a GPU.
    pub capabilities: Capabilities,
    /// What in the environment means nothing here, a sentence each.
    pub remarks: Vec<String>,
}

impl Wants {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.others.is_empty()
    }

    fn grant(&mut self, name: DeviceName) {
        if name.kind == GPU_KIND {
            push(&mut self.gpus, Which::from(name.device.as_str()));
        } else if !self.others.contains(&name) {
            self.others.push(name);
        }
    }

    /// GPU names that have to be looked up as they are.
    pub fn opaque(&self) -> impl Iterator<Item = &str> {
        self.gpus.iter().filter_map(|which| if let Which::Name(name) = which { Some(name.as_str()) } else { None })
    }
}

/// What is known about a container that may want devices.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// Its annotations.
    pub annotations: &'a HashMap<String, String>,
    /// The devices that the host passed through for it.
    pub devices: &'a [Device],
    /// Its variables, `NAME=value`.
    pub environment: &'a [String],
    /// Whether `VISIBLE_CDI_DEVICES` among them grants devices.
    pub by_environment: bool,
}

/// What a container is granted, and what its environment leaves of that.
///
/// Grants come from annotations, from devices of the kind `vfio-pci-gk` (passed
/// through, driven by the guest's kernel), and from the variable
/// `VISIBLE_CDI_DEVICES` where the kernel command line allows that. Such devices
/// may say where in the guest's PCI tree they are. That beats the index in an
/// annotation: the shim can only guess how the guest will sort.
///
/// # Errors
/// An annotation or `VISIBLE_CDI_DEVICES` holds something that is no qualified CDI name.
pub fn wants(asking: Asking<'_>, sysfs: &Path) -> Result<Wants> {
    let Asking { annotations, devices, environment, by_environment } = asking;
    let mut wants = Wants::default();
    if annotations.get(CONTAINER_TYPE).is_some_and(|kind| kind == SANDBOX) {
        return Ok(wants);
    }
    let mut named: Vec<(&String, &String)> =
        annotations.iter().filter(|(key, _)| key.starts_with(ANNOTATION)).collect();
    named.sort();
    let passed: Vec<Passed> =
        devices.iter().filter(|device| device.type_ == "vfio-pci-gk").map(|device| Passed::of(device, sysfs)).collect();
    for (key, value) in named {
        let placed = is_placed(key, &passed);
        for text in value.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let name: DeviceName =
                text.parse().map_err(|error| Error::invalid(format!("annotation {key}: {error}")))?;
            if !(placed && name.kind == GPU_KIND && matches!(Which::from(name.device.as_str()), Which::Index(_))) {
                wants.grant(name);
            }
        }
    }
    for address in passed.iter().flat_map(|device| &device.gpus) {
        push(&mut wants.gpus, Which::Pci(*address));
    }
    if by_environment && let Some(text) = environment::value(environment, environment::CDI_DEVICES) {
        environment::cdi_devices(text)?.into_iter().for_each(|name| wants.grant(name));
    }
    if !wants.gpus.is_empty() {
        wants.visible = Visible::of(environment);
        let text = environment::value(environment, environment::CAPABILITIES).unwrap_or_default();
        let (capabilities, unknown) = Capabilities::parse(text);
        wants.capabilities = capabilities;
        let remark = |word| format!("{}: {word:?} is no part of a driver; ignored", environment::CAPABILITIES);
        wants.remarks = unknown.into_iter().map(remark).collect();
    }
    Ok(wants)
}

/// A device that the host passed through, to be driven by the guest's kernel.
struct Passed {
    /// What the host calls it: the last part of its path there, and its number.
    names: [String; 2],
    /// The GPUs at the places that its options name.
    gpus: Vec<Address>,
    /// Whether every option names a place.
    whole: bool,
}

impl Passed {
    fn of(device: &Device, sysfs: &Path) -> Self {
        let places: Vec<Option<Address>> = device
            .options
            .iter()
            .map(|option| option.split_once('=').and_then(|(_, path)| pci_path(sysfs, path)))
            .collect();
        let node = device.container_path.rsplit('/').next().unwrap_or_default();
        Self {
            names: [bare(node), bare(&device.id)],
            whole: places.iter().all(Option::is_some),
            gpus: places.into_iter().flatten().filter(|address| is_gpu(sysfs, *address)).collect(),
        }
    }
}

/// The number in `vfio7` or `7`.
fn bare(name: &str) -> String {
    name.strip_prefix("vfio").unwrap_or(name).to_owned()
}

/// Whether the GPUs that an annotation counts are those whose places are known.
/// A shim writes `cdi.k8s.io/vfio7` about the device `/dev/vfio/7`. Another
/// annotation may be about any of them, so all have to be known.
fn is_placed(annotation: &str, passed: &[Passed]) -> bool {
    let name = bare(annotation.strip_prefix(ANNOTATION).unwrap_or(annotation));
    let mut about = passed.iter().filter(|device| !name.is_empty() && device.names.contains(&name)).peekable();
    let whole = match about.peek() {
        Some(_) => about.all(|device| device.whole),
        None => passed.iter().all(|device| device.whole),
    };
    whole && passed.iter().any(|device| !device.gpus.is_empty())
}

fn push(gpus: &mut Vec<Which>, which: Which) {
    if !gpus.contains(&which) {
        gpus.push(which);
    }
}

fn is_gpu(sysfs: &Path, address: Address) -> bool {
    firstlight_pci::functions_of_kind(sysfs, firstlight_pci::Kind::Gpu).contains(&address)
}

/// The address of the function at a PCI path such as `02/00`; `None` if there
/// is no such place.
#[must_use]
pub fn pci_path(sysfs: &Path, path: &str) -> Option<Address> {
    path.parse::<PciPath>().ok()?.resolve(sysfs).ok().map(|found| found.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    fn annotated(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn asked(annotations: &HashMap<String, String>, devices: &[Device], sysfs: &Path) -> Result<Wants> {
        wants(Asking { annotations, devices, environment: &[], by_environment: false }, sysfs)
    }

    #[test]
    fn names_become_gpus_and_others() {
        let annotations = annotated(&[
            ("cdi.k8s.io/vfio1", "nvidia.com/gpu=0, nvidia.com/gpu=0000:02:00.0"),
            ("cdi.k8s.io/vfio2", "nvidia.com/gpu=all,nvidia.com/gpu=0,a.b/c=d"),
            ("cdi.k8s.io/x", "nvidia.com/gpu=GPU-1"),
            ("other", "nvidia.com/gpu=9"),
        ]);
        let wants = asked(&annotations, &[], Path::new("/nonexistent")).unwrap();
        let address = "0000:02:00.0".parse().unwrap();
        assert_eq!(wants.gpus, [Which::Index(0), Which::Pci(address), Which::All, Which::Name("GPU-1".into())]);
        assert_eq!(wants.others, ["a.b/c=d".parse().unwrap()]);
        assert_eq!(wants.opaque().collect::<Vec<_>>(), ["GPU-1"]);
    }

    #[test]
    fn the_pause_container_gets_nothing_and_broken_names_are_refused() {
        let mut annotations = annotated(&[("cdi.k8s.io/vfio1", "nvidia.com/gpu=0"), (CONTAINER_TYPE, SANDBOX)]);
        assert!(asked(&annotations, &[], Path::new("/")).unwrap().is_empty());
        annotations.remove(CONTAINER_TYPE);
        annotations.insert("cdi.k8s.io/vfio1".into(), "gpu0".into());
        let error = asked(&annotations, &[], Path::new("/")).unwrap_err();
        assert!(error.message.contains("cdi.k8s.io/vfio1") && error.message.contains("gpu0"), "{error}");
    }

    fn plant(sysfs: &Path, path: &str, bus_behind: Option<&str>) {
        let dir = sysfs.join("devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        if let Some(bus) = bus_behind {
            fs::create_dir_all(dir.join("pci_bus").join(bus)).unwrap();
        }
    }

    #[test]
    fn a_place_in_the_tree_is_an_address_and_beats_the_index() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = root.path();
        plant(sysfs, "pci0000:00/0000:00:02.0", Some("0000:01"));
        plant(sysfs, "pci0000:00/0000:00:02.0/0000:01:00.0", None);
        plant(sysfs, "pci0000:20/0000:20:00.1", Some("0000:21"));
        plant(sysfs, "pci0000:20/0000:20:00.1/0000:21:00.0", None);
        assert_eq!(pci_path(sysfs, "02/00").unwrap().to_string(), "0000:01:00.0");
        assert_eq!(pci_path(sysfs, "20/00.1/00").unwrap().to_string(), "0000:21:00.0");
        for nowhere in ["", "02/01", "03/00", "02/00/00", "zz", "02/00.9", "+2/00"] {
            assert_eq!(pci_path(sysfs, nowhere), None, "{nowhere}");
        }

        let gpu = sysfs.join("bus/pci/devices/0000:01:00.0");
        fs::create_dir_all(&gpu).unwrap();
        fs::write(gpu.join("modalias"), "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n").unwrap();
        let device =
            Device { type_: "vfio-pci-gk".into(), options: vec!["0000:c1:00.0=02/00".into()], ..Default::default() };
        let annotations = annotated(&[("cdi.k8s.io/vfio1", "nvidia.com/gpu=3")]);
        let wants = asked(&annotations, std::slice::from_ref(&device), sysfs).unwrap();
        let placed = Which::Pci("0000:01:00.0".parse().unwrap());
        assert_eq!(wants.gpus.as_slice(), std::slice::from_ref(&placed));

        // Of a second one the shim does not know the place: its index is all there is.
        let nowhere = Device {
            type_: "vfio-pci-gk".into(),
            container_path: "/dev/vfio/8".into(),
            options: vec!["0000:c2:00.0=".into()],
            ..Default::default()
        };
        for (id, container_path) in [("", "/dev/vfio/7"), ("7", ""), ("", "/dev/vfio/devices/vfio7")] {
            let first = Device { id: id.into(), container_path: container_path.into(), ..device.clone() };
            let annotations =
                annotated(&[("cdi.k8s.io/vfio7", "nvidia.com/gpu=3"), ("cdi.k8s.io/vfio8", "nvidia.com/gpu=5")]);
            let wants = asked(&annotations, &[first, nowhere.clone()], sysfs).unwrap();
            assert_eq!(wants.gpus, [Which::Index(5), placed.clone()], "{id} {container_path}");
        }
        // Nobody can tell whose index this is: none is lost.
        let annotations = annotated(&[("cdi.k8s.io/x", "nvidia.com/gpu=0,nvidia.com/gpu=1")]);
        let wants = asked(&annotations, &[device, nowhere], sysfs).unwrap();
        assert_eq!(wants.gpus, [Which::Index(0), Which::Index(1), placed]);
    }

    #[test]
    fn the_environment_grants_only_where_that_is_allowed() {
        let none = HashMap::new();
        let environment = ["A=b".to_owned(), "VISIBLE_CDI_DEVICES=nvidia.com/gpu=0,1:a.b/c=d".to_owned()];
        let asking =
            |by_environment| Asking { annotations: &none, devices: &[], environment: &environment, by_environment };
        assert!(wants(asking(false), Path::new("/nonexistent")).unwrap().is_empty());
        let granted = wants(asking(true), Path::new("/nonexistent")).unwrap();
        assert_eq!(granted.gpus, [Which::Index(0), Which::Index(1)]);
        assert_eq!(granted.others, ["a.b/c=d".parse().unwrap()]);

        let pause = annotated(&[(CONTAINER_TYPE, SANDBOX)]);
        let pause = Asking { annotations: &pause, ..asking(true) };
        assert!(wants(pause, Path::new("/nonexistent")).unwrap().is_empty());
    }

    #[test]
    fn what_nvidia_s_variables_say_is_no_grant() {
        let none = HashMap::new();
        let environment = ["NVIDIA_VISIBLE_DEVICES=all".to_owned(), "NVIDIA_DRIVER_CAPABILITIES=all,tea".to_owned()];
        let asking = Asking { annotations: &none, devices: &[], environment: &environment, by_environment: true };
        assert!(wants(asking, Path::new("/nonexistent")).unwrap().is_empty());
        let annotations = annotated(&[("cdi.k8s.io/x", "nvidia.com/gpu=0")]);
        let granted = wants(Asking { annotations: &annotations, ..asking }, Path::new("/nonexistent")).unwrap();
        assert_eq!(granted.gpus, [Which::Index(0)]);
        assert_eq!(granted.capabilities, Capabilities::parse("all").0);
        assert!(granted.remarks[0].contains("tea"), "{:?}", granted.remarks);
    }

    proptest! {
        #[test]
        fn any_texts_are_wants_or_errors(value in "\\PC{0,60}", path in "\\PC{0,20}") {
            let _ = asked(&annotated(&[("cdi.k8s.io/x", &value)]), &[], Path::new("/nonexistent"));
            let _ = pci_path(Path::new("/nonexistent"), &path);
        }
    }
}
