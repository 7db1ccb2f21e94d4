//! `kernel_modules` of CreateSandbox. PID 1 loads them: it knows the image's
//! modules, and it is the one that locks the kernel.

use std::path::Path;

use firstlight_agent_api::agent::KernelModule;
use ttrpc::Code;

use crate::control::Control;
use crate::error::{Error, Result};

/// As long as a name of the kernel's can be.
const LONGEST_NAME: usize = 56;

/// What all parameters of one module may take, bytes.
const LONGEST_PARAMETERS: usize = 4096;

/// Checks what goes into a path and into the kernel.
fn check(module: &KernelModule) -> Result<()> {
    let name = &module.name;
    let good = !name.is_empty()
        && name.len() <= LONGEST_NAME
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if !good {
        let name: String = name.chars().take(80).collect();
        return Err(Error::invalid(format!("kernel module {name:?}: no name of a module")));
    }
    let len: usize = module.parameters.iter().map(|one| one.len() + 1).sum();
    if len > LONGEST_PARAMETERS || module.parameters.iter().any(|one| one.chars().any(char::is_control)) {
        return Err(Error::invalid(format!("kernel module {name}: its parameters are no text for the kernel")));
    }
    Ok(())
}

/// Loads the modules in order. One that is there already is not asked for.
///
/// # Errors
/// A name makes no sense, or a module is not there and cannot be loaded.
pub(crate) async fn load(control: Option<&Control>, sysfs: &Path, modules: &[KernelModule]) -> Result<()> {
    for module in modules {
        check(module)?;
    }
    for module in modules {
        let name = &module.name;
        if sysfs.join("module").join(name.replace('-', "_")).exists() {
            continue;
        }
        let Some(control) = control else {
            let message = format!("kernel module {name}: the agent works without PID 1; load it before");
            return Err(Error::new(Code::FAILED_PRECONDITION, message));
        };
        control.load_module(name, &module.parameters.join(" ")).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_parameters_are_checked_and_loaded_modules_left_alone() {
        let module = |name: &str, parameters: &[&str]| KernelModule {
            name: name.into(),
            parameters: parameters.iter().map(|one| (*one).to_owned()).collect(),
            ..Default::default()
        };
        for bad in ["", "../x", "a b", "a\0", "a/b", &"x".repeat(57)] {
            assert!(check(&module(bad, &[])).is_err(), "{bad}");
        }
        check(&module("nvidia-uvm", &["a=1", "b=x y"])).unwrap();
        assert!(check(&module("a", &["b\nc"])).is_err() && check(&module("a", &[&"x".repeat(5000)])).is_err());
        let sysfs = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(sysfs.path().join("module/nvidia_uvm")).unwrap();
        let run = |modules: &[KernelModule]| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(load(None, sysfs.path(), modules))
        };
        run(&[module("nvidia-uvm", &[])]).unwrap();
        assert!(run(&[module("overlay", &[])]).unwrap_err().message.contains("overlay"));
    }
}
