//! GPUs for containers: which one asks for which, when they are there, and how they get in.

mod decide;
mod environment;
mod narrow;
mod want;

use std::path::Path;
use std::time::Duration;

use firstlight_boot_record::{Gpu, GpuPhase};
use firstlight_cdi::{DeviceName, Directory, GPU_KIND, apply};
use firstlight_pci::{Address, Kind};
use oci_spec::runtime::Spec;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use ttrpc::Code;

pub use decide::{Decision, Missing, decide};
pub use environment::{Visible, cdi_devices};
pub use want::{Asking, Wants, Which, pci_path, wants};

use crate::clock::now_us;
use crate::error::{Error, Result};
use crate::paths::Paths;

/// What PID 1 has said about the guest's GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Whether the PCI bus has been scanned: before that the list says nothing.
    pub scanned: bool,
    /// In PCI order.
    pub gpus: Vec<Gpu>,
    /// Why nothing more will come.
    pub lost: Option<String>,
}

/// How long GPUs are waited for.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// For one that is on the bus to be ready.
    pub ready: Duration,
    /// For one to be on the bus: the kernel may find it later than the VMM has plugged it in.
    pub plugged: Duration,
}

/// Where GPUs come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// PID 1 attaches them and tells when they are ready.
    Init(watch::Receiver<View>),
    /// There is no PID 1 of ours: what the CDI files say is there.
    Files,
}

impl Source {
    /// Waits until every GPU that is granted, and that the container's environment
    /// leaves it, is ready, and changes the configuration so that the container
    /// has them. Nothing is changed before all are there; dropping the future
    /// leaves nothing behind. Returns what is odd about the request, a sentence each.
    ///
    /// # Errors
    /// `INTERNAL` for a GPU that failed, with its address, step, times and the
    /// driver's words; `DEADLINE_EXCEEDED` when the time is over;
    /// `INVALID_ARGUMENT` for a GPU that the guest does not have.
    pub async fn give(&self, spec: &mut Spec, wants: &Wants, patience: Patience, paths: &Paths) -> Result<Vec<String>> {
        if wants.is_empty() {
            return Ok(Vec::new());
        }
        let gpus = match self {
            Self::Init(view) => Some(ready(view.clone(), wants, patience, &paths.sysfs).await?),
            Self::Files => None,
        };
        let dir = Directory::read(&paths.cdi).map_err(|error| Error::internal(error.to_string()))?;
        let granted: Vec<DeviceName> = match gpus {
            Some(gpus) => {
                let opaque = wants.opaque().map(gpu_name);
                gpus.iter().map(|gpu| name(gpu, &dir)).chain(opaque).collect()
            }
            None => wants.gpus.iter().map(|which| gpu_name(&which.to_string())).collect(),
        };
        // A grant that is nowhere is an error, also where the environment would not use it.
        for name in &granted {
            dir.find(name).map_err(|error| Error::invalid(error.to_string()))?;
        }
        let (left, remarks) = narrow::narrow(granted, &wants.visible, &dir);
        let files = wants.capabilities.devices().filter(|name| !wants.gpus.is_empty() && dir.has(name));
        inject(spec, left.into_iter().chain(wants.others.iter().cloned()).chain(files), &dir, paths)?;
        Ok(wants.remarks.iter().cloned().chain(remarks).collect())
    }
}

fn gpu_name(device: &str) -> DeviceName {
    DeviceName { kind: GPU_KIND.to_owned(), device: device.to_owned() }
}

/// The name under which a GPU is in the files: its address if it has that name, else its index.
fn name(gpu: &Gpu, dir: &Directory) -> DeviceName {
    let by_address = gpu_name(&gpu.pci.to_string());
    if dir.has(&by_address) { by_address } else { gpu_name(&gpu.index.to_string()) }
}

