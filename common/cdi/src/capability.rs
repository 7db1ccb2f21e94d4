//! Driver capabilities, as `NVIDIA_DRIVER_CAPABILITIES` names them.
//!
//! The driver's files are CDI devices of a separate kind, [`DRIVER_KIND`]: one
//! per capability, without device nodes. A container that has a GPU also gets
//! those that its environment names. They are separate from the GPUs so that the
//! GPU specification stays small (it is rewritten each time a GPU becomes ready), and so
//! that any CDI runtime can inject them: `nvidia.com/gpu=0`, `nvidia.com/driver=compute`.

use crate::DeviceName;

/// The CDI kind of the driver's files.
pub const DRIVER_KIND: &str = "nvidia.com/driver";

/// A driver capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Capability {
    /// CUDA and OpenCL.
    Compute,
    /// `nvidia-smi` and NVML.
    Utility,
    /// Encoding and decoding.
    Video,
    /// OpenGL, EGL and Vulkan.
    Graphics,
    /// X11.
    Display,
    /// Upscaling and other network-driven image work.
    Ngx,
    /// The 32-bit libraries of the others.
    Compat32,
}

/// Every capability and its name.
const NAMES: &[(Capability, &str)] = &[
    (Capability::Compute, "compute"),
    (Capability::Utility, "utility"),
    (Capability::Video, "video"),
    (Capability::Graphics, "graphics"),
    (Capability::Display, "display"),
    (Capability::Ngx, "ngx"),
    (Capability::Compat32, "compat32"),
];

/// The default set, equal to that of NVIDIA Container Toolkit.
const DEFAULT_SET: &[Capability] = &[Capability::Compute, Capability::Utility];

impl Capability {
    /// Returns its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// Returns the name of the CDI device with its 64-bit or 32-bit files.
    #[must_use]
    pub fn device(self, is_32bit: bool) -> String {
        if is_32bit { format!("{}-32", self.name()) } else { self.name().to_owned() }
    }
}

/// A set of driver capabilities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities(Vec<Capability>);

impl Default for Capabilities {
    fn default() -> Self {
        Self(DEFAULT_SET.to_vec())
    }
}

impl Capabilities {
    /// Parses the variable's value; also returns unknown names. An empty value, or
    /// one without a known name, is the default set.
    #[must_use]
    pub fn parse(text: &str) -> (Self, Vec<String>) {
        let mut known = Vec::new();
        let mut unknown = Vec::new();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word == "all" {
                known = NAMES.iter().map(|(capability, _)| *capability).collect();
            } else if let Some((capability, _)) = NAMES.iter().find(|(_, known)| *known == word) {
                if !known.contains(capability) {
                    known.push(*capability);
                }
            } else if unknown.len() < 8 {
                unknown.push(word.chars().take(32).collect());
            }
        }
        (if known.is_empty() { Self::default() } else { Self(known) }, unknown)
    }

    /// Returns the CDI devices with these capabilities' files. An image may lack some of them.
    pub fn devices(&self) -> impl Iterator<Item = DeviceName> {
        let with_32bit = self.0.contains(&Capability::Compat32);
        let name = |device| DeviceName { kind: DRIVER_KIND.to_owned(), device };
        let capabilities = self.0.iter().filter(|capability| **capability != Capability::Compat32);
        capabilities
            .flat_map(move |capability| {
                [false, true]
                    .into_iter()
                    .filter(move |is_32bit| !is_32bit || with_32bit)
                    .map(|is_32bit| capability.device(is_32bit))
            })
            .map(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(text: &str) -> Vec<String> {
        Capabilities::parse(text).0.devices().map(|name| name.device).collect()
    }

    #[test]
    fn capability_names_select_devices() {
        assert_eq!(names(""), ["compute", "utility"]);
        assert_eq!(names("utility"), ["utility"]);
        assert_eq!(names("video, compat32,video"), ["video", "video-32"]);
        assert_eq!(names("all").len(), 12);
        assert_eq!(Capabilities::parse("compute,tea").1, ["tea"]);
        assert_eq!(names("tea"), ["compute", "utility"]);
    }

    #[test]
    fn device_names_are_valid_cdi_names() {
        for name in Capabilities::parse("all").0.devices() {
            assert_eq!(name.to_string().parse::<DeviceName>().unwrap(), name);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_nonempty_set_of_known_capabilities(text in "([a-z0-9]{0,9},?){0,40}") {
            let (set, unknown) = Capabilities::parse(&text);
            prop_assert!(!set.0.is_empty() && set.0.len() <= NAMES.len() && unknown.len() <= 8);
        }
    }
}
