//! The agent's other vsock ports: the log and the debug console.

use std::time::Duration;

use firstlight_e2e::{Scenario, lab};
use firstlight_vm::Vm;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

const LOG: u32 = 1025;
const CONSOLE: u32 = 1026;

const TIMEOUT: Duration = Duration::from_secs(30);

fn with_shell() -> Scenario {
    let image = lab().variant("with-shell").unwrap();
    let mut scenario = Scenario::gpus(0);
    scenario.guest.initrd = Some(image.initrd);
    scenario.parameter(&format!("agent.debug_console_vport={CONSOLE}"))
}

async fn listens(vm: &Vm) {
    let seen = vm.console().wait_for(|record| record.event("agent-listening").is_some()).await;
    assert!(seen, "the agent listens:\n{}", vm.console_tail());
}

/// Reads until the text contains `expected`; returns the text.
async fn read_until(stream: &mut UnixStream, expected: &str) -> String {
    let mut text = String::new();
    let read = async {
        let mut buffer = [0; 1024];
        while !text.contains(expected) {
            let len = stream.read(&mut buffer).await.unwrap();
            assert!(len > 0, "the connection ended before {expected:?}: {text:?}");
            text.push_str(&String::from_utf8_lossy(&buffer[..len]));
        }
    };
    let in_time = timeout(TIMEOUT, read).await.is_ok();
    assert!(in_time, "no {expected:?} in {TIMEOUT:?}: {text:?}");
    text
}

#[test]
fn log_port_and_debug_console_work_and_a_shell_ends_with_its_connection() {
    let scenario = with_shell()
        .parameter(&format!("agent.log_vport={LOG}"))
        .parameter("agent.log=debug")
        .parameter("agent.debug_console")
        .parameter("agent.cdi_timeout=soon");
    scenario.watched(async |vm| {
        listens(vm).await;
        let mut lines = BufReader::new(vm.connect(LOG, TIMEOUT).await.unwrap()).lines();
        // Lines logged before the client connected are delivered too, in order, among lines of other sources.
        for (expected, level) in [("agent.cdi_timeout must be", "ERRO"), ("debug console: vsock port 1026", "WARN")] {
            let record = loop {
                let line = timeout(TIMEOUT, lines.next_line()).await.expect("a line in time").unwrap().unwrap();
                let record: serde_json::Value = serde_json::from_str(&line).unwrap();
                if record["msg"].as_str().unwrap().contains(expected) {
                    break record;
                }
            };
            assert_eq!((record["name"].as_str(), record["source"].as_str()), (Some("kata-agent"), Some("agent")));
            assert_eq!(record["level"].as_str(), Some(level), "{record}");
        }
        // One client at a time.
        let mut second = vm.connect(LOG, TIMEOUT).await.unwrap();
        let mut nothing = Vec::new();
        let end = timeout(TIMEOUT, second.read_to_end(&mut nothing)).await;
        assert!(end.is_ok() && nothing.is_empty(), "{nothing:?}");

        let mut console = vm.connect(CONSOLE, TIMEOUT).await.unwrap();
        console.write_all(b"stty -echo; echo pid=$$. uid=$(id -u). on $(tty).\n").await.unwrap();
        let text = read_until(&mut console, "/dev/pts/").await;
        let pid = text.rsplit_once("pid=").and_then(|(_, rest)| rest.split('.').next()).unwrap().to_owned();
        assert!(pid.parse::<u32>().is_ok() && text.contains("uid=0."), "{text:?}");
        console.write_all(b"trap '' HUP; exec sleep 1000\n").await.unwrap();
        let mut other = vm.connect(CONSOLE, TIMEOUT).await.unwrap();
        let ask = format!("stty -echo; test -d /proc/{pid} && echo alive=$((1+1))\n");
        other.write_all(ask.as_bytes()).await.unwrap();
        read_until(&mut other, "alive=2").await;
        // Shut down, then read to the end: the lab's vsock backend does not forward the close of a socket with unread
        // bytes to the guest.
        console.shutdown().await.unwrap();
        let mut rest = Vec::new();
        assert!(timeout(TIMEOUT, console.read_to_end(&mut rest)).await.is_ok(), "the connection stays");
        let ask = format!("while test -d /proc/{pid}; do sleep 0.1; done; echo gone=$((1+1))\n");
        other.write_all(ask.as_bytes()).await.unwrap();
        read_until(&mut other, "gone=2").await;
        // A shell that ends by itself ends the connection.
        other.write_all(b"exit\n").await.unwrap();
        let mut rest = Vec::new();
        assert!(timeout(TIMEOUT, other.read_to_end(&mut rest)).await.is_ok());
    });
}

#[test]
fn debug_console_and_log_port_are_closed_by_default() {
    with_shell().watched(async |vm| {
        listens(vm).await;
        let open = vm.connect(CONSOLE, Duration::from_secs(3)).await;
        assert!(open.is_err(), "the debug console is open");
        let open = vm.connect(LOG, Duration::from_secs(3)).await;
        assert!(open.is_err(), "the log port is open");
    });
}
