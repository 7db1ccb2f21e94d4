use super::rules::{Absent, Firmware, Names, Opens, Used};
use super::*;
use proptest::prelude::*;
use std::process::Command;

fn file(bytes: &[u8]) -> Node {
    Node::File { mode: 0o755, content: Content::Bytes(bytes.to_vec()) }
}

fn link(target: &str) -> Node {
    Node::Symlink { target: target.into() }
}

/// Compiles a program and a library with the host's compiler.
fn built(dir: &Path) -> (Vec<u8>, Vec<u8>) {
    let (program, library) = (dir.join("program"), dir.join("libours.so.1"));
    let compile = |text: &str, target: &Path, more: &[&str]| {
        let source = dir.join("source.c");
        fs::write(&source, text).unwrap();
        let mut gcc = Command::new("gcc");
        gcc.arg("-o").arg(target).arg(&source).args(more).current_dir(dir);
        assert!(gcc.status().unwrap().success());
    };
    compile("int ours(void) { return 0; }", &library, &["-shared", "-fPIC", "-Wl,-soname,libours.so.1"]);
    compile(
        "int ours(void); int main(void) { return ours(); }",
        &program,
        &["libours.so.1", "-Wl,-rpath,$ORIGIN/../private"],
    );
    (fs::read(program).unwrap(), fs::read(library).unwrap())
}

fn texts(tree: &Tree, rules: &Rules) -> Vec<String> {
    check(tree, rules).unwrap().iter().map(ToString::to_string).collect()
}

#[test]
fn libraries_are_searched_as_by_the_loader_and_missing_ones_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (program, library) = built(dir.path());
    let libc = Absent { file: "/*/*/*".into(), need: "libc.so.6".into(), reason: "a test".into() };
    let program_libc = Absent { file: "usr/bin/program".into(), ..libc.clone() };
    let loader = Absent { need: "/lib64/ld-linux-x86-64.so.2".into(), ..program_libc.clone() };
    let rules = Rules { absent: vec![libc, program_libc, loader], ..Rules::default() };
    let mut tree = Tree::default();
    tree.add("usr/bin/program", file(&program)).unwrap();
    let findings = texts(&tree, &rules);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].contains("/usr/bin/program needs libours.so.1 (DT_NEEDED)"), "{findings:?}");
    // In the RPATH of the program, through a link, or in the default search path.
    for (path, links) in [
        ("usr/private/libours.so.1", vec![]),
        ("usr/lib/x86_64-linux-gnu/libours.so.1.0", vec![("usr/lib/x86_64-linux-gnu/libours.so.1", "libours.so.1.0")]),
        ("opt/real/libours.so.1", vec![("lib64", "/opt/./here/../real")]),
    ] {
        let mut tree = tree.clone();
        tree.add(path, file(&library)).unwrap();
        if path.starts_with("opt") {
            tree.add("opt/here", Node::Directory { mode: 0o755 }).unwrap();
        }
        for (at, target) in links {
            tree.add(at, link(target)).unwrap();
        }
        assert_eq!(texts(&tree, &rules), [""; 0], "{path}");
    }
    // Without the rules, the missing libc and loader are reported as well.
    let all = texts(&tree, &Rules::default());
    assert!(all.iter().any(|text| text.contains("libc.so.6")) && all.iter().any(|text| text.contains("interpreter")));
}

#[test]
fn symlink_cycles_and_files_as_directories_are_not_libraries() {
    let mut tree = Tree::default();
    tree.add("a", link("b")).unwrap();
    tree.add("b", link("/a")).unwrap();
    tree.add("plain", file(b"x")).unwrap();
    tree.add("up", link("../../../plain")).unwrap();
    assert_eq!(resolve(&tree, "/a"), None);
    assert_eq!(resolve(&tree, "plain/x"), None);
    assert_eq!(resolve(&tree, "up").as_deref(), Some("plain"), "the root's parent is the root");
    assert_eq!(resolve(&tree, "none"), None);
}

