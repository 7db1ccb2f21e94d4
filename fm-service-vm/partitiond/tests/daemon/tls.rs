//! The TLS listener.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::support::{Fixture, quick};

/// A certificate authority.
struct Authority {
    dir: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new(dir: &Path, name: &str) -> Self {
        let (dir, called) = (dir.join(name), name);
        fs::create_dir(&dir).unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, called);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        fs::write(dir.join("ca.pem"), issuer.pem()).unwrap();
        Self { dir, issuer }
    }

    /// Creates `NAME.pem` and `NAME.key` for these hosts.
    fn signs(&self, name: &str, hosts: &[&str]) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        fs::write(self.file(&format!("{name}.pem")), certificate.pem()).unwrap();
        let path = self.file(&format!("{name}.key"));
        fs::write(&path, key.serialize_pem()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }
}

/// Returns a port that was free a moment ago.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn tls_requires_a_certificate_of_the_client_ca() {
    let mut fixture = Fixture::new(&quick("h100"));
    fixture.until("the fabric was polled", |health| health.ok).await;
    fixture.kill_daemon();
    let (ours, others) = (Authority::new(fixture.dir.path(), "ours"), Authority::new(fixture.dir.path(), "others"));
    ours.signs("daemon", &["127.0.0.1"]);
    ours.signs("host", &["host"]);
    others.signs("host", &["host"]);
    let address = format!("127.0.0.1:{}", port());
    let options = [
        ("--listen-tls", address.clone()),
        ("--certificate", ours.file("daemon.pem")),
        ("--key", ours.file("daemon.key")),
        ("--client-ca", ours.file("ca.pem")),
    ];
    fixture.more.extend(options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.clone()]));
    fixture.start_daemon();
    fixture.until("the fabric was polled", |health| health.ok).await;

    let url = format!("https://{address}");
    let asked = |url: &str, certificate: &Authority, ca: &Authority, command: &[&str]| {
        let (pem, key, ca) = (certificate.file("host.pem"), certificate.file("host.key"), ca.file("ca.pem"));
        let head = ["--connect", url, "--certificate", &pem, "--key", &key, "--ca", &ca, "--timeout", "5"];
        fixture.fmctl_without_connect(&[&head, command].concat())
    };
    let (said, error, code) = asked(&url, &ours, &ours, &["activate", "--gpus", "2", "--owner", "vm-1"]);
    assert_eq!((said.as_str(), code), ("Successfully activated partition 3 with GPUs 1,3\n", 0), "{error}");
    for (certificate, ca, url, said) in [
        // A client certificate of another CA; a daemon certificate of another CA; another host name.
        (&others, &ours, url.clone(), ""),
        (&ours, &others, url.clone(), "UnknownIssuer"),
        (&ours, &ours, url.replace("127.0.0.1", "localhost"), "not valid for"),
    ] {
        let (out, error, code) = asked(&url, certificate, ca, &["list"]);
        assert_eq!((out.as_str(), code), ("", 7), "{error}");
        let is_reported = error.contains("the daemon closed the connection")
            || error.contains(&format!("failed to connect to fm-partitiond on {url}"));
        assert!(is_reported && error.contains(said), "{error}");
    }
    let (_, error, code) = fixture.fmctl_without_connect(&["--connect", &url, "list"]);
    assert!(error.contains("--certificate is missing") && code == 2, "{error}");
    let plain = url.replace("https", "http");
    let (_, error, code) = fixture.fmctl_without_connect(&["--connect", &plain, "list"]);
    assert!(error.contains("expected unix:PATH") && code == 2, "{error}");
    // Connections without TLS are closed.
    for bytes in [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &[0x16, 3, 1, 0xff, 0xff], &[0; 300]] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let _ = stream.write_all(bytes);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.windows(4).any(|part| part == b"grpc"), "{answer:?}");
    }
    assert_eq!(asked(&url, &ours, &ours, &["status", "3"]).2, 0);
    assert_eq!(fixture.run_fmctl(&["deactivate", "3", "--owner", "vm-1"]).2, 0);
}

#[test]
fn invalid_certificates_are_reported() {
    let fixture = Fixture::new(&quick("h100"));
    let ours = Authority::new(fixture.dir.path(), "ours");
    ours.signs("daemon", &["127.0.0.1"]);
    ours.signs("other", &["127.0.0.1"]);
    fs::write(ours.file("open.key"), fs::read(ours.file("daemon.key")).unwrap()).unwrap();
    fs::set_permissions(ours.file("open.key"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::write(ours.file("none.pem"), "none").unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (free, taken) = (format!("127.0.0.1:{}", port()), taken.local_addr().unwrap().to_string());
    let another = || {
        let at = |name: &str| fixture.dir.path().join(name);
        fixture.another_daemon(&at("other.journal"), &at("other.sock"))
    };
    for (address, certificate, key, ca, said) in [
        (&free, "daemon.pem", "open.key", "ca.pem", "open.key may be read by others (mode 640): chmod 600"),
        (&free, "nowhere.pem", "daemon.key", "ca.pem", "nowhere.pem: No such file"),
        (&free, "daemon.pem", "nowhere.key", "ca.pem", "nowhere.key: No such file"),
        (&free, "none.pem", "daemon.key", "ca.pem", "have to be PEM files"),
        (&free, "daemon.pem", "other.key", "ca.pem", "the key that of the certificate"),
        (&free, "daemon.pem", "daemon.key", "none.pem", "have to be PEM files"),
        (&taken, "daemon.pem", "daemon.key", "ca.pem", "Address already in use"),
    ] {
        let mut command = another();
        command.args(["--listen-tls", address]);
        for (option, file) in [("--certificate", certificate), ("--key", key), ("--client-ca", ca)] {
            command.args([option, &ours.file(file)]);
        }
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(said), "{said} in {text}");
    }
    let output = another().args(["--listen-tls", &free]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("--client-ca"), "{text}");
}
