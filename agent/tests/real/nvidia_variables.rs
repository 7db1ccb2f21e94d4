//! NVIDIA's environment variables of a container: they select among granted devices. The device numbers are those
//! of real GPUs without a driver, so an open that the device filter allows fails with another error than EPERM.

use std::fs;

use crate::gpus::{Init, boot_with, gpu};
use crate::support::{Agent, spec, with_containers};
use firstlight_boot_record::GpuPhase;

/// Three GPUs by index; two of them also by PCI address and by UUID-like names.
const CDI: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[
 {"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0,"permissions":"rw"}]}},
 {"name":"1","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia1","type":"c","major":195,"minor":1,"permissions":"rw"}]}},
 {"name":"2","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia2","type":"c","major":195,"minor":2,"permissions":"rw"}]}},
 {"name":"GPU-1","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia1","type":"c","major":195,"minor":1,"permissions":"rw"}]}},
 {"name":"0000:02:00.0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia1","type":"c","major":195,"minor":1,"permissions":"rw"}]}},
 {"name":"0000:03:00.0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia2","type":"c","major":195,"minor":2,"permissions":"rw"}]}},
 {"name":"GPU-2","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia2","type":"c","major":195,"minor":2,"permissions":"rw"}]}}]}"#;

/// The driver's files by capability.
const FILES: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/driver","devices":[
 {"name":"compute","containerEdits":{"mounts":[{"hostPath":"/run/cdi/libcuda","containerPath":"/usr/lib64/libcuda.so.1"}]}},
 {"name":"utility","containerEdits":{"mounts":[{"hostPath":"/run/cdi/libml","containerPath":"/usr/lib64/libnvidia-ml.so.1"}]}},
 {"name":"video","containerEdits":{"mounts":[{"hostPath":"/run/cdi/libcuvid","containerPath":"/usr/lib64/libnvcuvid.so.1"}]}}]}"#;

/// Prints the minors that the device filter allows, the nodes in `/dev` and the libraries.
const SCRIPT: &str = r#"for minor in 0 1 2; do
  mknod /dev/probe$minor c 195 $minor
  case "$( { : < /dev/probe$minor; } 2>&1 )" in
    *"Operation not permitted"*) ;;
    *) echo "passed $minor" ;;
  esac
done
ls /dev | grep nvidia
[ -e /usr/lib64 ] && ls /usr/lib64
true"#;

async fn boot(command_line: &str) -> (Agent, Init) {
    let (agent, mut init) = boot_with(CDI, command_line).await;
    let dir = agent.inside("/run/cdi");
    fs::write(dir.join("nvidia-driver.json"), FILES).unwrap();
    for file in ["libcuda", "libml", "libcuvid"] {
        fs::write(dir.join(file), "").unwrap();
    }
    init.publish(true, (0..3).map(|index| gpu(index, GpuPhase::Ready)).collect()).await;
    agent.sandbox().await;
    (agent, init)
}

/// Returns the devices and files of a container with these granted GPUs and these variables.
async fn sees(agent: &Agent, id: &str, granted: &str, env: &[&str]) -> Vec<String> {
    let root = agent.root(id);
    let mut spec = spec(&root, SCRIPT);
    if !granted.is_empty() {
        spec.Annotations.insert("cdi.k8s.io/vfio0".into(), granted.into());
    }
    spec.Process.mut_or_insert_default().Env.extend(env.iter().map(|entry| (*entry).to_owned()));
    agent.create(spec, id).await.unwrap();
    agent.begin(id).await;
    let output = agent.output(id, "").await;
    assert_eq!(agent.wait(id, "").await.unwrap(), 0, "{output}");
    agent.remove(id).await.unwrap();
    output.lines().map(str::to_owned).collect()
}

#[test]
fn naming_a_gpu_that_is_not_granted_opens_nothing() {
    with_containers(async || {
        let (agent, _init) = boot("").await;
        let default = ["libcuda.so.1", "libnvidia-ml.so.1"];
        for (at, named) in ["2", "GPU-2", "0000:03:00.0", "none"].iter().enumerate() {
            let variable = format!("NVIDIA_VISIBLE_DEVICES={named}");
            let seen = sees(&agent, &format!("other{at}"), "nvidia.com/gpu=0", &[&variable]).await;
            assert_eq!(seen, default, "{named}: no node, and none opens after mknod");
        }
        let seen = sees(&agent, "all", "nvidia.com/gpu=0", &["NVIDIA_VISIBLE_DEVICES=all"]).await;
        assert_eq!(seen, ["passed 0", "nvidia0", default[0], default[1]], "all means all granted GPUs");
        let every = ["NVIDIA_VISIBLE_DEVICES=all", "VISIBLE_CDI_DEVICES=nvidia.com/gpu=all"];
        let seen = sees(&agent, "nothing", "", &every).await;
        assert!(seen.is_empty(), "variables grant nothing by default: {seen:?}");
    });
}

#[test]
fn variables_select_among_granted_gpus() {
    with_containers(async || {
        let (agent, _init) = boot("").await;
        let both = "nvidia.com/gpu=0,nvidia.com/gpu=1";
        for (at, named) in ["1", "GPU-1", "0000:02:00.0", "1,2,GPU-2"].iter().enumerate() {
            let variable = format!("NVIDIA_VISIBLE_DEVICES={named}");
            let seen =
                sees(&agent, &format!("one{at}"), both, &[&variable, "NVIDIA_DRIVER_CAPABILITIES=utility"]).await;
            assert_eq!(seen, ["passed 1", "nvidia1", "libnvidia-ml.so.1"], "{named}");
        }
        let seen = sees(&agent, "both", both, &["NVIDIA_DRIVER_CAPABILITIES=all"]).await;
        let files = ["libcuda.so.1", "libnvcuvid.so.1", "libnvidia-ml.so.1"];
        assert_eq!(seen, [&["passed 0", "passed 1", "nvidia0", "nvidia1"][..], &files].concat());
    });
}

#[test]
fn variable_grants_devices_if_the_command_line_allows_it() {
    with_containers(async || {
        let (agent, _init) = boot("quiet agent.visible_cdi_devices=true").await;
        let both = "VISIBLE_CDI_DEVICES=nvidia.com/gpu=0,0000:02:00.0:nvidia.com/driver=video";
        let seen = sees(&agent, "granted", "", &[both, "NVIDIA_DRIVER_CAPABILITIES=utility"]).await;
        let files = ["libnvcuvid.so.1", "libnvidia-ml.so.1"];
        assert_eq!(seen, [&["passed 0", "passed 1", "nvidia0", "nvidia1"][..], &files].concat());
        let seen = sees(&agent, "beside", "nvidia.com/gpu=2", &["VISIBLE_CDI_DEVICES=none"]).await;
        assert_eq!(seen[..2], ["passed 2", "nvidia2"], "nothing by the variable, one by the annotation");
        let narrowed = ["VISIBLE_CDI_DEVICES=nvidia.com/gpu=0,1", "NVIDIA_VISIBLE_DEVICES=GPU-1"];
        let seen = sees(&agent, "narrowed", "", &narrowed).await;
        assert_eq!(seen[..2], ["passed 1", "nvidia1"]);
        // The pause container gets nothing by any variable.
        let root = agent.root("pause");
        let mut spec = spec(&root, SCRIPT);
        spec.Annotations.insert("io.katacontainers.pkg.oci.container_type".into(), "pod_sandbox".into());
        spec.Process.mut_or_insert_default().Env.push(both.to_owned());
        agent.create(spec, "pause").await.unwrap();
        agent.begin("pause").await;
        assert_eq!(agent.output("pause", "").await, "");
    });
}
