//! `image-builder matrix` and `image-builder profiles`.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use firstlight_image_builder::cache;
use firstlight_image_builder::driver::matrix::{Cell, Row, Table};
use firstlight_image_builder::driver::profile::Catalogue;
use firstlight_image_builder::driver::{Choice, Gate, Module, Plan, Version, report};
use firstlight_image_builder::kernel::{Kernel, Package, Source};
use firstlight_image_builder::packages::Packages;
use firstlight_progress::Progress;
use serde::Serialize;

/// Options of `matrix`.
#[derive(Debug, Args)]
pub(crate) struct Matrix {
    /// Only this driver.
    #[arg(long, value_name = "VERSION")]
    driver: Option<Version>,
    /// The Debian suite of a driver that is not in the table.
    #[arg(long, value_name = "SUITE", requires = "driver")]
    driver_suite: Option<String>,
    /// Only this kernel.
    #[arg(long, value_name = "VERSION")]
    kernel: Option<Version>,
    /// The Debian suite of a kernel that is not in the table.
    #[arg(long, value_name = "SUITE", requires = "kernel")]
    kernel_suite: Option<String>,
    /// Compile each cell (about five minutes of CPU time) and report differences from the table.
    #[arg(long)]
    build: bool,
    /// Compile each cell a second time in another directory, and compare the bytes.
    #[arg(long, requires = "build")]
    twice: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Cache directory for downloads and compiled modules [default: as for build].
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
}

/// Options of `profiles`.
#[derive(Debug, Args)]
pub(crate) struct Profiles {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The kernel package of all cells.
const KERNEL: &str = "linux-image-cloud-amd64";

/// A cell of the table and the result of compiling it.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    row: Row,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Outcome>,
}

#[derive(Debug, Serialize)]
struct Outcome {
    compiles: bool,
    /// Whether the result matches the table.
    as_expected: bool,
    /// The compiler's first error.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    modules: BTreeMap<String, Module>,
    /// Whether a second build produced the same bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    reproducible: Option<bool>,
}

impl Matrix {
    pub(crate) fn run(&self) -> Result<()> {
        let table = Table::own()?;
        let cells = self.cells(&table)?;
        let mut stdout = io::stdout().lock();
        if !self.build {
            if self.json {
                let rows: Vec<Row> = cells.iter().map(|cell| table.row(cell)).collect();
                return print_json(&mut stdout, &rows);
            }
            let shown = Table { cells, patches: table.patches };
            write!(stdout, "{}", report::cells(&shown))?;
            return Ok(());
        }
        let cache = self.cache.clone().map_or_else(cache::root, Ok)?;
        let mut lines = Vec::new();
        for cell in &cells {
            let result = self.outcome(&cache, &table, cell)?;
            if !self.json {
                print(&mut stdout, cell, &result)?;
            }
            lines.push(Line { row: table.row(cell), result: Some(result) });
        }
        if self.json {
            print_json(&mut stdout, &lines)?;
        }
        let results = || lines.iter().filter_map(|line| line.result.as_ref());
        let mismatches = results().filter(|one| !one.as_expected || one.reproducible == Some(false)).count();
        if mismatches > 0 {
            bail!("{mismatches} of {} cells differ from image-builder/driver/matrix.toml", lines.len());
        }
        Ok(())
    }

    /// Returns the selected cells of the table, or the cell that the options describe.
    fn cells(&self, table: &Table) -> Result<Vec<Cell>> {
        let is_selected = |option: &Option<Version>, version: &Version| {
            option.as_ref().is_none_or(|branch| version.is_in_branch(branch))
        };
        let cells: Vec<Cell> = table
            .cells
            .iter()
            .filter(|cell| is_selected(&self.driver, &cell.driver) && is_selected(&self.kernel, &cell.kernel))
            .cloned()
            .collect();
        if !cells.is_empty() {
            return Ok(cells);
        }
        match (&self.driver, &self.driver_suite, &self.kernel, &self.kernel_suite) {
            (Some(driver), Some(driver_suite), Some(kernel), Some(kernel_suite)) => Ok(vec![Cell {
                driver: driver.clone(),
                driver_suite: driver_suite.clone(),
                kernel: kernel.clone(),
                kernel_suite: kernel_suite.clone(),
                builds: true,
                why: None,
            }]),
            _ => bail!(
                "no such cell in the table; to test one, pass --driver, --driver-suite, --kernel and --kernel-suite"
            ),
        }
    }

