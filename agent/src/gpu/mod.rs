//! GPUs for containers: parses the request, waits until the GPUs are ready, applies their CDI
//! edits.

mod decide;
mod environment;
mod request;
mod visible;

use std::path::Path;
use std::time::Duration;

use firstlight_boot_record::GpuPhase;
use firstlight_cdi::{DeviceName, Directory, GPU_KIND, apply};
use firstlight_init_control::GpuState;
use firstlight_pci::{Address, Kind};
use oci_spec::runtime::Spec;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use ttrpc::Code;

pub use decide::{Decision, Missing, decide};
pub use environment::{Visible, cdi_devices};
pub use request::{DeviceRequest, GpuSelector, RequestInput, pci_path, requested_devices};

use crate::clock::now_us;
use crate::error::{Error, Result};
use crate::paths::Paths;

/// State of the guest's GPUs, as reported by PID 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Whether the PCI bus has been scanned; before that the list is not meaningful.
    pub scanned: bool,
    /// In PCI order.
    pub gpus: Vec<GpuState>,
    /// Why the connection to PID 1 failed, if it did.
    pub disconnected: Option<String>,
}

/// Timeouts of the wait for GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For a GPU on the bus to become ready.
    pub ready: Duration,
    /// For a GPU to appear on the bus: the kernel may find it later than the VMM has plugged it in.
    pub plugged: Duration,
}

/// Source of GPU state.
#[derive(Debug, Clone)]
pub enum Source {
    /// PID 1 attaches GPUs and reports when they are ready.
    Init(watch::Receiver<View>),
    /// No Firstlight PID 1: the CDI files are taken as they are.
    Files,
}

impl Source {
    /// Waits until every GPU that is granted and selected by the container's environment is ready,
    /// and then applies their CDI edits to the configuration. Nothing is changed before all are
    /// ready; cancel-safe. Returns warnings about the request.
    ///
    /// # Errors
    /// `INTERNAL` for a GPU that failed, with its address, step, times and the driver's message;
    /// `DEADLINE_EXCEEDED` on timeout; `INVALID_ARGUMENT` for a GPU that the guest does not have.
    pub async fn inject_devices(
        &self,
        spec: &mut Spec,
        request: &DeviceRequest,
        timeouts: Timeouts,
        paths: &Paths,
    ) -> Result<Vec<String>> {
        if request.is_empty() {
            return Ok(Vec::new());
        }
        let gpus = match self {
            Self::Init(view) => Some(ready(view.clone(), request, timeouts, &paths.sysfs).await?),
            Self::Files => None,
        };
        let dir = Directory::read(&paths.cdi).map_err(|error| Error::internal(error.to_string()))?;
        let granted: Vec<DeviceName> = match gpus {
            Some(gpus) => {
                let opaque = request.opaque().map(gpu_name);
                gpus.iter().map(|gpu| name(gpu, &dir)).chain(opaque).collect()
            }
            None => request.gpus.iter().map(|which| gpu_name(&which.to_string())).collect(),
        };
        // A granted device without CDI entry is an error even if the environment does not select
        // it.
        for name in &granted {
            dir.find(name).map_err(|error| Error::invalid(error.to_string()))?;
        }
        let (left, warnings) = visible::select_visible(granted, &request.visible, &dir);
        let files = request.capabilities.devices().filter(|name| !request.gpus.is_empty() && dir.has(name));
        inject(spec, left.into_iter().chain(request.others.iter().cloned()).chain(files), &dir, paths)?;
        Ok(request.warnings.iter().cloned().chain(warnings).collect())
    }
}

fn gpu_name(device: &str) -> DeviceName {
    DeviceName { kind: GPU_KIND.to_owned(), device: device.to_owned() }
}

/// Returns a GPU's CDI device name: its address if the CDI file has that, otherwise its index.
fn name(gpu: &GpuState, dir: &Directory) -> DeviceName {
    let by_address = gpu_name(&gpu.pci.to_string());
    if dir.has(&by_address) { by_address } else { gpu_name(&gpu.index.to_string()) }
}

fn inject(spec: &mut Spec, names: impl Iterator<Item = DeviceName>, dir: &Directory, paths: &Paths) -> Result<()> {
    // Applied to a copy, so an error leaves the configuration unchanged.
    let mut changed = spec.clone();
    for name in names {
        let (whole, device) = dir.find(&name).map_err(|error| Error::invalid(error.to_string()))?;
        for edits in [&whole.container_edits, &device.container_edits] {
            apply(&mut changed, edits, &paths.root).map_err(|error| Error::internal(format!("{name}: {error}")))?;
        }
    }
    *spec = changed;
    Ok(())
}

/// Returns a GPU that is on the bus and that PID 1 has not reported yet: it was plugged in just
/// now.
fn plugged(sysfs: &Path, view: &View) -> Option<Address> {
    let known = |pci: &Address| view.gpus.iter().any(|gpu| gpu.pci == *pci && gpu.phase != GpuPhase::Removed);
    firstlight_pci::functions_of_kind(sysfs, Kind::Gpu).into_iter().find(|pci| !known(pci))
}

