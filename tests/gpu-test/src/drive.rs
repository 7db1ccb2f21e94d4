//! The test run: starts the agent and calls it as a shim does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use firstlight::agent::{Agent, Output, sandbox_storages};
use firstlight::container::{self, Probe};
use firstlight_init::cdi::ReadyGpu;
use firstlight_oci::Image;
use tokio::net::UnixStream;

use crate::figures::{Figure, Figures};
use crate::machine::Machine;
use crate::namespace::{self, CONTAINERS};
use crate::probe::Cuda;

/// The timeout for the agent's socket, which includes unpacking the image.
const START: Duration = Duration::from_secs(20);

/// The timeout of a call that does not block.
const CALL: Duration = Duration::from_secs(30);

/// The timeout of a container's lifecycle: the first open of a GPU may have to initialise it.
const LIFECYCLE: Duration = Duration::from_secs(120);

/// How many minors the containers try to open.
const PROBED_MINORS: u32 = 8;

/// Runs the test and returns its figures.
pub(crate) fn run(machine: &Machine, gpu: usize, bundle: &Path) -> anyhow::Result<Figures> {
    let Some(chosen) = machine.gpus.get(gpu) else {
        bail!("--gpu {gpu}: out of range: {} usable GPUs, numbered from 0", machine.gpus.len());
    };
    let dir = tempfile::Builder::new()
        .prefix("firstlight-gpu-test-")
        .tempdir()
        .context("failed to create a temporary directory")?;
    let image = Image::open(&bundle.join("image")).context("failed to open the bundle's image")?;
    let begin = Instant::now();
    let mut agent = Running::start(bundle, dir.path())?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("failed to start tokio")?;
    let result = runtime.block_on(async {
        let mut figures = Vec::new();
        let connection = agent.connect(dir.path()).await?;
        figures.push(Figure::time("namespace, CDI file, image unpacked, agent responds", Some(ms(begin))));
        let storages = sandbox_storages().into_iter().filter(|storage| storage.driver != "virtio-fs").collect();
        connection.create_sandbox_with("gpu-test", storages).await?;
        figures.extend(cuda(&connection, &image, machine, chosen).await?);
        // Selecting needs two GPUs.
        if let Some(other) = machine.gpus.iter().find(|other| *other != chosen) {
            figures.extend(select_one(&connection, &image, chosen, other).await?);
        } else {
            eprintln!("gpu-test: only one GPU: skipping the container that selects one of two");
        }
        anyhow::Ok(figures)
    });
    drop(agent);
    // The parent of the containers' cgroups, empty now.
    let _ = fs::remove_dir("/sys/fs/cgroup/firstlight");
    let figures = result?;
    let machine = format!("{}, {} GPUs, driver {}", machine.processor, machine.gpus.len(), machine.driver);
    Ok(Figures { bench: "gpu", machine, figures })
}

/// The running agent in its namespace; killed on drop.
struct Running(Child);

impl Running {
    fn start(bundle: &Path, dir: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("failed to find this program")?;
        let mut command = Command::new(program);
        command.arg("--bundle").arg(bundle).arg("--exec-agent").arg(dir).stdin(Stdio::null());
        firstlight_sys::child::die_with_parent(&mut command);
        Ok(Self(command.spawn().context("failed to start this program again")?))
    }

