//! Mount points prepared by an attacker.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{create, inside, mounts, refused, storage, with_agent};

#[test]
fn symlink_in_a_mount_point_is_refused() {
    with_agent(async |agent| {
        let victim = agent.dir.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("precious"), "x").unwrap();
        fs::create_dir_all(inside(&agent, "")).unwrap();
        let path = "shared/containers/c1/volume";
        let parts: Vec<&str> = path.split('/').collect();
        for part in 0..parts.len() {
            let link = inside(&agent, &parts[..=part].join("/"));
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(&victim, &link).unwrap();
            for (driver, fstype) in [("ephemeral", "tmpfs"), ("local", "local"), ("bind", "bind")] {
                // A valid storage first: it must be rolled back.
                let good = storage("ephemeral", "tmpfs", "tmpfs", "sandbox/good", &[]);
                let source = if driver == "bind" { Path::new("/bin") } else { Path::new("tmpfs") };
                let bad = storage(driver, source, fstype, path, &["mode=0777"]);
                let message = refused(&agent, vec![good, bad]).await;
                assert!(message.contains(&format!("{:?} is", parts[part])), "{driver} {part}: {message}");
            }
            assert_eq!(fs::read_dir(&victim).unwrap().count(), 1);
            fs::remove_file(&link).unwrap();
        }
        for outside in ["/etc", "/run/kata-containers/../x", "/run/kata-containers", "relative"] {
            let mut volume = storage("ephemeral", "tmpfs", "tmpfs", "x", &[]);
            volume.mount_point = outside.into();
            assert!(refused(&agent, vec![volume]).await.contains(outside));
        }
    });
}

/// An attacker continuously swaps a directory and a symbolic link.
#[test]
fn mount_point_swapped_during_mount_escapes_nothing() {
    with_agent(async |agent| {
        let victim = agent.dir.path().join("victim");
        fs::create_dir(&victim).unwrap();
        let contested = inside(&agent, "shared/contested");
        fs::create_dir_all(&contested).unwrap();
        let (link, dir) = (inside(&agent, "shared/link"), inside(&agent, "shared/directory"));
        symlink(&victim, &link).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let racer = {
            let (ended, contested, dir) = (Arc::clone(&ended), contested.clone(), dir.clone());
            std::thread::spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    let _ = fs::rename(&contested, &dir);
                    let _ = fs::rename(&link, &contested);
                    let _ = fs::rename(&contested, &link);
                    let _ = fs::rename(&dir, &contested);
                }
            })
        };
        let volume = storage("ephemeral", "tmpfs", "tmpfs", "shared/contested/volume", &[]);
        for _ in 0..25 {
            let made = create(&agent, "c1", vec![volume.clone()]).await.is_ok();
            let table = fs::read_to_string(format!("/proc/{}/mountinfo", agent.pids()[0])).unwrap();
            assert!(!table.contains("/victim"), "{table}");
            if made {
                agent.remove("c1").await.unwrap();
            }
            assert_eq!(mounts(&agent), Vec::<String>::new(), "unmounted, wherever it was");
        }
        ended.store(true, Ordering::Relaxed);
        racer.join().unwrap();
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
    });
}
