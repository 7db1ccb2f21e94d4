//! Boot records as a terminal table and as SVG.
//!
//! [`rows`] puts everything with a start and an end on one time axis: the
//! kernel, each unit, each GPU's attach, each container, the power-off;
//! [`table`] prints them for a terminal, [`svg`] draws them.
#![forbid(unsafe_code)]

mod critical_path;
mod rows;
mod svg;
mod table;

pub use critical_path::critical_path;
pub use rows::{Row, RowStyle, rows};
pub use svg::svg;
pub use table::{TableOptions, table};
