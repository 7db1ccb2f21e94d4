//! The lifecycle of containers.

use std::fs;
use std::time::{Duration, Instant};

use crate::resources::ResourceUsage;
use crate::support::{code, process, short, spec, with_agent};
use firstlight_agent_api::agent::{
    CloseStdinRequest, CreateSandboxRequest, DestroySandboxRequest, GuestDetailsRequest, StatsContainerRequest,
    TtyWinResizeRequest, WriteStreamRequest,
};
use firstlight_agent_api::health::CheckRequest;
use ttrpc::Code;

#[test]
fn pod_lifecycle() {
    with_agent(async |agent| {
        agent.health.check(short(), &CheckRequest::new()).await.unwrap();
        let version = agent.health.version(short(), &CheckRequest::new()).await.unwrap();
        assert_eq!(version.agent_version, env!("CARGO_PKG_VERSION"));
        agent.sandbox().await;
        let details = agent.calls.get_guest_details(short(), &GuestDetailsRequest::new()).await.unwrap();
        assert!(details.agent_details.supports_seccomp);

        // A second sandbox is refused, and the first is unchanged.
        let marker = agent.inside("/run/kata-containers/marker");
        fs::create_dir_all(marker.parent().unwrap()).unwrap();
        fs::write(&marker, "x").unwrap();
        assert_eq!(
            code(agent.calls.create_sandbox(short(), &CreateSandboxRequest::new()).await).0,
            Code::ALREADY_EXISTS
        );
        assert!(marker.exists());

        agent.run("c1", "echo out; echo err >&2; read line; echo got $line; echo $HOME; hostname 2>/dev/null || cat /proc/sys/kernel/hostname; exit 3").await;
        let write = |data: &[u8]| WriteStreamRequest {
            container_id: "c1".into(),
            exec_id: "c1".into(),
            data: data.to_vec(),
            ..Default::default()
        };
        assert_eq!(agent.calls.write_stdin(short(), &write(b"hello\n")).await.unwrap().len, 6);
        assert_eq!(agent.output("c1", "").await, "out\ngot hello\n/root\nguest-1\n");
        assert_eq!(agent.wait("c1", "c1").await.unwrap(), 3);
        assert_eq!(code(agent.wait("c1", "c1").await).0, Code::NOT_FOUND);
        // As a shim does at the end.
        agent.signal("c1", "", 9).await.unwrap();
        agent.remove("c1").await.unwrap();
        assert_eq!(code(agent.remove("c1").await).0, Code::INVALID_ARGUMENT);
        assert!(!agent.inside("/run/kata-containers/c1").exists());
        assert!(
            agent.dir.path().join("c1/rootfs/bin/sh").is_symlink(),
            "the image belongs to the host and is not removed"
        );

        // The second call is idempotent.
        for _ in 0..2 {
            agent.calls.destroy_sandbox(short(), &DestroySandboxRequest::new()).await.unwrap();
        }
        agent.wait_for_exit("without PID 1, the agent exits with its sandbox").await;
    });
}

