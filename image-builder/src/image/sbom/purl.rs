//! Formats package URLs of Debian packages.

use firstlight_image::PackageRecord;

/// Returns the package URL of a package, as specified for the type `deb`:
/// `pkg:deb/debian/NAME@VERSION?arch=ARCHITECTURE&distro=SUITE[&upstream=SOURCE[@VERSION]]`.
pub(super) fn of(package: &PackageRecord) -> String {
    let (name, version) = (percent_encode(&package.name), percent_encode(&package.version));
    let arch =
        package.architecture.as_deref().map(|name| format!("arch={}&", percent_encode(name))).unwrap_or_default();
    let upstream = package.source.as_deref().map(|source| format!("&upstream={}", upstream(source, &package.version)));
    let upstream = upstream.unwrap_or_default();
    format!("pkg:deb/debian/{name}@{version}?{arch}distro={}{upstream}", percent_encode(&package.suite))
}

/// Returns the source package, under whose name scanners look up advisories:
/// `NAME`, or `NAME@VERSION` if the version differs, as other SBOM generators write it.
fn upstream(source: &str, version: &str) -> String {
    match source.split_once('=') {
        Some((name, other)) if other != version => percent_encode(&format!("{name}@{other}")),
        Some((name, _)) => percent_encode(name),
        None => percent_encode(source),
    }
}

/// Percent-encodes everything but letters, digits and `.-_~:`.
fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        match byte {
            b'.' | b'-' | b'_' | b'~' | b':' => encoded.push(byte.into()),
            _ if byte.is_ascii_alphanumeric() => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_versions_of_debian_are_encoded() {
        let package = |name: &str, version: &str, arch: Option<&str>| {
            let [name, version, suite] = [name, version, "bookworm-backports"].map(str::to_owned);
            let architecture = arch.map(str::to_owned);
            of(&PackageRecord { name, version, suite, architecture, source: None, sha256: String::new() })
        };
        assert_eq!(
            package("libstdc++6", "1:12.2.0-14+deb12u1~x", Some("amd64")),
            "pkg:deb/debian/libstdc%2B%2B6@1:12.2.0-14%2Bdeb12u1~x?arch=amd64&distro=bookworm-backports"
        );
        let of_source = |source: &str| {
            let [name, version, suite, sha256] = ["libcuda1", "5-2", "sid", ""].map(str::to_owned);
            of(&PackageRecord { name, version, suite, architecture: None, source: Some(source.into()), sha256 })
        };
        assert_eq!(of_source("nvidia=5-2"), "pkg:deb/debian/libcuda1@5-2?distro=sid&upstream=nvidia");
        assert_eq!(of_source("g++=4"), "pkg:deb/debian/libcuda1@5-2?distro=sid&upstream=g%2B%2B%404");
        assert_eq!(package("a", "1", None), "pkg:deb/debian/a@1?distro=bookworm-backports");
        assert_eq!(package("a?b", "é#", None), "pkg:deb/debian/a%3Fb@%C3%A9%23?distro=bookworm-backports");
    }
}