/// Waits for the GPUs, without polling.
async fn ready(
    mut view: watch::Receiver<View>,
    request: &DeviceRequest,
    timeouts: Timeouts,
    sysfs: &Path,
) -> Result<Vec<GpuState>> {
    if request.gpus.is_empty() {
        return Ok(Vec::new());
    }
    let begin = Instant::now();
    loop {
        let decision = {
            let view = view.borrow_and_update();
            match decide(&view, &request.visible.before_waiting(&request.gpus, &view.gpus)) {
                Decision::Unknown(error) => match plugged(sysfs, &view) {
                    Some(pci) => Decision::Wait(Missing::Plugged(pci)),
                    None => Decision::Unknown(error),
                },
                decision => decision,
            }
        };
        let missing = match decision {
            Decision::Ready(gpus) => return Ok(gpus),
            Decision::Fail(error) => return Err(error),
            Decision::Unknown(error) => {
                // A plugged GPU changes the view; nothing else is waited for.
                match timeout_at(begin + timeouts.plugged, view.changed()).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(_)) | Err(_) => return Err(error),
                }
            }
            Decision::Wait(missing) => missing,
        };
        match timeout_at(begin + timeouts.ready, view.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => {
                return Err(Error::internal(format!("{}: PID 1 is not connected", missing.describe(now_us()))));
            }
            Err(_) => {
                let waited = begin.elapsed().as_secs_f64();
                let what = missing.describe(now_us());
                let hint = "to wait longer, raise agent.cdi_timeout on the kernel command line and the shim's create_container_timeout";
                let message = format!("{what}; waited {waited:.1} s ({hint})");
                return Err(Error::new(Code::DEADLINE_EXCEEDED, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::decide::tests::gpu;
    use super::*;
    use firstlight_boot_record::GpuPhase;
    use std::fs;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap().block_on(future)
    }

    fn timeouts_of(seconds: u64) -> Timeouts {
        Timeouts { ready: Duration::from_secs(seconds), plugged: Duration::from_secs(seconds.min(2)) }
    }

    fn write_cdi_files(paths: &Paths) {
        fs::create_dir_all(&paths.cdi).unwrap();
        let device = |name: &str, minor: u32| {
            format!(
                r#"{{"name":"{name}","containerEdits":{{"deviceNodes":[{{"path":"/dev/nvidia{minor}","type":"c","major":195,"minor":{minor}}}]}}}}"#
            )
        };
        let devices = [device("0", 0), device("0000:01:00.0", 0), device("1", 1)].join(",");
        let text = format!(
            r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{devices}],"containerEdits":{{"env":["NVIDIA=1"]}}}}"#
        );
        fs::write(paths.cdi.join("a.json"), text).unwrap();
    }

    fn minors(spec: &Spec) -> Vec<i64> {
        let devices = spec.linux().as_ref().unwrap().devices().clone().unwrap_or_default();
        devices.iter().map(oci_spec::runtime::LinuxDevice::minor).collect()
    }

    fn device_request(which: &[GpuSelector]) -> DeviceRequest {
        DeviceRequest { gpus: which.to_vec(), ..DeviceRequest::default() }
    }

    #[test]
    fn gpu_on_the_bus_is_waited_for_and_absent_gpu_fails_early() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            write_cdi_files(&paths);
            let (sender, view) = watch::channel(View { scanned: true, gpus: vec![], disconnected: None });
            let source = Source::Init(view);
            let mut spec = Spec::default();
            let begin = Instant::now();
            let request = device_request(&[GpuSelector::Index(0)]);
            let error = source.inject_devices(&mut spec, &request, timeouts_of(9), &paths).await.unwrap_err();
            assert_eq!(error.code, Code::INVALID_ARGUMENT);
            assert!((2..9).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
            // On the bus, the timeout for readiness applies.
            let function = paths.sysfs.join("bus/pci/devices/0000:01:00.0");
            fs::create_dir_all(&function).unwrap();
            let modalias = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n";
            fs::write(function.join("modalias"), modalias).unwrap();
            let begin = Instant::now();
            let error = source.inject_devices(&mut spec, &request, timeouts_of(9), &paths).await.unwrap_err();
            assert_eq!((error.code, begin.elapsed().as_secs()), (Code::DEADLINE_EXCEEDED, 9));
            assert!(error.message.contains("0000:01:00.0 is on the PCI bus"), "{error}");
            let report = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                sender.send_modify(|view| view.gpus = vec![gpu(0, GpuPhase::Ready)]);
            };
            let (given, ()) = tokio::join!(source.inject_devices(&mut spec, &request, timeouts_of(9), &paths), report);
            given.unwrap();
            assert_eq!(minors(&spec), [0]);
        });
    }

    #[test]
    fn container_waits_only_for_its_own_gpu() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            write_cdi_files(&paths);
            let (sender, view) = watch::channel(View::default());
            let source = Source::Init(view);
            let mut spec = Spec::default();
            let request = device_request(&[GpuSelector::Index(1)]);
            let inject_devices = source.inject_devices(&mut spec, &request, timeouts_of(9), &paths);
            let boot = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let gpus = vec![gpu(0, GpuPhase::Attaching), gpu(1, GpuPhase::Attaching)];
                sender.send_modify(|view| *view = View { scanned: true, gpus, disconnected: None });
                tokio::time::sleep(Duration::from_secs(1)).await;
                sender.send_modify(|view| view.gpus[1].phase = GpuPhase::Ready);
            };
            let (given, ()) = tokio::join!(inject_devices, boot);
            given.unwrap();
            assert_eq!(minors(&spec), [1], "GPU 0 still attaches");
            assert!(spec.process().as_ref().unwrap().env().as_ref().unwrap().contains(&"NVIDIA=1".to_owned()));
        });
    }

    #[test]
    fn timeout_error_names_gpu_step_and_parameter() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            let gpus = vec![gpu(0, GpuPhase::Attaching)];
            let (_sender, view) = watch::channel(View { scanned: true, gpus, disconnected: None });
            let mut spec = Spec::default();
            let request = device_request(&[GpuSelector::All]);
            let result = Source::Init(view).inject_devices(&mut spec, &request, timeouts_of(3), &paths).await;
            let error = result.unwrap_err();
            assert_eq!(error.code, Code::DEADLINE_EXCEEDED);
            for part in ["0000:01:00.0", "wait-open-complete", "3.0 s", "agent.cdi_timeout"] {
                assert!(error.message.contains(part), "{error}");
            }
            assert_eq!(spec, Spec::default());
        });
    }

    #[test]
    fn without_pid_1_cdi_files_are_used() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            write_cdi_files(&paths);
            let mut spec = Spec::default();
            let request = device_request(&[GpuSelector::Pci("0000:01:00.0".parse().unwrap())]);
            Source::Files.inject_devices(&mut spec, &request, timeouts_of(0), &paths).await.unwrap();
            assert_eq!(minors(&spec), [0]);
            let request = device_request(&[GpuSelector::Index(7)]);
            let error = Source::Files.inject_devices(&mut spec, &request, timeouts_of(0), &paths).await.unwrap_err();
            assert!(
                error.message.contains("nvidia.com/gpu=7") && error.message.contains("nvidia.com/gpu=0"),
                "{error}"
            );
        });
    }

    #[test]
    fn gpu_not_selected_by_the_environment_is_not_waited_for() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            write_cdi_files(&paths);
            let gpus = vec![gpu(0, GpuPhase::Failed), gpu(1, GpuPhase::Ready)];
            let (_sender, view) = watch::channel(View { scanned: true, gpus, disconnected: None });
            let mut spec = Spec::default();
            let visible = Visible::Only(vec![GpuSelector::Index(1), GpuSelector::Index(7)]);
            let request = DeviceRequest { gpus: vec![GpuSelector::All], visible, ..DeviceRequest::default() };
            let warnings =
                Source::Init(view).inject_devices(&mut spec, &request, timeouts_of(0), &paths).await.unwrap();
            assert_eq!(minors(&spec), [1]);
            assert!(warnings.len() == 1 && warnings[0].contains("names 7"), "{warnings:?}");
        });
    }

    #[test]
    fn driver_files_are_mounted_by_capability_and_only_with_a_gpu() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            write_cdi_files(&paths);
            let device = |name: &str| {
                format!(
                    r#"{{"name":"{name}","containerEdits":{{"mounts":[{{"hostPath":"/{name}","containerPath":"/{name}"}}]}}}}"#
                )
            };
            let devices = [device("compute"), device("utility"), device("video")].join(",");
            let text = format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/driver","devices":[{devices}]}}"#);
            fs::write(paths.cdi.join("b.json"), text).unwrap();
            let mounted = async |gpus: &[GpuSelector], capabilities: &str| {
                let mut spec = Spec::default();
                let capabilities = firstlight_cdi::Capabilities::parse(capabilities).0;
                let others = vec!["nvidia.com/driver=utility".parse().unwrap()];
                let others = if gpus.is_empty() { others } else { vec![] };
                let request = DeviceRequest { gpus: gpus.to_vec(), others, capabilities, ..DeviceRequest::default() };
                Source::Files.inject_devices(&mut spec, &request, timeouts_of(0), &paths).await.unwrap();
                let mounts = spec.mounts().clone().unwrap_or_default();
                let ours = mounts.iter().filter(|mount| mount.typ().as_deref() == Some("bind"));
                ours.map(|mount| mount.destination().display().to_string()).collect::<Vec<_>>()
            };
            assert_eq!(mounted(&[GpuSelector::Index(0)], "").await, ["/compute", "/utility"]);
            assert_eq!(mounted(&[GpuSelector::Index(0)], "video,ngx").await, ["/video"]);
            assert_eq!(mounted(&[], "all").await, ["/utility"], "without a GPU only what was granted by name");
        });
    }
}