#[test]
fn exec_processes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        assert_eq!(agent.shell("c1", "e1", "echo hi; exit 4").await, ("hi\n".to_owned(), 4));
        assert_eq!(code(agent.wait("c1", "e1").await).0, Code::NOT_FOUND);

        // An exec id can be reused after the process, but not while in use.
        agent.exec("c1", "e1", "sleep 1000").await.unwrap();
        let (kind, text) = code(agent.exec("c1", "e1", "true").await);
        assert_eq!(kind, Code::ALREADY_EXISTS);
        assert!(text.contains("exec_id 'e1' already exists"), "{text}");
        agent.signal("c1", "e1", 15).await.unwrap();
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 143);

        // Output ends although a grandchild holds the pipe.
        let start = Instant::now();
        assert_eq!(agent.shell("c1", "e2", "echo tail; sleep 100 & exit 0").await, ("tail\n".to_owned(), 0));
        assert!(start.elapsed() < Duration::from_secs(50), "{:?}", start.elapsed());

        // A missing program: an error with its name, and no leftover files.
        let mut missing = process("");
        missing.Args = vec!["/bin/nothere".into()];
        let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
        request.container_id = "c1".into();
        request.exec_id = "e3".into();
        request.process = Some(missing).into();
        let (_, text) = code(agent.calls.exec_process(short(), &request).await);
        assert!(text.contains("/bin/nothere"), "{text}");
        let state = agent.inside("/run/firstlight/containers/c1");
        let names: Vec<_> = fs::read_dir(state).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert!(names.iter().all(|name| !name.to_string_lossy().starts_with("tenant-")), "{names:?}");

        // SIGPIPE has its default action, and none of the agent's descriptors or variables are inherited.
        assert_eq!(
            agent.shell("c1", "e4", "yes | head -n 1; ls /proc/self/fd | grep -v '^[012]$' | grep -c .").await.0,
            "y\n1\n"
        );
        let (environment, _) = agent.shell("c1", "e5", "env").await;
        assert!(environment.contains("HOME=/root") && !environment.contains("AGENT_ADDR"), "{environment}");

        // SIGTERM kills an init process without a handler; a signal to an unknown container reaches no process.
        assert_eq!(code(agent.signal("nope", "", 15).await).0, Code::INVALID_ARGUMENT);
        assert_eq!(code(agent.signal("c1", "", 99).await).0, Code::INVALID_ARGUMENT);
        agent.signal("c1", "c1", 15).await.unwrap();
        assert_eq!(agent.wait("c1", "").await.unwrap(), 137);
        assert_eq!(code(agent.exec("c1", "e6", "true").await).0, Code::FAILED_PRECONDITION);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn exec_processes_leave_no_descriptors_and_no_zombies() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let before = ResourceUsage::when_idle(&agent).await;
        for round in 0..20 {
            // The output is never read.
            let name = format!("e{round}");
            agent.exec("c1", &name, "echo unread; echo unread >&2").await.unwrap();
            assert_eq!(agent.wait("c1", &name).await.unwrap(), 0);
        }
        before.wait_until_equal(&agent).await;
        assert_eq!(before.processes, 1, "only the container's init process: {before:?}");
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn unlisted_devices_are_denied() {
    with_agent(async |agent| {
        agent.sandbox().await;
        // In the container's own /dev: elsewhere a nodev mount may deny the open, which proves nothing.
        let script = "mknod /dev/gpu c 195 0 && (cat /dev/gpu; echo code $?) 2>&1; \
             mknod /dev/log c 1 11 && (: > /dev/log; echo code $?) 2>&1; \
             echo x > /dev/null && head -c 2 /dev/zero | grep -c . ; \
             mknod /dev/disk b 254 0 && (cat /dev/disk; echo code $?) 2>&1";
        agent.run("c1", script).await;
        let output = agent.output("c1", "").await;
        let denied = output.matches("Operation not permitted").count();
        assert_eq!(denied, 3, "{output}");

        // If listed, the same device can be opened, also by an exec process.
        let root = agent.root("c2");
        let mut listed = spec(&root, "sleep 1000");
        listed.Linux.mut_or_insert_default().Devices = vec![firstlight_agent_api::oci::LinuxDevice {
            Path: "/dev/kmsg".into(),
            Type: "c".into(),
            Major: 1,
            Minor: 11,
            ..Default::default()
        }];
        agent.create(listed, "c2").await.unwrap();
        agent.begin("c2").await;
        let (output, _) = agent
            .shell("c2", "e1", "(: > /dev/kmsg) && echo opened; mknod /dev/gpu c 195 0; (: < /dev/gpu) 2>&1")
            .await;
        assert!(output.contains("opened") && output.contains("Operation not permitted"), "{output}");
        for container in ["c1", "c2"] {
            agent.remove(container).await.unwrap();
        }
    });
}

#[test]
fn terminal_input_output_and_resize() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        let mut with_terminal = spec(&root, "stty size; read line; stty size; echo got $line");
        let process = with_terminal.Process.mut_or_insert_default();
        process.Terminal = true;
        process.ConsoleSize.mut_or_insert_default().Height = 24;
        process.ConsoleSize.mut_or_insert_default().Width = 80;
        agent.create(with_terminal, "c1").await.unwrap();
        agent.begin("c1").await;
        let read = agent.output("c1", "");
        let type_in = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let size = TtyWinResizeRequest { container_id: "c1".into(), row: 40, column: 132, ..Default::default() };
            agent.calls.tty_win_resize(short(), &size).await.unwrap();
            let write = WriteStreamRequest { container_id: "c1".into(), data: b"hi\n".to_vec(), ..Default::default() };
            agent.calls.write_stdin(short(), &write).await.unwrap();
        };
        let (output, ()) = tokio::join!(read, type_in);
        for part in ["24 80", "40 132", "got hi"] {
            assert!(output.contains(part), "{output}");
        }
        assert_eq!(agent.wait("c1", "").await.unwrap(), 0);
        agent.remove("c1").await.unwrap();
    });
}

