//! Two compilers that never end: the load that a developer's machine has.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// How many compile at the same time.
const COMPILERS: usize = 2;

/// Functions of the program that they compile: some seconds of rustc at its optimisation level.
const FUNCTIONS: usize = 300;

/// Compilers that run until this is dropped.
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
    /// Starts them; their files are in `dir`.
    pub(super) fn start(dir: &Path) -> anyhow::Result<Self> {
        let source = dir.join("load.rs");
        fs::write(&source, program()).with_context(|| source.display().to_string())?;
        let mut load = Self(Vec::new());
        for at in 0..COMPILERS {
            let out = dir.join(format!("load-{at}.rlib"));
            let mut command = Command::new("sh");
            // A compiler that cannot run must not end the load unnoticed.
            command.args([
                "-c",
                "while rustc --edition=2021 --crate-type=lib -C opt-level=3 -o \"$2\" \"$1\"; do :; done",
                "sh",
            ]);
            command.arg(&source).arg(&out).stdin(Stdio::null());
            load.0.push(command.spawn().context("failed to start a compiler")?);
        }
        Ok(load)
    }

    /// Fails when a compiler has ended.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        for child in &mut self.0 {
            if let Some(status) = child.try_wait().context("failed to look at a compiler")? {
                anyhow::bail!("a compiler of the load ended with {status}: the suite ran without its load");
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
