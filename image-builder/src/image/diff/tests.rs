use firstlight_image::{DriverRecord, SuiteRecord, VerityRecord};

use super::*;
use proptest::prelude::*;

fn file(size: u64, hash: &str, origin: &str) -> FileRecord {
    let origin = match origin {
        "own" => Origin::Own,
        package => Origin::Package(package.to_owned()),
    };
    FileRecord { size, sha256: hash.into(), sha1: None, mode: Some(0o644), origin: Some(origin) }
}

fn package(name: &str, version: &str) -> PackageRecord {
    let [name, version, suite, sha256] = [name, version, "sid", version].map(str::to_owned);
    PackageRecord { name, version, suite, architecture: Some("amd64".into()), source: None, sha256 }
}

fn image() -> ImageRecord {
    let root = FileDigest { size: 4096, sha256: "aa".into() };
    ImageRecord {
        schema: 1,
        name: "gpu".into(),
        format: "erofs".into(),
        kernel_release: "6.12.95".into(),
        command_line: Some("root=/dev/dm-0".into()),
        verity: Some(VerityRecord {
            file: "rootfs.img".into(),
            root_hash: "11".into(),
            params: String::new(),
            data_offset: 0,
            hash_offset: 0,
            hash_size: 0,
        }),
        packages: vec![package("libc6", "2.36"), package("zlib1g", "1.2")],
        tools: vec![package("erofs-utils", "1.8")],
        suites: vec![SuiteRecord { name: "sid".into(), date: "then".into(), sha256: String::new() }],
        outputs: BTreeMap::from([("rootfs.img".into(), root)]),
        files: BTreeMap::from([
            ("init".into(), file(100, "i1", "own")),
            ("lib/libc.so.6".into(), file(2_000, "c1", "sid/libc6=2.36")),
            ("lib/libz.so.1".into(), file(300, "z1", "sid/zlib1g=1.2")),
        ]),
        others: BTreeMap::from([("var/run".into(), "link /run".into()), ("tmp".into(), "directory 1777".into())]),
        ..ImageRecord::default()
    }
}

#[test]
fn same_image_then_dates_and_tools_are_ignored() {
    let (a, mut b) = (image(), image());
    let diff = Diff::new(&a, &b);
    assert!(diff.same);
    assert_eq!(diff.text(false), "gpu and gpu are the same image\n");
    // Other dates of suites and another version of mkfs with the same output.
    b.suites[0].date = "now".into();
    b.tools = vec![package("erofs-utils", "1.9")];
    let diff = Diff::new(&a, &b);
    assert!(diff.same && diff.suites.len() == 1 && diff.tools.len() == 1, "{diff:?}");
    let text = diff.text(false);
    assert!(text.contains("erofs-utils 1.8 -> 1.9 (sid)") && text.contains("sid: then -> now"), "{text}");
}

