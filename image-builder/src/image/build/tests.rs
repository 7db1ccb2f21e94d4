use super::*;
use crate::format::cpio;
use crate::kernel::tests::fake;
use std::os::unix::fs::PermissionsExt as _;

const MANIFEST: &str = r#"
[image]
name = "test"
format = "initramfs"
[kernel]
package = "linux-image-test"
suite = "sid"
modules = ["vsock", "virtio_pci"]
[[file]]
path = "/init"
source = "init"
mode = 0o755
[[file]]
path = "/etc/passwd"
content = "root:x:0:0::/:\n"
[[symlink]]
path = "/var/run"
target = "/run"
[[directory]]
path = "/tmp"
mode = 0o1777
"#;

/// Returns an empty package set.
fn no_packages(dir: &Path) -> Packages<'static> {
    Packages::new(dir, None, Progress::quiet())
}

fn built(dir: &Path, out: &str) -> Result<Image, Error> {
    let manifest = Manifest::parse(MANIFEST, &dir.join("m.toml"), &Variables::new()).unwrap();
    build_with(&manifest, &fake(dir), &mut no_packages(dir), &dir.join(out))
}

#[test]
fn repeated_builds_give_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("init"), "#!init").unwrap();
    let first = built(dir.path(), "one").unwrap();
    // Another inode and another mtime: neither may affect the image.
    fs::remove_file(dir.path().join("init")).unwrap();
    fs::write(dir.path().join("init"), "#!init").unwrap();
    let second = built(dir.path(), "two").unwrap();
    for (one, two) in
        [(&first.initrd, &second.initrd), (&first.record, &second.record), (&first.kernel, &second.kernel)]
    {
        assert_eq!(fs::read(one).unwrap(), fs::read(two).unwrap(), "{}", one.display());
    }
    // And building over a finished image changes nothing.
    let again = built(dir.path(), "one").unwrap();
    assert_eq!(again.contents, first.contents);
}

#[test]
fn image_over_its_budget_fails_and_largest_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("init"), "#!init".repeat(1000)).unwrap();
    let built = |budget: &str, out: &str| {
        let text = format!("{MANIFEST}\n[budget]\n{budget}");
        let manifest = Manifest::parse(&text, &dir.path().join("m.toml"), &Variables::new()).unwrap();
        build_with(&manifest, &fake(dir.path()), &mut no_packages(dir.path()), &dir.path().join(out))
    };
    let image = built("image = 1_000_000\nfiles = 1_000_000", "fits").unwrap();
    let (packed, files) = (fs::metadata(&image.initrd).unwrap().len(), image.contents.file_bytes);
    built(&format!("image = {packed}\nfiles = {files}"), "just").unwrap();
    let error = built(&format!("image = {}", packed - 1), "image").unwrap_err().to_string();
    assert!(error.contains("test") && error.contains(&format!("budget.image allows {}", packed - 1)), "{error}");
    assert!(error.contains("the largest: /init 6 kB") && !error.contains("budget.files"), "{error}");
    let error = built(&format!("files = {}", files - 1), "files").unwrap_err().to_string();
    assert!(error.contains("budget.files") && !error.contains("budget.image"), "{error}");
    assert!(!dir.path().join("files").join(RECORD).exists());
}

