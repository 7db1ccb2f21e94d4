//! Containers that request GPUs; the test stands in for PID 1.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{Agent, short, spec, with_containers};
use firstlight_agent_api::firstlight::GetBootRecordRequest;
use firstlight_agent_api::firstlight_ttrpc::BootRecordClient;
use firstlight_boot_record::{BootRecord, DriverCode, GpuPhase};
use firstlight_init_control::{FromInit, GpuState, ToInit, decode, encode};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixListener;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use ttrpc::{Code, Error};

/// The kernel's log stands in for a GPU: an existing character device that containers cannot open by default.
const CDI: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[
 {"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","type":"c","major":1,"minor":11,"permissions":"rw"}]}},
 {"name":"9","containerEdits":{"hooks":[{"hookName":"createContainer","path":"/usr/bin/nvidia-ctk"}]}}],
 "containerEdits":{"env":["NVIDIA_VISIBLE_DEVICES=void"]}}"#;

pub(crate) struct Init {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl Init {
    async fn receive(&mut self) -> ToInit {
        let line = tokio::time::timeout(Duration::from_secs(10), self.lines.next_line()).await.unwrap();
        decode(line.unwrap().unwrap().as_bytes()).unwrap()
    }

    pub(crate) async fn publish(&mut self, scanned: bool, gpus: Vec<GpuState>) {
        self.writer.write_all(&encode(&FromInit::Gpus { scanned, gpus }).unwrap()).await.unwrap();
    }
}

async fn boot() -> (Agent, Init) {
    boot_with(CDI, "").await
}

/// Starts an agent with a stand-in PID 1 that has published these CDI devices, and with this kernel command line
/// unless it is empty. Its PCI bus is empty, so the machine's own GPUs are not visible.
pub(crate) async fn boot_with(cdi: &str, command_line: &str) -> (Agent, Init) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let control = path.display().to_string();
    let line = dir.path().join("cmdline");
    fs::write(&line, command_line).unwrap();
    let line = if command_line.is_empty() { String::new() } else { line.display().to_string() };
    let bus = dir.path().join("pci");
    fs::create_dir(&bus).unwrap();
    let bus = bus.display().to_string();
    let environment = [("FIRSTLIGHT_CONTROL", control.as_str()), ("CMDLINE", line.as_str()), ("PCI", bus.as_str())];
    let (agent, connected) = tokio::join!(Agent::start_in(dir, &environment), listener.accept());
    let (reader, writer) = connected.unwrap().0.into_split();
    let mut init = Init { lines: BufReader::new(reader).lines(), writer };
    assert_eq!(init.receive().await, ToInit::Subscribe);
    assert!(matches!(init.receive().await, ToInit::Listening { at_us: 1.. }));
    let dir = agent.inside("/run/cdi");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("nvidia.json"), cdi).unwrap();
    (agent, init)
}

pub(crate) fn gpu(index: u32, phase: GpuPhase) -> GpuState {
    GpuState {
        pci: format!("0000:{:02x}:00.0", index + 1).parse().unwrap(),
        index,
        phase,
        step: "wait-open-complete".into(),
        attempts: 1,
        start_us: Some(1),
        end_us: None,
        attach_us: None,
        driver: None,
        detail: String::new(),
    }
}

fn asking(root: &Path, script: &str, name: &str) -> firstlight_agent_api::oci::Spec {
    let mut spec = spec(root, script);
    spec.Annotations.insert("cdi.k8s.io/vfio0".into(), name.into());
    spec
}

fn status(error: Error) -> (Code, String) {
    match error {
        Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn create_waits_for_its_gpu_and_gets_no_other() {
    with_containers(async || {
        let (agent, mut init) = boot().await;
        agent.sandbox().await;
        // A container without GPUs does not wait, although the bus is not scanned yet.
        // The node is in the container's own /dev, so only the device filter can deny the open.
        agent.run("c1", "mknod /dev/g c 1 11; (: > /dev/g) 2>&1 | grep -o 'Operation not permitted'; exit 5").await;
        assert_eq!(agent.output("c1", "").await, "Operation not permitted\n");
        assert_eq!(agent.wait("c1", "").await.unwrap(), 5);

        let root = agent.root("c2");
        let script = "(: > /dev/nvidia0) && echo open; env | grep NVIDIA";
        let begin = Instant::now();
        let create = agent.create(asking(&root, script, "nvidia.com/gpu=0"), "c2");
        let attach = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            init.publish(true, vec![gpu(0, GpuPhase::Attaching), gpu(1, GpuPhase::Attaching)]).await;
            tokio::time::sleep(Duration::from_millis(300)).await;
            init.publish(true, vec![gpu(0, GpuPhase::Ready), gpu(1, GpuPhase::Attaching)]).await;
        };
        let (created, ()) = tokio::join!(create, attach);
        created.unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(600));
        agent.begin("c2").await;
        assert_eq!(agent.output("c2", "").await, "open\nNVIDIA_VISIBLE_DEVICES=void\n");
        assert_eq!(agent.wait("c2", "").await.unwrap(), 0);

        // PID 1 has received all events.
        let mut events = Vec::new();
        while events.len() < 6 {
            if let ToInit::Event { kind: what, object, detail, .. } = init.receive().await {
                events.push(format!("{what} {object} {detail}").trim_end().to_owned());
            }
        }
        let life = |id: &str, code: u32| {
            [
                format!("container-created {id}"),
                format!("container-started {id}"),
                format!("container-exited {id} code {code}"),
            ]
        };
        assert_eq!(events, [life("c1", 5), life("c2", 0)].concat());
    });
}

