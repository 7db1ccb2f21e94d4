//! Overlay file systems.

use std::fs;
use std::os::unix::fs::symlink;

use super::{Loop, create, erofs, inside, mounted, mounts, read, refused, storage, with_agent};
use crate::support::require_file_system;

#[test]
fn overlay_merges_layers_without_changing_them() {
    with_agent(async |agent| {
        require_file_system("overlay");
        let [top, bottom] = ["top:layer", "bottom"].map(|name| agent.dir.path().join(name));
        for (layer, text) in [(&top, "top"), (&bottom, "bottom")] {
            fs::create_dir(layer).unwrap();
            fs::write(layer.join("both"), text).unwrap();
            fs::write(layer.join(text), text).unwrap();
        }
        let lower = format!("lowerdir={}:{}", top.display().to_string().replace("top:", "top\\:"), bottom.display());
        let writable = "io.katacontainers.fs-opt.overlay-rw";
        create(&agent, "c1", vec![storage("overlayfs", "none", "overlay", "sandbox/o", &[&lower, writable])])
            .await
            .unwrap();
        assert_eq!(
            (read(&agent, "sandbox/o/both").as_str(), read(&agent, "sandbox/o/bottom").as_str()),
            ("top", "bottom")
        );
        fs::write(inside(&agent, "sandbox/o/both"), "changed").unwrap();
        assert_eq!(read(&agent, "sandbox/o/both"), "changed");
        assert_eq!(fs::read_to_string(top.join("both")).unwrap(), "top");
        agent.remove("c1").await.unwrap();
        assert!(mounts(&agent).is_empty(), "{:?}", mounts(&agent));

        // With upperdir and workdir, as the shim sends them.
        let run = "/run/kata-containers/layers/c2";
        let own = format!("lowerdir={},upperdir={run}/fs,workdir={run}/work", bottom.display());
        let mut volume = storage("overlayfs", "none", "overlay", "sandbox/o", &[&own]);
        let create_directory = "io.katacontainers.volume.overlayfs.create_directory=";
        volume.driver_options = vec![format!("{create_directory}{run}/fs"), format!("{create_directory}{run}/work")];
        create(&agent, "c2", vec![volume]).await.unwrap();
        fs::write(inside(&agent, "sandbox/o/new"), "x").unwrap();
        assert_eq!(read(&agent, "layers/c2/fs/new"), "x");
        agent.remove("c2").await.unwrap();
        assert!(!inside(&agent, "layers/c2/fs").exists());

        symlink(&bottom, agent.dir.path().join("link")).unwrap();
        for (options, part) in [
            (format!("lowerdir={}/link", agent.dir.path().display()), "\"link\" is a symbolic link"),
            ("ro".to_owned(), "lowerdir"),
            (format!("lowerdir={},colour=red", bottom.display()), "overlay rejects the option colour=red"),
        ] {
            let message =
                refused(&agent, vec![storage("overlayfs", "none", "overlay", "sandbox/o", &[&options])]).await;
            assert!(message.contains(part), "{message}");
        }
    });
}

#[test]
fn rootfs_is_an_overlay_of_erofs_images_and_a_disk() {
    with_agent(async |agent| {
        require_file_system("overlay");
        let image = |name: &str, text: &str| {
            let path = agent.dir.path().join(format!("{name}.erofs"));
            fs::write(&path, erofs::image(name, text)).unwrap();
            Loop::of(&path)
        };
        let (top, bottom) = (image("app", "top"), image("base", "bottom"));
        let disk = Loop::ext4(agent.dir.path(), "disk", "x");
        let layers = |disk: &str| {
            let mark = "X-kata.multi-layer=true";
            vec![
                storage(
                    "erofs.multi-layer",
                    disk,
                    "ext4",
                    "c1-root",
                    &[mark, "X-kata.overlay-upper", "X-kata.mkdir.path={{ mount 0 }}/upper/made:0700"],
                ),
                storage("erofs.multi-layer", &top.0, "erofs", "c1-root", &[mark, "X-kata.overlay-lower", "ro"]),
                storage("erofs.multi-layer", &bottom.0, "erofs", "c1-root", &[mark, "X-kata.overlay-lower", "ro"]),
            ]
        };
        create(&agent, "c1", layers(&disk.0)).await.unwrap();
        assert_eq!((read(&agent, "c1-root/app").as_str(), read(&agent, "c1-root/base").as_str()), ("top", "bottom"));
        assert!(inside(&agent, "c1-root/made").is_dir());
        fs::write(inside(&agent, "c1-root/app"), "changed").unwrap();
        assert!(mounted(&agent, "c1-root").unwrap().contains(" overlay "));
        agent.remove("c1").await.unwrap();
        assert!(mounts(&agent).is_empty(), "{:?}", mounts(&agent));

        // The changes are on the disk.
        create(&agent, "c2", layers(&disk.0)).await.unwrap();
        assert_eq!(read(&agent, "c1-root/app"), "changed");
        agent.remove("c2").await.unwrap();

        let message = refused(&agent, layers(&disk.0)[1..].to_vec()).await;
        assert!(message.contains("0 writable layers"), "{message}");
        let message = refused(&agent, layers("/dev/nothere")).await;
        assert!(message.contains("nothere"), "{message}");
    });
}
