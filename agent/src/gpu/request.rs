//! Parses which devices a container requests.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use firstlight_agent_api::agent::Device;
use firstlight_cdi::{Capabilities, DeviceName, GPU_KIND};
use firstlight_pci::{Address, PciPath};

use super::environment::{self, Visible};
use crate::error::{Error, Result};

/// Prefix of annotations that carry CDI names.
const ANNOTATION: &str = "cdi.k8s.io/";

/// Annotation with the container's type. The sandbox's own container (the pause process) carries
/// the pod's annotations and gets no devices.
const CONTAINER_TYPE: &str = "io.katacontainers.pkg.oci.container_type";
const SANDBOX: &str = "pod_sandbox";

/// Selects one or several GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSelector {
    /// Every GPU of the guest.
    All,
    /// By position in PCI order.
    Index(u32),
    /// By address.
    Pci(Address),
    /// By a name that only the CDI file resolves, such as a UUID.
    Name(String),
}

impl fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Index(index) => write!(f, "{index}"),
            Self::Pci(address) => write!(f, "{address}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl From<&str> for GpuSelector {
    fn from(device: &str) -> Self {
        if device == "all" {
            return Self::All;
        }
        let index = device.parse().map(Self::Index);
        index.or_else(|_| device.parse().map(Self::Pci)).unwrap_or_else(|_| Self::Name(device.to_owned()))
    }
}

/// Devices that a container requests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceRequest {
    /// GPUs.
    pub gpus: Vec<GpuSelector>,
    /// Devices of other kinds, which need no wait.
    pub others: Vec<DeviceName>,
    /// GpuSelector of the GPUs the environment selects.
    pub visible: Visible,
    /// GpuSelector of the driver's files are mounted with a GPU.
    pub capabilities: Capabilities,
    /// Warnings about unknown values in the environment.
    pub warnings: Vec<String>,
}

impl DeviceRequest {
    /// Returns whether no device is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.others.is_empty()
    }

    fn grant(&mut self, name: DeviceName) {
        if name.kind == GPU_KIND {
            push(&mut self.gpus, GpuSelector::from(name.device.as_str()));
        } else if !self.others.contains(&name) {
            self.others.push(name);
        }
    }

    /// Returns the GPU names that only the CDI file resolves.
    pub fn opaque(&self) -> impl Iterator<Item = &str> {
        self.gpus
            .iter()
            .filter_map(|which| if let GpuSelector::Name(name) = which { Some(name.as_str()) } else { None })
    }
}

/// Inputs from which a container's device request is parsed.
#[derive(Debug, Clone, Copy)]
pub struct RequestInput<'a> {
    /// Its annotations.
    pub annotations: &'a HashMap<String, String>,
    /// Devices that the host passed through for it.
    pub devices: &'a [Device],
    /// Its environment, `NAME=value`.
    pub environment: &'a [String],
    /// Whether `VISIBLE_CDI_DEVICES` in the environment grants devices.
    pub environment_grants: bool,
}

/// Returns what a container is granted, and what its environment selects of that.
///
/// Grants come from annotations, from devices of type `vfio-pci-gk` (passed through, driven by the
/// guest's kernel), and from the variable `VISIBLE_CDI_DEVICES` if the kernel command line allows
/// that. PassedThrough-through devices may have a guest PCI path. That takes precedence over the index in
/// an annotation: the shim can only guess the guest's PCI order.
///
/// # Errors
/// An annotation or `VISIBLE_CDI_DEVICES` contains an invalid CDI name.
pub fn requested_devices(input: RequestInput<'_>, sysfs: &Path) -> Result<DeviceRequest> {
    let RequestInput { annotations, devices, environment, environment_grants } = input;
    let mut request = DeviceRequest::default();
    if annotations.get(CONTAINER_TYPE).is_some_and(|kind| kind == SANDBOX) {
        return Ok(request);
    }
    let mut named: Vec<(&String, &String)> =
        annotations.iter().filter(|(key, _)| key.starts_with(ANNOTATION)).collect();
    named.sort();
    let passed_through: Vec<PassedThrough> = devices
        .iter()
        .filter(|device| device.type_ == "vfio-pci-gk")
        .map(|device| PassedThrough::of(device, sysfs))
        .collect();
    for (key, value) in named {
        let placed = has_known_paths(key, &passed_through);
        for text in value.split(',').map(str::trim).filter(|text| !text.is_empty()) {
            let name: DeviceName =
                text.parse().map_err(|error| Error::invalid(format!("annotation {key}: {error}")))?;
            if !(placed
                && name.kind == GPU_KIND
                && matches!(GpuSelector::from(name.device.as_str()), GpuSelector::Index(_)))
            {
                request.grant(name);
            }
        }
    }
    for address in passed_through.iter().flat_map(|device| &device.gpus) {
        push(&mut request.gpus, GpuSelector::Pci(*address));
    }
    if environment_grants && let Some(text) = environment::value(environment, environment::CDI_DEVICES) {
        environment::cdi_devices(text)?.into_iter().for_each(|name| request.grant(name));
    }
    if !request.gpus.is_empty() {
        request.visible = Visible::of(environment);
        let text = environment::value(environment, environment::CAPABILITIES).unwrap_or_default();
        let (capabilities, unknown) = Capabilities::parse(text);
        request.capabilities = capabilities;
        let warning = |word| format!("{}: unknown capability {word:?}; ignored", environment::CAPABILITIES);
        request.warnings = unknown.into_iter().map(warning).collect();
    }
    Ok(request)
}