#[test]
fn errors_name_the_gpu_and_the_cause() {
    with_containers(async || {
        let (agent, mut init) = boot().await;
        let mut broken = gpu(0, GpuPhase::Failed);
        broken.end_us = Some(3_500_001);
        broken.driver = Some(DriverCode { rc: -5, adapter_status: 0x62 });
        broken.detail = "RmInitAdapter failed!".into();
        init.publish(true, vec![broken, gpu(1, GpuPhase::Attaching), gpu(9, GpuPhase::Ready)]).await;
        let root = agent.root("c1");

        let failed = agent.create(asking(&root, "true", "nvidia.com/gpu=0"), "c1").await.unwrap_err();
        let (code, text) = status(failed);
        assert_eq!(code, Code::INTERNAL);
        for part in ["c1", "0000:01:00.0", "wait-open-complete", "3.5 s", "rc -5", "0x62", "RmInitAdapter failed!"] {
            assert!(text.contains(part), "{text}");
        }

        // An expired deadline reports the GPU's name, not only a timeout.
        let mut request = firstlight_agent_api::agent::CreateContainerRequest::new();
        request.container_id = "c1".into();
        request.OCI = Some(asking(&root, "true", "nvidia.com/gpu=0000:02:00.0")).into();
        let deadline = ttrpc::context::with_duration(Duration::from_secs(1));
        let (code, text) = status(agent.calls.create_container(deadline, &request).await.unwrap_err());
        assert!(code == Code::DEADLINE_EXCEEDED && text.contains("0000:02:00.0") && text.contains("0.8 s"), "{text}");

        let unknown = agent.create(asking(&root, "true", "nvidia.com/gpu=7"), "c1").await.unwrap_err();
        assert_eq!(status(unknown).0, Code::INVALID_ARGUMENT);
        let hook = agent.create(asking(&root, "true", "nvidia.com/gpu=9"), "c1").await.unwrap_err();
        assert!(status(hook).1.contains("nvidia-ctk"));
        // The pause container has the annotations too, and gets no GPU.
        let mut pause = asking(&root, "exit 0", "nvidia.com/gpu=0");
        pause.Annotations.insert("io.katacontainers.pkg.oci.container_type".into(), "pod_sandbox".into());
        agent.create(pause, "c1").await.unwrap();
    });
}

#[test]
fn boot_record_is_served_and_destroy_sandbox_powers_off() {
    with_containers(async || {
        let (agent, mut init) = boot().await;
        let address = format!("unix://{}", agent.dir.path().join("agent.sock").display());
        let records = BootRecordClient::new(ttrpc::r#async::Client::connect(&address).await.unwrap());
        let request = GetBootRecordRequest::new();
        let ask = records.get(short(), &request);
        let answer = async {
            let ToInit::Record { id } = init.receive().await else { panic!("expected a request for the record") };
            let mut record = BootRecord::new("test", 1);
            record.kernel.command_line = "x".repeat(100_000);
            init.writer.write_all(&encode(&FromInit::Record { id, record: Box::new(record) }).unwrap()).await.unwrap();
        };
        let (record, ()) = tokio::join!(ask, answer);
        assert_eq!(BootRecord::from_json(&record.unwrap().json).unwrap().kernel.command_line.len(), 100_000);

        agent.calls.destroy_sandbox(short(), &Default::default()).await.unwrap();
        assert!(matches!(init.receive().await, ToInit::PowerOff { reason } if reason.contains("DestroySandbox")));
        assert!(!agent.pids().is_empty(), "PID 1 powers off the guest; the agent does not exit");
    });
}
