use std::fs;

use firstlight_cmdline::CommandLine;

use super::modules::{VSOCK_DRIVER, settings};
use super::*;
use crate::mode;

/// Runs a unit to its end.
fn run(unit: UnitId, inputs: &Inputs) -> Report {
    match dispatch(unit, inputs) {
        Dispatch::Ended(report) => report,
        Dispatch::Thread(run) => run(inputs),
        Dispatch::Component(component) => panic!("{component:?}"),
    }
}

/// Returns the report of a unit that needs no thread.
fn at_once(unit: UnitId, inputs: &Inputs) -> Option<Report> {
    match dispatch(unit, inputs) {
        Dispatch::Ended(report) => Some(report),
        Dispatch::Thread(_) | Dispatch::Component(_) => None,
    }
}

fn inputs(dir: &tempfile::TempDir) -> Inputs {
    Inputs {
        root: Root::at(dir.path()),
        release: "6.12".into(),
        params: Arc::default(),
        functions: Arc::default(),
        decision: None,
        gpus: Vec::new(),
        ready: 0,
        units: 1,
    }
}

fn write(dir: &tempfile::TempDir, path: &str, text: &str) {
    let path = Root::at(dir.path()).path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn unknown_parameter_fails_unit_and_others_apply() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir, "proc/cmdline", "quiet firstlight.mod=gpu firstlight.on-failure=hold\n");
    let (end, product) = run(UnitId::CommandLine, &inputs(&dir));
    let End::Failed(text) = end else { panic!("{end:?}") };
    assert!(text.contains("firstlight.mod: unknown parameter; did you mean firstlight.mode?"), "{text}");
    let Product::CommandLine(line, params) = product else { panic!() };
    assert!(line.starts_with("quiet"));
    assert_eq!(params.on_failure, crate::params::OnFailure::Hold);
}

#[test]
fn all_controllers_are_enabled() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir, "sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
    assert_eq!(run(UnitId::Cgroup2, &inputs(&dir)).0, End::Ok("cpu io memory".into()));
    let path = dir.path().join("sys/fs/cgroup/cgroup.subtree_control");
    assert_eq!(fs::read_to_string(path).unwrap(), "+cpu +io +memory");
}

#[test]
fn vsock_already_present_needs_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(at_once(UnitId::Vsock, &inputs(&dir)), None);
    let (end, _) = run(UnitId::Vsock, &inputs(&dir));
    assert!(matches!(&end, End::Failed(text) if text.contains("vmw_vsock_virtio_transport")), "{end:?}");
    write(&dir, &format!("{VSOCK_DRIVER}/bind"), "");
    assert!(matches!(at_once(UnitId::Vsock, &inputs(&dir)), Some((End::Ok(_), _))));
}

#[test]
fn cpu_guest_needs_no_driver_and_gpu_guest_without_driver_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Auto));
    assert!(matches!(run(UnitId::NvidiaModules, &inputs).0, End::NotNeeded(_)));
    inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Chosen(&mode::GUEST_MODES[1])));
    let (end, _) = run(UnitId::NvidiaModules, &inputs);
    assert!(matches!(&end, End::Failed(text) if text.contains("module nvidia is neither in")), "{end:?}");
}

/// modules.dep lists files that do not exist, so the error names each module that was tried.
#[test]
fn extension_driver_is_loaded_by_extension_modules_dep() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    inputs.decision = Some(mode::decide(&[], mode::ModeChoice::Chosen(&mode::GUEST_MODES[1])));
    write(&dir, "lib/modules/6.12/modules.dep", "base.ko:\n");
    let list = "run/kata-extensions/gpu/lib/modules/6.12/modules.dep";
    write(&dir, list, "updates/nvidia.ko: kernel/ecc.ko\nkernel/ecc.ko:\nupdates/nvidia-uvm.ko: updates/nvidia.ko\n");
    let End::Failed(text) = run(UnitId::NvidiaModules, &inputs).0 else { panic!() };
    let file = "run/kata-extensions/gpu/lib/modules/6.12/kernel/ecc.ko";
    assert!(text.contains(file) && !text.contains("neither in"), "{text}");
    inputs.release = "6.13".to_owned();
    let End::Failed(text) = run(UnitId::NvidiaModules, &inputs).0 else { panic!() };
    assert!(text.contains("modules for 6.12, and this kernel is 6.13"), "{text}");
}

