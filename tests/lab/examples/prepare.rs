//! Prepares the lab and prints the paths of its parts:
//! `cargo run -p firstlight-lab --example prepare [SOURCE-OF-STAND-INS]`.

use std::error::Error;
use std::path::PathBuf;

use firstlight_image_builder::cache;
use firstlight_lab::{Toolbox, host_packages, stand_in};
use firstlight_progress::Progress;

fn main() -> Result<(), Box<dyn Error>> {
    let missing = host_packages::missing(host_packages::PACKAGES)?;
    for package in &missing {
        println!("missing on this host: {} ({})", package.name, package.reason);
    }
    let toolbox = Toolbox::prepare(&cache::root()?, Progress::stderr("lab"))?;
    for (name, tool) in
        [("qemu", &toolbox.qemu), ("vsock", &toolbox.vhost_device_vsock), ("virtiofsd", &toolbox.virtiofsd)]
    {
        println!("{name}: {:?}", tool.command());
    }
    println!("busybox: {}", toolbox.busybox.display());
    println!("vmlinux: {}", toolbox.kernel.vmlinux().display());
    println!("headers: {}", toolbox.headers.build.display());
    if let Some(source) = std::env::args_os().nth(1).map(PathBuf::from) {
        let built = stand_in::build(&toolbox, &source, &toolbox.headers.release)?;
        println!("nvidia.ko: {}\nnvidia-uvm.ko: {}", built.nvidia_ko.display(), built.nvidia_uvm_ko.display());
    }
    Ok(())
}
