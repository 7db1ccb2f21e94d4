//! The host side of Firstlight
#![forbid(unsafe_code)]