#[test]
fn single_gpu_disables_nvlink_unless_overridden() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    let gpu = |number: u8| Function {
        address: format!("0000:{number:02x}:00.0").parse().unwrap(),
        vendor: 0x10de,
        device: 0x2335,
        class: 0x03_0200,
        driver: None,
        nvlink_bridge: false,
    };
    for (gpus, line, expected) in [
        (1, "", "NVreg_NvLinkDisable=1"),
        (1, "firstlight.nvidia.NVreg_X=2", "NVreg_X=2 NVreg_NvLinkDisable=1"),
        (1, "nvidia.NVreg_NvLinkDisable=0", "NVreg_NvLinkDisable=0"),
        (2, "", ""),
    ] {
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
        let functions: Vec<_> = (0..gpus).map(gpu).collect();
        inputs.decision = Some(mode::decide(&functions, mode::ModeChoice::Auto));
        let modules = Modules::read(&inputs.root, &inputs.release);
        assert_eq!(settings(&modules, &inputs, "nvidia"), expected, "{gpus} {line}");
        assert_eq!(settings(&modules, &inputs, "nvidia-uvm"), "");
    }
    // The command line follows the image's options; the mode's parameter is added only if neither
    // sets it.
    write(&dir, "etc/modprobe.d/x.conf", "options nvidia NVreg_A=1 NVreg_NvLinkDisable=0\n");
    inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse("nvidia.NVreg_A=2")));
    inputs.decision = Some(mode::decide(&[gpu(0)], mode::ModeChoice::Auto));
    let modules = Modules::read(&inputs.root, &inputs.release);
    assert_eq!(settings(&modules, &inputs, "nvidia"), "NVreg_A=1 NVreg_NvLinkDisable=0 NVreg_A=2");
}

#[test]
fn confidential_mode_is_set_by_cpu_flags_or_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    write(&dir, "proc/cpuinfo", "flags : fpu tdx_guest\n");
    for (line, expected) in [
        ("firstlight.mode=gpu", Some("tdx_guest (Intel TDX)")),
        ("firstlight.mode=gpu firstlight.confidential=off", None),
        ("firstlight.mode=gpu firstlight.confidential=on", Some("firstlight.confidential=on")),
        ("firstlight.mode=cpu firstlight.confidential=on", None),
    ] {
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
        let (End::Ok(detail), Product::Mode(decision)) = run(UnitId::Mode, &inputs) else { panic!("{line}") };
        assert_eq!(decision.confidential.as_deref(), expected, "{line}");
        assert_eq!(detail.contains("confidential: "), expected.is_some(), "{detail}");
    }
}

#[test]
fn unsupported_topology_fails_mode_only_if_requested() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    for (line, fails) in
        [("firstlight.mode=service-vm-nvl4", false), ("firstlight.on-unsupported-topology=fail", false)]
    {
        inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
        assert_eq!(matches!(run(UnitId::Mode, &inputs).0, End::Failed(_)), fails, "{line}");
    }
    let line = "firstlight.mode=service-vm-nvl4 firstlight.on-unsupported-topology=fail";
    inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
    let (end, product) = run(UnitId::Mode, &inputs);
    assert!(matches!(&end, End::Failed(text) if text.contains("no NVSwitch is on the PCI bus")), "{end:?}");
    assert!(matches!(product, Product::Mode(decision) if decision.unsupported.is_some()));
}