fn inject(spec: &mut Spec, names: impl Iterator<Item = DeviceName>, dir: &Directory, paths: &Paths) -> Result<()> {
    // A copy, so that an error half-way leaves the configuration as it was.
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

/// A GPU that is on the bus and not among those that PID 1 has told of: it was plugged in just now.
fn plugged(sysfs: &Path, view: &View) -> Option<Address> {
    let known = |pci: &Address| view.gpus.iter().any(|gpu| gpu.pci == *pci && gpu.phase != GpuPhase::Removed);
    firstlight_pci::functions_of_kind(sysfs, Kind::Gpu).into_iter().find(|pci| !known(pci))
}

/// Waits for the GPUs, by event.
async fn ready(mut view: watch::Receiver<View>, wants: &Wants, patience: Patience, sysfs: &Path) -> Result<Vec<Gpu>> {
    if wants.gpus.is_empty() {
        return Ok(Vec::new());
    }
    let begin = Instant::now();
    loop {
        let decision = {
            let view = view.borrow_and_update();
            match decide(&view, &wants.visible.before_waiting(&wants.gpus, &view.gpus)) {
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
                // What is plugged in changes the view; nothing else is waited for.
                match timeout_at(begin + patience.plugged, view.changed()).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(_)) | Err(_) => return Err(error),
                }
            }
            Decision::Wait(missing) => missing,
        };
        match timeout_at(begin + patience.ready, view.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => {
                return Err(Error::internal(format!("{}: PID 1 is not connected", missing.describe(now_us()))));
            }
            Err(_) => {
                let waited = begin.elapsed().as_secs_f64();
                let what = missing.describe(now_us());
                let hint =
                    "longer: agent.cdi_timeout on the kernel command line, and the shim's create_container_timeout";
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

    fn within(seconds: u64) -> Patience {
        Patience { ready: Duration::from_secs(seconds), plugged: Duration::from_secs(seconds.min(2)) }
    }

    fn plant(paths: &Paths) {
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

    fn want(which: &[Which]) -> Wants {
        Wants { gpus: which.to_vec(), ..Wants::default() }
    }

    #[test]
    fn one_that_is_plugged_in_just_now_is_waited_for_and_one_that_never_comes_is_not() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            plant(&paths);
            let (sender, view) = watch::channel(View { scanned: true, gpus: vec![], lost: None });
            let source = Source::Init(view);
            let mut spec = Spec::default();
            let begin = Instant::now();
            let wants = want(&[Which::Index(0)]);
            let error = source.give(&mut spec, &wants, within(9), &paths).await.unwrap_err();
            assert_eq!(error.code, Code::INVALID_ARGUMENT);
            assert!((2..9).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
            // On the bus it is waited for as long as any other.
            let function = paths.sysfs.join("bus/pci/devices/0000:01:00.0");
            fs::create_dir_all(&function).unwrap();
            let modalias = "pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00\n";
            fs::write(function.join("modalias"), modalias).unwrap();
            let begin = Instant::now();
            let error = source.give(&mut spec, &wants, within(9), &paths).await.unwrap_err();
            assert_eq!((error.code, begin.elapsed().as_secs()), (Code::DEADLINE_EXCEEDED, 9));
            assert!(error.message.contains("0000:01:00.0 is on the PCI bus"), "{error}");
            let tell = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                sender.send_modify(|view| view.gpus = vec![gpu(0, GpuPhase::Ready)]);
            };
            let (given, ()) = tokio::join!(source.give(&mut spec, &wants, within(9), &paths), tell);
            given.unwrap();
            assert_eq!(minors(&spec), [0]);
        });
    }

    #[test]
    fn a_container_waits_for_its_gpu_only() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            plant(&paths);
            let (sender, view) = watch::channel(View::default());
            let source = Source::Init(view);
            let mut spec = Spec::default();
            let wants = want(&[Which::Index(1)]);
            let give = source.give(&mut spec, &wants, within(9), &paths);
            let boot = async {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let gpus = vec![gpu(0, GpuPhase::Attaching), gpu(1, GpuPhase::Attaching)];
                sender.send_modify(|view| *view = View { scanned: true, gpus, lost: None });
                tokio::time::sleep(Duration::from_secs(1)).await;
                sender.send_modify(|view| view.gpus[1].phase = GpuPhase::Ready);
            };
            let (given, ()) = tokio::join!(give, boot);
            given.unwrap();
            assert_eq!(minors(&spec), [1], "GPU 0 still attaches");
            assert!(spec.process().as_ref().unwrap().env().as_ref().unwrap().contains(&"NVIDIA=1".to_owned()));
        });
    }

    #[test]
    fn the_time_runs_out_with_names() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            let gpus = vec![gpu(0, GpuPhase::Attaching)];
            let (_sender, view) = watch::channel(View { scanned: true, gpus, lost: None });
            let mut spec = Spec::default();
            let wants = want(&[Which::All]);
            let result = Source::Init(view).give(&mut spec, &wants, within(3), &paths).await;
            let error = result.unwrap_err();
            assert_eq!(error.code, Code::DEADLINE_EXCEEDED);
            for part in ["0000:01:00.0", "wait-open-complete", "3.0 s", "agent.cdi_timeout"] {
                assert!(error.message.contains(part), "{error}");
            }
            assert_eq!(spec, Spec::default());
        });
    }

    #[test]
    fn without_pid_1_the_files_count() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            plant(&paths);
            let mut spec = Spec::default();
            let wants = want(&[Which::Pci("0000:01:00.0".parse().unwrap())]);
            Source::Files.give(&mut spec, &wants, within(0), &paths).await.unwrap();
            assert_eq!(minors(&spec), [0]);
            let wants = want(&[Which::Index(7)]);
            let error = Source::Files.give(&mut spec, &wants, within(0), &paths).await.unwrap_err();
            assert!(
                error.message.contains("nvidia.com/gpu=7") && error.message.contains("nvidia.com/gpu=0"),
                "{error}"
            );
        });
    }

    #[test]
    fn a_gpu_that_the_environment_leaves_out_is_not_waited_for() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            plant(&paths);
            let gpus = vec![gpu(0, GpuPhase::Failed), gpu(1, GpuPhase::Ready)];
            let (_sender, view) = watch::channel(View { scanned: true, gpus, lost: None });
            let mut spec = Spec::default();
            let visible = Visible::Only(vec![Which::Index(1), Which::Index(7)]);
            let wants = Wants { gpus: vec![Which::All], visible, ..Wants::default() };
            let remarks = Source::Init(view).give(&mut spec, &wants, within(0), &paths).await.unwrap();
            assert_eq!(minors(&spec), [1]);
            assert!(remarks.len() == 1 && remarks[0].contains("names 7"), "{remarks:?}");
        });
    }

    #[test]
    fn the_drivers_files_come_with_a_grant_and_by_what_is_asked_for() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let paths = Paths::below(root.path());
            plant(&paths);
            let device = |name: &str| {
                format!(
                    r#"{{"name":"{name}","containerEdits":{{"mounts":[{{"hostPath":"/{name}","containerPath":"/{name}"}}]}}}}"#
                )
            };
            let devices = [device("compute"), device("utility"), device("video")].join(",");
            let text = format!(r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/driver","devices":[{devices}]}}"#);
            fs::write(paths.cdi.join("b.json"), text).unwrap();
            let mounted = async |gpus: &[Which], capabilities: &str| {
                let mut spec = Spec::default();
                let capabilities = firstlight_cdi::Capabilities::parse(capabilities).0;
                let others = vec!["nvidia.com/driver=utility".parse().unwrap()];
                let others = if gpus.is_empty() { others } else { vec![] };
                let wants = Wants { gpus: gpus.to_vec(), others, capabilities, ..Wants::default() };
                Source::Files.give(&mut spec, &wants, within(0), &paths).await.unwrap();
                let mounts = spec.mounts().clone().unwrap_or_default();
                let ours = mounts.iter().filter(|mount| mount.typ().as_deref() == Some("bind"));
                ours.map(|mount| mount.destination().display().to_string()).collect::<Vec<_>>()
            };
            assert_eq!(mounted(&[Which::Index(0)], "").await, ["/compute", "/utility"]);
            assert_eq!(mounted(&[Which::Index(0)], "video,ngx").await, ["/video"]);
            assert_eq!(mounted(&[], "all").await, ["/utility"], "without a GPU only what was granted by name");
        });
    }
}