#[test]
fn rules_declare_needs_that_files_do_not_show() {
    let dir = tempfile::tempdir().unwrap();
    let (_, library) = built(dir.path());
    let reason = || "a test".to_owned();
    let mut rules = Rules {
        opens: vec![Opens {
            file: "/usr/lib/libmain.so.*".into(),
            needs: vec!["libours.so.1".into()],
            reason: reason(),
        }],
        names: vec![Names { file: "/etc/fm.cfg".into(), key: "TOPOLOGY".into(), reason: reason() }],
        absent: vec![Absent { file: "usr/lib/*".into(), need: "libc.so.6".into(), reason: reason() }],
        ..Rules::default()
    };
    let mut tree = Tree::default();
    tree.add("usr/lib/libmain.so.1", file(b"not ELF")).unwrap();
    tree.add("etc/fm.cfg", file(b"# TOPOLOGY=/no\n TOPOLOGY = /usr/share/nvswitch\n")).unwrap();
    let findings = texts(&tree, &rules);
    assert!(
        findings[0].contains("libours.so.1 (opened with dlopen)") || findings[1].contains("libours"),
        "{findings:?}"
    );
    assert!(
        findings.iter().any(|text| text.contains("/etc/fm.cfg needs /usr/share/nvswitch (value of a key)")),
        "{findings:?}"
    );
    assert_eq!(findings.len(), 2, "{findings:?}");
    tree.add("usr/share/nvswitch", Node::Directory { mode: 0o755 }).unwrap();
    tree.add("usr/lib/libours.so.1", file(&library)).unwrap();
    assert_eq!(texts(&tree, &rules), [""; 0]);
    // An unused library is reported, but is not an error.
    rules.opens.clear();
    let found = check(&tree, &rules).unwrap();
    assert!(matches!(&found[..], [Finding::Unused { file, .. }] if file == "usr/lib/libours.so.1"), "{found:?}");
    assert!(!found[0].is_error());
    rules.used.push(Used { file: "usr/lib/libours*".into(), reason: reason() });
    assert_eq!(texts(&tree, &rules), [""; 0]);
    // Ineffective rules are errors, as they may be misspelled.
    rules.names.push(Names { file: "/etc/none".into(), key: "X".into(), reason: reason() });
    rules.names.push(Names { file: "/etc/fm.cfg".into(), key: "LEVEL".into(), reason: reason() });
    rules.firmware.push(Firmware { module: "nvidia".into(), reason: reason() });
    let found = check(&tree, &rules).unwrap();
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(Finding::is_error), "{found:?}");
}

#[test]
fn module_without_any_of_its_firmware_is_reported() {
    let module = crate::kernel::tests::module_with(&["firmware=nvidia/1/a.bin", "firmware=nvidia/1/b.bin"]);
    let rules =
        Rules { firmware: vec![Firmware { module: "nvidia".into(), reason: "one each".into() }], ..Rules::default() };
    let mut tree = Tree::default();
    tree.add("lib/modules/6/updates/nvidia.ko", file(&module)).unwrap();
    let findings = texts(&tree, &rules);
    assert!(findings[0].contains("nvidia/1/a.bin, nvidia/1/b.bin"), "{findings:?}");
    tree.add("lib/firmware/nvidia/1/b.bin.zst", file(b"x")).unwrap();
    assert_eq!(texts(&tree, &rules), [""; 0]);
}

#[test]
fn compressed_module_then_its_firmware_is_checked() {
    let module = crate::kernel::tests::module_with(&["firmware=nvidia/1/a.bin"]);
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
    std::io::Write::write_all(&mut writer, &module).unwrap();
    let packed = writer.finish().unwrap();
    // In module names, - and _ are equivalent.
    let reason = "one each".to_owned();
    let rules = Rules { firmware: vec![Firmware { module: "a-b".into(), reason }], ..Rules::default() };
    let mut tree = Tree::default();
    tree.add("lib/modules/6/kernel/a_b.ko.xz", file(&packed)).unwrap();
    let findings = texts(&tree, &rules);
    assert!(findings.len() == 1 && findings[0].contains("a_b.ko.xz needs one of nvidia/1/a.bin"), "{findings:?}");
    tree.add("usr/lib/firmware/nvidia/1/a.bin.xz", file(b"x")).unwrap();
    assert_eq!(texts(&tree, &rules), [""; 0]);
    // Wrongly compressed or invalid modules are reported.
    for (name, bytes) in [("a-b.ko.xz", &packed[..20]), ("a-b.ko.zst", &packed[..]), ("a-b.ko", &packed[..])] {
        let mut tree = Tree::default();
        tree.add(&format!("lib/modules/6/{name}"), file(bytes)).unwrap();
        let error = check(&tree, &rules).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("which firmware"), "{error}");
    }
}

#[test]
fn truncated_elf_file_then_error() {
    let dir = tempfile::tempdir().unwrap();
    let (program, _) = built(dir.path());
    let mut tree = Tree::default();
    tree.add("program", file(&program[..40])).unwrap();
    let error = check(&tree, &Rules::default()).unwrap_err().to_string();
    assert!(error.contains("/program"), "{error}");
}

proptest! {
    #[test]
    fn corrupted_files_do_not_panic(at in 0usize..20_000, byte in any::<u8>(), cut in 4usize..20_000) {
        use std::sync::OnceLock;
        static WHOLE: OnceLock<Vec<u8>> = OnceLock::new();
        let whole = WHOLE.get_or_init(|| built(tempfile::tempdir().unwrap().path()).0);
        let mut bytes = whole[..cut.min(whole.len())].to_vec();
        let path = at % bytes.len();
        bytes[path] = byte;
        let mut tree = Tree::default();
        tree.add("program", file(&bytes)).unwrap();
        let _ = check(&tree, &Rules::default());
    }
}
