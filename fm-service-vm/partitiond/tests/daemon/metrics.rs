//! Figures, and who asks for them without manners.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use firstlight_fabric_api::v1 as api;
use firstlight_fake_fm::ask::Op;
use firstlight_fake_fm::control::{Command, Fault};

use crate::support::{Stand, activate, deactivate, quick};

/// An address of the loopback interface that nobody has.
fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn asked(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // It may hang up before all is written, or without reading all.
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
async fn a_scraper_sees_what_is_so() {
    let mut stand = Stand::new(&quick("h100"));
    stand.kill_daemon();
    let address = free();
    stand.more.extend(["--metrics".to_owned(), address.clone()]);
    stand.start_daemon();
    stand.until("the fabric is seen", |health| health.ok).await;
    let mut client = stand.client().await;
    client.activate(activate("r1", 2, "a")).await.unwrap();
    client.activate(activate("r2", 1, "a")).await.unwrap();
    client.deactivate(deactivate("d1", 8, "a")).await.unwrap();
    let fault = Fault { op: Some(Op::Activate), rc: -10, after_ms: 30, take_effect: false, times: 1 };
    stand.fm.control.tell(&Command::Fault(fault)).unwrap();
    client.activate(activate("r3", 1, "a")).await.unwrap_err();
    client.quarantine(api::QuarantineRequest { gpu: 8, reason: "Xid 79".to_owned() }).await.unwrap();
    let answer = asked(&address, GET);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{answer}");
    let (_, text) = answer.split_once("\r\n\r\n").unwrap();
    let is = |name: &str| value(text, &format!("firstlight_fabric_{name}"));
    // The same without a port, but for what goes on.
    let (said, error, code) = stand.typed(&["metrics"]);
    assert!(error.is_empty() && code == 0, "{error}");
    let lasting = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with("firstlight_fabric_list_age_seconds"));
        lines.map(str::to_owned).collect()
    };
    assert_eq!(lasting(&said), lasting(text));
    for (name, wanted) in [
        ("manager_up", 1.0),
        ("partitions{state=\"active\"}", 1.0),
        ("partitions{state=\"changing\"}", 0.0),
        ("free_partitions{gpus=\"1\"}", 5.0),
        ("free_partitions{gpus=\"2\"}", 2.0),
        ("free_partitions{gpus=\"8\"}", 0.0),
        ("largest_free_gpus", 2.0),
        ("foreign_partitions", 0.0),
        ("quarantined_gpus", 1.0),
        ("outage", 0.0),
        ("module_map_verified", 0.0),
        ("changes_total{kind=\"activate\",outcome=\"done\"}", 2.0),
        ("changes_total{kind=\"activate\",outcome=\"undone\"}", 1.0),
        ("changes_total{kind=\"deactivate\",outcome=\"done\"}", 1.0),
        ("change_duration_seconds_count{kind=\"activate\"}", 3.0),
        ("change_duration_seconds_bucket{kind=\"activate\",le=\"+Inf\"}", 3.0),
        ("change_under_way_seconds", 0.0),
    ] {
        assert_eq!(is(name), Some(wanted), "{name} in {text}");
    }
    assert!(is("change_duration_seconds_bucket{kind=\"activate\",le=\"0.020\"}").unwrap() < 3.0, "{text}");
    assert!(is("journal_bytes").unwrap() > 100.0 && is("list_age_seconds").unwrap() < 60.0, "{text}");
    assert!(text.contains("firstlight_fabric_build_info{version=\""));
    // While a change hangs, and when the manager is gone.
    stand.fm.control.tell(&Command::Hang(Some(Op::Activate))).unwrap();
    let late = tokio::spawn({
        let mut client = client.clone();
        async move { client.activate(activate("r4", 1, "a")).await }
    });
    stand.until("the change is under way", |health| health.under_way_ms > 0).await;
    let text = asked(&address, GET);
    assert_eq!(value(&text, "firstlight_fabric_partitions{state=\"changing\"}"), Some(1.0), "{text}");
    stand.fm.control.tell(&Command::Release).unwrap();
    late.await.unwrap().unwrap();
    stand.fm.kill().unwrap();
    stand.until("it is gone", |health| !health.fabric_manager).await;
    assert_eq!(value(&asked(&address, GET), "firstlight_fabric_manager_up"), Some(0.0));
    stand.kill_daemon();
    let socket = stand.dir.path().join("metrics.sock");
    let at = stand.more.iter().position(|word| *word == address).unwrap();
    stand.more[at] = format!("unix:{}", socket.display());
    stand.start_daemon();
    stand.client().await;
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.write_all(GET).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn who_asks_without_manners_harms_nobody() {
    let mut stand = Stand::new(&quick("h100"));
    stand.kill_daemon();
    let address = free();
    stand.more.extend(["--metrics".to_owned(), address.clone()]);
    stand.start_daemon();
    crate::tokio_main(async { stand.until("the fabric is seen", |health| health.ok).await });
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
    // All places are taken by those who say nothing, or a letter now and then.
    let begun = Instant::now();
    let mut silent: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(&address).unwrap()).collect();
    for stream in silent.iter_mut().take(8) {
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
    }
    let mut last = String::new();
    while !last.starts_with("HTTP/1.1 200 OK") {
        assert!(begun.elapsed() < Duration::from_secs(20), "they have their places still: {last:?}");
        if let Some(stream) = silent.first_mut() {
            let _ = stream.write_all(b"x");
        }
        std::thread::sleep(Duration::from_millis(100));
        last = asked(&address, GET);
    }
    // Others did not wait for them.
    assert_eq!(stand.typed(&["list"]).2, 0);
    // A daemon whose port is taken says so.
    let output = stand.another_daemon(&stand.dir.path().join("j"), &stand.dir.path().join("s"));
    let output = { output }.args(["--metrics", &address]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains(&format!("cannot show metrics on {address}")), "{error}");
}
