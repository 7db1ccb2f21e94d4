//! Image builds, compared with the usual tools: `mmdebstrap` of the same packages
//! and `mkfs.erofs` of the result.
//!
//! Both have every package on disk. The driver's modules are compiled before,
//! because the peer cannot do that. Both pack with the same `mkfs.erofs` and the
//! same options.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use firstlight_image_builder::format::Compression;
use firstlight_image_builder::image::Image;
use firstlight_image_builder::image::manifest::{Format, Manifest};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::packages::debian;
use firstlight_image_builder::packages::tools::{Kit, Toolset};
use firstlight_lab::formats::Packing;
use firstlight_lab::{Lab, cache_root, shipped};
use firstlight_progress::Progress;

use super::{Figure, median};
use crate::steps::processor_time;

/// The image to build, and its format.
const IMAGE: &str = "gpu-550";
const PACKING: Packing = Packing { format: Format::Erofs, compression: Compression::Lz4hc, verity: true };

/// The peer.
const PEER: &str = "mmdebstrap + mkfs.erofs";

/// image-builder's options for mkfs.erofs: see `docs/images.md`, formats.
const PACK: &[&str] = &["--quiet", "-b4096", "-T0", "--all-root", "-zlz4hc,level=12", "-C65536"];

/// Omitted in the peer's image: our image has the compiled modules, and this package depends on a compiler.
const SOURCE: &str = "nvidia-open-kernel-dkms";

/// Cost of a build, in seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    /// Processor time of this process and its children, which other load on the machine changes little.
    cpu: f64,
    /// Wall clock.
    wall: f64,
}

/// Runs `work` and returns its result with its cost.
fn measured<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<(T, Cost)> {
    let (begin, before) = (Instant::now(), processor_time());
    let result = work()?;
    let cpu = processor_time().saturating_sub(before).as_secs_f64();
    Ok((result, Cost { cpu, wall: begin.elapsed().as_secs_f64() }))
}

/// Builds an image and returns it with its cost.
fn timed_build(manifest: &Manifest, out: &Path, cache: &Path) -> anyhow::Result<(Image, Cost)> {
    measured(|| Ok(shipped::build(manifest, out, cache, Progress::quiet())?))
}

/// Returns the manifest with a changed PID 1: the same program with one byte appended.
fn with_other_init(manifest: &Manifest, dir: &Path, turn: u8) -> anyhow::Result<Manifest> {
    let mut other = manifest.clone();
    let init = other
        .files
        .iter_mut()
        .find(|file| file.path.trim_start_matches('/') == "init")
        .context("the image has no /init")?;
    let source = init.source.as_mut().context("/init has no source")?;
    let mut program = fs::read(&*source).with_context(|| format!("read {source}"))?;
    program.push(turn);
    *source = dir.join(format!("init-{turn}")).display().to_string();
    fs::write(&*source, program).with_context(|| format!("write {source}"))?;
    Ok(other)
}