/// A passed-through device that the guest's kernel drives.
struct PassedThrough {
    /// The host's names of it: the last component of its path there, and its number.
    names: [String; 2],
    /// GPUs at the PCI paths of its options.
    gpus: Vec<Address>,
    /// Whether every option has a valid PCI path.
    whole: bool,
}

impl PassedThrough {
    fn of(device: &Device, sysfs: &Path) -> Self {
        let addresses: Vec<Option<Address>> = device
            .options
            .iter()
            .map(|option| option.split_once('=').and_then(|(_, path)| pci_path(sysfs, path)))
            .collect();
        let node = device.container_path.rsplit('/').next().unwrap_or_default();
        Self {
            names: [number_in(node), number_in(&device.id)],
            whole: addresses.iter().all(Option::is_some),
            gpus: addresses.into_iter().flatten().filter(|address| is_gpu(sysfs, *address)).collect(),
        }
    }
}

/// Returns the number in `vfio7` or `7`.
fn number_in(name: &str) -> String {
    name.strip_prefix("vfio").unwrap_or(name).to_owned()
}

/// Returns whether the PCI paths of the GPUs that an annotation counts are known. A shim writes
/// `cdi.k8s.io/vfio7` for the device `/dev/vfio/7`. Any other annotation may refer to any of them,
/// so all must be known.
fn has_known_paths(annotation: &str, passed_through: &[PassedThrough]) -> bool {
    let name = number_in(annotation.strip_prefix(ANNOTATION).unwrap_or(annotation));
    let mut about = passed_through.iter().filter(|device| !name.is_empty() && device.names.contains(&name)).peekable();
    let whole = match about.peek() {
        Some(_) => about.all(|device| device.whole),
        None => passed_through.iter().all(|device| device.whole),
    };
    whole && passed_through.iter().any(|device| !device.gpus.is_empty())
}

fn push(gpus: &mut Vec<GpuSelector>, which: GpuSelector) {
    if !gpus.contains(&which) {
        gpus.push(which);
    }
}

fn is_gpu(sysfs: &Path, address: Address) -> bool {
    firstlight_pci::functions_of_kind(sysfs, firstlight_pci::Kind::Gpu).contains(&address)
}

