//! A service VM and a tenant on one host.

use crate::host::{self, Board};

/// Counts lines with this prefix and suffix.
fn count(console: &str, begin: &str, end: &str) -> usize {
    console.lines().filter(|line| line.starts_with(begin) && line.ends_with(end)).count()
}

#[test]
fn service_vm_gets_the_switches_and_a_tenant_the_gpu() {
    let console = host::run(Board::Switches, include_str!("together.sh"));
    println!("{console}");
    let says = |message: &str| assert!(console.contains(message), "{message}");
    assert!(console.contains(host::END), "the host came to its end");

    // Four switches and both functions of the endpoint in one group, the GPU in another.
    assert_eq!(count(&console, "before ", " driver none"), 7);
    let group = console.lines().find(|line| line.contains("0x22a3")).and_then(|line| line.split(' ').nth(4)).unwrap();
    assert_eq!(count(&console, "before ", &format!(" group {group} driver none")), 6);

    says("has no driver, not vfio-pci");
    says("--unmanaged: 1");
    says(
        "service-vm define --image /lab/service --memory 512 --cpus 1 --huge-pages --baseboard-serial 1650123456789: 0",
    );
    // A group that another VM uses is reported before libvirt is called.
    says(&format!("cannot be started: IOMMU group {group} is in use by thief (process "));
    assert_eq!(count(&console, "host: ", " service-vm start: 1"), 1);

    assert_eq!(count(&console, "host: ", " service-vm start: 0"), 2);
    says("\"state\": \"running\"");
    says("\"problems\": []");
    assert_eq!(console.matches("\"driver\": \"vfio-pci\"").count(), 5, "all switches, the endpoint's second function");
    assert_eq!(count(&console, "running ", " driver vfio-pci"), 5);
    says("thief says: error: Requested operation is not valid: PCI device 0000:03:00.0 is in use by driver QEMU");

    // Both VMs run at once, each in its mode.
    assert_eq!(count(&console, "list: ", "running"), 2);
    says(
        "service: firstlight/1 {\"mode\":{\"name\":\"service-vm-nvl4\",\"reason\":\"GPUs on the PCI bus: 0, NVSwitches: 4\"}}",
    );
    says("tenant: firstlight/1 {\"mode\":{\"name\":\"gpu\",\"reason\":\"GPUs on the PCI bus: 1, NVSwitches: 0\"}}");
    for guest in ["service", "tenant"] {
        says(&format!("{guest}: firstlight/1 {{\"state\":\"ready\"}}"));
    }
    says("agent of 100 reached");
    says("agent of 101 reached");

    // The host controls the fabric through vsock, and a tenant starts with its partition.
    says("fabric: PARTITION ID  STATUS    GPUs  NVLINKS  GPU PHYSICAL IDs");
    assert_eq!(
        count(&console, "fabric: ", "     1,2,3,4,5,6,7,8"),
        1,
        "listed while the service VM runs, and not after"
    );
    says("fabric: Successfully activated partition 7 with GPUs 1");
    says("fmctl activate 7 --owner tenant --guest-driver 550.163.01: 0");
    // The service VM was destroyed under the tenant: fmctl failed to connect, and the next service VM reports the
    // outage.
    says("fabric: fmctl: failed to connect to fm-partitiond on vsock:100:1030");
    says("fabric: * the fabric has lost partitions 7 while tenants had them");
    says("fmctl reconcile --yes: 0");
    says("fmctl inventory set /tmp/table.toml --baseboard-serial 1650999999999: 5");
    assert!(console.lines().any(|line| line.starts_with("fabric: fmctl: ") && line.contains("1650123456789")));

    // Functions are released when the command returns.
    assert_eq!(count(&console, "host: ", " service-vm destroy: 0"), 3);
    assert_eq!(count(&console, "after ", " driver none"), 6);
    says("firstlight-service-vm: shut off (destroyed)");
    says("was off already");
    // Also for a domain that has ended by itself, which libvirt may report before it releases anything.
    assert_eq!(count(&console, "afterwards ", " driver none"), 7, "the tenant is gone as well");
}

#[test]
fn service_vm_gets_the_bridge_and_another_connectx7_stays_with_the_host() {
    let console = host::run(Board::Bridge, include_str!("bridge.sh"));
    println!("{console}");
    assert!(console.contains(host::END), "the host came to its end");
    assert_eq!(count(&console, "before ", " driver none"), 5);
    assert_eq!(count(&console, "host: ", " service-vm start: 0"), 1);
    assert_eq!(count(&console, "running ", " driver vfio-pci"), 4);
    assert_eq!(count(&console, "running ", " driver none"), 1);
    let mode = r#""mode":{"name":"service-vm-nvl5""#;
    assert!(console.contains(mode), "{mode}");
    assert_eq!(count(&console, "after ", " driver none"), 5);
}
