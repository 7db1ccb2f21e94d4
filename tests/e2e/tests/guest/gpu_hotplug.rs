//! GPUs that are added and removed while the guest runs.

use std::time::Duration;

use firstlight::agent::Agent;
use firstlight_agent_api::agent::CreateContainerRequest;
use firstlight_boot_record::{BootRecord, Gpu, GpuPhase};
use firstlight_e2e::Scenario;
use firstlight_lab::h100;
use firstlight_vm::{Device, Vm};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Files, output, ready, refused};

/// The debug console's vsock port.
pub(crate) const CONSOLE: u32 = 1026;

/// Timeout of waits that do not include an attach.
const TIMEOUT: Duration = Duration::from_secs(60);

fn scenario(files: &Files, at_boot: usize, spare: usize) -> Scenario {
    let mut scenario = files.scenario("with-shell", Vec::new());
    scenario.guest.devices = vec![h100(Duration::from_secs(2)); at_boot];
    scenario.guest.spare_gpus = vec![h100(Duration::from_secs(2)); spare];
    scenario.parameter("agent.debug_console").parameter(&format!("agent.debug_console_vport={CONSOLE}"))
}

/// Hot-plugs these devices at their ports.
pub(crate) async fn plug(vm: &Vm, spare: &[(usize, Device)]) {
    let mut monitor = vm.monitor().await.unwrap();
    for (port, device) in spare {
        monitor.plug(*port, device).await.unwrap();
    }
}

/// Polls the record until `condition` holds; returns it.
pub(crate) async fn record_when(agent: &Agent, what: &str, condition: impl Fn(&BootRecord) -> bool) -> BootRecord {
    let begin = Instant::now();
    loop {
        let record = agent.boot_record().await.unwrap();
        if condition(&record) {
            return record;
        }
        assert!(begin.elapsed() < TIMEOUT, "{what}: {:#?} {:#?}", record.gpus, record.events);
        sleep(Duration::from_millis(100)).await;
    }
}

fn phases(record: &BootRecord) -> Vec<GpuPhase> {
    record.gpus.iter().map(|gpu| gpu.phase).collect()
}

/// Runs a line in a shell on the debug console, outside of all containers; returns its output.
pub(crate) async fn shell(vm: &Vm, line: &str) -> String {
    shell_within(vm, line, TIMEOUT).await
}

/// Like [`shell`], with a timeout.
pub(crate) async fn shell_within(vm: &Vm, line: &str, limit: Duration) -> String {
    let mut console = vm.connect(CONSOLE, TIMEOUT).await.unwrap();
    console.write_all(format!("stty -echo; {line}; echo end=$((1+1))\n").as_bytes()).await.unwrap();
    let (mut text, mut buffer) = (String::new(), [0; 1024]);
    let read = async {
        while !text.contains("end=2") {
            let len = console.read(&mut buffer).await.unwrap();
            assert!(len > 0, "{line}: the shell ended: {text:?}");
            text.push_str(&String::from_utf8_lossy(&buffer[..len]));
        }
    };
    let in_time = timeout(limit, read).await.is_ok();
    assert!(in_time, "{line}: {text:?}");
    console.shutdown().await.unwrap();
    let _ = timeout(TIMEOUT, console.read_to_end(&mut Vec::new())).await;
    text
}

/// Returns a request for a container with this GPU, which lists and opens its GPU nodes.
pub(crate) fn container(files: &Files, id: &str, gpu: &str) -> CreateContainerRequest {
    let mut request = files.request(id, "ls /dev | grep '^nvidia[0-9]'; : < /dev/nvidia0 && echo opened", &[]);
    let annotations = &mut request.OCI.mut_or_insert_default().Annotations;
    annotations.insert("cdi.k8s.io/vfio0".to_owned(), format!("nvidia.com/gpu={gpu}"));
    request
}

fn pci(gpu: &Gpu) -> String {
    gpu.pci.to_string()
}

