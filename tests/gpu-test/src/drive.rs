//! The run: the agent is started and driven as a shim does it.

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
use crate::probe::Cuda;
use crate::stage::{self, CONTAINERS};

/// The longest wait for the agent's socket: the image is unpacked before.
const START: Duration = Duration::from_secs(20);

/// One call that does not wait by its nature.
const CALL: Duration = Duration::from_secs(30);

/// A container's whole life: the first user of a GPU may have to attach it.
const LIFE: Duration = Duration::from_secs(120);

/// How many of the driver's GPUs the containers try to open beside their own.
const TRIED: u32 = 8;

/// Drives everything.
pub(crate) fn run(machine: &Machine, gpu: usize, bundle: &Path) -> anyhow::Result<Figures> {
    let Some(chosen) = machine.gpus.get(gpu) else {
        bail!("--gpu {gpu}: there are {} GPUs that can be used here, from 0", machine.gpus.len());
    };
    let dir = tempfile::Builder::new().prefix("firstlight-gpu-test-").tempdir().context("make a directory")?;
    let image = Image::open(&bundle.join("image")).context("the bundle")?;
    let begin = Instant::now();
    let mut agent = Running::start(bundle, dir.path())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let result = runtime.block_on(async {
        let mut figures = Vec::new();
        let connection = agent.connect(dir.path()).await?;
        figures.push(Figure::time("namespace, CDI file, image unpacked, agent answers", Some(ms(begin))));
        let storages = sandbox_storages().into_iter().filter(|storage| storage.driver != "virtio-fs").collect();
        connection.create_sandbox_with("gpu-test", storages).await?;
        figures.extend(cuda(&connection, &image, machine, chosen).await?);
        // Two are needed for a choice.
        if let Some(other) = machine.gpus.iter().find(|other| *other != chosen) {
            figures.extend(narrow(&connection, &image, chosen, other).await?);
        } else {
            eprintln!("gpu-test: one GPU: the container that narrows two to one is left out");
        }
        anyhow::Ok(figures)
    });
    drop(agent);
    // The parent of the containers' groups; it is empty now, and missed by nobody.
    let _ = fs::remove_dir("/sys/fs/cgroup/firstlight");
    let figures = result?;
    let machine = format!("{}, {} GPUs, driver {}", machine.processor, machine.gpus.len(), machine.driver);
    Ok(Figures { bench: "gpu", machine, figures })
}

/// The agent, in its namespace; ends with this value.
struct Running(Child);

impl Running {
    fn start(bundle: &Path, dir: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.arg("--bundle").arg(bundle).arg("--stage").arg(dir).stdin(Stdio::null());
        firstlight_sys::child::die_with_parent(&mut command);
        Ok(Self(command.spawn().context("start this program again")?))
    }