#[test]
fn image_has_the_entries_of_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("init"), "#!init").unwrap();
    let image = built(dir.path(), "out").unwrap();
    let archive = fs::read(&image.initrd).unwrap();
    let entries: Vec<cpio::Entry> = cpio::Reader::new(&archive[..]).map(Result::unwrap).collect();
    let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "dev",
            "dev/console",
            "dev/null",
            "etc",
            "etc/passwd",
            "init",
            "lib",
            "lib/modules",
            "lib/modules/6.12.95",
            "lib/modules/6.12.95/kernel",
            "lib/modules/6.12.95/kernel/vsock.ko",
            "lib/modules/6.12.95/modules.alias",
            "lib/modules/6.12.95/modules.builtin",
            "lib/modules/6.12.95/modules.dep",
            "lib/modules/6.12.95/modules.softdep",
            "tmp",
            "var",
            "var/run",
        ]
    );
    let entry = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
    assert_eq!(entry("init").mode, cpio::file_type::REGULAR | 0o755);
    assert_eq!(entry("tmp").mode, cpio::file_type::DIRECTORY | 0o1777);
    assert_eq!(entry("dev/console").device, (5, 1));
    assert_eq!(entry("var/run").data, b"/run");

    let contents = &image.contents;
    assert_eq!(contents.built_in_modules, ["virtio_pci"]);
    let init = &contents.files["init"];
    assert_eq!((init.size, &init.sha256), (6, &digest::of_bytes(b"#!init")));
    assert_eq!((init.mode, init.sha1.as_deref()), (Some(0o755), Some("162c441ea26820a9cc96c605827850977b306574")));
    // Origins.
    let origin = |path: &str| contents.files[path].origin.clone().unwrap();
    let of_kernel = Origin::Package("sid/linux-image-test=6.12.95-1".to_owned());
    assert_eq!((origin("init"), origin("etc/passwd")), (Origin::Own, Origin::Own));
    assert_eq!(origin("lib/modules/6.12.95/kernel/vsock.ko"), of_kernel);
    assert_eq!(origin("lib/modules/6.12.95/modules.builtin"), of_kernel);
    assert_eq!(origin("lib/modules/6.12.95/modules.dep"), Origin::Builder);
    assert!(contents.files.values().all(|file| file.origin.is_some()));
    assert_eq!(contents.kernel, Some(of_kernel));
    assert_eq!(contents.packages[0].id(), "sid/linux-image-test=6.12.95-1");
    for (path, text) in [("var/run", "link /run"), ("tmp", "directory 1777"), ("dev/null", "character 666 1,3")] {
        assert_eq!(contents.others[path], text);
    }
    assert_eq!(contents.files.len() + contents.others.len(), contents.entries);
    assert_eq!(contents.outputs["initrd.cpio"].size, archive.len() as u64);
    assert_eq!(contents.outputs["initrd.cpio"].sha256, digest::of_bytes(&archive));
    assert_eq!(contents.entries, entries.len());
}

#[test]
fn missing_source_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = built(dir.path(), "out").unwrap_err().to_string();
    assert!(error.contains("cannot open") && error.contains("init"), "{error}");
}

#[test]
fn tree_is_copied_with_links_and_modes() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("init"), "#!init").unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("usr/bin")).unwrap();
    fs::create_dir_all(tree.join("other")).unwrap();
    fs::write(tree.join("usr/bin/tool"), "tool").unwrap();
    fs::set_permissions(tree.join("usr/bin/tool"), fs::Permissions::from_mode(0o750)).unwrap();
    std::os::unix::fs::symlink("tool", tree.join("usr/bin/alias")).unwrap();
    let with = |tail: &str| {
        let text = format!("{MANIFEST}{tail}");
        let manifest = Manifest::parse(&text, &dir.path().join("m.toml"), &Variables::new()).unwrap();
        build_with(&manifest, &fake(dir.path()), &mut no_packages(dir.path()), &dir.path().join("out"))
    };
    let image = with("[[tree]]\nsource = \"tree\"\nonly = [\"usr\"]\n").unwrap();
    let archive = fs::read(&image.initrd).unwrap();
    let entries: Vec<cpio::Entry> = cpio::Reader::new(&archive[..]).map(Result::unwrap).collect();
    let entry = |name: &str| entries.iter().find(|entry| entry.name == name);
    assert_eq!(
        entry("usr/bin/tool").map(|tool| (tool.mode & 0o7777, tool.data.as_slice())),
        Some((0o750, &b"tool"[..]))
    );
    assert_eq!(entry("usr/bin/alias").map(|alias| alias.data.as_slice()), Some(&b"tool"[..]));
    assert!(entry("other").is_none());
    let missing = with("[[tree]]\nsource = \"tree\"\nonly = [\"none\"]\n").unwrap_err();
    let Error::Cache(missing) = missing else { panic!("{missing}") };
    assert!(missing.to_string().contains("tree/none"), "{missing}");
}

