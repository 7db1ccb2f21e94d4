//! Reasons why parameters of Kata's agent are ignored.

pub(super) const CDH: &str = "there is no Confidential Data Hub in the guest";

pub(super) const CONFIG_FILE: &str =
    "a file in the image could silently override the command line; use the command line";

pub(super) const DEVMODE: &str = "it has no effect in Kata's agent either";

pub(super) const GUEST_COMPONENTS: &str = "the guest components of confidential computing are not started";

pub(super) const IMAGE_PULL: &str = "images are not pulled in the guest";

pub(super) const MEM_AGENT: &str = "there is no memory agent; its calls return UNIMPLEMENTED";

pub(super) const PASSFD: &str =
    "only Dragonball passes descriptors through vsock; streams use ReadStdout, ReadStderr and WriteStdin";

pub(super) const PROXY: &str = "nothing in the guest makes HTTP requests";

pub(super) const SECURE_STORAGE: &str = "there is no trusted storage in the guest";

pub(super) const TRACE: &str = "there is no trace export; the boot record has timings";