#[test]
fn failed_creates_report_the_cause_and_leave_other_containers_running() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let root = agent.root("c2");
        // The id of a running container.
        let (kind, _) = code(agent.create(spec(&root, "true"), "c1").await);
        assert_eq!(kind, Code::ALREADY_EXISTS);
        assert_eq!(agent.shell("c1", "e1", "echo alive").await.0, "alive\n");

        let mut bad = spec(&root, "true");
        bad.Process.mut_or_insert_default().Capabilities.mut_or_insert_default().Bounding = vec!["CAP_FLY".into()];
        let (kind, text) = code(agent.create(bad, "c2").await);
        assert!(kind == Code::INVALID_ARGUMENT && text.contains("CAP_FLY"), "{text}");

        let mut bad = spec(&root, "true");
        bad.Root.mut_or_insert_default().Path = "/nowhere".into();
        let (_, text) = code(agent.create(bad, "c2").await);
        assert!(text.contains("/nowhere"), "{text}");

        let mut bad = spec(&root, "true");
        bad.Mounts.push(firstlight_agent_api::oci::Mount {
            destination: "/data".into(),
            source: "/missing-source".into(),
            type_: "bind".into(),
            options: vec!["rbind".into()],
            ..Default::default()
        });
        let (_, text) = code(agent.create(bad, "c2").await);
        assert!(text.contains("missing-source") && !text.contains('\n'), "{text}");

        // Every failed create was rolled back, so the id is free.
        agent.create(spec(&root, "exit 7"), "c2").await.unwrap();
        agent.begin("c2").await;
        assert_eq!(agent.wait("c2", "").await.unwrap(), 7);
        agent.remove("c2").await.unwrap();
        agent.remove("c1").await.unwrap();
        assert_eq!(
            fs::read_dir(agent.inside("/sys/fs/cgroup/firstlight-test"))
                .map_or(0, |all| { all.flatten().filter(|entry| entry.path().is_dir()).count() }),
            0
        );
    });
}

#[test]
fn container_removal_kills_all_its_processes() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000 & sleep 1000").await;
        agent.exec("c1", "e1", "sleep 1000").await.unwrap();
        let stats = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
        agent.calls.stats_container(short(), &stats).await.unwrap();
        agent.signal("c1", "", 9).await.unwrap();
        assert_eq!(agent.wait("c1", "e1").await.unwrap(), 137);
        assert_eq!(agent.wait("c1", "").await.unwrap(), 137);
        agent.remove("c1").await.unwrap();

        // Closing stdin is end of file for its reader.
        agent.run("c2", "cat; echo end").await;
        let close = CloseStdinRequest { container_id: "c2".into(), exec_id: "c2".into(), ..Default::default() };
        agent.calls.close_stdin(short(), &close).await.unwrap();
        assert_eq!(agent.output("c2", "").await, "end\n");
        agent.remove("c2").await.unwrap();
    });
}

#[test]
fn runtime_and_containers_end_when_the_server_dies() {
    with_agent(async |agent| {
        agent.sandbox().await;
        agent.run("c1", "sleep 1000").await;
        let pids = agent.pids();
        let kill = |pid: u32| {
            let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        };
        kill(pids[0]);
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            if pids.iter().all(|pid| {
                !std::path::Path::new(&format!("/proc/{pid}/cgroup")).exists() || crate::support::has_exited(*pid)
            }) {
                return;
            }
        }
        panic!("the runtime or the container outlived the server");
    });
}