    async fn connect(&mut self, dir: &Path) -> anyhow::Result<Agent> {
        let socket: PathBuf = stage::socket(dir);
        let begin = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(&socket).await {
                let agent = Agent::new(stream, CALL);
                agent.check().await?;
                return Ok(agent);
            }
            if let Some(status) = self.0.try_wait().context("look at the agent")? {
                bail!("the agent ended before it served ({status}); its reason is above");
            }
            if begin.elapsed() > START {
                bail!("the agent did not serve within {START:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Its runtime then ends what is left of the containers, and itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// How a container's life went.
struct Life {
    create: f64,
    start: f64,
    whole: f64,
    remove: f64,
    code: i32,
    stdout: String,
}

/// One container from its creation to its removal.
async fn life(
    agent: &Agent,
    image: &Image,
    id: &str,
    script: String,
    gpus: &[&ReadyGpu],
    env: &[String],
) -> anyhow::Result<Life> {
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
        let stdout = agent.read_all(id, Output::Stdout).await?;
        let stderr = agent.read_all(id, Output::Stderr).await?;
        anyhow::Ok((stdout, stderr, agent.wait(id).await?))
    };
    let ended = tokio::time::timeout(LIFE, ended).await;
    let (stdout, stderr, code) = ended.with_context(|| format!("container {id} did not end within {LIFE:?}"))??;
    let whole = ms(begin);
    let removing = Instant::now();
    agent.remove_container(id).await?;
    let remove = ms(removing);
    stdout.lines().for_each(|line| eprintln!("  {id}: {line}"));
    stderr.lines().for_each(|line| eprintln!("  {id}: stderr: {line}"));
    Ok(Life { create, start, whole, remove, code, stdout })
}

/// What tries to open nodes; after the CUDA program, whose times it would change.
fn opens() -> String {
    container::default_command().pop().unwrap_or_default()
}

/// Lists the GPUs' nodes before the CUDA program runs: where it may, NVIDIA's
/// library itself makes nodes of every GPU that the driver has, also of those
/// that it cannot open.
const GIVEN: &str = "for node in /dev/nvidia[0-9]*; do [ -e $node ] && echo given $node; done";

/// One GPU, a kernel on it, and no other GPU.
async fn cuda(agent: &Agent, image: &Image, machine: &Machine, gpu: &ReadyGpu) -> anyhow::Result<Vec<Figure>> {
    let script = format!("{GIVEN}\n/bin/cuda-probe; code=$?\n{}\nexit $code", opens());
    let life = life(agent, image, CONTAINERS[0], script, &[gpu], &[]).await?;
    let (cuda, probe) = (Cuda::read(&life.stdout), Probe::read(&life.stdout));
    if let Some(error) = cuda.text("error") {
        eprintln!("gpu-test: {}: CUDA: {error}", gpu.pci);
    }
    let step = |key: &str| cuda.number(&format!("us-{key}")).map(|us| us / 1000.0);
    let seen = life.stdout.lines().filter(|line| line.starts_with("given /dev/nvidia")).count();
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
        Figure::time("CreateContainer to the container's end", Some(life.whole)),
        Figure::time("RemoveContainer", Some(life.remove)),
        Figure::exactly("container's exit code", Some(f64::from(life.code)), 0.0),
        Figure::exactly("CUDA: sums that were right", cuda.number("verified"), 1_048_576.0),
        Figure::exactly("CUDA: devices", cuda.number("devices"), 1.0),
        Figure::holds(
            format!("CUDA: the device is the one granted, {} ({name})", gpu.pci),
            cuda.text("pci").is_some_and(here),
        ),
        Figure::exactly("GPU nodes in the container's /dev", u32::try_from(seen).ok().map(f64::from), 1.0),
        Figure::holds(
            format!("of minors 0 to {}, after mknod as root, only {} opens", TRIED - 1, gpu.minor),
            only(&probe, gpu),
        ),
        Figure::exactly(
            "other GPUs of this machine that the container opened",
            Some(count(machine.gpus.iter().filter(|other| *other != gpu && probe.opened.contains(&other.minor)))),
            0.0,
        ),
    ])
}

/// Two GPUs granted, one of them chosen by the environment, and fewer of the driver's files.
async fn narrow(agent: &Agent, image: &Image, first: &ReadyGpu, second: &ReadyGpu) -> anyhow::Result<Vec<Figure>> {
    let libraries = "for name in libcuda libnvidia-ml; do for directory in /usr/lib/x86_64-linux-gnu /usr/lib64; do\n\
        [ -e $directory/$name.so.1 ] && echo has $name && break; done; done\ntrue";
    let script = format!("{}\n{libraries}", opens());
    let env = [
        // Neither a GPU that was not granted nor one that does not exist is had by asking.
        format!("NVIDIA_VISIBLE_DEVICES={},99,GPU-00000000-0000-0000-0000-000000000000", second.pci),
        "NVIDIA_DRIVER_CAPABILITIES=utility".to_owned(),
    ];
    let life = life(agent, image, CONTAINERS[1], script, &[first, second], &env).await?;
    let probe = Probe::read(&life.stdout);
    let has = |name: &str| life.stdout.lines().any(|line| line == format!("has {name}"));
    Ok(vec![
        Figure::time("CreateContainer with two GPUs granted and one chosen", Some(life.create)),
        Figure::exactly("its exit code", Some(f64::from(life.code)), 0.0),
        Figure::holds(
            format!("NVIDIA_VISIBLE_DEVICES={}: only minor {} opens", second.pci, second.minor),
            only(&probe, second),
        ),
        Figure::holds(
            "NVIDIA_DRIVER_CAPABILITIES=utility: libnvidia-ml is there, libcuda is not",
            has("libnvidia-ml") && !has("libcuda"),
        ),
    ])
}

/// Whether only this GPU opened, and the others were refused by the device filter.
fn only(probe: &Probe, gpu: &ReadyGpu) -> bool {
    let own: Vec<u32> = Some(gpu.minor).filter(|minor| *minor < TRIED).into_iter().collect();
    probe.denied_open(&own) == Some(true)
}

fn count<T>(items: impl Iterator<Item = T>) -> f64 {
    items.fold(0.0, |sum, _| sum + 1.0)
}
