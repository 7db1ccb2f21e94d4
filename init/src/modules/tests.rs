use std::fs;

use super::*;
use proptest::prelude::*;

struct Image {
    _directory: tempfile::TempDir,
    root: Root,
}

impl Image {
    fn of(files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = Self { root: Root::at(dir.path()), _directory: dir };
        for (path, text) in files {
            let path = if path.starts_with('/') { (*path).to_owned() } else { format!("/lib/modules/6.12/{path}") };
            let path = image.root.path(&path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        image
    }

    fn modules(&self) -> Modules {
        Modules::read(&self.root, "6.12")
    }
}

/// Returns the set's modules in the order in which a single thread loads them.
fn turns(modules: &Modules, names: &[&str], order: LoadOrder) -> (Vec<String>, Outcome) {
    let set = modules.set(names, order);
    let (_, done) = load::run(set.nodes, 1, &|_| Ok(true));
    (done.loaded.into_iter().map(|(name, _)| name).collect(), set.outcome)
}

fn none(_: &str) -> String {
    String::new()
}

#[test]
fn dependencies_are_loaded_first() {
    let image = Image::of(&[
        (
            "modules.dep",
            "kernel/net/vsock.ko.xz:\n\
             kernel/net/vmw_vsock_virtio_transport.ko.xz: kernel/net/vmw_vsock_virtio_transport_common.ko.xz kernel/net/vsock.ko.xz\n\
             updates/nvidia-uvm.ko: updates/nvidia.ko\n",
        ),
        ("modules.builtin", "kernel/fs/fuse/virtiofs.ko\n"),
    ]);
    let modules = image.modules();
    let (loaded, _) = turns(&modules, &["vmw-vsock-virtio-transport"], LoadOrder::Free);
    assert_eq!(loaded, ["vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"]);
    assert_eq!(turns(&modules, &["nvidia_uvm"], LoadOrder::Free).0, ["nvidia", "nvidia-uvm"]);
    assert!(!modules.has("nvidia"));
    let outcome = modules.load(&["virtiofs"], LoadOrder::Free, &none);
    assert_eq!(outcome.to_result(), Ok("virtiofs built in".to_owned()));
}

#[test]
fn requested_order_is_kept() {
    let image = Image::of(&[("modules.dep", "a.ko:\nb.ko:\nc.ko:\n")]);
    assert_eq!(turns(&image.modules(), &["c", "a", "b"], LoadOrder::InOrder).0, ["c", "a", "b"]);
    let set = image.modules().set(&["c", "a", "b"], LoadOrder::InOrder);
    assert_eq!(order::width(&set.nodes), 1);
    assert_eq!(order::width(&image.modules().set(&["c", "a", "b"], LoadOrder::Free).nodes), 3);
}

#[test]
fn each_module_is_loaded_once_after_shared_dependencies() {
    let image = Image::of(&[("modules.dep", "a.ko: common.ko\nb.ko: common.ko\ncommon.ko:\n")]);
    let (loaded, _) = turns(&image.modules(), &["a", "b", "common", "a"], LoadOrder::Free);
    assert_eq!(loaded, ["common", "a", "b"]);
}

#[test]
fn soft_dependencies_are_loaded_before_and_after_if_present() {
    let image = Image::of(&[
        ("modules.dep", "x.ko: need.ko\nneed.ko:\nbefore.ko: deep.ko\ndeep.ko:\nafter.ko:\nreal.ko:\n"),
        ("modules.softdep", "softdep x pre: before lost built nick post: after\n"),
        ("modules.builtin", "kernel/built.ko\n"),
        ("modules.alias", "alias nick real\n"),
    ]);
    let (loaded, outcome) = turns(&image.modules(), &["x"], LoadOrder::Free);
    let place = |name: &str| loaded.iter().position(|one| one == name).unwrap();
    assert!(place("deep") < place("before") && place("before") < place("x") && place("need") < place("x"));
    assert!(place("real") < place("x") && place("x") < place("after"), "{loaded:?}");
    assert_eq!(loaded.len(), 6);
    assert_eq!(outcome.remarks, ["softdep of x: no module lost"]);
    // None of these lines has a file: the requested module fails, and its soft dependency is
    // skipped.
    let outcome = image.modules().load(&["x"], LoadOrder::Free, &none);
    let errors: Vec<String> = outcome.errors.iter().map(ToString::to_string).collect();
    assert!(errors[0].contains("need.ko") && errors[1].contains("need, which it needs"), "{errors:?}");
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert_eq!(outcome.remarks.iter().filter(|remark| remark.starts_with("left out: ")).count(), 4);
}

#[test]
fn dependency_cycles_are_broken() {
    let image = Image::of(&[
        ("modules.dep", "a.ko: b.ko\nb.ko: a.ko\nself.ko: self.ko\n"),
        ("/etc/modprobe.d/x.conf", "softdep a pre: self\nsoftdep self pre: a post: a\n"),
    ]);
    let (mut loaded, _) = turns(&image.modules(), &["a", "self"], LoadOrder::Free);
    loaded.sort();
    assert_eq!(loaded, ["a", "b", "self"]);
}

#[test]
fn devices_get_their_drivers_unless_blacklisted() {
    let image = Image::of(&[
        ("modules.dep", "virtio_net.ko:\nnvme.ko:\nother.ko:\n"),
        (
            "modules.alias",
            "alias virtio:d00000001v* virtio_net\nalias pci:v*bc01sc08i02* nvme\nalias pci:v000010DE* nvidia\n",
        ),
    ]);
    let devices =
        ["virtio:d00000001v00001AF4", "pci:v00001B36bc01sc08i02", "pci:v000010DEd00002335"].map(str::to_owned);
    let free = |_: &str| false;
    assert_eq!(image.modules().drivers(&devices, &free), ["virtio_net", "nvme", "nvidia"]);
    assert_eq!(image.modules().drivers(&devices, &devices::is_gpu_driver), ["virtio_net", "nvme"]);
    let path = image.root.path("/run/modprobe.d/x.conf");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "alias virtio:d00000001v* other\nblacklist nvme\n").unwrap();
    assert_eq!(image.modules().drivers(&devices, &free), ["other", "nvidia"]);
}

#[test]
fn name_is_a_module_or_an_alias() {
    let image = Image::of(&[
        ("modules.dep", "xfs.ko:\nslow.ko:\nquick.ko:\n"),
        ("modules.alias", "alias fs-xfs xfs\nalias fs-slow slow\n"),
        ("/etc/modprobe.d/x.conf", "alias slow quick\nblacklist slow\n"),
    ]);
    let modules = image.modules();
    let meant = |name: &str| modules.resolve(name, &|_| false);
    assert_eq!(
        (meant("xfs"), meant("fs_xfs"), meant("slow")),
        (vec!["xfs".to_owned()], vec!["xfs".to_owned()], vec!["quick".to_owned()])
    );
    assert_eq!(meant("fs-slow"), ["fs-slow"], "its module is held back");
    assert_eq!(meant("nothing"), ["nothing"]);
}

#[test]
fn errors_have_module_file_and_hint() {
    let image = Image::of(&[("modules.dep", "updates/nvidia.ko:\n")]);
    let error = |name| image.modules().load(&[name], LoadOrder::Free, &none).to_result().unwrap_err();
    let text = error("nvidia");
    assert!(text.contains("updates/nvidia.ko") && text.contains("do not match"), "{text}");
    let text = error("overlay");
    assert!(text.contains("overlay") && text.contains("modules.dep") && text.contains("image"), "{text}");
    let load = |errno, compressed| {
        let source = io::Error::from_raw_os_error(errno);
        ModuleError::Load { name: "x".into(), file: "x.ko".into(), source, compressed }.to_string()
    };
    assert!(load(libc::ENOEXEC, false).contains("another kernel"));
    assert!(load(libc::EINVAL, true).contains("uncompressed"));
    assert!(load(libc::EINVAL, false).contains("parameter"));
    assert!(load(libc::EPERM, false).contains("module_blacklist="));
}

#[test]
fn kernel_without_module_lists_has_no_modules() {
    let image = Image::of(&[]);
    assert!(!Modules::any(&image.root, "6.12"));
    assert_eq!(image.modules().load(&["x"], LoadOrder::Free, &none).errors.len(), 1);
    let image = Image::of(&[("modules.dep", "")]);
    assert!(!Modules::any(&image.root, "6.12"), "an empty list is none");
}

/// A list as long as a distribution's: modules are found by name, without a scan per module.
#[test]
fn long_list_is_read_once() {
    let line = |at: usize| format!("kernel/drivers/some/where/module{at}.ko.xz: kernel/lib/module{}.ko.xz\n", at / 2);
    let text: String = (1..6000).map(line).collect();
    let bytes = text.len();
    let begin = std::time::Instant::now();
    let list = Dependencies::new(text);
    let made = begin.elapsed();
    let found = (0..6000).filter(|at| list.find(&format!("module{at}")).is_some()).count();
    println!("{bytes} bytes of modules.dep: table in {made:?}, 6000 names in {:?}", begin.elapsed() - made);
    assert_eq!(found, 5999);
    let image = Image::of(&[]);
    let mut modules = image.modules();
    modules.dependencies = list;
    // 5999, 2999, 1499 and so on.
    assert_eq!(turns(&modules, &["module5999"], LoadOrder::Free).0.len(), 14);
}

proptest! {
    /// For any content of the lists, each listed module is processed exactly once.
    #[test]
    fn arbitrary_lists_end(dep in "([a-e]\\.ko:( [a-e]\\.ko){0,3}\n){0,6}", soft in "(softdep [a-e*] pre:( [a-e]){0,2} post:( [a-e]){0,2}\n){0,4}") {
        let image = Image::of(&[("modules.dep", &dep), ("modules.softdep", &soft)]);
        let names = ["a", "b", "c", "d", "e"];
        let modules = image.modules();
        let known = names.iter().filter(|name| modules.has(name)).count();
        let (loaded, outcome) = turns(&modules, &names, LoadOrder::Free);
        let mut once = loaded.clone();
        once.sort();
        once.dedup();
        prop_assert_eq!(once.len(), loaded.len());
        prop_assert!(loaded.len() >= known && outcome.errors.len() == names.len() - known);
    }
}
