//! A boot record as a table and as a picture.
//!
//! [`rows`] puts everything with a beginning and an end on one axis: the
//! kernel, each unit, each GPU's attach, each container, the power-off;
//! [`table`] prints them for a terminal, [`svg`] draws them.
#![forbid(unsafe_code)]

mod rows;
mod svg;
mod table;

pub use rows::{Look, Row, rows};
pub use svg::svg;
pub use table::table;