#[test]
fn every_kind_of_change_is_reported() {
    let a = image();
    let mut b = image();
    b.kernel_release = "6.12.107".into();
    b.command_line = None;
    b.verity.as_mut().unwrap().root_hash = "22".into();
    b.outputs.get_mut("rootfs.img").unwrap().size = 8192;
    b.packages = vec![package("libc6", "2.37"), package("libzstd1", "1.5")];
    b.files.insert("lib/libc.so.6".into(), file(2_500, "c2", "sid/libc6=2.37"));
    b.files.remove("lib/libz.so.1");
    b.files.insert("lib/libzstd.so.1".into(), file(9_000, "d1", "sid/libzstd1=1.5"));
    b.files.get_mut("init").unwrap().mode = Some(0o755);
    b.others.insert("tmp".into(), "directory 755".into());
    let diff = Diff::new(&a, &b);
    assert!(!diff.same);
    let whats = |changes: &[Change<String>]| changes.iter().map(|one| one.what.clone()).collect::<Vec<_>>();
    assert_eq!(whats(&diff.facts), ["command line", "kernel release", "root hash"]);
    assert_eq!(whats(&diff.others), ["tmp"]);
    // The largest change of size first, by absolute value.
    let order: Vec<(&str, i128)> = diff.files.iter().map(|one| (one.what.as_str(), growth(one))).collect();
    let sorted = [("lib/libzstd.so.1", 9_000), ("lib/libc.so.6", 500), ("lib/libz.so.1", -300), ("init", 0)];
    assert_eq!(order, sorted);
    let total = |origin: &str, a, b| Total { origin: origin.into(), a, b };
    assert_eq!(
        diff.totals,
        [
            total("sid/libzstd1", 0, 9_000),
            total("sid/libc6", 2_000, 2_500),
            total("sid/zlib1g", 300, 0),
            total("own", 100, 100)
        ]
    );
    let text = diff.text(false);
    for line in [
        "  ~ kernel release: 6.12.95 -> 6.12.107\n",
        "  - command line: root=/dev/dm-0\n",
        "  ~        +4096         4096 ->        8192  rootfs.img\n",
        "  ~ libc6 2.36 -> 2.37 (sid)\n",
        "  + libzstd1 1.5 (sid)\n",
        "  - zlib1g 1.2 (sid)\n",
        "files: 1 added, 1 removed, 2 changed, +9200 bytes in total\n",
        "  +        +9000              ->        9000  /lib/libzstd.so.1\n",
        "  ~           +0          100 ->         100  /init  mode 644 -> 755\n",
        "  ~ /tmp: directory 1777 -> directory 755\n",
        "         +500         2000 ->        2500  sid/libc6\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    assert!(!text.contains("  own\n"), "unchanged totals are not shown:\n{text}");
    // Long values are shown on separate lines.
    let (long, longer) = ("x".repeat(60), "y".repeat(60));
    let line = |text: &str| ImageRecord { command_line: Some(text.into()), ..image() };
    let text = Diff::new(&line(&long), &line(&longer)).text(false);
    assert!(text.contains(&format!("  ~ command line:\n         {long}\n      -> {longer}\n")), "{text}");
    // In the reverse comparison, added and removed are swapped.
    let back = Diff::new(&b, &a);
    assert_eq!(back.files.iter().map(growth).sum::<i128>(), -9_200);
    assert!(back.text(false).contains("  + zlib1g 1.2 (sid)\n"));
}

#[test]
fn fields_missing_in_earlier_records_are_ignored() {
    let mut new = image();
    let mut old = image();
    new.kernel = Some(Origin::Package("sid/linux-image=6.12.95".into()));
    let [version, source, compiler] = ["550", "sid/dkms=550", "gcc"].map(str::to_owned);
    new.driver = Some(DriverRecord { version, source, compiler, patches: Vec::new() });
    for file in old.files.values_mut() {
        (file.mode, file.origin) = (None, None);
    }
    old.others.clear();
    let diff = Diff::new(&old, &new);
    assert!(diff.same && diff.totals.is_empty(), "{diff:?}");
    // If both records have the fields, a removed driver is a change.
    let mut without = new.clone();
    without.driver = None;
    let text = Diff::new(&new, &without).text(false);
    assert!(text.contains("  - driver: 550\n"), "{text}");
}

#[test]
fn long_lists_are_truncated_and_control_characters_escaped() {
    let a = image();
    let mut b = image();
    for at in 0..50 {
        b.files.insert(format!("e\u{1b}vil/{at:02}"), file(1, "x", "own"));
        b.others.insert(format!("\"quoted\"\u{202e}{at:02}"), "link ü".into());
    }
    let diff = Diff::new(&a, &b);
    let (some, all) = (diff.text(false), diff.text(true));
    assert!(some.contains("and 10 files with smaller changes") && !all.contains("smaller changes"));
    assert_eq!(all.matches("/e\\u{1b}vil/").count(), 50, "{all}");
    assert!(!all.contains('\u{1b}') && !all.contains('\u{202e}'));
    assert!(all.contains("  + /\"quoted\"\\u{202e}07: link ü\n"), "{all}");
}

proptest! {
    #[test]
    fn image_equals_itself_and_differs_after_any_file_change(sizes in prop::collection::vec(any::<u64>(), 1..6), at in 0usize..6) {
        let mut a = image();
        a.files = sizes.iter().enumerate().map(|(n, size)| (format!("f{n}"), file(*size, "x", "own"))).collect();
        prop_assert!(Diff::new(&a, &a).same);
        let mut b = a.clone();
        b.files.values_mut().nth(at % sizes.len()).unwrap().sha256.push('y');
        let diff = Diff::new(&a, &b);
        prop_assert!(!diff.same && diff.files.len() == 1);
        let _ = diff.text(true);
    }
}
