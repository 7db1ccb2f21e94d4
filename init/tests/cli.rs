//! The command line of the program when started manually.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_firstlight-init")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn program_exits_unless_it_is_process_1() {
    for arguments in [&[][..], &["--boot"]] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("process 1 of a guest"), "{}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
    assert!(text(&run(&["--boot"]).stderr).contains("unknown option --boot"));
}

#[test]
fn plan_and_parameters_are_printed_on_request() {
    let plan = text(&run(&["--print-plan"]).stdout);
    assert!(plan.starts_with("| unit | needs |") && plan.contains("| gpu-attach[PCI] | nodes | pci-scan |"), "{plan}");
    let params = text(&run(&["--print-params"]).stdout);
    assert!(params.contains("| `firstlight.attach-deadline` |"), "{params}");
    let daemons = text(&run(&["--print-daemons"]).stdout);
    assert!(daemons.contains("| fabricmanager | modes with a fabric |"), "{daemons}");
    assert!(text(&run(&["--version"]).stdout).starts_with("firstlight-init "));
    assert!(text(&run(&["--help"]).stdout).contains("--print-plan"));
}
