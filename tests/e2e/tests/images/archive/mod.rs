//! Builds from an altered or malicious archive, with a full disk, killed, or
//! unprivileged. The test makes and signs the archive; apt, dpkg and
//! `image-builder` are the real ones.

mod deb;
mod failures;
mod packages;
mod place;
mod releases;
