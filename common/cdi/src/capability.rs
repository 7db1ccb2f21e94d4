//! Parts of a driver, as `NVIDIA_DRIVER_CAPABILITIES` names them.
//!
//! The driver's files are devices of a kind of their own, [`DRIVER_KIND`]: one
//! per part, without device nodes. A container that has a GPU also gets those
//! that its environment names. They are apart from the GPUs so that the file
//! about GPUs stays small (it is written each time one becomes ready), and so
//! that any CDI runtime can give them: `nvidia.com/gpu=0`, `nvidia.com/driver=compute`.

use crate::DeviceName;

/// The kind under which the driver's files are published.
pub const DRIVER_KIND: &str = "nvidia.com/driver";

/// What a program uses of a driver.
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

/// Every part and its word.
const WORDS: &[(Capability, &str)] = &[
    (Capability::Compute, "compute"),
    (Capability::Utility, "utility"),
    (Capability::Video, "video"),
    (Capability::Graphics, "graphics"),
    (Capability::Display, "display"),
    (Capability::Ngx, "ngx"),
    (Capability::Compat32, "compat32"),
];

/// What a container gets that does not say, as with NVIDIA's own toolkit.
const USUAL: &[Capability] = &[Capability::Compute, Capability::Utility];

impl Capability {
    /// The word that stands for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        WORDS.iter().find(|(known, _)| *known == self).map_or("", |(_, word)| word)
    }

    /// The name of the device that has its files, 64-bit or 32-bit.
    #[must_use]
    pub fn device(self, narrow: bool) -> String {
        if narrow { format!("{}-32", self.word()) } else { self.word().to_owned() }
    }
}

/// A set of parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities(Vec<Capability>);

impl Default for Capabilities {
    fn default() -> Self {
        Self(USUAL.to_vec())
    }
}

impl Capabilities {
    /// Reads the variable's value, and returns the words that are none of ours.
    /// Nothing, an empty value or one without any known word is the usual set.
    #[must_use]
    pub fn parse(text: &str) -> (Self, Vec<String>) {
        let mut known = Vec::new();
        let mut unknown = Vec::new();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if word == "all" {
                known = WORDS.iter().map(|(capability, _)| *capability).collect();
            } else if let Some((capability, _)) = WORDS.iter().find(|(_, known)| *known == word) {
                if !known.contains(capability) {
                    known.push(*capability);
                }
            } else if unknown.len() < 8 {
                unknown.push(word.chars().take(32).collect());
            }
        }
        (if known.is_empty() { Self::default() } else { Self(known) }, unknown)
    }

    /// The devices that have these parts' files. Not every image has each of them.
    pub fn devices(&self) -> impl Iterator<Item = DeviceName> {
        let narrow = self.0.contains(&Capability::Compat32);
        let name = |device| DeviceName { kind: DRIVER_KIND.to_owned(), device };
        let wide = self.0.iter().filter(|capability| **capability != Capability::Compat32);
        wide.flat_map(move |capability| {
            [false, true].into_iter().filter(move |bits| !bits || narrow).map(|bits| capability.device(bits))
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
    fn words_become_devices() {
        assert_eq!(names(""), ["compute", "utility"]);
        assert_eq!(names("utility"), ["utility"]);
        assert_eq!(names("video, compat32,video"), ["video", "video-32"]);
        assert_eq!(names("all").len(), 12);
        assert_eq!(Capabilities::parse("compute,tea").1, ["tea"]);
        assert_eq!(names("tea"), ["compute", "utility"]);
    }

    #[test]
    fn every_device_has_a_name_that_can_be_asked_for() {
        for name in Capabilities::parse("all").0.devices() {
            assert_eq!(name.to_string().parse::<DeviceName>().unwrap(), name);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_set_of_known_parts(text in "([a-z0-9]{0,9},?){0,40}") {
            let (set, unknown) = Capabilities::parse(&text);
            prop_assert!(!set.0.is_empty() && set.0.len() <= WORDS.len() && unknown.len() <= 8);
        }
    }
}