#[test]
fn exec_processes_get_the_seccomp_filter_and_pods_share_pid_namespaces() {
    with_agent(async |agent| {
        agent.sandbox().await;
        for (container, no_new_privileges) in [("c1", false), ("c2", true)] {
            let root = agent.root(container);
            let mut filtered = spec(&root, "mkdir /tmp/a; grep -i seccomp: /proc/self/status; sleep 1001");
            filtered.Process.mut_or_insert_default().NoNewPrivileges = no_new_privileges;
            let seccomp = filtered.Linux.mut_or_insert_default().Seccomp.mut_or_insert_default();
            seccomp.DefaultAction = "SCMP_ACT_ALLOW".into();
            seccomp.Architectures = vec!["SCMP_ARCH_X86_64".into()];
            seccomp.Syscalls = vec![firstlight_agent_api::oci::LinuxSyscall {
                Names: vec!["mkdir".into(), "sched_setaffinity".into(), "ioctl".into()],
                Action: "SCMP_ACT_ERRNO".into(),
                ..Default::default()
            }];
            agent.create(filtered, container).await.unwrap();
            agent.begin(container).await;
            let (output, _) =
                agent.shell(container, "e1", "mkdir /tmp/b 2>&1; grep -E 'Seccomp:|CapEff:' /proc/self/status").await;
            assert!(output.contains("Operation not permitted") && output.contains("Seccomp:\t2"), "{output}");
            // The capabilities are the requested ones, not those needed for loading the filter.
            assert!(output.contains("CapEff:\t00000000080000e3"), "{output}");
            // Resetting the CPU affinity uses no system call that the filter forbids.
            let cpus = "Cpus_allowed_list:";
            let here = fs::read_to_string("/proc/self/status").unwrap();
            let here = here.lines().find(|line| line.starts_with(cpus)).unwrap();
            let (output, _) =
                agent.shell(container, "e2", &format!("grep -h {cpus} /proc/1/status /proc/self/status")).await;
            assert_eq!(output, format!("{here}\n{here}\n"));
        }

        let root = agent.root("c3");
        let mut request = firstlight_agent_api::agent::CreateContainerRequest::new();
        request.container_id = "c3".into();
        request.OCI = Some(spec(&root, "cat /proc/1/cmdline; sleep 1000")).into();
        request.sandbox_pidns = true;
        agent.calls.create_container(short(), &request).await.unwrap();
        agent.begin("c3").await;
        let (output, _) = agent.shell("c3", "e1", "cat /proc/1/cmdline").await;
        assert!(output.contains("1001"), "the first container's init process: {output}");
        for container in ["c3", "c2", "c1"] {
            agent.remove(container).await.unwrap();
        }
    });
}

#[test]
fn program_that_cannot_be_executed_fails_with_the_cause() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        fs::write(root.join("bin/broken"), "#!/bin/nowhere\n").unwrap();
        let mut broken = spec(&root, "");
        broken.Process.mut_or_insert_default().Args = vec!["/bin/broken".into()];
        let (_, text) = code(agent.create(broken.clone(), "c1").await);
        assert!(text.contains("/bin/broken") && text.contains("permission"), "{text}");
        fs::set_permissions(root.join("bin/broken"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        agent.create(broken, "c1").await.unwrap();
        let (_, text) = code(agent.start_container("c1").await);
        assert!(text.contains("/bin/broken") && text.contains("ENOENT") && text.len() < 300, "{text}");
        assert_eq!(agent.wait("c1", "").await.unwrap(), 255);
        agent.remove("c1").await.unwrap();

        // Exec: a failed execve is the call's error, not an exit code.
        agent.run("c2", "sleep 1000").await;
        fs::write(root.parent().unwrap().parent().unwrap().join("c2/rootfs/bin/garbage"), "#!/bin/nowhere\n").unwrap();
        let garbage = agent.dir.path().join("c2/rootfs/bin/garbage");
        fs::set_permissions(garbage, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut request = firstlight_agent_api::agent::ExecProcessRequest::new();
        request.container_id = "c2".into();
        for (number, (program, part)) in
            [("/bin/garbage", "ENOENT"), ("/etc/passwd", "permission"), ("/bin/none", "/bin/none")].iter().enumerate()
        {
            request.exec_id = format!("e{number}");
            let mut process = process("");
            process.Args = vec![(*program).to_owned()];
            request.process = Some(process).into();
            let (_, text) = code(agent.calls.exec_process(short(), &request).await);
            assert!(text.contains(part), "{program}: {text}");
            assert_eq!(code(agent.wait("c2", &request.exec_id).await).0, Code::NOT_FOUND);
        }
        agent.remove("c2").await.unwrap();
    });
}

#[test]
fn cancelled_create_leaves_no_container() {
    with_agent(async |agent| {
        agent.sandbox().await;
        let root = agent.root("c1");
        for _ in 0..10 {
            let mut request = firstlight_agent_api::agent::CreateContainerRequest::new();
            request.container_id = "c1".into();
            request.OCI = Some(spec(&root, "sleep 1000")).into();
            // Shorter than any creation of a container.
            let deadline = ttrpc::context::with_duration(Duration::from_micros(400));
            assert!(agent.calls.create_container(deadline, &request).await.is_err());
            let mut free = false;
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                free = !agent.inside("/run/kata-containers/c1").exists();
                if free {
                    break;
                }
            }
            assert!(free);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        agent.create(spec(&root, "exit 0"), "c1").await.unwrap();
        agent.remove("c1").await.unwrap();
    });
}
