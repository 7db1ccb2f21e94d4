//! Writes the configuration of a private apt tree.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// Options that are copied from the host's apt configuration: network access and
/// the maximum age of an archive. Other options (hooks, clean-up rules, extra
/// indexes) must not apply to a private tree.
const COPIED_OPTIONS: &[&str] = &[
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::ForceIPv4",
    "Acquire::ForceIPv6",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
    "Acquire::Max-ValidTime",
    "Acquire::Proxy",
];

/// Returns the tree's `apt.conf`; `host` is the output of `apt-config dump`.
pub(super) fn apt_conf(tree: &Path, host: &str) -> String {
    let tree = tree.display();
    let mut text = format!(
        r#"Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "{tree}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{tree}/state";
Dir::State::lists "{tree}/lists";
Dir::State::status "{tree}/status";
Dir::Cache "{tree}/cache";
Dir::Cache::archives "{tree}/cache/archives";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Install-Recommends "false";
// The tree belongs to the user: the sandbox account of apt could not write to it.
APT::Sandbox::User "root";
// Access is serialized by our own lock file.
Debug::NoLocking "true";
Acquire::Languages "none";
Acquire::GzipIndexes "true";
Acquire::Retries "2";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
"#
    );
    for line in host.lines().filter(|line| COPIED_OPTIONS.iter().any(|option| line.starts_with(option))) {
        // An option that is set twice is dumped twice; the last one is effective.
        let _ = writeln!(text, "{line}");
    }
    text
}

/// All components: NVIDIA's packages are in contrib and non-free, its firmware in non-free-firmware.
const COMPONENTS: &str = "main contrib non-free non-free-firmware";

/// Returns the tree's `sources.list` with its only source.
pub(super) fn sources_list(mirror: &str, suite: &str, keyring: &str) -> String {
    format!("deb [signed-by={keyring}] {mirror} {suite} {COMPONENTS}\n")
}

/// Returns the output of `apt-config dump`; empty if it fails.
pub(super) fn host_options() -> String {
    Command::new("apt-config")
        .arg("dump")
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_is_copied_from_the_host_and_hooks_are_not() {
        let host = "Acquire::http::Proxy \"http://proxy.example:3128\";\n\
                    APT::Update::Post-Invoke:: \"rm -f *.deb\";\n\
                    Dir::Cache::pkgcache \"\";\nAcquire::Check-Valid-Until \"false\";\n";
        let text = apt_conf(Path::new("/c/apt/sid"), host);
        assert!(text.contains("Acquire::http::Proxy \"http://proxy.example:3128\";\n"));
        assert!(text.contains("Acquire::Check-Valid-Until \"false\";\n"));
        assert!(!text.contains("Post-Invoke"));
        assert!(!text.contains("Dir::Cache::pkgcache \"\""));
        assert!(text.contains("Dir::State::status \"/c/apt/sid/status\";"));
    }
}