/// Returns the address of the function at a PCI path such as `02/00`; `None` if there is none.
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

    fn request_of(annotations: &HashMap<String, String>, devices: &[Device], sysfs: &Path) -> Result<DeviceRequest> {
        requested_devices(RequestInput { annotations, devices, environment: &[], environment_grants: false }, sysfs)
    }

    #[test]
    fn cdi_names_are_split_into_gpus_and_others() {
        let annotations = annotated(&[
            ("cdi.k8s.io/vfio1", "nvidia.com/gpu=0, nvidia.com/gpu=0000:02:00.0"),
            ("cdi.k8s.io/vfio2", "nvidia.com/gpu=all,nvidia.com/gpu=0,a.b/c=d"),
            ("cdi.k8s.io/x", "nvidia.com/gpu=GPU-1"),
            ("other", "nvidia.com/gpu=9"),
        ]);
        let request = request_of(&annotations, &[], Path::new("/nonexistent")).unwrap();
        let address = "0000:02:00.0".parse().unwrap();
        assert_eq!(
            request.gpus,
            [GpuSelector::Index(0), GpuSelector::Pci(address), GpuSelector::All, GpuSelector::Name("GPU-1".into())]
        );
        assert_eq!(request.others, ["a.b/c=d".parse().unwrap()]);
        assert_eq!(request.opaque().collect::<Vec<_>>(), ["GPU-1"]);
    }

    #[test]
    fn pause_container_gets_no_devices_and_invalid_names_are_rejected() {
        let mut annotations = annotated(&[("cdi.k8s.io/vfio1", "nvidia.com/gpu=0"), (CONTAINER_TYPE, SANDBOX)]);
        assert!(request_of(&annotations, &[], Path::new("/")).unwrap().is_empty());
        annotations.remove(CONTAINER_TYPE);
        annotations.insert("cdi.k8s.io/vfio1".into(), "gpu0".into());
        let error = request_of(&annotations, &[], Path::new("/")).unwrap_err();
        assert!(error.message.contains("cdi.k8s.io/vfio1") && error.message.contains("gpu0"), "{error}");
    }

    fn add_function(sysfs: &Path, path: &str, bus_behind: Option<&str>) {
        let dir = sysfs.join("devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        if let Some(bus) = bus_behind {
            fs::create_dir_all(dir.join("pci_bus").join(bus)).unwrap();
        }
    }

    #[test]
    fn pci_path_is_resolved_and_takes_precedence_over_the_index() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = root.path();
        add_function(sysfs, "pci0000:00/0000:00:02.0", Some("0000:01"));
        add_function(sysfs, "pci0000:00/0000:00:02.0/0000:01:00.0", None);
        add_function(sysfs, "pci0000:20/0000:20:00.1", Some("0000:21"));
        add_function(sysfs, "pci0000:20/0000:20:00.1/0000:21:00.0", None);
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
        let request = request_of(&annotations, std::slice::from_ref(&device), sysfs).unwrap();
        let placed = GpuSelector::Pci("0000:01:00.0".parse().unwrap());
        assert_eq!(request.gpus.as_slice(), std::slice::from_ref(&placed));

        // The shim does not know the PCI path of the second device: only its index is known.
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
            let request = request_of(&annotations, &[first, nowhere.clone()], sysfs).unwrap();
            assert_eq!(request.gpus, [GpuSelector::Index(5), placed.clone()], "{id} {container_path}");
        }
        // The annotation matches no device: both indices are retained.
        let annotations = annotated(&[("cdi.k8s.io/x", "nvidia.com/gpu=0,nvidia.com/gpu=1")]);
        let request = request_of(&annotations, &[device, nowhere], sysfs).unwrap();
        assert_eq!(request.gpus, [GpuSelector::Index(0), GpuSelector::Index(1), placed]);
    }

    #[test]
    fn environment_grants_devices_only_if_enabled() {
        let none = HashMap::new();
        let environment = ["A=b".to_owned(), "VISIBLE_CDI_DEVICES=nvidia.com/gpu=0,1:a.b/c=d".to_owned()];
        let input = |environment_grants| RequestInput {
            annotations: &none,
            devices: &[],
            environment: &environment,
            environment_grants,
        };
        assert!(requested_devices(input(false), Path::new("/nonexistent")).unwrap().is_empty());
        let granted = requested_devices(input(true), Path::new("/nonexistent")).unwrap();
        assert_eq!(granted.gpus, [GpuSelector::Index(0), GpuSelector::Index(1)]);
        assert_eq!(granted.others, ["a.b/c=d".parse().unwrap()]);

        let pause = annotated(&[(CONTAINER_TYPE, SANDBOX)]);
        let pause = RequestInput { annotations: &pause, ..input(true) };
        assert!(requested_devices(pause, Path::new("/nonexistent")).unwrap().is_empty());
    }

    #[test]
    fn nvidia_variables_grant_nothing() {
        let none = HashMap::new();
        let environment = ["NVIDIA_VISIBLE_DEVICES=all".to_owned(), "NVIDIA_DRIVER_CAPABILITIES=all,tea".to_owned()];
        let input =
            RequestInput { annotations: &none, devices: &[], environment: &environment, environment_grants: true };
        assert!(requested_devices(input, Path::new("/nonexistent")).unwrap().is_empty());
        let annotations = annotated(&[("cdi.k8s.io/x", "nvidia.com/gpu=0")]);
        let granted =
            requested_devices(RequestInput { annotations: &annotations, ..input }, Path::new("/nonexistent")).unwrap();
        assert_eq!(granted.gpus, [GpuSelector::Index(0)]);
        assert_eq!(granted.capabilities, Capabilities::parse("all").0);
        assert!(granted.warnings[0].contains("tea"), "{:?}", granted.warnings);
    }

    proptest! {
        #[test]
        fn any_annotation_is_a_request_or_an_error(value in "\\PC{0,60}", path in "\\PC{0,20}") {
            let _ = request_of(&annotated(&[("cdi.k8s.io/x", &value)]), &[], Path::new("/nonexistent"));
            let _ = pci_path(Path::new("/nonexistent"), &path);
        }
    }
}
