//! Building an image, beside what one would do without this project:
//! `mmdebstrap` of the same packages and `mkfs.erofs` of the result.
//!
//! Both have every package on disk, and the driver's modules are compiled
//! before: the peer cannot do that at all. Both pack with the same `mkfs.erofs`
//! and the same options.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use firstlight_image_builder::build::Image;
use firstlight_image_builder::debian;
use firstlight_image_builder::format::Compression;
use firstlight_image_builder::manifest::{Format, Manifest};
use firstlight_image_builder::packages::Packages;
use firstlight_image_builder::progress::Progress;
use firstlight_image_builder::tools::{Kit, Toolset};
use firstlight_lab::formats::Packing;
use firstlight_lab::{Lab, cache_root, shipped};

use super::{Figure, median};

/// What is built, and as what.
const IMAGE: &str = "gpu-550";
const PACKING: Packing = Packing { format: Format::Erofs, compression: Compression::Lz4hc, verity: true };

/// The peer.
const PEER: &str = "mmdebstrap + mkfs.erofs";

/// The options of ours: `docs/images.md`, formats.
const PACK: &[&str] = &["--quiet", "-b4096", "-T0", "--all-root", "-zlz4hc,level=12", "-C65536"];

/// What is compiled of it is in our image and in no package; with it would come a compiler.
const SOURCE: &str = "nvidia-open-kernel-dkms";

/// Builds, and says how long that took, s.
fn timed(manifest: &Manifest, out: &Path, cache: &Path) -> anyhow::Result<(Image, f64)> {
    let begin = Instant::now();
    let image = shipped::build(manifest, out, cache, Progress::quiet())?;
    Ok((image, begin.elapsed().as_secs_f64()))
}

/// The manifest with another PID 1: the same program with one more byte behind its end.
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

/// Runs a program to its end; what it said is in the error.
fn run(name: &str, command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start {name}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = said.lines().rev().take(8).collect();
        bail!("{name} ended with {}:\n{}", output.status, last.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    Ok(())
}

/// The peer's tree as an archive, its packages from and into `kept`.
fn mmdebstrap(names: &[&str], kept: &Path, to: &Path) -> anyhow::Result<()> {
    let source = format!("deb {} trixie main contrib non-free non-free-firmware", debian::mirror()?);
    let archives = "/var/cache/apt/archives";
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=extract", "--architectures=amd64"]);
    command.arg(format!("--include={}", names.join(",")));
    // As ours: what is needed, not what is recommended; packages stay for the next time.
    command.args(["--aptopt=Apt::Install-Recommends \"false\"", "--skip=download/empty,cleanup/apt"]);
    command.arg(format!("--setup-hook=mkdir -p \"$1\"{archives}"));
    command.arg(format!("--setup-hook=copy-in {} /var/cache/apt/", kept.display()));
    // Hooks of the stage "customize" do not run with this variant.
    command.arg(format!("--extract-hook=copy-out {archives} {}", kept.parent().unwrap_or(kept).display()));
    command.arg("--extract-hook=rm -rf \"$1\"/var/cache/apt \"$1\"/var/lib/apt/lists");
    run("mmdebstrap", command.arg("trixie").arg(to).arg(source))
}

/// Fails where the peer did other work than ours: its tree must hold no packages or lists, and the packages must be at
/// hand for the next turn, as ours are.
fn check_peer(kept: &Path, tree: &Path) -> anyhow::Result<()> {
    let debs = fs::read_dir(kept).with_context(|| kept.display().to_string())?;
    let debs = debs.flatten().filter(|entry| entry.path().extension().is_some_and(|end| end == "deb")).count();
    if debs == 0 {
        bail!("the peer kept no package in {}: its next turn would download all of them", kept.display());
    }
    let output = Command::new("tar").arg("--list").arg("--file").arg(tree).output().context("failed to start tar")?;
    let names = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() || names.is_empty() {
        bail!("failed to list {}: {}", tree.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    let is_surplus = |name: &&str| name.ends_with(".deb") || name.contains("/var/lib/apt/lists/");
    if let Some(surplus) = names.lines().find(is_surplus) {
        bail!("the peer's tree holds {surplus}, which is no file of an image");
    }
    Ok(())
}

/// Builds the peer's image; how long that took, s, and its bytes.
fn peer(image: &Image, tools: &Toolset, dir: &Path) -> anyhow::Result<(f64, u64)> {
    let there = image.contents.packages.iter().filter(|package| package.suite == "trixie" && package.name != SOURCE);
    let names: BTreeSet<&str> = there.map(|package| package.name.as_str()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let (kept, tree, packed) = (dir.join("archives"), dir.join("peer.tar"), dir.join("peer.erofs"));
    fs::create_dir_all(&kept).with_context(|| format!("create {}", kept.display()))?;
    let begin = Instant::now();
    mmdebstrap(&names, &kept, &tree)?;
    let mut pack = tools.command("mkfs.erofs")?;
    run("mkfs.erofs", pack.args(PACK).arg("--tar=f").arg(&packed).arg(&tree))?;
    let took = begin.elapsed().as_secs_f64();
    check_peer(&kept, &tree)?;
    let bytes = fs::metadata(&packed).with_context(|| format!("look at {}", packed.display()))?.len();
    Ok((took, bytes))
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
        bail!("mmdebstrap is not installed, which this bench compares with: apt-get install mmdebstrap");
    }
    let cache = cache_root()?;
    let dir = tempfile::tempdir().context("make a directory")?;
    // Fetches what is missing and compiles the driver, which is not measured.
    let manifest = lab.manifest_in_format(IMAGE, PACKING)?;
    let (image, _) = timed(&manifest, &dir.path().join("warm"), &cache)?;
    let tools = Toolset::of(Kit::Erofs, &mut Packages::new(&cache, None, Progress::quiet()))?;
    let (_, peer_bytes) = peer(&image, &tools, dir.path())?;
    let (mut fresh, mut same, mut changed, mut peers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for turn in 1..=turns {
        let out = dir.path().join(format!("out-{turn}"));
        fresh.push(timed(&manifest, &out, &cache)?.1);
        let (again, took) = timed(&manifest, &out, &cache)?;
        same.push(took);
        let (other, took) = timed(&with_other_init(&manifest, dir.path(), turn)?, &out, &cache)?;
        changed.push(took);
        if again.contents != image.contents || other.contents.outputs == image.contents.outputs {
            bail!("turn {turn} did not build what it should have built");
        }
        peers.push(peer(&image, &tools, dir.path())?.0);
        let last = |all: &[f64]| all.last().copied().unwrap_or_default();
        eprintln!(
            "bench: {turn} of {turns}: new directory {:.1} s, unchanged {:.1} s, another PID 1 {:.1} s, peer {:.1} s",
            last(&fresh),
            last(&same),
            last(&changed),
            last(&peers)
        );
        let _ = fs::remove_dir_all(&out);
    }
    let base = lab.shipped("base")?;
    let peer_s = median(peers);
    Ok(vec![
        Figure::shown("gpu-550 as EROFS with dm-verity, into a new directory", "s", median(fresh)).beside(PEER, peer_s),
        Figure::at_most("the same once more, nothing changed", "s", median(same), 3.0).beside(PEER, peer_s),
        Figure::at_most("the same with another PID 1", "s", median(changed), 15.0).beside(PEER, peer_s),
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