#[test]
fn inputs_outside_packages_change_own_files_sha256() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| fs::write(dir.path().join(name), text).unwrap();
    write("init", b"#!init");
    write("r.toml", b"");
    let module = |note: &str| crate::kernel::tests::module_with(&["depends=", "vermagic=6.12.95 SMP", note]);
    let hash = |tail: &str, vmlinux: &str| {
        let package = "package = \"linux-image-test\"\nsuite = \"sid\"\n";
        let text = match vmlinux {
            "" => format!("{MANIFEST}{tail}"),
            _ => format!("{}{tail}", MANIFEST.replace(package, "recipe = \"r.toml\"\n")),
        };
        let manifest = Manifest::parse(&text, &dir.path().join("m.toml"), &Variables::new()).unwrap();
        let mut kernel = fake(dir.path());
        if !vmlinux.is_empty() {
            fs::write(kernel.vmlinux(), vmlinux).unwrap();
            kernel.facts.vmlinux_sha256 = digest::of_bytes(vmlinux.as_bytes());
            kernel.facts.vmlinux_size = vmlinux.len() as u64;
        }
        let image = build_with(&manifest, &kernel, &mut no_packages(dir.path()), &dir.path().join("out")).unwrap();
        image.contents.own_files_sha256
    };
    let extra = |name: &str| format!("[[extra-modules]]\npath = \"{name}\"\n");
    let plain = hash("", "");
    assert_eq!(hash("", ""), plain);
    // An extra module, changed contents, and another name.
    write("a.ko", &module("alias=1"));
    let with_a = hash(&extra("a.ko"), "");
    assert_ne!(with_a, plain);
    write("a.ko", &module("alias=2"));
    let with_other = hash(&extra("a.ko"), "");
    assert_ne!(with_other, with_a);
    write("b.ko", &module("alias=2"));
    assert_ne!(hash(&extra("b.ko"), ""), with_other);
    // A Debian kernel does not depend on the host; a compiled one does.
    let (one, two) = (hash("", "one"), hash("", "two"));
    assert!(one != plain && one != two);
    assert_eq!(hash("", "one"), one);
}

#[test]
fn driver_files_have_the_drivers_origin() {
    let dir = tempfile::tempdir().unwrap();
    let pinned = |name: &str| Pinned {
        suite: "trixie".into(),
        name: name.into(),
        requested: None,
        version: "550.163.01-2".into(),
        architecture: "amd64".into(),
        source: None,
        size: 1,
        sha256: digest::of_bytes(name.as_bytes()),
    };
    let record = driver::Record {
        schema: 1,
        driver: "550.163.01".into(),
        kernel_release: "6.12.95".into(),
        compiler: "gcc-14".into(),
        patches: vec!["resize".into()],
        package: pinned("nvidia-open-kernel-dkms"),
        build_packages: Vec::new(),
        modules: BTreeMap::new(),
    };
    let built = driver::BuiltModules { dir: dir.path().into(), record };
    let driver = Driver { version: "550.163.01".parse().unwrap(), built, modules: Vec::new(), files: None };
    let driver_info = driver_record(&driver);
    assert_eq!((driver_info.version.as_str(), driver_info.compiler.as_str()), ("550.163.01", "gcc-14"));
    assert_eq!(
        (driver_info.source.as_str(), driver_info.patches.len()),
        ("trixie/nvidia-open-kernel-dkms=550.163.01-2", 1)
    );

    // Driver modules have the source package as origin, those of the manifest are own files.
    let module = crate::kernel::tests::module_with(&["depends=vsock", "vermagic=6.12.95 SMP"]);
    let file = |name: &str| {
        let file = dir.path().join(name);
        fs::write(&file, &module).unwrap();
        file
    };
    let (kernel, extra) = (fake(dir.path()), [Extra::update(file("nvidia.ko")), Extra::built(file("ours.ko"))]);
    let form = Form::Plain(TypeInformation::Keep);
    let modules = modules::select("6.12.95", kernel.modules(), &[], &extra, form).unwrap();
    let of_kernel = Origin::Source("sid/linux-source=1".into());
    let origins = add_modules(&mut Tree::default(), &kernel, &modules, &of_kernel, Some(&driver)).unwrap();
    let origin = |path: &str| &origins[&format!("lib/modules/6.12.95/{path}")];
    assert_eq!(origin("updates/nvidia.ko"), &Origin::Source(driver_info.source));
    assert_eq!((origin("extra/ours.ko"), origin("kernel/vsock.ko")), (&Origin::Own, &of_kernel));

    // Libraries and firmware have their packages as origin.
    let entry = |package: &str, path: &str| driver::DriverEntry {
        group: "cuda".into(),
        package: package.into(),
        path: path.into(),
        kind: driver::Kind::File { mode: 0o644, size: 1, sha256: "0".repeat(64) },
    };
    let entries = [entry("libcuda1", "usr/lib/libcuda.so.1"), entry("unknown", "usr/lib/lost.so")];
    let origins: Origins = origins_of(&entries, &[pinned("other"), pinned("libcuda1")]).collect();
    let libcuda = Origin::Package("trixie/libcuda1=550.163.01-2".into());
    assert_eq!(origins, Origins::from([("usr/lib/libcuda.so.1".to_owned(), libcuda)]));
}

