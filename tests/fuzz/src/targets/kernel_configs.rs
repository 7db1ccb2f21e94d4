//! Input of `image-builder kernel check`: kernel configurations, fragments, and Kconfig files.

use std::path::Path;
use std::sync::OnceLock;

use firstlight_image_builder::kernel::check::{Rules, Subject, Verdict, check_config};
use firstlight_image_builder::kernel::config::RequestedConfig;
use firstlight_image_builder::kernel::dot_config::DotConfig;
use firstlight_image_builder::kernel::fragment;
use firstlight_image_builder::kernel::kconfig::{Symbols, Tree};

use super::text;

pub(super) const CONFIGURATIONS: &[&[u8]] = &[
    b"#\n# Automatically generated file; DO NOT EDIT.\n# Linux/x86 6.12.95 Kernel Configuration\n#\nCONFIG_NET=y\n\
      # CONFIG_DRM is not set\nCONFIG_LSM=\"landlock,lockdown\"\nCONFIG_NR_CPUS=8192\nCONFIG_EROFS_FS=m\n\
      # end of Kernel hacking\n",
    b"CONFIG_VFIO=m\r\nCONFIG_VFIO=y\r\nCONFIG_MODULE_SIG_FORCE=y\nCONFIG_RETPOLINE=y\nCONFIG_X=-0x1\n",
    b"\x7fELF IKCFG_ST\x1f\x8b\x08\0\0\0\0\0\0\xff\x03\0\0\0\0\0\0\0\0\0IKCFG_ED",
    b"\x1f\x8b\x08\0\0\0\0\0\x02\xffs\xf6\xf7s\xf3t\x8fw\xb4\xad\xe4\x02\0\x8e\xb1\x80\xda\x0b\0\0\0",
];

pub(super) const FRAGMENTS: &[&[u8]] = &[
    b"# A file.\n\n# [require 5.1.., module dm-mod, or B, optional] Why. Without it: what.\nCONFIG_A=y\n#: CONFIG_C=y\n",
    b"# --- title\n# [forbid ..6.9] x\n#: # CONFIG_D is not set\n# [hint 5.1..6.1]\nCONFIG_E=\"a,b\"\nCONFIG_F=-1\n",
];

pub(super) const SOURCES: &[&[u8]] = &[
    b"menu \"M\"\n\tdepends on NET && !(A || B=m)\n\tvisible if $(success,x)\nconfig VSOCKETS\n\ttristate \"V\" if X\n\
      \tselect CRC32 if \\\n\t\tNET\n\thelp\n\t  config NO\nendmenu\nif NET\nchoice\n\tprompt \"c\"\nconfig HZ\n\tbool \"h\"\n\
      endchoice\nendif\n",
    b"config A\n\tdef_bool y\n\tdepends on \"x\" != 'y' && C >= 5\nconfig A\n\tbool \"a\\\"b\" # c\nsource \"x\"\n",
];

fn rules() -> &'static Rules {
    static RULES: OnceLock<Rules> = OnceLock::new();
    // A unit test of image-builder proves that the built-in rules load.
    RULES.get_or_init(|| {
        Rules::built_in().unwrap_or(Rules { fragments: vec![], purposes: vec![], renamed: vec![], milestones: vec![] })
    })
}

/// The report of any configuration covers every rule.
pub(super) fn configuration(bytes: &[u8]) {
    let Ok(config) = DotConfig::read(bytes) else { return };
    assert!(!config.is_empty() && config.notes.len() <= 16);
    let purposes = ["gpu-guest".to_owned(), "host".to_owned()];
    let Ok(report) = check_config(rules(), &purposes, Subject { origin: "x", config: &config, source: None }) else {
        return;
    };
    let all = rules().for_purposes(&purposes).map_or(0, |rules| rules.len());
    let of_symbols = report.findings.iter().filter(|finding| !finding.symbol.is_empty()).count();
    assert_eq!(report.fits + of_symbols, all);
    let text = report.text();
    assert_eq!(text.contains("does not fit"), report.verdict == Verdict::DoesNotFit);
}

/// The options of a fragment are printed so that they parse to the same options.
pub(super) fn fragment_options(bytes: &[u8]) {
    let text = text(bytes);
    let file = Path::new("x.config");
    let read = fragment::read(file, &text);
    let mut requested = RequestedConfig::default();
    if requested.add(file, &text).is_ok() {
        assert!(read.is_ok_and(|all| all.len() >= requested.len()));
        let mut again = RequestedConfig::default();
        assert!(again.add(file, &requested.text()).is_ok() && again.text() == requested.text());
        assert!(requested.unmet_values(&requested.text()).is_empty());
    }
}

/// The text after the last `CONFIG_` is a configuration; the text before it is Kconfig.
pub(super) fn source(bytes: &[u8]) {
    let text = text(bytes);
    let (source, line) = text.rsplit_once("CONFIG_").unwrap_or((&text, "NET=y"));
    let tree = Tree::from_symbols(Symbols::parse(source));
    let Ok(config) = DotConfig::parse(&format!("CONFIG_{line}\n")) else { return };
    for symbol in ["VSOCKETS", "CRC32", "HZ", "A"] {
        for value in ["y", "m", "n"] {
            assert!(!tree.explain(symbol, value, &config).sentence().is_empty());
        }
    }
}
