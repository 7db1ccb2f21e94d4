//! Builds from an archive that is not what it should be, or on a machine that
//! gives out. The archive is a test's own, with a key of its own; apt, dpkg and
//! `image-builder` are the real ones.

mod deb;
mod packages;
mod place;
mod releases;
mod trouble;
