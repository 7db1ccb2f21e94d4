//! Images pushed to docker's registry and pulled from there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use firstlight_image::digest::of_bytes;
use firstlight_image_builder::cache;
use firstlight_lab::toolbox::{BASIC, Registry, registry};
use firstlight_oci::pull::{Credentials, PullRequest, PulledImage, RetryPolicy, pull};
use firstlight_oci::{File, Image, NewImage};
use firstlight_progress::Progress;
use serde_json::{Value, json};

/// Starts a registry, which requires a password if `requires_login`.
fn started(requires_login: bool) -> Registry {
    registry(&cache::root().unwrap(), requires_login, Progress::stderr("images")).unwrap()
}

fn pulled(source: &str, out: &Path, platform: &str, credentials: &Credentials) -> Result<PulledImage, String> {
    let delay = Duration::from_millis(10);
    let request = PullRequest {
        source: &source.parse().unwrap(),
        out,
        platform: &platform.parse().unwrap(),
        plain_http: false,
        credentials,
        retry: RetryPolicy { attempts: 2, first_delay: delay, max_delay: delay },
        progress: Progress::stderr("images"),
    };
    pull(&request).map_err(|error| error.to_string())
}

/// Writes a layout with a text file, a link and a world-writable directory.
fn layout(dir: &Path) {
    let image = NewImage {
        files: vec![
            File::Directory { path: "tmp".into(), mode: 0o1777 },
            File::Text { path: "etc/motd".into(), text: "hello ".repeat(100_000) },
            File::Link { path: "etc/issue".into(), target: "motd".into() },
        ],
        env: vec!["A=b".into()],
        command: vec!["/bin/hello".into()],
    };
    image.write(dir).unwrap();
}

/// Asserts that two layouts have the same blobs.
fn assert_same(one: &Path, other: &Path) {
    let blobs = |dir: &Path| {
        let entries = fs::read_dir(dir.join("blobs/sha256")).unwrap();
        let mut blobs: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        blobs.sort();
        blobs
    };
    let (one, other) = (blobs(one), blobs(other));
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(&other) {
        assert_eq!(one.file_name(), other.file_name());
        assert_eq!(fs::read(one).unwrap(), fs::read(other).unwrap());
    }
}

#[test]
fn pushed_image_is_pulled_unmodified_and_unpacks() {
    let dir = tempfile::tempdir().unwrap();
    let (pushed, out, root) = (dir.path().join("pushed"), dir.path().join("out"), dir.path().join("root"));
    layout(&pushed);
    let registry = started(false);
    registry.push(&pushed, "team/hello", "v1").unwrap();
    let source = format!("docker://{}/team/hello:v1", registry.host());
    let image = pulled(&source, &out, "linux/amd64", &Credentials::default()).unwrap();
    assert_same(&pushed, &out);
    fs::create_dir(&root).unwrap();
    let opened = Image::open(&out).unwrap();
    assert_eq!(opened.default_command(), ["/bin/hello"]);
    opened.unpack(&root).unwrap();
    assert_eq!(fs::read_to_string(root.join("etc/issue")).unwrap().len(), 600_000);
    assert_eq!(fs::metadata(root.join("tmp")).unwrap().permissions().mode() & 0o7777, 0o1777);
    // By digest, no blob is fetched again.
    let source = format!("docker://{}/team/hello@{}", registry.host(), image.digest);
    assert_eq!(pulled(&source, &out, "linux/amd64", &Credentials::default()).unwrap().fetched, 0);
    let source = format!("docker://{}/team/none", registry.host());
    let error = pulled(&source, &out, "linux/amd64", &Credentials::default()).unwrap_err();
    assert!(error.contains("team/none") && error.contains("failed to get the image"), "{error}");
}

#[test]
fn platform_of_a_docker_manifest_list_is_selected() {
    const LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    const CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    let dir = tempfile::tempdir().unwrap();
    let (pushed, out, root) = (dir.path().join("pushed"), dir.path().join("out"), dir.path().join("root"));
    layout(&pushed);
    let registry = started(false);
    let put = |bytes: &[u8], media_type: &str| -> Value {
        let digest = format!("sha256:{}", of_bytes(bytes));
        registry.push_blob("multi", &digest, bytes).unwrap();
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() })
    };
    let largest = |dir: &Path| {
        let files = fs::read_dir(dir.join("blobs/sha256")).unwrap().map(|entry| entry.unwrap().path());
        fs::read(files.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap()).unwrap()
    };
    let tar = largest(&pushed);
    let mut list = Vec::new();
    for architecture in ["arm64", "amd64"] {
        let config = json!({ "os": "linux", "architecture": architecture,
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", of_bytes(&tar))] } });
        let config = put(config.to_string().as_bytes(), CONFIG);
        let layer = put(&tar, "application/vnd.docker.image.rootfs.diff.tar");
        let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
        let bytes = manifest.to_string().into_bytes();
        let digest = format!("sha256:{}", of_bytes(&bytes));
        registry.push_manifest("multi", &digest, MANIFEST, &bytes).unwrap();
        list.push(json!({ "mediaType": MANIFEST, "digest": digest, "size": bytes.len(),
            "platform": { "os": "linux", "architecture": architecture } }));
    }
    let list = json!({ "schemaVersion": 2, "mediaType": LIST, "manifests": list });
    registry.push_manifest("multi", "latest", LIST, list.to_string().as_bytes()).unwrap();
    let source = format!("docker://{}/multi", registry.host());
    let image = pulled(&source, &out, "linux/amd64", &Credentials::default()).unwrap();
    assert_eq!(image.digest.to_string(), list["manifests"][1]["digest"].as_str().unwrap());
    fs::create_dir(&root).unwrap();
    Image::open(&out).unwrap().unpack(&root).unwrap();
    assert!(root.join("etc/motd").is_file());
    let error = pulled(&source, &out, "linux/ppc64le", &Credentials::default()).unwrap_err();
    assert!(error.contains("linux/ppc64le; available: linux/amd64, linux/arm64"), "{error}");
}

#[test]
fn registry_with_passwords_requires_the_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let (pushed, out, file) = (dir.path().join("pushed"), dir.path().join("out"), dir.path().join("config.json"));
    layout(&pushed);
    let registry = started(true);
    registry.push(&pushed, "secret", "v1").unwrap();
    let source = format!("docker://{}/secret:v1", registry.host());
    let with = |auth: &str| {
        fs::write(&file, json!({ "auths": { registry.host(): { "auth": auth } } }).to_string()).unwrap();
        pulled(&source, &out, "linux/amd64", &Credentials::of_file(&file))
    };
    let error = with("bWU6Z3Vlc3M=").unwrap_err();
    assert!(error.contains("refuses the credentials") && error.contains("config.json"), "{error}");
    let error = pulled(&source, &out, "linux/amd64", &Credentials::default()).unwrap_err();
    assert!(error.contains("a user name and a password") && error.contains("docker login"), "{error}");
    assert!(!out.exists());
    with(BASIC).unwrap();
    assert_same(&pushed, &out);
}
