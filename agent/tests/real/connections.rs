//! Access control of connections, and behaviour without free descriptors.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firstlight_agent_api::agent::GetMetricsRequest;
use firstlight_agent_api::health::CheckRequest;
use tokio::io::AsyncReadExt;
use tokio_vsock::{VMADDR_CID_HOST, VMADDR_CID_LOCAL, VsockAddr, VsockStream};

use crate::support::{Agent, not_runnable, program, short, with_containers};

/// Starts the agent with few descriptors.
const FEW: &str = r#"ulimit -n 40; exec "$AGENT""#;

/// Returns the CPU time of a process in ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn accept_pauses_without_descriptors_and_resumes() {
    with_containers(async || {
        let agent = Agent::start_as(&["--mount"], FEW, tempfile::tempdir().unwrap(), &[]).await;
        let server = agent.pids()[0];
        let socket = agent.address.strip_prefix("unix://").unwrap();
        let many: Vec<UnixStream> = (0..80).map(|_| UnixStream::connect(socket).unwrap()).collect();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let open = fs::read_dir(format!("/proc/{server}/fd")).unwrap().count();
        assert!(open >= 39, "{open} descriptors: the limit is not reached");
        let before = ticks(server);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let used = ticks(server) - before;
        assert!(used < 50, "{used} of 200 ticks of CPU time used");
        drop(many);
        agent.connect().await.get_metrics(short(), &GetMetricsRequest::new()).await.unwrap();
        agent.health.check(short(), &CheckRequest::new()).await.unwrap();
    });
}

/// An agent that listens on vsock as in a guest.
struct VsockAgent(Child);

impl VsockAgent {
    fn at(port: u32) -> Self {
        let child = Command::new(program())
            .env("AGENT_ADDR", format!("vsock://-1:{port}"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// Kills the agent and returns its log.
    fn stop_and_read_log(mut self) -> String {
        self.0.kill().unwrap();
        let mut log = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }
}

impl Drop for VsockAgent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Connects; returns whether the server closes the connection.
async fn closed(cid: u32, port: u32) -> std::io::Result<bool> {
    let mut stream = VsockStream::connect(VsockAddr::new(cid, port)).await?;
    let read = tokio::time::timeout(Duration::from_secs(10), AsyncReadExt::read(&mut stream, &mut [0; 16])).await;
    // End of file, or reset; the server never sends anything.
    Ok(matches!(read, Ok(Ok(0) | Err(_))))
}

#[test]
fn connections_from_inside_the_guest_are_refused_with_rate_limited_logs() {
    const PORT: u32 = 10_240;
    with_containers(async || {
        let agent = VsockAgent::at(PORT);
        let begin = Instant::now();
        let first = loop {
            match closed(VMADDR_CID_LOCAL, PORT).await {
                Err(error) if begin.elapsed() > Duration::from_secs(10) => {
                    not_runnable(format_args!("no vsock loopback on this machine (modprobe vsock_loopback): {error}"))
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                Ok(first) => break first,
            }
        };
        assert!(first, "CID 1");
        let own = vsock::get_local_cid().unwrap();
        if ![VMADDR_CID_LOCAL, VMADDR_CID_HOST, u32::MAX].contains(&own) {
            assert!(closed(own, PORT).await.unwrap(), "the guest's own CID {own}");
        }
        for number in 0..200 {
            assert!(closed(VMADDR_CID_LOCAL, PORT).await.unwrap(), "connection {number}");
        }
        let most = usize::try_from(begin.elapsed().as_secs()).unwrap() + 1;
        let log = agent.stop_and_read_log();
        let refusals: Vec<&str> = log.lines().filter(|line| line.contains("only the host may connect")).collect();
        assert!(
            !refusals.is_empty() && refusals[0].contains("refused 1 connections") && refusals[0].contains("CID 1:"),
            "{log}"
        );
        assert!(refusals.len() <= most, "{} lines in {most} s:\n{log}", refusals.len());
    });
}
