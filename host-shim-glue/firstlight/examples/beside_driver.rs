//! Drives an agent that runs alone on a machine with a real NVIDIA driver:
//! `beside_driver SOCKET OCI-LAYOUT [GPU]...` runs the default probe in a
//! container with these GPUs (CDI names) and says what it could open. The agent
//! is started beforehand with `AGENT_ADDR=unix://SOCKET`, as root.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firstlight::agent::{Agent, Output, SHARED, sandbox_storages};
use firstlight::container::{self, Probe};
use firstlight_oci::Image;
use tokio::net::UnixStream;

const CONTAINER: &str = "beside-driver";

async fn drive(socket: &str, layout: &str, gpus: &[String]) -> anyhow::Result<ExitCode> {
    let image = Image::open(Path::new(layout))?;
    let stream = UnixStream::connect(socket).await.with_context(|| format!("connect to {socket}"))?;
    let agent = Agent::new(stream, Duration::from_secs(20));
    agent.check().await?;
    // Here the "shared" folder is an ordinary one.
    let storages = sandbox_storages().into_iter().filter(|storage| storage.driver != "virtio-fs").collect();
    agent.create_sandbox_with("beside-driver-sandbox", storages).await?;
    let root = Path::new(SHARED).join(CONTAINER).join("rootfs");
    std::fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
    image.unpack(&root)?;
    let spec = container::spec(CONTAINER, &image, &container::default_command(), gpus);
    let begin = Instant::now();
    agent.create_container(CONTAINER, spec, Duration::from_secs(60)).await?;
    let created = begin.elapsed();
    agent.start_container(CONTAINER).await?;
    let started = begin.elapsed();
    let stdout = agent.read_all(CONTAINER, Output::Stdout).await?;
    let code = agent.wait(CONTAINER).await?;
    agent.remove_container(CONTAINER).await?;
    print!("{stdout}");
    let probe = Probe::read(&stdout);
    println!("exit code {code}; created after {created:?}, started after {started:?}; {probe:?}");
    agent.destroy_sandbox().await?;
    Ok(if code == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, layout, gpus @ ..] = arguments.as_slice() else {
        bail!("usage: beside_driver SOCKET OCI-LAYOUT [GPU]...")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    runtime.block_on(drive(socket, layout, gpus))
}