#[test]
fn container_modules_missing_in_image_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(at_once(UnitId::ContainerModules, &inputs(&dir)), Some((End::NotNeeded(_), _))));
    write(&dir, "lib/modules/6.12/modules.dep", "kernel/other.ko:\n");
    assert_eq!(at_once(UnitId::ContainerModules, &inputs(&dir)), None);
    assert_eq!(run(UnitId::ContainerModules, &inputs(&dir)).0, End::Ok(String::new()));
}

/// modules.dep lists files that do not exist, so the error names each module that was tried.
#[test]
fn drivers_are_loaded_for_devices_except_gpus_and_blacklisted() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    let list = |name: &str, text: &str| write(&dir, &format!("lib/modules/6.12/modules.{name}"), text);
    list("dep", "i6300esb.ko:\nnvidia.ko:\nnouveau.ko:\nmlx5_ib.ko:\nnvme.ko:\next4.ko:\nib_umad.ko:\n");
    list(
        "alias",
        "alias pci:v00008086d000025ABsv* i6300esb\nalias pci:v000010DEd* nvidia\nalias pci:v000010DEd* nouveau\n\
         alias auxiliary:mlx5_core.rdma mlx5_ib\nalias pci:v*bc01sc08i02* nvme\nalias pci:v00008086d000025ABsv* notinimage\n",
    );
    for (bus, device, text) in [
        ("pci", "0000:00:01.0", "pci:v00008086d000025ABsv0bc08"),
        ("pci", "0000:00:02.0", "pci:v000010DEd00002335sv0"),
        ("pci", "0000:00:03.0", "pci:v00001B36bc01sc08i02"),
        ("auxiliary", "mlx5_core.rdma.0", "auxiliary:mlx5_core.rdma"),
    ] {
        write(&dir, &format!("sys/bus/{bus}/devices/{device}/modalias"), text);
    }
    let tried = |inputs: &Inputs| {
        let End::Failed(text) = run(UnitId::ContainerModules, inputs).0 else { panic!() };
        let all = ["i6300esb", "nvidia", "nouveau", "mlx5_ib", "nvme", "ext4", "ib_umad", "notinimage"];
        all.into_iter().filter(|name| text.contains(&format!("module {name}:"))).collect::<Vec<_>>()
    };
    assert_eq!(tried(&inputs), ["i6300esb", "mlx5_ib", "nvme", "ext4", "ib_umad"]);
    write(&dir, "usr/lib/modprobe.d/x.conf", "blacklist nvme\nblacklist ext4\n");
    let line = "modprobe.blacklist=mlx5-ib module_blacklist=ib_umad,i6300esb";
    inputs.params = Arc::new(Params::from_command_line(&CommandLine::parse(line)));
    assert_eq!(tried(&inputs), ["ext4"], "a blacklist in modprobe.d does not apply to modules loaded by name");
    let End::Failed(text) = run(UnitId::ContainerModules, &inputs).0 else { panic!() };
    assert!(text.contains("left out: ib_umad, named by module_blacklist="), "{text}");
}

#[test]
fn locked_module_loading_is_reported_as_cause() {
    let dir = tempfile::tempdir().unwrap();
    assert!(load_requested(&inputs(&dir), "dm-mod", "").unwrap_err().contains("modules.dep"));
    write(&dir, "lib/modules/6.12/modules.builtin", "kernel/fs/fuse/virtiofs.ko\n");
    assert_eq!(load_requested(&inputs(&dir), "virtiofs", "").unwrap(), "virtiofs built in");
    write(&dir, "proc/sys/kernel/modules_disabled", "1\n");
    let text = load_requested(&inputs(&dir), "dm-mod", "").unwrap_err();
    assert!(text.contains("dm-mod") && text.contains("firstlight.lockdown=off"), "{text}");
}

#[test]
fn lockdown_can_be_disabled() {
    let dir = tempfile::tempdir().unwrap();
    let mut inputs = inputs(&dir);
    inputs.params = Arc::new(Params { lockdown: false, ..Params::default() });
    assert!(matches!(run(UnitId::Lockdown, &inputs).0, End::NotNeeded(_)));
}