    async fn connect(&mut self, dir: &Path) -> anyhow::Result<Agent> {
        let socket: PathBuf = namespace::socket(dir);
        let begin = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(&socket).await {
                let agent = Agent::new(stream, CALL);
                agent.check().await?;
                return Ok(agent);
            }
            if let Some(status) = self.0.try_wait().context("failed to wait for the agent")? {
                bail!("the agent exited before it listened ({status}); see its error above");
            }
            if begin.elapsed() > START {
                bail!("timed out after {START:?} waiting for the agent to listen");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Its runtime then kills the remaining containers and exits.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// The durations and results of a container's lifecycle.
struct Lifecycle {
    create: f64,
    start: f64,
    whole: f64,
    remove: f64,
    code: i32,
    stdout: String,
}

/// Runs one container from create to remove.
async fn run_lifecycle(
    agent: &Agent,
    image: &Image,
    id: &str,
    script: String,
    gpus: &[&ReadyGpu],
    env: &[String],
) -> anyhow::Result<Lifecycle> {
    let names: Vec<String> = gpus.iter().map(|gpu| gpu.pci.to_string()).collect();
    let command = ["/bin/sh".to_owned(), "-c".to_owned(), script];
    let mut spec = container::spec(id, image, &command, &names);
    spec.Process.mut_or_insert_default().Env.extend_from_slice(env);
    let begin = Instant::now();
    agent.create_container(id, spec, CALL).await?;
    let create = ms(begin);
    let started = Instant::now();
    agent.start_container(id).await?;
    let start = ms(started);
    let ended = async {
        let stdout = agent.read_all(id, Output::Stdout, |_| ()).await?;
        let stderr = agent.read_all(id, Output::Stderr, |_| ()).await?;
        anyhow::Ok((stdout, stderr, agent.wait(id).await?))
    };
    let ended = tokio::time::timeout(LIFECYCLE, ended).await;
    let (stdout, stderr, code) = ended.with_context(|| format!("container {id} timed out after {LIFECYCLE:?}"))??;
    let whole = ms(begin);
    let removing = Instant::now();
    agent.remove_container(id).await?;
    let remove = ms(removing);
    stdout.lines().for_each(|line| eprintln!("  {id}: {line}"));
    stderr.lines().for_each(|line| eprintln!("  {id}: stderr: {line}"));
    Ok(Lifecycle { create, start, whole, remove, code, stdout })
}

/// Returns the script that tries to open nodes; it runs after the CUDA program, whose times it would affect.
fn open_probe() -> String {
    container::probe_command().pop().unwrap_or_default()
}

/// Lists the GPU nodes before the CUDA program runs: if permitted, NVIDIA's library creates nodes for all GPUs of
/// the driver, even those it cannot open.
const LIST_NODES: &str = "for node in /dev/nvidia[0-9]*; do [ -e $node ] && echo node $node; done";

/// Tests a container with one GPU: a kernel runs on it, and no other GPU is accessible.
async fn cuda(agent: &Agent, image: &Image, machine: &Machine, gpu: &ReadyGpu) -> anyhow::Result<Vec<Figure>> {
    let script = format!("{LIST_NODES}\n/bin/cuda-probe; code=$?\n{}\nexit $code", open_probe());
    let life = run_lifecycle(agent, image, CONTAINERS[0], script, &[gpu], &[]).await?;
    let (cuda, probe) = (Cuda::read(&life.stdout), Probe::read(&life.stdout));
    if let Some(error) = cuda.text("error") {
        eprintln!("gpu-test: {}: CUDA: {error}", gpu.pci);
    }
    let step = |key: &str| cuda.number(&format!("us-{key}")).map(|us| us / 1000.0);
    let seen = life.stdout.lines().filter(|line| line.starts_with("node /dev/nvidia")).count();
    let here = |pci: &str| crate::machine::same_gpu(pci, gpu.pci);
    let name = cuda.text("name").unwrap_or("no CUDA device");
    Ok(vec![
        Figure::time("CreateContainer with one GPU and the driver's files", Some(life.create)),
        Figure::time("StartContainer", Some(life.start)),
        Figure::time("CUDA: libcuda.so.1 loaded", step("load")),
        Figure::time("CUDA: cuInit", step("init")),
        Figure::time("CUDA: context", step("context")),
        Figure::time("CUDA: kernel compiled from PTX by the driver", step("compile")),
        Figure::time("CUDA: 8 MiB copied in, 12 MiB allocated", step("copy-in")),
        Figure::time("CUDA: first kernel", step("kernel-first")),
        Figure::time("CUDA: one kernel of 1,048,576 additions, mean of 100", step("kernel")),
        Figure::time("CUDA: 4 MiB copied out", step("copy-out")),
        Figure::time("CreateContainer to the container's exit", Some(life.whole)),
        Figure::time("RemoveContainer", Some(life.remove)),
        Figure::equals("container's exit code", Some(f64::from(life.code)), 0.0),
        Figure::equals("CUDA: correct sums", cuda.number("verified"), 1_048_576.0),
        Figure::equals("CUDA: devices", cuda.number("devices"), 1.0),
        Figure::holds(
            format!("CUDA: the device is the one granted, {} ({name})", gpu.pci),
            cuda.text("pci").is_some_and(here),
        ),
        Figure::equals("GPU nodes in the container's /dev", u32::try_from(seen).ok().map(f64::from), 1.0),
        Figure::holds(
            format!("of minors 0 to {}, after mknod as root, only {} opens", PROBED_MINORS - 1, gpu.minor),
            only(&probe, gpu),
        ),
        Figure::equals(
            "other GPUs of this machine that the container opened",
            Some(count(machine.gpus.iter().filter(|other| *other != gpu && probe.opened.contains(&other.minor)))),
            0.0,
        ),
    ])
}

/// Tests a container with two granted GPUs that selects one by its environment, and fewer of the driver's files.
async fn select_one(agent: &Agent, image: &Image, first: &ReadyGpu, second: &ReadyGpu) -> anyhow::Result<Vec<Figure>> {
    let libraries = "for name in libcuda libnvidia-ml; do for directory in /usr/lib/x86_64-linux-gnu /usr/lib64; do\n\
        [ -e $directory/$name.so.1 ] && echo has $name && break; done; done\ntrue";
    let script = format!("{}\n{libraries}", open_probe());
    let env = [
        // Naming GPUs that are not granted or do not exist has no effect.
        format!("NVIDIA_VISIBLE_DEVICES={},99,GPU-00000000-0000-0000-0000-000000000000", second.pci),
        "NVIDIA_DRIVER_CAPABILITIES=utility".to_owned(),
    ];
    let life = run_lifecycle(agent, image, CONTAINERS[1], script, &[first, second], &env).await?;
    let probe = Probe::read(&life.stdout);
    let has = |name: &str| life.stdout.lines().any(|line| line == format!("has {name}"));
    Ok(vec![
        Figure::time("CreateContainer with two GPUs granted and one selected", Some(life.create)),
        Figure::equals("its exit code", Some(f64::from(life.code)), 0.0),
        Figure::holds(
            format!("NVIDIA_VISIBLE_DEVICES={}: only minor {} opens", second.pci, second.minor),
            only(&probe, second),
        ),
        Figure::holds(
            "NVIDIA_DRIVER_CAPABILITIES=utility: libnvidia-ml is present, libcuda is absent",
            has("libnvidia-ml") && !has("libcuda"),
        ),
    ])
}

/// Whether only this GPU opened, and the device filter denied the others.
fn only(probe: &Probe, gpu: &ReadyGpu) -> bool {
    let own: Vec<u32> = Some(gpu.minor).filter(|minor| *minor < PROBED_MINORS).into_iter().collect();
    probe.denied_open(&own) == Some(true)
}

fn count<T>(items: impl Iterator<Item = T>) -> f64 {
    items.fold(0.0, |sum, _| sum + 1.0)
}
