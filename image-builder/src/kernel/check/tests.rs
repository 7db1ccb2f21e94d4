use super::*;
use crate::kernel::kconfig::{Symbols, Tree};

fn purposes(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Builds a Linux 6.12 configuration that sets every rule's symbol to `value(rule)`.
fn config_with(names: &[&str], value: impl Fn(&Rule) -> Option<String>) -> String {
    let mut text = "# Linux/x86 6.12.95 Kernel Configuration\n".to_owned();
    for rule in Rules::built_in().unwrap().for_purposes(&purposes(names)).unwrap() {
        let symbol = &rule.requirement.symbol;
        match value(&rule).as_deref() {
            Some("n") => text.push_str(&format!("# CONFIG_{symbol} is not set\n")),
            Some(value) => text.push_str(&format!("CONFIG_{symbol}={value}\n")),
            None => {}
        }
    }
    text
}

fn expected_value(rule: &Rule) -> Option<String> {
    Some(rule.requirement.value.clone())
}

fn report(names: &[&str], text: &str) -> Report {
    report_with(names, text, None)
}

fn report_with(names: &[&str], text: &str, source: Option<&Tree>) -> Report {
    let config = DotConfig::parse(text).unwrap();
    let subject = Subject { origin: "test", config: &config, source };
    check_config(&Rules::built_in().unwrap(), &purposes(names), subject).unwrap()
}

#[test]
fn kernel_that_satisfies_all_rules_fits() {
    for purpose in Rules::built_in().unwrap().purposes {
        let names = [purpose.name.as_str()];
        let report = report(&names, &config_with(&names, expected_value));
        let findings: Vec<_> = report.findings.iter().filter(|one| one.status != Status::Version).collect();
        assert!(findings.is_empty(), "{}: {findings:?}", purpose.name);
        assert_eq!(report.verdict, Verdict::Fits);
        assert!(report.modules.is_empty() && report.notes.is_empty());
    }
}

/// Also asserts that the finding names the missing symbol.
#[test]
fn kernel_without_a_required_symbol_does_not_fit() {
    let rules = Rules::built_in().unwrap();
    for purpose in &rules.purposes {
        let names = [purpose.name.as_str()];
        for rule in rules.for_purposes(&purposes(&names)).unwrap().iter().filter(|rule| rule.class == Class::Require) {
            let symbol = &rule.requirement.symbol;
            let without = |other: &Rule| match &other.requirement.symbol {
                same if same == symbol => Some("n".to_owned()),
                // Alternatives are off, too.
                other if rule.requirement.tag.or.contains(other) => Some("n".to_owned()),
                _ => expected_value(other),
            };
            let report = report(&names, &config_with(&names, without));
            let gone = rule.requirement.tag.kernels.is_after(Version::leading("6.12").unwrap());
            let renamed_away = symbol == "MEMCG_SWAP";
            if gone || renamed_away {
                continue;
            }
            assert_eq!(report.verdict, Verdict::DoesNotFit, "{}: {symbol}", purpose.name);
            let finding = report.about(symbol).unwrap();
            assert_eq!((finding.severity, &finding.status), (Severity::Error, &Status::Off), "{symbol}");
            assert!(!finding.reason.is_empty() && finding.advice.contains(symbol), "{finding:?}");
        }
    }
}

#[test]
fn accepted_modules_satisfy_rules_and_are_listed() {
    let names = ["gpu-guest"];
    let modules = |rule: &Rule| match (&rule.requirement.tag.module, rule.requirement.value.as_str()) {
        (Some(_), "y") => Some("m".to_owned()),
        _ => expected_value(rule),
    };
    let text = config_with(&names, modules);
    let gpu = report(&names, &text);
    assert_eq!(gpu.verdict, Verdict::Fits);
    let listed: Vec<&str> =
        gpu.modules.iter().filter(|needed| needed.required).map(|needed| needed.module.as_str()).collect();
    assert!(!listed.contains(&"ptp_kvm") && gpu.modules.iter().any(|needed| needed.module == "ptp_kvm"));
    for module in ["dm-mod", "dm-verity", "erofs", "virtio_blk", "vsock", "vmw_vsock_virtio_transport"] {
        assert!(listed.contains(&module), "{listed:?}");
    }
    // The same kernel cannot set up a dm-verity root from its command line.
    let root = report(&["verity-root"], &text);
    assert_eq!(root.about("EROFS_FS").unwrap().status, Status::Module);
    assert_eq!(root.verdict, Verdict::DoesNotFit);
}

#[test]
fn forbidden_symbol_is_reported() {
    let text = config_with(&["gpu-guest"], expected_value)
        .replace("# CONFIG_MODULE_SIG_FORCE is not set", "CONFIG_MODULE_SIG_FORCE=y");
    let report = report(&["gpu-guest"], &text);
    let finding = report.about("MODULE_SIG_FORCE").unwrap();
    assert_eq!((finding.severity, &finding.status), (Severity::Error, &Status::On));
    assert!(finding.advice.starts_with("build the kernel without"), "{}", finding.advice);
}

#[test]
fn one_alternative_satisfies_the_rule() {
    let without = config_with(&["host"], |rule| match rule.requirement.symbol.as_str() {
        "INTEL_IOMMU" | "AMD_IOMMU" => None,
        _ => expected_value(rule),
    });
    let neither = report(&["host"], &without);
    assert!(neither.about("AMD_IOMMU").unwrap().advice.contains("CONFIG_INTEL_IOMMU"));
    assert!(neither.about("INTEL_IOMMU").is_some());
    let one = report(&["host"], &format!("{without}CONFIG_INTEL_IOMMU=y\n"));
    assert_eq!((one.about("INTEL_IOMMU"), one.about("AMD_IOMMU")), (None, None));
}

#[test]
fn renamed_symbols_are_resolved_and_reported_by_the_kernels_name() {
    let base = config_with(&["cc"], |rule| match rule.requirement.symbol.as_str() {
        "MITIGATION_RETPOLINE" | "MEMORY_HOTPLUG_DEFAULT_ONLINE" | "CRYPTO_MANAGER_DISABLE_TESTS" => None,
        "CRYPTO_SHA256_SSSE3" | "X86_5LEVEL" => None,
        _ => expected_value(rule),
    });
    let of = |version: &str, lines: &str| {
        let text = format!("{}{lines}", base.replace("6.12.95", version));
        let report = report(&["cc"], &text);
        let mut symbols: Vec<String> = report.findings.into_iter().map(|finding| finding.symbol).collect();
        symbols.retain(|symbol| !symbol.is_empty());
        symbols
    };
    let old = "CONFIG_RETPOLINE=y\nCONFIG_MEMORY_HOTPLUG_DEFAULT_ONLINE=y\nCONFIG_CRYPTO_MANAGER_DISABLE_TESTS=y\n\
        CONFIG_CRYPTO_SHA256_SSSE3=m\nCONFIG_X86_5LEVEL=y\n";
    assert_eq!(of("6.8.1", old), Vec::<String>::new());
    let new = "CONFIG_MITIGATION_RETPOLINE=y\nCONFIG_MHP_DEFAULT_ONLINE_TYPE_ONLINE_AUTO=y\n# CONFIG_CRYPTO_SELFTESTS is not set\n";
    assert_eq!(of("6.18.3", new), Vec::<String>::new());
    // An unmentioned CRYPTO_SELFTESTS is off.
    assert_eq!(of("6.18.3", &new.replace("# CONFIG_CRYPTO_SELFTESTS is not set\n", "")), Vec::<String>::new());
    let slow = new.replace("# CONFIG_CRYPTO_SELFTESTS is not set", "CONFIG_CRYPTO_SELFTESTS=y");
    assert_eq!(of("6.18.3", &slow), ["CRYPTO_SELFTESTS"]);
    // The finding uses this kernel's name of the symbol.
    assert_eq!(of("6.8.1", &old.replace("CONFIG_RETPOLINE=y", "# CONFIG_RETPOLINE is not set")), ["RETPOLINE"]);
}

#[test]
fn numbers_and_lists_are_compared_by_meaning() {
    for (expected, value, fits) in [
        ("512", Some("8192"), true),
        ("512", Some("64"), false),
        ("512", None, false),
        ("\"lockdown,landlock\"", Some("\"landlock,lockdown,yama\""), true),
        ("\"lockdown\"", Some("\"landlock\""), false),
        ("0x10", Some("0x10"), true),
        ("y", Some("m"), false),
        ("m", Some("y"), true),
        ("n", None, true),
        ("n", Some("m"), false),
    ] {
        assert_eq!(satisfies(expected, value, false), fits, "{expected} {value:?}");
    }
    assert!(satisfies("y", Some("m"), true));
}

#[test]
fn unknown_symbols_are_distinguished_from_disabled_ones() {
    let without = config_with(&["gpu-guest"], |rule| match rule.requirement.symbol.as_str() {
        "EROFS_FS_ZIP_ZSTD" | "PCI_P2PDMA" | "DMA_SHARED_BUFFER" => None,
        _ => expected_value(rule),
    });
    let old = report(&["gpu-guest"], &without.replace("6.12.95", "6.1.176"));
    let zstd = old.about("EROFS_FS_ZIP_ZSTD").unwrap();
    assert_eq!(zstd.status, Status::Unknown);
    assert!(zstd.advice.contains("6.10 or later; else use lz4hc"), "{}", zstd.advice);
    assert_eq!(old.about("PCI_P2PDMA").unwrap().status, Status::Absent);
    // The source tree explains the missing symbols.
    let source = "config PCI_P2PDMA\n\tbool \"x\"\n\tdepends on ZONE_DEVICE && IOMMU_DMA\n\
        config DMA_SHARED_BUFFER\n\tbool\nconfig SYNC_FILE\n\tbool \"y\"\n\tselect DMA_SHARED_BUFFER\n";
    let tree = Tree::from_symbols(Symbols::parse(source));
    let explained = report_with(&["gpu-guest"], &without, Some(&tree));
    let status = |symbol: &str| explained.about(symbol).unwrap().status.clone();
    assert_eq!(status("PCI_P2PDMA"), Status::Blocked { by: vec!["IOMMU_DMA is off".to_owned()] });
    assert_eq!(status("DMA_SHARED_BUFFER"), Status::Promptless { by: vec!["SYNC_FILE".to_owned()] });
    assert_eq!(status("EROFS_FS_ZIP_ZSTD"), Status::Unknown);
}

#[test]
fn version_milestones_are_hints() {
    let milestones = |version: &str| {
        let text = format!("# Linux/x86 {version} Kernel Configuration\nCONFIG_A=y\n");
        let report = report(&["host"], &text);
        let found = report.findings.iter().filter(|one| one.status == Status::Version);
        found.map(|one| (one.severity, one.expected.clone())).collect::<Vec<_>>()
    };
    let hint = |version: &str| (Severity::Hint, format!("{version} or later"));
    assert_eq!(milestones("6.12.107"), [hint("6.15"), hint("6.19")]);
    assert_eq!(milestones("6.1.0")[..2], [hint("6.2"), hint("6.12")]);
    assert_eq!(milestones("7.2.12"), []);
    let unknown = report(&["host"], "CONFIG_A=y\n");
    assert!(unknown.notes[0].contains("does not state its kernel version"), "{:?}", unknown.notes);
}

#[test]
fn text_and_json_reports_agree() {
    let report = report(&["host"], "# Linux/x86 6.12.1 Kernel Configuration\nCONFIG_VFIO=m\nCONFIG_VFIO=m\n");
    let text = report.text();
    let first = text.lines().next().unwrap();
    assert!(first.starts_with("test (Linux 6.12.1): does not fit for host; "), "{first}");
    for words in [
        "\nerrors:\n",
        "\nhints:\n",
        "  CONFIG_KVM is not mentioned, expected y or m",
        "modules that the image",
        "note: ",
    ] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    assert!(text.find("\nerrors:").unwrap() < text.find("\nhints:").unwrap());
    assert!(text.lines().skip(1).all(|line| line.len() <= 120), "{text}");

    let json: serde_json::Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["schema"], SCHEMA);
    assert_eq!(json["verdict"], "does-not-fit");
    assert_eq!(json["modules"][0]["module"], "vfio");
    let finding = json["findings"].as_array().unwrap().iter().find(|one| one["symbol"] == "KVM").unwrap();
    assert_eq!((&finding["status"], &finding["severity"]), (&"absent".into(), &"error".into()));
    assert!(finding["rule"].as_str().unwrap().starts_with("kernel-configs/host.config:"));
    assert_eq!(json["findings"].as_array().unwrap().len(), report.findings.len());
}
