//! What is added to a guest that runs: processors that the host plugs in, and
//! modules that a shim asks for.

use std::time::{Duration, Instant};

use firstlight::agent::Agent;
use firstlight_agent_api::agent::{
    CreateContainerRequest, CreateSandboxRequest, GetMetricsRequest, KernelModule, OnlineCPUMemRequest,
};
use tokio::time::sleep;
use ttrpc::context::with_duration;

use crate::support::{CALL, Files, booted, ended, output, started};

/// Begins a sandbox with this module; why it was refused.
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

#[test]
fn modules_are_loaded_for_a_sandbox_and_processors_are_used_when_they_come() {
    let files = Files::make();
    // Says how many processors it may use, and again when there are three.
    let counting = "nproc; n=0; until [ \"$(nproc)\" -ge 3 ] || [ $n -ge 600 ]; do sleep 0.1; n=$((n+1)); done; nproc";
    let bound = |id: &str, script: &str, list: &str| -> CreateContainerRequest {
        let mut request = files.request(id, script, &[]);
        let linux = request.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
        linux.Resources.mut_or_insert_default().CPU.mut_or_insert_default().Cpus = list.into();
        request
    };
    let mut scenario = files.scenario("storages", Vec::new()).parameter("firstlight.lockdown=off");
    scenario.guest.spare_cpus = 2;
    scenario.watched(async |vm| {
        let agent = booted(vm).await;
        let error = sandbox_with_module(&agent, "no-such-module", &[]).await.unwrap_err();
        assert!(error.contains("no-such-module") && error.contains("modules.dep"), "{error}");
        let error = sandbox_with_module(&agent, "dummy", &["numdummies=many"]).await.unwrap_err();
        assert!(error.contains("module dummy") && error.contains("Invalid argument"), "{error}");
        // What failed has left nothing: the sandbox can be had.
        sandbox_with_module(&agent, "dummy", &["numdummies=3"]).await.unwrap();
        let said = output(&agent, &files.request("net", "ls /sys/class/net; ls -d /sys/module/dummy", &[])).await;
        assert_eq!(said, "dummy0\ndummy1\ndummy2\nlo\n/sys/module/dummy\n");

        // A shim asks when it has asked the VMM, and the guest may see the processor later.
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
        println!("  a processor was plugged in after 1 s and online after {:?}", begin.elapsed());
        std::fs::write(files.shared().join("two/rootfs/go"), "").unwrap();
        assert_eq!(ended(&agent, "all").await, "2\n3\n");
        assert_eq!(ended(&agent, "list").await, "2\n3\n");
        assert_eq!(ended(&agent, "two").await, "2\n", "its list has no third one");
        let metrics = agent.calls().get_metrics(with_duration(CALL), &GetMetricsRequest::default()).await.unwrap();
        let has = |cpu: u32| metrics.metrics.contains(&format!("kata_guest_cpu_time{{cpu=\"{cpu}\""));
        assert!(has(2) && !has(3), "{}", metrics.metrics);

        // One that was not plugged in is told of.
        let error = online(&agent, 4).await.unwrap_err();
        assert!(error.contains("3 of 4 CPUs") && error.contains("plugged in"), "{error}");
        monitor.plug_cpus(1).await.unwrap();
        online(&agent, 4).await.unwrap();
        let said = output(&agent, &files.request("four", "nproc; cat /sys/devices/system/cpu/online", &[])).await;
        assert_eq!(said, "4\n0-3\n");
    });
}
