//! The Prometheus endpoint, and malformed or stalled scrapes.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fake_fm::call::Op;
use firstlight_fake_fm::control::{Command, Fault};

use crate::support::{Fixture, activate, deactivate, quick};

/// Returns a free port of the loopback interface.
fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn asked(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The daemon may close the connection before it has read everything.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n";

fn value(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test]
async fn metrics_match_the_fabric_state() {
    let mut fixture = Fixture::new(&quick("h100"));
    fixture.kill_daemon();
    let address = free();
    fixture.more.extend(["--metrics".to_owned(), address.clone()]);
    fixture.start_daemon();
    fixture.until("the fabric was polled", |health| health.ok).await;
    let mut client = fixture.client().await;
    client.activate(activate("r1", 2, "a")).await.unwrap();
    client.activate(activate("r2", 1, "a")).await.unwrap();
    client.deactivate(deactivate("d1", 8, "a")).await.unwrap();
    let fault = Fault { op: Some(Op::Activate), rc: -10, after_ms: 30, take_effect: false, times: 1 };
    fixture.fm.control.send(&Command::Fault(fault)).unwrap();
    client.activate(activate("r3", 1, "a")).await.unwrap_err();
    client.quarantine(api::QuarantineRequest { gpu: 8, reason: "Xid 79".to_owned() }).await.unwrap();
    let answer = asked(&address, GET);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{answer}");
    let (_, text) = answer.split_once("\r\n\r\n").unwrap();
    let is = |name: &str| value(text, &format!("firstlight_fabric_{name}"));
    // `fmctl metrics` prints the same, apart from values that change with time.
    let (said, error, code) = fixture.run_fmctl(&["metrics"]);
    assert!(error.is_empty() && code == 0, "{error}");
    let lasting = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with("firstlight_fabric_list_age_seconds"));
        lines.map(str::to_owned).collect()
    };
    assert_eq!(lasting(&said), lasting(text));
    for (name, expected) in [
        ("manager_up", 1.0),
        ("partitions{state=\"active\"}", 1.0),
        ("partitions{state=\"changing\"}", 0.0),
        ("free_partitions{gpus=\"1\"}", 5.0),
        ("free_partitions{gpus=\"2\"}", 2.0),
        ("free_partitions{gpus=\"8\"}", 0.0),
        ("largest_free_gpus", 2.0),
        ("unowned_partitions", 0.0),
        ("quarantined_gpus", 1.0),
        ("outage", 0.0),
        ("module_map_verified", 0.0),
        ("changes_total{kind=\"activate\",outcome=\"done\"}", 2.0),
        ("changes_total{kind=\"activate\",outcome=\"failed\"}", 1.0),
        ("changes_total{kind=\"deactivate\",outcome=\"done\"}", 1.0),
        ("change_duration_seconds_count{kind=\"activate\"}", 3.0),
        ("change_duration_seconds_bucket{kind=\"activate\",le=\"+Inf\"}", 3.0),
        ("change_in_progress_seconds", 0.0),
    ] {
        assert_eq!(is(name), Some(expected), "{name} in {text}");
    }
    assert!(is("change_duration_seconds_bucket{kind=\"activate\",le=\"0.020\"}").unwrap() < 3.0, "{text}");
    assert!(is("journal_bytes").unwrap() > 100.0 && is("list_age_seconds").unwrap() < 60.0, "{text}");
    assert!(text.contains("firstlight_fabric_build_info{version=\""));
    // During a hanging change, and after FM has died.
    fixture.fm.control.send(&Command::Hang(Some(Op::Activate))).unwrap();
    let late = tokio::spawn({
        let mut client = client.clone();
        async move { client.activate(activate("r4", 1, "a")).await }
    });
    fixture.until("the change is in progress", |health| health.in_progress_ms > 0).await;
    let text = asked(&address, GET);
    assert_eq!(value(&text, "firstlight_fabric_partitions{state=\"changing\"}"), Some(1.0), "{text}");
    fixture.fm.control.send(&Command::Release).unwrap();
    late.await.unwrap().unwrap();
    fixture.fm.kill().unwrap();
    fixture.until("FM is gone", |health| !health.fabric_manager).await;
    assert_eq!(value(&asked(&address, GET), "firstlight_fabric_manager_up"), Some(0.0));
    fixture.kill_daemon();
    let socket = fixture.dir.path().join("metrics.sock");
    let at = fixture.more.iter().position(|word| *word == address).unwrap();
    fixture.more[at] = format!("unix:{}", socket.display());
    fixture.start_daemon();
    fixture.client().await;
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(GET).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn malformed_or_slow_scrapes_are_bounded() {
    let mut fixture = Fixture::new(&quick("h100"));
    fixture.kill_daemon();
    let address = free();
    fixture.more.extend(["--metrics".to_owned(), address.clone()]);
    fixture.start_daemon();
    crate::block_on(async { fixture.until("the fabric was polled", |health| health.ok).await });
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "400 Bad Request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400 Bad Request"),
        (&[b'x'; 60_000], "431 Request Header Fields Too Large"),
    ] {
        let answer = asked(&address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{status}: {answer}");
    }
    // All connections are taken by silent or very slow clients.
    let start = Instant::now();
    let mut silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&address).unwrap()).collect();
    for stream in silent.iter_mut().take(8) {
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
    }
    let mut last = String::new();
    while !last.starts_with("HTTP/1.1 200 OK") {
        assert!(start.elapsed() < Duration::from_secs(20), "the connections are still taken: {last:?}");
        if let Some(stream) = silent.first_mut() {
            let _ = stream.write_all(b"x");
        }
        std::thread::sleep(Duration::from_millis(100));
        last = asked(&address, GET);
    }
    // The gRPC interface is not affected.
    assert_eq!(fixture.run_fmctl(&["list"]).2, 0);
    // A port in use is reported.
    let output = fixture.another_daemon(&fixture.dir.path().join("j"), &fixture.dir.path().join("s"));
    let output = { output }.args(["--metrics", &address]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains(&format!("failed to serve metrics on {address}")), "{error}");
}
