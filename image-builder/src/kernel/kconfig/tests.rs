use super::*;
use proptest::prelude::*;
use std::fs;

/// Kconfig text in the kernel's style, including unusual constructs.
const TEXT: &str = r#"
mainmenu "Linux"
cc-option = $(success,$(CC) -Werror $(1))

config BLOCK
	bool "Enable the block layer" if EXPERT
	default y
	select SBITMAP
	help
	  Provide block layer support. Say
	  config FAKE
	  if you are unsure.

menuconfig MD
	bool "Multiple devices"
	depends on BLOCK
	select CRC32 if \
		BLOCK

if MD

config BLK_DEV_DM
	tristate "Device mapper" # a note
	help

	  Below an empty line.

config DM_INIT
	bool "DM \"dm-mod.create=\" parameter support"
	depends on BLK_DEV_DM=y
	depends on !DM_OFF

endif # MD

config DMA_SHARED_BUFFER
	bool
	default n

config SYNC_FILE
	bool "Explicit Synchronization Framework"
	select DMA_SHARED_BUFFER

menu "Hidden"
	visible if SHOWN
	depends on MD

config INSIDE
	bool "Inside"

endmenu

choice
	prompt "Timer frequency"
	default HZ_250

config HZ_100
	bool "100 HZ"
config HZ_250
	bool "250 HZ"
endchoice

config TWICE
	bool "Twice"
	depends on ABSENT && ALSO

config TWICE
	bool "Twice"
	depends on BLOCK && $(cc-option,-x) && MD

config HIDDEN
	bool "Hidden" if EXPERT
	depends on BLOCK
"#;

fn explain(symbol: &str, expected: &str, config: &str) -> Explanation {
    Tree::from_symbols(Symbols::parse(TEXT)).explain(symbol, expected, &DotConfig::parse(config).unwrap())
}

fn blocked(by: &[&str]) -> Explanation {
    Explanation::Blocked(by.iter().map(|one| (*one).to_owned()).collect())
}

#[test]
fn disabled_symbol_is_explained() {
    let block = "CONFIG_BLOCK=y\n";
    assert_eq!(explain("FAKE", "y", block), Explanation::Unknown);
    assert_eq!(explain("DM_INIT", "y", block), blocked(&["MD is off", "BLK_DEV_DM is off, not y"]));
    let module = "CONFIG_BLOCK=y\nCONFIG_MD=y\nCONFIG_BLK_DEV_DM=m\n";
    assert_eq!(explain("DM_INIT", "y", module), blocked(&["BLK_DEV_DM is m, not y"]));
    let ready = "CONFIG_MD=y\nCONFIG_BLK_DEV_DM=y\nCONFIG_DM_OFF=y\n";
    assert_eq!(explain("DM_INIT", "y", ready), blocked(&["DM_OFF is y"]));
    assert_eq!(explain("DM_INIT", "y", "CONFIG_MD=y\nCONFIG_BLK_DEV_DM=y\n"), Explanation::Settable);
    assert_eq!(explain("DMA_SHARED_BUFFER", "y", block), Explanation::Promptless(vec!["SYNC_FILE".to_owned()]));
    assert_eq!(explain("HZ_100", "y", "CONFIG_HZ_250=y\n"), Explanation::Choice);
    assert_eq!(explain("HIDDEN", "y", block), blocked(&["EXPERT is off"]));
}

#[test]
fn enclosing_conditions_apply_to_symbol() {
    assert_eq!(explain("INSIDE", "y", "CONFIG_A=y\n"), blocked(&["MD is off"]));
    assert_eq!(explain("INSIDE", "y", "CONFIG_MD=y\n"), blocked(&["SHOWN is off"]));
    assert_eq!(explain("INSIDE", "y", "CONFIG_MD=y\nCONFIG_SHOWN=y\n"), Explanation::Settable);
    // Of two definitions, the one with the fewest unmet dependencies; compiler checks are not evaluated.
    assert_eq!(explain("TWICE", "y", "CONFIG_BLOCK=y\n"), blocked(&["MD is off"]));
    assert_eq!(explain("TWICE", "y", "CONFIG_BLOCK=y\nCONFIG_MD=y\n"), Explanation::Settable);
}

#[test]
fn selectors_of_symbol_are_reported() {
    let on = "CONFIG_CRC32=y\nCONFIG_MD=y\nCONFIG_BLOCK=y\n";
    assert_eq!(explain("MD", "n", on), Explanation::Settable);
    let symbols = Symbols::parse("config CRC32\n\tbool\nconfig MD\n\tbool \"x\"\n\tselect CRC32 if \\\n\t\tBLOCK\n");
    let tree = Tree::from_symbols(symbols);
    let explain = |config: &str| tree.explain("CRC32", "n", &DotConfig::parse(config).unwrap());
    assert_eq!(explain(on), Explanation::Selected(vec!["MD".to_owned()]));
    assert_eq!(explain("CONFIG_MD=y\n"), Explanation::Settable);
}

#[test]
fn source_statements_are_followed_within_the_tree_only() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = dir.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    write("Kconfig", "source \"arch/$(SRCARCH)/Kconfig\"\nif A\nsource \"lib/Kconfig\"\nendif\nsource \"not/there\"\n");
    write("arch/x86/Kconfig", "config A\n\tbool \"A\"\nsource \"arch/x86/Kconfig\"\n");
    write("lib/Kconfig", "config B\n\tbool \"B\"\n");
    let tree = Tree::read(dir.path()).unwrap();
    assert_eq!(tree.len(), 2);
    assert_eq!(tree.explain("B", "y", &DotConfig::parse("CONFIG_X=y\n").unwrap()), blocked(&["A is off"]));

    write("lib/Kconfig", "source \"../outside\"\n");
    assert!(Tree::read(dir.path()).unwrap_err().to_string().contains("points outside"));
    write("lib/Kconfig", "source \"/etc/passwd\"\n");
    assert!(Tree::read(dir.path()).unwrap_err().to_string().contains("points outside"));
    for at in 0..100 {
        write(&format!("deep/{at}"), &format!("config D{at}\n\tbool\nsource \"deep/{}\"\n", at + 1));
    }
    write("Kconfig", "source \"deep/0\"\n");
    let error = Tree::read(dir.path()).unwrap_err().to_string();
    assert!(error.contains("too deeply"), "{error}");
    assert!(Tree::read(&dir.path().join("lib")).is_err());
}

proptest! {
    #[test]
    fn any_text_is_parsed(
        text in "(config A|config B|menu|endmenu|if A|endif|choice|endchoice|depends on [AB!&()]{1,4}|\tbool \"x\"|\tselect B|help|  \\PC{0,9}|\n){0,60}"
    ) {
        let tree = Tree::from_symbols(Symbols::parse(&text));
        let config = DotConfig::parse("CONFIG_A=y\n").unwrap();
        for expected in ["y", "m", "n"] {
            let _ = tree.explain("B", expected, &config).sentence();
        }
        prop_assert!(tree.len() <= text.lines().count());
    }
}
