//! A boot record as a table and as a picture
#![forbid(unsafe_code)]