#[test]
fn hot_plugged_gpus_are_attached_and_removed_gpus_are_released() {
    let files = Files::make();
    scenario(&files, 1, 2).watched_with(async |vm, spare| {
        let agent = ready(vm).await;
        record_when(&agent, "the boot has ended", |record| phases(record) == [GpuPhase::Ready]).await;
        plug(vm, spare).await;
        // Requested before the guest's driver has detected it.
        let said = output(&agent, &container(&files, "early", "0000:02:00.0")).await;
        assert_eq!(said.lines().count(), 1, "its own GPU and no other: {said}");
        let record = record_when(&agent, "three are ready", |record| phases(record) == [GpuPhase::Ready; 3]).await;
        // In the order in which the guest detected them.
        let at =
            |record: &BootRecord, pci: &str| record.gpus.iter().position(|gpu| gpu.pci.to_string() == pci).unwrap();
        let (second, third) = (&record.gpus[at(&record, "0000:02:00.0")], &record.gpus[at(&record, "0000:03:00.0")]);
        assert_eq!((record.gpus[0].index, second.index, third.index), (0, 1, 2), "{:#?}", record.gpus);
        assert!(third.start_us < second.end_us && second.start_us < third.end_us, "both in the driver at once");
        assert_eq!(record.events.iter().filter(|event| event.kind == "gpu-hotplugged").count(), 2);
        let node = |gpu: &Gpu| format!("nvidia{}\n", gpu.minor.unwrap());
        assert_eq!(output(&agent, &container(&files, "third", "2")).await, node(third));
        assert_ne!(node(second), node(third));

        // As in an orderly unplug by the host; the driver waits until no process has the GPU open.
        let gone = pci(second);
        let removed = shell(vm, &format!("echo 1 > /sys/bus/pci/devices/{gone}/remove; echo code=$?")).await;
        assert!(removed.contains("code=0"), "{removed:?}");
        let place = at(&record, &gone);
        let left =
            record_when(&agent, "the removed GPU is released", |record| record.gpus[place].phase == GpuPhase::Removed)
                .await;
        assert_eq!(left.gpus[0].phase, GpuPhase::Ready);
        let third_now = &left.gpus[at(&left, "0000:03:00.0")];
        assert_eq!(
            (third_now.phase, third_now.index),
            (GpuPhase::Ready, 1),
            "indices follow the order of the GPUs that are present"
        );
        let error = refused(&agent, &container(&files, "gone", &gone)).await;
        assert!(error.contains("unbound") || error.contains("removed from the guest"), "{error}");
        assert!(error.contains(&gone), "{error}");
        let files_of = shell(vm, "cat /var/run/cdi/nvidia.json; ls /dev").await;
        assert!(!files_of.contains(&gone) && files_of.contains(&pci(third)), "{files_of}");
        assert!(!files_of.split_whitespace().any(|name| name == node(second).trim()), "its node is gone: {files_of}");

        // After a rescan it has its former name and index.
        shell(vm, "echo 1 > /sys/bus/pci/rescan").await;
        let record =
            record_when(&agent, "the removed GPU is ready again", |record| phases(record) == [GpuPhase::Ready; 3])
                .await;
        assert_eq!((pci(&record.gpus[place]), record.gpus[place].index), (gone, 1));
        assert_eq!(output(&agent, &container(&files, "again", "1")).await, node(&record.gpus[place]));
        assert_eq!(output(&agent, &container(&files, "first", "0")).await, "nvidia0\nopened\n");
    });
}

#[test]
fn first_gpu_can_be_hot_plugged_with_gpu_hotplug_on() {
    let files = Files::make();
    let locked = "cat /proc/sys/kernel/modules_disabled";
    scenario(&files, 0, 1).parameter("firstlight.gpu-hotplug=on").watched_with(async |vm, spare| {
        let agent = ready(vm).await;
        assert!(shell(vm, locked).await.contains("0\r\n"), "modules can be loaded");
        plug(vm, spare).await;
        let record = record_when(&agent, "the GPU is ready", |record| phases(record) == [GpuPhase::Ready]).await;
        assert_eq!(record.mode.as_ref().map(|mode| mode.name.as_str()), Some("gpu"));
        assert_eq!(output(&agent, &container(&files, "c1", "0")).await, "nvidia0\nopened\n");
        assert!(shell(vm, locked).await.contains("1\r\n"), "no more modules");
    });
}

#[test]
fn first_gpu_hot_plugged_without_the_parameter_fails_and_names_it() {
    let files = Files::make();
    scenario(&files, 0, 1).watched_with(async |vm, spare| {
        let agent = ready(vm).await;
        plug(vm, spare).await;
        let record = record_when(&agent, "the GPU has failed", |record| phases(record) == [GpuPhase::Failed]).await;
        let detail = &record.gpus[0].detail;
        assert!(detail.contains("firstlight.gpu-hotplug=on") && detail.contains(&pci(&record.gpus[0])), "{detail}");
        let error = refused(&agent, &container(&files, "c1", "0")).await;
        assert!(error.contains("firstlight.gpu-hotplug=on"), "{error}");
    });
}
