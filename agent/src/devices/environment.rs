//! Translates PCI addresses in a container's environment.
//!
//! SR-IOV device plugins pass a container its functions as `PCIDEVICE_RESOURCE=ADDRESS,ADDRESS`
//! and, as JSON, `PCIDEVICE_RESOURCE_INFO`. The addresses are the host's; the guest has others.

use oci_spec::runtime::Process;
use serde_json::Value;

use super::Functions;

const PREFIX: &str = "PCIDEVICE_";
const INFO: &str = "_INFO";

impl Functions {
    /// Replaces the host's addresses by the guest's. Unknown addresses stay: they may belong to
    /// functions that the container does not get.
    pub fn translate(&self, process: &mut Process) {
        if self.0.is_empty() {
            return;
        }
        let Some(environment) = process.env().clone() else { return };
        let translated = environment.into_iter().map(|entry| match entry.split_once('=') {
            Some((name, value)) if name.starts_with(PREFIX) => {
                let value = if name.ends_with(INFO) { self.info(value) } else { self.list(value) };
                format!("{name}={value}")
            }
            _ => entry,
        });
        let translated = translated.collect();
        process.set_env(Some(translated));
    }

    fn guest(&self, host: &str) -> Option<String> {
        self.0.get(&host.trim().parse().ok()?).map(ToString::to_string)
    }

    fn list(&self, value: &str) -> String {
        let addresses = value.split(',').map(|host| self.guest(host).unwrap_or_else(|| host.to_owned()));
        addresses.collect::<Vec<_>>().join(",")
    }

    fn info(&self, text: &str) -> String {
        let Ok(mut value) = serde_json::from_str::<Value>(text) else { return text.to_owned() };
        self.translate_json(&mut value);
        value.to_string()
    }

    fn translate_json(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some(guest) = self.guest(text) {
                    *text = guest;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.translate_json(value)),
            Value::Object(fields) => {
                // Rebuilt, as two functions may have each other's address.
                let old = std::mem::take(fields);
                for (name, mut value) in old {
                    self.translate_json(&mut value);
                    fields.insert(self.guest(&name).unwrap_or(name), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn functions() -> Functions {
        let pair = |host: &str, guest: &str| (host.parse().unwrap(), guest.parse().unwrap());
        Functions([pair("0000:c1:00.0", "0000:01:00.0"), pair("0000:01:00.0", "0000:c1:00.0")].into())
    }

    fn translated(entries: &[&str]) -> Vec<String> {
        let mut process = Process::default();
        process.set_env(Some(entries.iter().map(ToString::to_string).collect()));
        functions().translate(&mut process);
        process.env().clone().unwrap()
    }

    #[test]
    fn only_host_addresses_are_translated() {
        let info =
            r#"PCIDEVICE_X_NIC_INFO={"0000:c1:00.0":{"generic":{"deviceID":"0000:c1:00.0"},"n":[1,"0000:01:00.0"]}}"#;
        assert_eq!(
            translated(&[
                "PCIDEVICE_X_NIC=0000:c1:00.0,0000:01:00.0,0000:99:00.0",
                info,
                "PCIDEVICE_Y_INFO=not json",
                "OTHER=0000:c1:00.0",
                "PCIDEVICE_",
            ]),
            [
                "PCIDEVICE_X_NIC=0000:01:00.0,0000:c1:00.0,0000:99:00.0",
                r#"PCIDEVICE_X_NIC_INFO={"0000:01:00.0":{"generic":{"deviceID":"0000:01:00.0"},"n":[1,"0000:c1:00.0"]}}"#,
                "PCIDEVICE_Y_INFO=not json",
                "OTHER=0000:c1:00.0",
                "PCIDEVICE_",
            ]
        );
    }

    proptest! {
        #[test]
        fn variable_names_are_never_changed(name in "[A-Z_]{0,12}", value in "\\PC{0,40}") {
            let entry = format!("PCIDEVICE_{name}={value}");
            let after = translated(&[&entry, &entry.replace('=', "_INFO=")]);
            let start = format!("PCIDEVICE_{name}");
            prop_assert!(after.iter().all(|entry| entry.starts_with(&start)));
        }
    }
}
