//! Generates messages, client and server from `proto/`; the compiler is Rust's own.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["fabric.proto"], ["proto"])?;
    // Written as JSON by fmctl.
    tonic_prost_build::configure().type_attribute(".", "#[derive(serde::Serialize)]").compile_fds(files)?;
    Ok(())
}
