//! Service VM images built with placeholders for NVIDIA's archives: programs
//! that do nothing, linked to the same libraries as the real ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use firstlight_image::Origin;
use firstlight_image::digest;
use firstlight_image_builder::cache;
use firstlight_image_builder::image::manifest::{Manifest, Variables};
use firstlight_image_builder::image::{Image, build_from};
use firstlight_lab::binaries::ServicePrograms;
use firstlight_lab::shipped::{self, Programs};

use crate::trees::packages;

fn compiled(dir: &Path, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let out = dir.join(name);
    fs::create_dir_all(out.parent().unwrap()).unwrap();
    let text = dir.join("source.c");
    fs::write(&text, source).unwrap();
    let done = Command::new("gcc").arg("-o").arg(&out).arg(&text).args(options).current_dir(dir).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    out
}

fn archive(dir: &Path, name: &str, files: &[(&str, PathBuf)]) -> PathBuf {
    let path = dir.join(name);
    let packed = fs::File::create(&path).unwrap();
    let mut builder = tar::Builder::new(packed);
    for (name, file) in files {
        builder.append_path_with_name(file, name).unwrap();
    }
    builder.into_inner().unwrap();
    path
}

/// Creates both archives, and returns the `--set` variables that name them.
fn supplied(dir: &Path) -> Variables {
    let library = |name: &str, soname: &str| {
        compiled(dir, name, "int f(void) { return 0; }", &["-shared", "-fPIC", &format!("-Wl,-soname,{soname}")])
    };
    let text = |name: &str, text: &str| {
        fs::write(dir.join(name), text).unwrap();
        dir.join(name)
    };
    let program = "extern int f(void); int main(void) { return f(); }";
    // The image has Debian's libz; only the soname matters here.
    library("libz.so.1", "libz.so.1");
    let manager = compiled(dir, "nv-fabricmanager", program, &["./libz.so.1"]);
    let plugin = library("libgrpc_mgr.so", "libgrpc_mgr.so");
    let subnet = compiled(dir, "nvlsm", program, &["./libgrpc_mgr.so", "-Wl,-rpath,$ORIGIN/../lib"]);
    let top = "fabricmanager-linux-x86_64-1-archive";
    let fabric = archive(
        dir,
        "fm.tar",
        &[
            (&format!("{top}/bin/nv-fabricmanager"), manager),
            (&format!("{top}/etc/fabricmanager.cfg"), text("cfg", "TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch\n")),
            (&format!("{top}/share/nvidia/nvswitch/dgxh100_hgxh100_topology"), text("map", "map")),
            (&format!("{top}/lib/libnvfm.so.1"), library("libnvfm.so.1", "libnvfm.so.1")),
        ],
    );
    let nvlsm = archive(
        dir,
        "nvlsm.tar",
        &[
            ("./opt/nvidia/nvlsm/sbin/nvlsm", subnet),
            ("./opt/nvidia/nvlsm/lib/libgrpc_mgr.so", plugin),
            ("./usr/share/nvidia/nvlsm/nvlsm.conf", text("conf", "x 1\n")),
        ],
    );
    let mut variables = Variables::new();
    for (name, path) in [("FABRICMANAGER", fabric), ("NVLSM", nvlsm)] {
        variables.insert(format!("{name}_SHA256"), digest::of_file(&path).unwrap().0);
        variables.insert(format!("{name}_VERSION"), "580.1".to_owned());
        variables.insert(name.to_owned(), path.display().to_string());
    }
    variables
}

fn read(name: &str, dir: &Path) -> Manifest {
    let program = dir.join("program");
    fs::write(&program, "placeholder").unwrap();
    let service = ServicePrograms { partitiond: program.clone(), fmctl: program.clone() };
    let programs =
        Programs { init: program.clone(), agent: program.clone(), gpu_settings: program, service: Some(service) };
    shipped::manifest_with(name, &programs, supplied(dir)).unwrap()
}

fn built(manifest: &Manifest, out: &Path) -> Result<Image, String> {
    assert!(cache::root().is_ok());
    build_from(manifest, &mut packages(), out).map_err(|error| error.to_string())
}

/// Asserts that the image has the file and that it comes from that archive.
fn assert_from_archive(image: &Image, path: &str, archive: &str) {
    let origin = image.contents.files.get(path).and_then(|file| file.origin.clone());
    assert_eq!(origin, Some(Origin::Archive(archive.to_owned())), "{path}");
}

#[test]
fn nvl5_image_has_both_daemons_and_the_bridge_drivers() {
    let dir = tempfile::tempdir().unwrap();
    let mut manifest = read("service-vm-nvl5", dir.path());
    let image = built(&manifest, &dir.path().join("out")).unwrap();
    for (path, archive) in [
        ("usr/bin/nv-fabricmanager", "nvidia-fabricmanager=580.1"),
        ("usr/share/nvidia/nvswitch/fabricmanager.cfg", "nvidia-fabricmanager=580.1"),
        ("opt/nvidia/nvlsm/sbin/nvlsm", "nvlsm=580.1"),
        ("usr/share/nvidia/nvlsm/nvlsm.conf", "nvlsm=580.1"),
    ] {
        assert_from_archive(&image, path, archive);
    }
    assert_eq!(image.contents.archives.len(), 2);
    let modules: Vec<&String> = image.contents.files.keys().filter(|path| path.ends_with(".ko")).collect();
    for module in ["mlx5_core.ko", "mlx5_ib.ko", "ib_umad.ko"] {
        assert!(modules.iter().any(|path| path.ends_with(&format!("/{module}"))), "{module}: {modules:?}");
    }
    assert!(!modules.iter().any(|path| path.ends_with("nvidia.ko")));
    // A missing library is an error at build time.
    manifest.packages.retain(|package| package.name != "zlib1g");
    let error = built(&manifest, &dir.path().join("without")).unwrap_err();
    assert!(error.contains("/usr/bin/nv-fabricmanager needs libz.so.1"), "{error}");
}

#[test]
fn nvl4_image_has_the_driver_and_the_topology_maps() {
    let dir = tempfile::tempdir().unwrap();
    let mut manifest = read("service-vm-nvl4", dir.path());
    let image = built(&manifest, &dir.path().join("out")).unwrap();
    let files = &image.contents.files;
    assert_from_archive(&image, "usr/bin/nv-fabricmanager", "nvidia-fabricmanager=550.163.01");
    assert_from_archive(
        &image,
        "usr/share/nvidia/nvswitch/dgxh100_hgxh100_topology",
        "nvidia-fabricmanager=550.163.01",
    );
    for end in ["/updates/nvidia.ko", "/gsp_ga10x.bin", "/libc.so.6"] {
        assert!(files.keys().any(|path| path.ends_with(end)), "{end}");
    }
    assert!(!files.keys().any(|path| path.contains("libcuda") || path.ends_with("nvidia-uvm.ko")));
    // A configuration that names a missing directory is an error.
    manifest.archives[0].files.retain(|part| !part.into.ends_with("nvswitch"));
    let error = built(&manifest, &dir.path().join("without")).unwrap_err();
    assert!(error.contains("fabricmanager.cfg"), "{error}");
}
