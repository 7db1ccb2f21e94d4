//! Checks kernel configurations: those of Debian's packages, and those of our recipes. No guest is booted.
#![expect(clippy::unwrap_used, reason = "a test whose setup fails has failed")]

use std::fs;
use std::path::{Path, PathBuf};

use firstlight_image_builder::cache;
use firstlight_image_builder::kernel::check::{Report, Rules, Severity, Status, Subject, Verdict, check_config};
use firstlight_image_builder::kernel::dot_config::{self, DotConfig};
use firstlight_image_builder::kernel::kconfig::Tree;
use firstlight_image_builder::kernel::modules::{self, Form};
use firstlight_image_builder::kernel::recipe::Recipe;
use firstlight_image_builder::kernel::{Kernel, Package, Source, package_config};
use firstlight_progress::Progress;

fn log() -> Progress {
    Progress::stderr("kernels")
}

fn cache() -> PathBuf {
    cache::root().unwrap()
}

fn cloud(suite: &str, series: &str) -> Package {
    Package { package: "linux-image-cloud-amd64".to_owned(), suite: suite.to_owned(), series: Some(series.to_owned()) }
}

/// Returns the configuration of Debian's cloud kernel.
fn stock(suite: &str, series: &str) -> String {
    let (candidate, file) = package_config(&cache(), &cloud(suite, series), log()).unwrap();
    assert!(candidate.version.starts_with(series), "{}", candidate.version);
    fs::read_to_string(file).unwrap()
}

fn report(config: &str, purposes: &[&str], source: Option<&Tree>) -> Report {
    let config = DotConfig::read(config.as_bytes()).unwrap();
    let purposes: Vec<String> = purposes.iter().map(|name| (*name).to_owned()).collect();
    let subject = Subject { origin: "stock", config: &config, source };
    let report = check_config(&Rules::built_in().unwrap(), &purposes, subject).unwrap();
    assert_eq!(report.notes.iter().filter(|note| !note.starts_with("a symbol that is not")).count(), 0);
    report
}

fn status(report: &Report, symbol: &str) -> Option<(Severity, Status)> {
    report.about(symbol).map(|finding| (finding.severity, finding.status.clone()))
}

fn errors(report: &Report) -> Vec<&str> {
    report.findings_of(Severity::Error).map(|finding| finding.symbol.as_str()).collect()
}

fn recipes() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel-configs");
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut recipes: Vec<PathBuf> = files.filter(|file| file.extension().is_some_and(|end| end == "toml")).collect();
    recipes.sort();
    recipes
}

/// Debian 12's kernel, which the images with driver 535 use.
#[test]
fn debian_6_1_config_is_checked() {
    let config = stock("bookworm", "6.1");
    let gpu = report(&config, &["gpu-guest"], None);
    let hint = |status| Some((Severity::Hint, status));
    assert_eq!(errors(&gpu), Vec::<&str>::new(), "{}", gpu.text());
    assert_eq!(status(&gpu, "DM_INIT"), hint(Status::Absent));
    assert_eq!(status(&gpu, "EROFS_FS_ZIP_ZSTD"), hint(Status::Unknown));
    for symbol in
        ["MEMORY_FAILURE", "X86_MCE", "PCI_P2PDMA", "DEVICE_PRIVATE", "IKCONFIG", "MEMORY_HOTPLUG_DEFAULT_ONLINE"]
    {
        assert!(status(&gpu, symbol).is_some_and(|(severity, _)| severity == Severity::Hint), "{symbol}");
    }
    // Present, or under the names that Linux 6.1 uses for them.
    for symbol in ["RETPOLINE", "MITIGATION_RETPOLINE", "PAGE_TABLE_ISOLATION", "CPU_MITIGATIONS", "MEMCG_SWAP"] {
        assert_eq!(status(&gpu, symbol), None, "{symbol}");
    }
    let needed: Vec<&str> =
        gpu.modules.iter().filter(|module| module.required).map(|module| module.module.as_str()).collect();
    for module in ["virtio_pci", "virtio_console", "virtiofs", "fuse", "virtio_blk", "vsock", "dm-verity", "erofs"] {
        assert!(needed.contains(&module), "{module}: {needed:?}");
    }
    let root = report(&config, &["verity-root"], None);
    let expected = ["BLK_DEV_DM", "DM_INIT", "DM_VERITY", "EROFS_FS", "VIRTIO_BLK", "VIRTIO_PCI"];
    assert_eq!((root.verdict, errors(&root).as_slice()), (Verdict::DoesNotFit, &expected[..]));
}