#[test]
fn archive_is_in_the_image_and_record_and_closure_checked() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("init"), "#!init").unwrap();
    let archive = |config: &str| {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, bytes) in [("fm-1/etc/fm.cfg", config), ("fm-1/share/h100_topology", "map")] {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, bytes.as_bytes()).unwrap();
        }
        let bytes = builder.into_inner().unwrap();
        fs::write(dir.path().join("fm.tar"), &bytes).unwrap();
        digest::of_bytes(&bytes)
    };
    let built = |sha256: &str, out: &str| {
        let text = format!(
            "{MANIFEST}\n[[archive]]\nname = \"fm\"\nversion = \"1\"\npath = \"fm.tar\"\nsha256 = \"{sha256}\"\n\
             licence = \"theirs\"\nreason = \"the fabric\"\nfiles = [{{ from = \"*/etc/fm.cfg\", into = \"/usr/share/fm\" }},\n\
             {{ from = \"*/share/*_topology\", into = \"/usr/share/fm\" }}]\n\
             [[closure.names]]\nfile = \"/usr/share/fm/fm.cfg\"\nkey = \"TOPOLOGY\"\nreason = \"maps\"\n"
        );
        let manifest = Manifest::parse(&text, &dir.path().join("m.toml"), &Variables::new()).unwrap();
        build_with(&manifest, &fake(dir.path()), &mut no_packages(dir.path()), &dir.path().join(out))
    };
    let hash = archive("TOPOLOGY=/usr/share/fm\n");
    let contents = built(&hash, "good").unwrap().contents;
    let record = &contents.archives[0];
    assert_eq!((record.sha256.as_str(), record.licence.as_str()), (hash.as_str(), "theirs"));
    let origin = Some(Origin::Archive("fm=1".into()));
    assert_eq!(contents.files["usr/share/fm/fm.cfg"].origin, origin);
    assert_eq!(contents.files["usr/share/fm/h100_topology"].origin, origin);
    assert_eq!(ImageRecord::read(&dir.path().join("good")).unwrap().archives, contents.archives);
    // The closure check covers supplied files.
    let error = built(&archive("TOPOLOGY=/usr/share/none\n"), "bad").unwrap_err().to_string();
    assert!(error.contains("/usr/share/fm/fm.cfg needs /usr/share/none"), "{error}");
    let error = built(&hash, "other").unwrap_err().to_string();
    assert!(error.contains("the manifest says") && error.contains("the fabric"), "{error}");
    assert!(!dir.path().join("bad").join(RECORD).exists());
}
