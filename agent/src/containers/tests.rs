//! Tests of the life cycle with a fake runtime.

use std::path::PathBuf;
use std::sync::mpsc;

use firstlight_agent_api::agent::{CreateContainerRequest, SharedMount};
use firstlight_agent_api::oci;
use firstlight_runtime::{Done, FailureKind};
use ttrpc::Code;

use super::*;
use crate::boot_events::tests::Recorded;
use crate::fake_runtime::{Answer, Calls, failure, run, runtime};

/// Containers with a runtime of the test, below a root of the test.
struct Fixture {
    root: tempfile::TempDir,
    containers: Arc<Containers>,
    calls: Calls,
    events: Recorded,
}

fn fixture(mut answer: impl FnMut(&Call) -> Answer + Send + 'static) -> Fixture {
    let (root, calls, config) = (tempfile::tempdir().unwrap(), Calls::default(), Config::default());
    let paths = Paths::below(root.path());
    std::fs::create_dir_all(&paths.cgroups).unwrap();
    let recorder = calls.clone();
    let runtime = runtime(move |call| {
        recorder.add(call);
        answer(call)
    });
    let (events, recorded) = Recorded::new();
    let hotplug = Hotplug::new(&paths, Duration::ZERO);
    let uses = Dependencies {
        sandbox: Arc::default(),
        runtime,
        storages: Arc::new(storage::Table::new(paths.clone(), hotplug.clone())),
        oom: Arc::default(),
        hotplug,
        gpus: Source::Files,
        events,
    };
    Fixture { containers: Containers::new(&config, &paths, uses), root, calls, events: recorded }
}

impl Fixture {
    fn bundle(&self, id: &str) -> PathBuf {
        Paths::below(self.root.path()).bundle(id)
    }

    fn cgroup(&self, id: &str) -> PathBuf {
        Paths::below(self.root.path()).cgroups.join(id)
    }

    async fn create(&self, id: &str) -> Result<()> {
        self.containers.create(request(id, false), None).await
    }
}

fn ok(_: &Call) -> Answer {
    Ok(Done::default())
}

fn request(id: &str, terminal: bool) -> CreateContainerRequest {
    let mut spec = oci::Spec::new();
    let process = spec.Process.mut_or_insert_default();
    process.Args = vec!["/bin/true".into()];
    process.Cwd = "/".into();
    process.Terminal = terminal;
    spec.Linux.mut_or_insert_default();
    spec.Root.mut_or_insert_default().Path = "/root-of-the-container".into();
    CreateContainerRequest { container_id: id.into(), OCI: Some(spec).into(), ..Default::default() }
}

/// Returns the kinds of calls, such as `create`.
fn kinds(calls: &Calls) -> Vec<String> {
    let name = |call: &Call| match serde_json::to_value(call).unwrap() {
        serde_json::Value::Object(object) => object.keys().next().cloned().unwrap(),
        other => panic!("{other}"),
    };
    calls.take().iter().map(name).collect()
}

#[test]
fn container_is_created_started_and_removed() {
    run(async {
        let mut fixture = fixture(|_| Ok(Done { pid: Some(42) }));
        let containers = Arc::clone(&fixture.containers);
        fixture.create("c1").await.unwrap();
        let container = containers.sandbox.container("c1").unwrap();
        assert_eq!((container.phase(), container.pid()), (Phase::Created, Some(42)));
        assert!(fixture.bundle("c1").join("config.json").exists());
        assert!(container.cgroup == fixture.cgroup("c1") && container.cgroup.is_dir());
        containers.start("c1").await.unwrap();
        assert_eq!(containers.start("c1").await.unwrap_err().code, Code::FAILED_PRECONDITION);
        containers.ended("c1", "", 3);
        containers.ended("c2", "", 3);
        containers.remove("c1", 0).await.unwrap();
        assert_eq!(kinds(&fixture.calls), ["create", "start", "delete"]);
        assert!(!fixture.bundle("c1").exists());
        assert_eq!(containers.remove("c1", 0).await.unwrap_err().code, Code::INVALID_ARGUMENT);
        let events = ["container-created c1", "container-started c1", "container-exited c1 code 3"];
        assert_eq!(fixture.events.take(), events);
    });
}

