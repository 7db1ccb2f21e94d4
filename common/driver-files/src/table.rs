//! Table of the files of NVIDIA's user-space driver and their capabilities.
//!
//! From the file lists of the driver's packages (535 to 595) and the published
//! capability list of NVIDIA Container Toolkit. Files that a release lacks are
//! skipped; files that are not listed are not injected.

use firstlight_cdi::Capability::{self, Compute, Display, Graphics, Ngx, Utility, Video};

/// Directories of 64-bit libraries in search order; the second last is that of
/// Debian's driver packages, the last that of Container-Optimized OS.
pub(super) const LIB64_DIRS: &[&str] =
    &["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/local/nvidia/lib64"];

/// The same for 32-bit libraries.
pub(super) const LIB32_DIRS: &[&str] = &[
    "/usr/lib/i386-linux-gnu",
    "/usr/lib32",
    "/usr/lib",
    "/usr/lib/i386-linux-gnu/nvidia/current",
    "/usr/local/nvidia/lib",
];

/// Default directories of a container's dynamic loader, without cache or environment
/// variables: Debian's and its derivatives', then those of other distributions. The
/// container's is unknown until its root is mounted, so both are used.
pub(super) const LIB64_TARGETS: &[&str] = &["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

/// The same for 32-bit libraries.
pub(super) const LIB32_TARGETS: &[&str] = &["/usr/lib/i386-linux-gnu", "/usr/lib"];

/// Directories of programs.
pub(super) const BIN_DIRS: &[&str] = &["/usr/bin", "/usr/lib/nvidia/current", "/usr/local/nvidia/bin"];

/// Target directory of programs.
pub(super) const BIN_TARGET: &str = "/usr/bin";

/// A library.
pub(super) struct Library {
    /// The file's name before `.so.`.
    pub(super) stem: &'static str,
    /// The file's version if it is not the driver's.
    pub(super) fixed: Option<&'static str>,
    /// Suffixes of its additional names (sonames).
    pub(super) names: &'static [&'static str],
    /// Capabilities that need it.
    pub(super) parts: &'static [Capability],
}

const fn library(stem: &'static str, names: &'static [&'static str], parts: &'static [Capability]) -> Library {
    Library { stem, fixed: None, names, parts }
}

/// All libraries.
pub(super) const LIBRARIES: &[Library] = &[
    library("libnvidia-ml", &[".so.1"], &[Utility]),
    library("libnvidia-cfg", &[".so.1"], &[Utility]),
    // Programs linked without a version, and Python bindings, load the unversioned name.
    library("libcuda", &[".so.1", ".so"], &[Compute]),
    library("libcudadebugger", &[".so.1"], &[Compute]),
    library("libnvidia-ptxjitcompiler", &[".so.1"], &[Compute]),
    library("libnvidia-nvvm", &[".so.4"], &[Compute]),
    Library { stem: "libnvidia-nvvm70", fixed: Some("4"), names: &[], parts: &[Compute] },
    library("libnvidia-opencl", &[".so.1"], &[Compute]),
    library("libnvidia-compiler", &[], &[Compute]),
    library("libnvidia-fatbinaryloader", &[], &[Compute]),
    library("libnvidia-pkcs11", &[], &[Compute]),
    library("libnvidia-pkcs11-openssl3", &[], &[Compute]),
    library("libnvidia-gpucomp", &[], &[Compute, Video, Graphics, Display]),
    library("libnvidia-allocator", &[".so.1"], &[Compute, Graphics, Display]),
    library("libnvcuvid", &[".so.1"], &[Video]),
    library("libnvidia-encode", &[".so.1"], &[Video]),
    library("libnvidia-opticalflow", &[".so.1"], &[Video]),
    library("libvdpau_nvidia", &[".so.1"], &[Video, Display]),
    library("libGLX_nvidia", &[".so.0"], &[Graphics, Display]),
    library("libEGL_nvidia", &[".so.0"], &[Graphics, Display]),
    library("libGLESv1_CM_nvidia", &[".so.1"], &[Graphics, Display]),
    library("libGLESv2_nvidia", &[".so.2"], &[Graphics, Display]),
    library("libnvidia-eglcore", &[], &[Graphics, Display]),
    library("libnvidia-glcore", &[], &[Graphics, Display]),
    library("libnvidia-glsi", &[], &[Graphics, Display]),
    library("libnvidia-tls", &[], &[Graphics, Display]),
    library("libnvidia-glvkspirv", &[], &[Graphics, Display]),
    library("libnvidia-rtcore", &[], &[Graphics, Display]),
    library("libnvidia-cbl", &[], &[Graphics, Display]),
    library("libnvidia-vksc-core", &[".so.1"], &[Graphics]),
    library("libnvoptix", &[".so.1"], &[Graphics, Display]),
    library("libnvidia-fbc", &[".so.1"], &[Graphics, Display]),
    library("libnvidia-ngx", &[".so.1"], &[Ngx]),
];

/// Programs.
pub(super) const TOOLS: &[(&str, Capability)] = &[
    ("nvidia-smi", Utility),
    ("nvidia-debugdump", Utility),
    ("nvidia-cuda-mps-control", Compute),
    ("nvidia-cuda-mps-server", Compute),
];

/// Other files, with the same path in guest and container.
pub(super) const DATA: &[(&str, Capability)] = &[
    ("/etc/OpenCL/vendors/nvidia.icd", Compute),
    ("/usr/share/nvidia/nvoptix.bin", Graphics),
    ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", Graphics),
    ("/usr/share/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/etc/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/usr/share/vulkan/implicit_layer.d/nvidia_layers.json", Graphics),
    ("/usr/lib/xorg/modules/drivers/nvidia_drv.so", Display),
];
