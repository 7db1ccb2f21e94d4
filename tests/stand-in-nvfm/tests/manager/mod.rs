//! A manager behind the library, and a process for each test.

use std::path::PathBuf;
use std::process::Command;

use firstlight_fake_fm::home::{Home, Running, build};
use firstlight_fake_fm::machine::Phase;
use firstlight_fake_fm::scenario::Scenario;
use nvfm::variant;

/// The library is one for a process, and so is its variant: a test runs in a process of its own.
pub(crate) fn alone(name: &str, variant: &str, test: impl FnOnce()) {
    if std::env::var_os("ALONE").is_some() {
        return test();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env("ALONE", "1").env(variant::VARIABLE, variant);
    let output = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// A manager in a directory of its own.
pub(crate) struct Manager {
    pub(crate) home: Home,
    pub(crate) fm: Running,
    program: PathBuf,
    _directory: tempfile::TempDir,
}

impl Manager {
    pub(crate) fn start(keys: &[(&str, &str)], scenario: &Scenario) -> Self {
        let (program, dir) = (build().unwrap(), tempfile::tempdir().unwrap());
        let home = Home::new(dir.path());
        home.write(keys, &Scenario { start_ms: 0, ..scenario.clone() }).unwrap();
        let mut fm = home.start(&program, &[]).unwrap();
        fm.wait_for(Phase::Ready).unwrap();
        Self { home, fm, program, _directory: dir }
    }

    pub(crate) fn again(&mut self, arguments: &[&str], phase: Phase) {
        self.fm = self.home.start(&self.program, arguments).unwrap();
        self.fm.wait_for(phase).unwrap();
    }
}
