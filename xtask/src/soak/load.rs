//! CPU load for the soak test: two compilers in endless loops, as on a developer's machine.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// Number of parallel compilers.
const COMPILERS: usize = 2;

/// Number of functions of the compiled program: some seconds of rustc at this optimisation level.
const FUNCTIONS: usize = 300;

/// Running compilers, killed on drop.
#[derive(Debug)]
pub(super) struct Load(Vec<Child>);

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Load {
    /// Starts the compilers, with their files in `dir`.
    pub(super) fn start(dir: &Path) -> anyhow::Result<Self> {
        let source = dir.join("load.rs");
        fs::write(&source, program()).with_context(|| source.display().to_string())?;
        let mut load = Self(Vec::new());
        for at in 0..COMPILERS {
            let out = dir.join(format!("load-{at}.rlib"));
            let mut command = Command::new("sh");
            // The loop ends if the compiler fails; `check` reports that.
            command.args([
                "-c",
                "while rustc --edition=2021 --crate-type=lib -C opt-level=3 -o \"$2\" \"$1\"; do :; done",
                "sh",
            ]);
            command.arg(&source).arg(&out).stdin(Stdio::null());
            // A killed soak leaves no load behind: the loop ends with this process, its compiler when it is done.
            firstlight_sys::child::die_with_parent(&mut command);
            load.0.push(command.spawn().context("failed to start a compiler")?);
        }
        Ok(load)
    }

    /// Fails if a compiler has exited.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        for child in &mut self.0 {
            if let Some(status) = child.try_wait().context("failed to query a compiler's status")? {
                anyhow::bail!("a compiler of the load exited with {status}: the suite ran without its load");
            }
        }
        Ok(())
    }
}

fn program() -> String {
    let mut text = String::from("#![allow(dead_code)]\nuse std::collections::BTreeMap;\n");
    for at in 0..FUNCTIONS {
        let _ = writeln!(
            text,
            "pub fn f{at}(mut v: Vec<[u64; {}]>) -> BTreeMap<String, usize> {{\n    v.sort_by_key(|a| a[{}]);\n    \
             v.iter().enumerate().map(|(i, a)| (format!(\"{{a:?}}\"), i + {at})).collect()\n}}",
            at % 24 + 1,
            at % (at % 24 + 1)
        );
    }
    text
}
