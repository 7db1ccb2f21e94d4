//! Additions to a running guest: CPUs and memory that the host hot-plugs, and
//! kernel modules that a shim requests.

use std::time::{Duration, Instant};

use firstlight::agent::Agent;
use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, GetMetricsRequest, GuestDetailsRequest, KernelModule,
    OnlineCPUMemRequest, UpdateContainerRequest,
};
use firstlight_agent_api::oci::LinuxResources;
use firstlight_vm::Qmp;
use tokio::time::sleep;
use ttrpc::context::with_duration;

use crate::support::{CALL, Files, booted, ended, output, started};

/// Creates a sandbox that requests a kernel module; returns the error's text.
pub(crate) async fn sandbox_with_module(agent: &Agent, name: &str, parameters: &[&str]) -> Result<(), String> {
    let module = KernelModule {
        name: name.into(),
        parameters: parameters.iter().map(|one| (*one).into()).collect(),
        ..Default::default()
    };
    let request = CreateSandboxRequest {
        sandbox_id: "sandbox".into(),
        storages: firstlight::agent::sandbox_storages(),
        kernel_modules: vec![module],
        ..Default::default()
    };
    let call = agent.calls().create_sandbox(with_duration(CALL), &request).await;
    call.map(drop).map_err(|error| error.to_string())
}

async fn online(agent: &Agent, count: u32) -> Result<(), String> {
    let request = OnlineCPUMemRequest { nb_cpus: count, cpu_only: true, ..Default::default() };
    let call = agent.calls().online_cpu_mem(with_duration(CALL), &request).await;
    call.map(drop).map_err(|error| error.to_string())
}

/// Calls OnlineCPUMem as a shim does after it has hot-plugged memory, or with `cpu_only` after hot-plugging CPUs.
async fn online_memory(agent: &Agent, cpu_only: bool) {
    let request = OnlineCPUMemRequest { wait: true, cpu_only, ..Default::default() };
    agent.calls().online_cpu_mem(with_duration(CALL), &request).await.unwrap();
}

/// The guest's memory, as a container sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    total_kib: u64,
    /// Memory blocks that are online, and those that are offline.
    online: u64,
    offline: u64,
}

impl Memory {
    async fn of(files: &Files, agent: &Agent) -> Self {
        let script = "sed -n 's/^MemTotal: *\\([0-9]*\\) kB$/\\1/p' /proc/meminfo
            cd /sys/devices/system/memory; cat memory*/state | grep -cx online; cat memory*/state | grep -cx offline";
        let said = output(agent, &files.request("look", script, &[])).await;
        let numbers: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
        let [total_kib, online, offline] = numbers.try_into().unwrap();
        Self { total_kib, online, offline }
    }