#[test]
fn invalid_request_reaches_neither_the_runtime_nor_the_file_system() {
    run(async {
        let mut fixture = fixture(ok);
        let create = async |request| fixture.containers.create(request, None).await.unwrap_err();
        assert!(create(request("../c1", false)).await.message.contains("container id"));
        let mut empty = request("c1", false);
        empty.OCI = None.into();
        assert!(create(empty).await.message.contains("no OCI configuration"));
        let mut sharing = request("c1", false);
        sharing.shared_mounts = vec![SharedMount { src_path: "../x".into(), ..Default::default() }];
        assert!(create(sharing).await.message.contains("not a path in a container"));
        let mut outside = request("c1", false);
        outside.OCI.as_mut().unwrap().Linux.mut_or_insert_default().CgroupsPath = "/../x".into();
        assert!(create(outside).await.message.contains("\"..\""));
        assert!(fixture.calls.take().is_empty() && fixture.events.take().is_empty());
        assert!(!fixture.bundle("c1").exists() && fixture.containers.sandbox.containers().is_empty());
    });
}

#[test]
fn failed_creation_leaves_nothing_and_its_id_unused() {
    run(async {
        let mut fixture = fixture(|_| failure(FailureKind::Internal, "no namespaces"));
        for _ in 0..2 {
            assert_eq!(fixture.create("c1").await.unwrap_err().message, "no namespaces");
            assert!(!fixture.bundle("c1").exists() && !fixture.cgroup("c1").exists());
            assert!(fixture.containers.sandbox.containers().is_empty());
        }
        assert_eq!(kinds(&fixture.calls), ["create", "create"]);
        assert!(fixture.events.take().is_empty());
    });
}

#[test]
fn container_whose_terminal_is_missing_is_removed() {
    run(async {
        let first = Arc::new(std::sync::Mutex::new(None::<Arc<Containers>>));
        let known = Arc::clone(&first);
        // The reply to Create carries no terminal; Kill ends the first process.
        let fixture = fixture(move |call| {
            if let (Call::Kill { .. }, Some(containers)) = (call, known.lock().unwrap().as_ref()) {
                containers.ended("c1", "", 137);
            }
            Ok(Done::default())
        });
        *first.lock().unwrap() = Some(Arc::clone(&fixture.containers));
        let error = fixture.containers.create(request("c1", true), None).await.unwrap_err();
        assert!(error.message.contains("failed to set up the terminal"), "{error}");
        assert_eq!(kinds(&fixture.calls), ["create", "kill", "delete"]);
        assert!(!fixture.bundle("c1").exists() && fixture.containers.sandbox.containers().is_empty());
        *first.lock().unwrap() = None;
    });
}

#[test]
fn container_whose_caller_disconnects_during_the_creation_is_removed() {
    run(async {
        let (go, gone) = mpsc::channel();
        let fixture = fixture(move |call| {
            if matches!(call, Call::Create { .. }) {
                gone.recv().unwrap();
            }
            Ok(Done::default())
        });
        let caller = tokio::time::timeout(Duration::from_millis(50), fixture.create("c1"));
        assert!(caller.await.is_err());
        let sandbox = &fixture.containers.sandbox;
        let container = sandbox.container("c1").unwrap();
        container.ended("", 0);
        go.send(()).unwrap();
        while sandbox.has(&container) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(kinds(&fixture.calls), ["create", "delete"]);
        assert!(!fixture.bundle("c1").exists());
    });
}

#[test]
fn container_can_be_started_again_after_a_failed_start() {
    run(async {
        let mut failed = false;
        let fixture = fixture(move |call| match call {
            Call::Start { .. } if !std::mem::replace(&mut failed, true) => {
                failure(FailureKind::Invalid, "no such program")
            }
            _ => Ok(Done::default()),
        });
        fixture.create("c1").await.unwrap();
        assert_eq!(fixture.containers.start("c1").await.unwrap_err().message, "no such program");
        assert_eq!(fixture.containers.sandbox.container("c1").unwrap().phase(), Phase::Created);
        fixture.containers.start("c1").await.unwrap();
    });
}

#[test]
fn all_containers_are_removed_even_if_one_cannot_be() {
    run(async {
        let fixture = fixture(|call| match call {
            Call::Delete { container } if container == "c1" => failure(FailureKind::Internal, "busy"),
            _ => Ok(Done::default()),
        });
        for id in ["c1", "c2"] {
            fixture.create(id).await.unwrap();
            fixture.containers.ended(id, "", 0);
        }
        assert_eq!(fixture.containers.remove_all().await.unwrap_err().message, "busy");
        let left = fixture.containers.sandbox.containers();
        assert_eq!(left.iter().map(|container| container.id.as_str()).collect::<Vec<_>>(), ["c1"]);
        assert!(fixture.bundle("c1").exists() && !fixture.bundle("c2").exists());
    });
}