/// Debian 13's kernel (and 12's through backports), which the lab and the images with driver 550 use.
#[test]
fn debian_6_12_config_is_checked() {
    let config = stock("bookworm-backports", "6.12");
    let gpu = report(&config, &["gpu-guest"], None);
    assert_eq!(errors(&gpu), Vec::<&str>::new(), "{}", gpu.text());
    assert_eq!(status(&gpu, "DM_INIT"), Some((Severity::Hint, Status::Absent)));
    for symbol in ["EROFS_FS_ZIP_ZSTD", "MEMORY_FAILURE", "VIRTIO_PCI", "VIRTIO_FS", "SYNC_FILE"] {
        assert_eq!(status(&gpu, symbol), None, "{symbol}");
    }
    let root = report(&config, &["verity-root"], None);
    let expected = ["BLK_DEV_DM", "DM_INIT", "DM_VERITY", "EROFS_FS", "VIRTIO_BLK"];
    assert_eq!((root.verdict, errors(&root).as_slice()), (Verdict::DoesNotFit, &expected[..]));
    assert_eq!(status(&root, "DM_VERITY"), Some((Severity::Error, Status::Module)));
    let host = report(&config, &["host"], None);
    assert_eq!((host.verdict, status(&host, "IOMMUFD")), (Verdict::Fits, Some((Severity::Hint, Status::Off))));
    let slow = report(&config, &["fast-boot"], None);
    assert_eq!(slow.verdict, Verdict::Fits);
    for symbol in ["XEN", "HYPERV", "AUDIT", "FTRACE", "DEBUG_INFO_BTF", "SERIO_I8042", "INIT_ON_ALLOC_DEFAULT_ON"] {
        assert_eq!(status(&slow, symbol), Some((Severity::Hint, Status::On)), "{symbol}");
    }
    assert_eq!(report(&config, &["cc"], None).verdict, Verdict::Fits);
    assert_eq!(report(&config, &["service-vm-nvl5"], None).verdict, Verdict::Fits);
}

/// Every module that a report names is in the kernel package under that name.
#[test]
fn modules_named_by_a_report_are_in_the_package() {
    let kernel = Kernel::prepare(&cache(), &Source::Package(cloud("bookworm-backports", "6.12")), log()).unwrap();
    let config = fs::read_to_string(kernel.config()).unwrap();
    let all = report(&config, &["gpu-guest", "cc", "service-vm-nvl5", "host"], None);
    let names: Vec<String> = all.modules.iter().map(|needed| needed.module.clone()).collect();
    assert!(names.len() > 30, "{names:?}");
    let missing = names.iter().filter(|name| {
        let name = std::slice::from_ref(*name);
        let found = modules::select(&kernel.facts.release, kernel.modules(), name, &[], Form::AsPackaged);
        // A built-in module is not found here, but then the report does not name it.
        !found.is_ok_and(|set| set.iter().count() > 0)
    });
    assert_eq!(missing.collect::<Vec<_>>(), Vec::<&String>::new());
}

/// Every recipe passes the rules of its purposes; the Kconfig source explains why other configurations fail them.
#[test]
fn recipes_configure_as_requested_and_blocked_symbols_are_explained() {
    let files = recipes();
    assert!(files.len() >= 4, "{files:?}");
    let mut source = None;
    for file in &files {
        let recipe = Recipe::read(file).unwrap();
        let config = Kernel::configure(&cache(), &recipe, log()).unwrap();
        let config = fs::read_to_string(config).unwrap();
        let purposes: &[&str] = match recipe.name.as_str() {
            "lab" => &["lab", "verity-root"],
            "gpu" => &["gpu-guest", "verity-root", "fast-boot"],
            "gpu-cc" => &["cc", "verity-root"],
            "service-nvl5" => &["service-vm-nvl5", "verity-root", "fast-boot"],
            other => panic!("add the purposes of recipe {other} to this test"),
        };
        let tree = Tree::read(&Kernel::kconfig(&cache(), &recipe, log()).unwrap()).unwrap();
        assert!(tree.len() > 10_000, "{} symbols", tree.len());
        let judged = report(&config, purposes, Some(&tree));
        assert_eq!(judged.verdict, Verdict::Fits, "{}", judged.text());
        source = Some((tree, config));
    }
    let (tree, own) = source.unwrap();
    let root = report(&stock("bookworm-backports", "6.12"), &["verity-root"], Some(&tree));
    let blocked = Status::Blocked { by: vec!["BLK_DEV_DM is m, not y".to_owned()] };
    assert_eq!(status(&root, "DM_INIT"), Some((Severity::Error, blocked)));
    // A symbol without a prompt, in a configuration without the symbol that selects it.
    let without =
        own.replace("CONFIG_SYNC_FILE=y", "# CONFIG_SYNC_FILE is not set").replace("CONFIG_DMA_SHARED_BUFFER=y\n", "");
    let gpu = report(&without, &["gpu-guest"], Some(&tree));
    let Some((Severity::Error, Status::Promptless { by })) = status(&gpu, "DMA_SHARED_BUFFER") else {
        panic!("{}", gpu.text())
    };
    assert!(by.iter().any(|name| name == "SYNC_FILE"), "{by:?}");
}

/// The configuration of a real kernel is never accepted when it is truncated, at any position.
#[test]
fn truncated_configuration_is_rejected() {
    let whole = stock("bookworm-backports", "6.12");
    assert!(whole.is_ascii());
    let last = whole.trim_end().len();
    for end in (200..last).step_by(997).chain([last - 1]) {
        let error = DotConfig::parse(&whole[..end]).unwrap_err();
        assert!(matches!(error, dot_config::Error::Truncated { .. }), "{end}: {error}");
    }
}