    fn outcome(&self, cache: &Path, table: &Table, cell: &Cell) -> Result<Outcome> {
        let mut packages = Packages::new(cache, None, Progress::stderr("image-builder"));
        let source = Source::Package(Package {
            package: KERNEL.to_owned(),
            suite: cell.kernel_suite.clone(),
            series: Some(cell.kernel.to_string()),
        });
        let failed = || format!("failed to build {}", cell.name());
        let kernel = Kernel::prepare_from(&mut packages, &source).with_context(failed)?;
        let choice = Choice { version: cell.driver.clone(), suite: cell.driver_suite.clone() };
        let plan = Plan::new(&mut packages, table, &choice, &kernel.facts, Gate::Open).with_context(failed)?;
        let built = match plan.build(&mut packages) {
            Ok(built) => built,
            Err(error) => {
                let Some(first) = error.compiler_error().map(str::to_owned) else {
                    return Err(error).with_context(failed);
                };
                return Ok(Outcome {
                    compiles: false,
                    as_expected: !cell.builds,
                    error: Some(first),
                    modules: BTreeMap::new(),
                    reproducible: None,
                });
            }
        };
        let reproducible = if self.twice {
            // On the file system of the cache, which has space, but not in the cache.
            let elsewhere = tempfile::tempdir_in(cache).context("failed to create a directory for the second build")?;
            let again = plan.compile(&mut packages, elsewhere.path()).with_context(failed)?;
            Some(again.modules == built.record.modules)
        } else {
            None
        };
        let modules = built.record.modules;
        Ok(Outcome { compiles: true, as_expected: cell.builds, error: None, modules, reproducible })
    }
}

impl Profiles {
    pub(crate) fn run(&self) -> Result<()> {
        let catalogue = Catalogue::own()?;
        let mut stdout = io::stdout().lock();
        if self.json {
            return print_json(&mut stdout, &catalogue);
        }
        write!(stdout, "{}", report::profiles(&catalogue))?;
        Ok(())
    }
}

fn print(out: &mut impl Write, cell: &Cell, result: &Outcome) -> Result<()> {
    let description = match (result.compiles, result.as_expected) {
        (true, true) => "compiles",
        (false, true) => "does not compile, as expected",
        (true, false) => "compiles, contrary to the table",
        (false, false) => "does not compile, contrary to the table",
    };
    writeln!(out, "{}: {description}", cell.name())?;
    if let Some(error) = &result.error {
        writeln!(out, "  {error}")?;
    }
    for (name, module) in &result.modules {
        writeln!(out, "  {}  {:>10}  {name}", module.sha256, module.size)?;
    }
    match result.reproducible {
        Some(true) => writeln!(out, "  a second build produced the same bytes")?,
        Some(false) => writeln!(out, "  a second build produced DIFFERENT bytes")?,
        None => {}
    }
    Ok(())
}

fn print_json(out: &mut impl Write, value: &impl Serialize) -> Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(driver: Option<&str>, kernel: Option<&str>, suites: Option<&str>) -> Matrix {
        let version = |text: &str| text.parse().unwrap();
        Matrix {
            driver: driver.map(version),
            driver_suite: suites.map(str::to_owned),
            kernel: kernel.map(version),
            kernel_suite: suites.map(str::to_owned),
            build: false,
            twice: false,
            json: false,
            cache: None,
        }
    }

    #[test]
    fn cells_are_chosen_by_branch_and_version() {
        let table = Table::own().unwrap();
        let count = |driver, kernel| matrix(driver, kernel, None).cells(&table).unwrap().len();
        assert_eq!(count(None, None), table.cells.len());
        assert!((1..table.cells.len()).contains(&count(Some("550"), None)));
        assert_eq!(count(Some("535.261.03"), Some("6.1.176")), 1);
    }

    #[test]
    fn untested_cell_needs_both_suites() {
        let table = Table::own().unwrap();
        let error = matrix(Some("570.1"), Some("6.1"), None).cells(&table).unwrap_err().to_string();
        assert!(error.contains("--kernel-suite"), "{error}");
        let cells = matrix(Some("570.1"), Some("6.12.9"), Some("sid")).cells(&table).unwrap();
        assert_eq!(cells[0].name(), "driver 570.1 (sid) with kernel 6.12.9 (sid)");
    }
}
