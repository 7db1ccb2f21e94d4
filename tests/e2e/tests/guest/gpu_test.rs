//! `gpu-test`, which is made for machines with a real driver, with the stand-in driver.

use std::time::Duration;

use firstlight_e2e::{Scenario, lab};
use tokio::time::timeout;

/// Timeout, longer than the guest's own for the test.
const LIMIT: Duration = Duration::from_mins(4);

/// Prefix of each line of the test's output.
const PREFIX: &str = "tests: ";

/// Rows that the table must have, with the result `yes`.
const PROMISES: &[&str] = &[
    "CUDA: correct sums",
    "CUDA: devices",
    "CUDA: the device is the one granted, 0000:01:00.0",
    "GPU nodes in the container's /dev",
    "of minors 0 to 7, after mknod as root, only 0 opens",
    "other GPUs of this machine that the container opened",
    "NVIDIA_VISIBLE_DEVICES=0000:02:00.0: only minor 1 opens",
    "NVIDIA_DRIVER_CAPABILITIES=utility: libnvidia-ml is present, libcuda is absent",
];

#[test]
fn container_runs_a_cuda_kernel_and_cannot_open_other_gpus() {
    let image = lab().gpu_test().unwrap();
    // It extracts itself to the root file system, as on machines that are not our guests.
    let mut scenario = Scenario::gpus(3).parameter("firstlight.root=rw");
    scenario.guest.initrd = Some(image.initrd);
    let mut ended = false;
    let console = scenario.watched(async |vm| ended = timeout(LIMIT, vm.wait()).await.is_ok());
    let output: Vec<&str> =
        console.lines().filter_map(|line| Some(line.split_once(PREFIX)?.1.trim_end_matches('\r'))).collect();
    let shown = if output.is_empty() { console.clone() } else { output.join("\n") };
    assert!(ended, "the guest did not end in {LIMIT:?}:\n{shown}");
    assert_eq!(output.last(), Some(&"ended with status 0"), "{shown}");
    for promise in PROMISES {
        let holds = output.iter().any(|line| line.starts_with(promise) && line.ends_with("  yes"));
        assert!(holds, "{promise}:\n{shown}");
    }
    println!("{shown}");
}
