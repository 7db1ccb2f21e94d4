//! `kernel_modules` of CreateSandbox. PID 1 loads them: it has the image's module index, and it
//! locks module loading.

use std::path::Path;

use firstlight_agent_api::agent::KernelModule;
use ttrpc::Code;

use crate::control::Control;
use crate::error::{Error, Result};

/// The kernel's limit on a module's name.
const MAX_NAME: usize = 56;

/// Maximum total length of a module's parameters, bytes.
const MAX_PARAMETERS: usize = 4096;

/// Validates name and parameters (untrusted input).
fn check(module: &KernelModule) -> Result<()> {
    let name = &module.name;
    let good = !name.is_empty()
        && name.len() <= MAX_NAME
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if !good {
        let name: String = name.chars().take(80).collect();
        return Err(Error::invalid(format!("kernel module {name:?}: invalid module name")));
    }
    let len: usize = module.parameters.iter().map(|one| one.len() + 1).sum();
    if len > MAX_PARAMETERS || module.parameters.iter().any(|one| one.chars().any(char::is_control)) {
        return Err(Error::invalid(format!("kernel module {name}: parameters too long or with control characters")));
    }
    Ok(())
}

/// Loads the modules in order. Loaded ones are skipped.
///
/// # Errors
/// A name is invalid, or a module cannot be loaded.
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
            let message = format!("kernel module {name}: the agent runs without PID 1; load the module beforehand");
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
    fn names_and_parameters_are_validated_and_loaded_modules_skipped() {
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