/// Runs a program; the error of a failure has the last lines of its stderr.
fn run(name: &str, command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start {name}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = stderr.lines().rev().take(8).collect();
        bail!("{name} failed with {}:\n{}", output.status, last.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    Ok(())
}

/// Creates the peer's tree as a tar archive, with `archives` as package cache.
fn mmdebstrap(names: &[&str], archives: &Path, to: &Path) -> anyhow::Result<()> {
    let source = format!("deb {} trixie main contrib non-free non-free-firmware", debian::mirror()?);
    let inside = "/var/cache/apt/archives";
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=extract", "--architectures=amd64"]);
    command.arg(format!("--include={}", names.join(",")));
    // As in our image: dependencies without recommended packages. Packages stay in the cache for the next turn.
    command.args(["--aptopt=Apt::Install-Recommends \"false\"", "--skip=download/empty,cleanup/apt"]);
    command.arg(format!("--setup-hook=mkdir -p \"$1\"{inside}"));
    command.arg(format!("--setup-hook=copy-in {} /var/cache/apt/", archives.display()));
    // Hooks of the stage "customize" do not run with this variant.
    command.arg(format!("--extract-hook=copy-out {inside} {}", archives.parent().unwrap_or(archives).display()));
    command.arg("--extract-hook=rm -rf \"$1\"/var/cache/apt \"$1\"/var/lib/apt/lists");
    run("mmdebstrap", command.arg("trixie").arg(to).arg(source))
}

/// Fails if the comparison would be unfair: the peer's tree must contain no packages or lists, and its packages must be
/// in the cache for the next turn, like ours.
fn check_peer(archives: &Path, tree: &Path) -> anyhow::Result<()> {
    let debs = fs::read_dir(archives).with_context(|| archives.display().to_string())?;
    let debs = debs.flatten().filter(|entry| entry.path().extension().is_some_and(|end| end == "deb")).count();
    if debs == 0 {
        bail!("the peer left no package in {}: its next turn would download all of them", archives.display());
    }
    let output = Command::new("tar").arg("--list").arg("--file").arg(tree).output().context("failed to start tar")?;
    let names = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || names.is_empty() {
        bail!("failed to list {}: {}", tree.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    let is_surplus = |name: &&str| name.ends_with(".deb") || name.contains("/var/lib/apt/lists/");
    if let Some(surplus) = names.lines().find(is_surplus) {
        bail!("the peer's tree contains {surplus}, which does not belong in an image");
    }
    Ok(())
}

/// Builds the peer's image and returns the cost and the size in bytes.
fn peer(image: &Image, tools: &Toolset, dir: &Path) -> anyhow::Result<(Cost, u64)> {
    let packages = image.contents.packages.iter().filter(|package| package.suite == "trixie" && package.name != SOURCE);
    let names: BTreeSet<&str> = packages.map(|package| package.name.as_str()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let (archives, tree, packed) = (dir.join("archives"), dir.join("peer.tar"), dir.join("peer.erofs"));
    fs::create_dir_all(&archives).with_context(|| format!("create {}", archives.display()))?;
    let ((), cost) = measured(|| {
        mmdebstrap(&names, &archives, &tree)?;
        let mut pack = tools.command("mkfs.erofs")?;
        run("mkfs.erofs", pack.args(PACK).arg("--tar=f").arg(&packed).arg(&tree))
    })?;
    check_peer(&archives, &tree)?;
    let bytes = fs::metadata(&packed).with_context(|| format!("failed to stat {}", packed.display()))?.len();
    Ok((cost, bytes))
}

fn size(image: &Image) -> u64 {
    let packed = |name: &&String| name.starts_with("initrd.") || name.ends_with(".img");
    image.contents.outputs.iter().find(|(name, _)| packed(name)).map_or(0, |(_, bytes)| bytes.size)
}

#[expect(clippy::cast_precision_loss, reason = "sizes of images are far below 2^52")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

pub(super) fn figures(lab: &Lab, turns: u8) -> anyhow::Result<Vec<Figure>> {
    if !on_path("mmdebstrap") {
        bail!("mmdebstrap is not installed, and this benchmark compares with it: apt-get install mmdebstrap");
    }
    let cache = cache_root()?;
    let dir = tempfile::tempdir().context("failed to create a directory")?;
    // Warm-up, not measured: downloads packages and compiles the driver.
    let manifest = lab.manifest_in_format(IMAGE, PACKING)?;
    let (image, _) = timed_build(&manifest, &dir.path().join("warm"), &cache)?;
    let tools = Toolset::of(Kit::Erofs, &mut Packages::new(&cache, None, Progress::quiet()))?;
    let (_, peer_bytes) = peer(&image, &tools, dir.path())?;
    let (mut fresh, mut same, mut changed, mut peers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for turn in 1..=turns {
        let out = dir.path().join(format!("out-{turn}"));
        fresh.push(timed_build(&manifest, &out, &cache)?.1);
        let (again, took) = timed_build(&manifest, &out, &cache)?;
        same.push(took);
        let (other, took) = timed_build(&with_other_init(&manifest, dir.path(), turn)?, &out, &cache)?;
        changed.push(took);
        if again.contents != image.contents || other.contents.outputs == image.contents.outputs {
            bail!("turn {turn} built unexpected contents");
        }
        peers.push(peer(&image, &tools, dir.path())?.0);
        let last =
            |all: &[Cost]| all.last().map_or_else(String::new, |cost| format!("{:.1}/{:.1}", cost.cpu, cost.wall));
        eprintln!(
            "bench: {turn} of {turns}: CPU/wall seconds: new directory {}, unchanged {}, another PID 1 {}, peer {}",
            last(&fresh),
            last(&same),
            last(&changed),
            last(&peers)
        );
        let _ = fs::remove_dir_all(&out);
    }
    let base = lab.shipped("base")?;
    let cpu = |all: &[Cost]| median(all.iter().map(|cost| cost.cpu).collect());
    let wall = |all: &[Cost]| median(all.iter().map(|cost| cost.wall).collect());
    let (peer_cpu, peer_wall) = (cpu(&peers), wall(&peers));
    Ok(vec![
        Figure::shown("gpu-550 as EROFS with dm-verity, into a new directory", "CPU s", cpu(&fresh))
            .beside(PEER, peer_cpu),
        Figure::shown("the same, wall clock", "s", wall(&fresh)).beside(PEER, peer_wall),
        Figure::at_most("CPU time, relative to the peer", "x", cpu(&fresh) / peer_cpu, 1.0),
        Figure::at_most("the same again, unchanged, relative to the peer", "x", cpu(&same) / peer_cpu, 0.1),
        Figure::at_most("the same with a changed PID 1, relative to the peer", "x", cpu(&changed) / peer_cpu, 1.0),
        Figure::at_most("its files", "MB", megabytes(image.contents.file_bytes), 140.0),
        Figure::at_most("its disk, hash tree included", "MB", megabytes(size(&image)), 75.0)
            .beside(PEER, megabytes(peer_bytes)),
        Figure::at_most("the base image", "MB", megabytes(size(&base)), 12.0),
    ])
}

fn on_path(program: impl AsRef<OsStr>) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir: PathBuf| dir.join(program.as_ref()).is_file())
}