    /// Polls until `so` returns true, at most 20 s; returns the last state.
    async fn until(files: &Files, agent: &Agent, so: impl Fn(Self) -> bool) -> Self {
        let begin = Instant::now();
        loop {
            let memory = Self::of(files, agent).await;
            if so(memory) || begin.elapsed() > Duration::from_secs(20) {
                return memory;
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Sizes of the memory modules, MiB: the first is hot-plugged before OnlineCPUMem, the second after it.
const MODULE: u32 = 512;
const LATER: u32 = 128;

async fn assert_hot_plugged_memory_comes_online(files: &Files, agent: &Agent, monitor: &mut Qmp) {
    let asked = GuestDetailsRequest { mem_block_size: true, mem_hotplug_probe: true, ..Default::default() };
    let details = agent.calls().get_guest_details(with_duration(CALL), &asked).await.unwrap();
    let block = details.mem_block_size_bytes;
    let said = "cd /sys/devices/system/memory; cat block_size_bytes auto_online_blocks; ls -d probe";
    let said = output(agent, &files.request("block", said, &[])).await;
    assert_eq!(said, format!("{block:x}\noffline\n"), "and no probe: {details:?}");
    assert!(!details.support_mem_hotplug_probe);
    assert!(block > 0 && u64::from(LATER) << 20 >= block, "a module is at least a block of {block} bytes");
    let blocks = |mib: u32| (u64::from(mib) << 20) / block;

    // Without new memory the call changes nothing.
    let old = Memory::of(files, agent).await;
    online_memory(agent, true).await;
    assert_eq!((Memory::of(files, agent).await, old.offline), (old, 0));

    // A container that fills one buffer larger than the guest's initial memory, and prints whether that succeeded.
    let much = old.total_kib / 1024 + 64;
    let script = format!(
        "n=0; until [ -e /go ] || [ $n -ge 600 ]; do sleep 0.1; n=$((n+1)); done
        dd if=/dev/zero of=/dev/null bs={much}M count=1 2>/dev/null && echo filled || echo refused"
    );
    let mut request = files.request("much", &script, &[]);
    let limit = |mib: u64| LinuxResources {
        Memory: Some(firstlight_agent_api::oci::LinuxMemory {
            Limit: i64::try_from(mib << 20).unwrap(),
            ..Default::default()
        })
        .into(),
        ..Default::default()
    };
    let linux = request.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
    linux.Resources.mut_or_insert_default().Memory = limit(64).Memory;
    started(agent, &request).await;

    // The kernel leaves new memory offline, and so does a call with cpu_only.
    monitor.plug_memory(MODULE).await.unwrap();
    let found = Memory::until(files, agent, |now| now.offline >= blocks(MODULE)).await;
    assert_eq!(found, Memory { offline: blocks(MODULE), ..old });
    online_memory(agent, true).await;
    assert_eq!(Memory::of(files, agent).await, found);

    let all =
        Memory { total_kib: old.total_kib + u64::from(MODULE) * 1024, online: old.online + blocks(MODULE), offline: 0 };
    for _ in 0..2 {
        let begin = Instant::now();
        online_memory(agent, false).await;
        println!("  OnlineCPUMem for {MODULE} MiB took {:?}", begin.elapsed());
        assert_eq!(Memory::of(files, agent).await, all);
    }

    let raised = limit(much + 128);
    let update =
        UpdateContainerRequest { container_id: "much".into(), resources: Some(raised).into(), ..Default::default() };
    agent.calls().update_container(with_duration(CALL), &update).await.unwrap();
    std::fs::write(files.shared().join("much/rootfs/go"), "").unwrap();
    assert_eq!(ended(agent, "much").await, "filled\n");

    // The VMM replies before the guest has detected the memory, so the call may precede the memory.
    online_memory(agent, false).await;
    monitor.plug_memory(LATER).await.unwrap();
    let later =
        Memory { total_kib: all.total_kib + u64::from(LATER) * 1024, online: all.online + blocks(LATER), offline: 0 };
    assert_eq!(Memory::until(files, agent, |now| now == later).await, later);

    // A module beyond the VM's maximum is rejected, and the guest's memory is unchanged.
    let error = monitor.plug_memory(LATER).await.unwrap_err().to_string();
    assert!(error.contains("device_add"), "{error}");
    assert_eq!(Memory::of(files, agent).await, later);
}

#[test]
fn sandbox_modules_are_loaded_and_hot_plugged_cpus_and_memory_come_online() {
    let files = Files::make();
    // Prints the number of CPUs, and again when there are three.
    let counting = "nproc; n=0; until [ \"$(nproc)\" -ge 3 ] || [ $n -ge 600 ]; do sleep 0.1; n=$((n+1)); done; nproc";
    let bound = |id: &str, script: &str, list: &str| -> CreateContainerRequest {
        let mut request = files.request(id, script, &[]);
        let linux = request.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
        linux.Resources.mut_or_insert_default().CPU.mut_or_insert_default().Cpus = list.into();
        request
    };
    let mut scenario = files
        .scenario("storages", Vec::new())
        .parameter("firstlight.lockdown=off")
        // The agent must bring memory online, not the kernel.
        .parameter("memhp_default_state=offline");
    scenario.guest.spare_cpus = 2;
    scenario.guest.memory_mib = 768;
    scenario.guest.spare_memory_mib = MODULE + LATER;
    scenario.watched(async |vm| {
        let agent = booted(vm).await;
        let error = sandbox_with_module(&agent, "no-such-module", &[]).await.unwrap_err();
        assert!(error.contains("no-such-module") && error.contains("modules.dep"), "{error}");
        let error = sandbox_with_module(&agent, "dummy", &["numdummies=many"]).await.unwrap_err();
        assert!(error.contains("module dummy") && error.contains("Invalid argument"), "{error}");
        // The failed requests left no state: the sandbox can be created.
        sandbox_with_module(&agent, "dummy", &["numdummies=3"]).await.unwrap();
        let said = output(&agent, &files.request("net", "ls /sys/class/net; ls -d /sys/module/dummy", &[])).await;
        assert_eq!(said, "dummy0\ndummy1\ndummy2\nlo\n/sys/module/dummy\n");

        // A shim calls OnlineCPUMem when the VMM has replied; the guest may detect the CPU later.
        started(&agent, &files.request("all", counting, &[])).await;
        started(&agent, &bound("list", counting, "0-2")).await;
        started(
            &agent,
            &bound("two", "n=0; until [ -e /go ] || [ $n -ge 600 ]; do sleep 0.1; n=$((n+1)); done; nproc", "0-1"),
        )
        .await;
        let mut monitor = vm.monitor().await.unwrap();
        let plugged = async {
            sleep(Duration::from_secs(1)).await;
            monitor.plug_cpus(1).await.unwrap();
        };
        let begin = Instant::now();
        let (asked, ()) = tokio::join!(online(&agent, 3), plugged);
        asked.unwrap();
        println!("  a CPU was hot-plugged after 1 s and online after {:?}", begin.elapsed());
        std::fs::write(files.shared().join("two/rootfs/go"), "").unwrap();
        assert_eq!(ended(&agent, "all").await, "2\n3\n");
        assert_eq!(ended(&agent, "list").await, "2\n3\n");
        assert_eq!(ended(&agent, "two").await, "2\n", "its CPU list has no third CPU");
        let metrics = agent.calls().get_metrics(with_duration(CALL), &GetMetricsRequest::default()).await.unwrap();
        let has = |cpu: u32| metrics.metrics.contains(&format!("kata_guest_cpu_time{{cpu=\"{cpu}\""));
        assert!(has(2) && !has(3), "{}", metrics.metrics);

        // A CPU that was not hot-plugged is an error.
        let error = online(&agent, 4).await.unwrap_err();
        assert!(error.contains("3 of 4 CPUs") && error.contains("plugged in"), "{error}");
        monitor.plug_cpus(1).await.unwrap();
        online(&agent, 4).await.unwrap();
        let said = output(&agent, &files.request("four", "nproc; cat /sys/devices/system/cpu/online", &[])).await;
        assert_eq!(said, "4\n0-3\n");

        assert_hot_plugged_memory_comes_online(&files, &agent, &mut monitor).await;
    });
}
