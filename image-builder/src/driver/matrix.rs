//! The compatibility table of drivers and kernels: which combinations compile,
//! with which patches, and why others do not.

use std::cmp::Ordering;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::version::{Range, Version};

/// The built-in table.
pub const TABLE: &str = include_str!("../../driver/matrix.toml");

/// Why a combination of driver and kernel is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The table is not valid TOML or has unknown keys.
    #[error("failed to parse the table of drivers and kernels")]
    Table(#[from] Box<toml::de::Error>),
    /// The table is inconsistent.
    #[error("invalid table of drivers and kernels: {0}")]
    Inconsistent(String),
    /// The combination is known not to compile.
    #[error("driver {driver} does not compile for kernel {kernel}: {why}; {alternative}")]
    Incompatible {
        /// The driver.
        driver: String,
        /// The kernel.
        kernel: String,
        /// The reason in the table.
        why: String,
        /// The nearest combination that compiles.
        alternative: String,
    },
    /// The combination has not been tested.
    #[error(
        "driver {driver} has not been tested with kernel {kernel}; {alternative}. To test it: image-builder matrix --build \
         --driver {driver} --driver-suite {driver_suite} --kernel {kernel} --kernel-suite {kernel_suite}"
    )]
    Untested {
        /// The driver.
        driver: String,
        /// The driver's suite.
        driver_suite: String,
        /// The kernel.
        kernel: String,
        /// The kernel's suite.
        kernel_suite: String,
        /// The nearest combination that compiles.
        alternative: String,
    },
}

/// The table.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The tested combinations.
    #[serde(rename = "cell")]
    pub cells: Vec<Cell>,
    /// Patches of driver sources.
    #[serde(default, rename = "patch")]
    pub patches: Vec<Patch>,
}

/// A tested combination of a driver and a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cell {
    /// The driver's version.
    pub driver: Version,
    /// The driver's suite.
    pub driver_suite: String,
    /// The kernel's version, without Debian's part.
    pub kernel: Version,
    /// The kernel's suite.
    pub kernel_suite: String,
    /// Whether it compiles.
    pub builds: bool,
    /// The reason if it does not compile.
    #[serde(default)]
    pub why: Option<String>,
}

impl Cell {
    /// Returns whether the cell is for this driver and kernel.
    #[must_use]
    pub fn is_for(&self, driver: &Version, kernel: &Version) -> bool {
        self.driver == *driver && self.kernel == *kernel
    }

    /// Returns a description for messages.
    #[must_use]
    pub fn name(&self) -> String {
        format!("driver {} ({}) with kernel {} ({})", self.driver, self.driver_suite, self.kernel, self.kernel_suite)
    }
}

/// A text replacement in a driver's source, needed for some kernels.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// The name.
    pub name: String,
    /// Drivers to which the patch applies.
    pub drivers: Vec<Range>,
    /// Kernels that need the patch.
    pub kernels: Vec<Range>,
    /// The file, relative to the driver's source.
    pub file: String,
    /// The text to replace, which must occur exactly once.
    pub find: String,
    /// The replacement.
    pub replace: String,
    /// A text in the kernel headers that shows that the kernel needs the patch.
    pub evidence: Option<Evidence>,
    /// The reason.
    pub reason: String,
}

/// A text in the kernel headers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The file, relative to the kernel headers.
    pub file: String,
    /// The text that it contains.
    pub has: String,
}

impl Patch {
    /// Returns whether the patch is for this driver.
    #[must_use]
    pub fn is_for_driver(&self, driver: &Version) -> bool {
        self.drivers.iter().any(|range| range.contains(driver))
    }

    /// Returns whether the patch is needed for this driver and kernel.
    #[must_use]
    pub fn applies(&self, driver: &Version, kernel: &Version) -> bool {
        self.is_for_driver(driver) && self.kernels.iter().any(|range| range.contains(kernel))
    }
}

/// A row of the table in machine-readable form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The driver's version.
    pub driver: String,
    /// The driver's suite.
    pub driver_suite: String,
    /// The kernel's version.
    pub kernel: String,
    /// The kernel's suite.
    pub kernel_suite: String,
    /// Whether it compiles.
    pub builds: bool,
    /// Names of the required patches.
    pub patches: Vec<String>,
    /// The reason if it does not compile.
    pub why: Option<String>,
}

impl Table {
    /// Returns the built-in table.
    ///
    /// # Errors
    /// The built-in table is invalid, which a test excludes.
    pub fn own() -> Result<Self, Error> {
        Self::parse(TABLE)
    }

    /// Parses a table.
    ///
    /// # Errors
    /// Invalid TOML, unknown keys, or inconsistent cells or patches.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let table: Self = toml::from_str(text).map_err(Box::new)?;
        for (index, cell) in table.cells.iter().enumerate() {
            if table.cells[..index].iter().any(|other| other.is_for(&cell.driver, &cell.kernel)) {
                return Err(Error::Inconsistent(format!("{} is listed twice", cell.name())));
            }
            if cell.builds == cell.why.is_some() {
                return Err(Error::Inconsistent(format!(
                    "{}: `why` must be given if and only if `builds` is false",
                    cell.name()
                )));
            }
        }
        for patch in &table.patches {
            let inconsistent = |what: &str| Err(Error::Inconsistent(format!("patch {}: {what}", patch.name)));
            let files = [Some(&patch.file), patch.evidence.as_ref().map(|evidence| &evidence.file)];
            if files.into_iter().flatten().any(|file| !is_plain(file)) {
                return inconsistent("file must be a relative path without ..");
            }
            if patch.find.is_empty() || patch.find == patch.replace {
                return inconsistent("the patch changes nothing");
            }
            if patch.reason.trim().is_empty() {
                return inconsistent("the reason is empty");
            }
        }
        Ok(table)
    }

    /// Returns the patches that `driver` needs for `kernel`, in the order of the table.
    pub fn patches(&self, driver: &Version, kernel: &Version) -> impl Iterator<Item = &Patch> {
        self.patches.iter().filter(|patch| patch.applies(driver, kernel))
    }

    /// Returns the cell of `driver` and `kernel`, if the combination has been tested.
    #[must_use]
    pub fn cell(&self, driver: &Version, kernel: &Version) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.is_for(driver, kernel))
    }

    /// Checks that a combination is known to compile, or, if `untried` is set, that it
    /// is not known to fail.
    ///
    /// # Errors
    /// [`Error::Incompatible`] and [`Error::Untested`], with the nearest combination that compiles.
    pub fn gate(&self, driver: (&Version, &str), kernel: (&Version, &str), untried: bool) -> Result<(), Error> {
        let ((driver, driver_suite), (kernel, kernel_suite)) = (driver, kernel);
        let alternative = || match self.nearest(driver, kernel) {
            Some(cell) => format!("the nearest combination that compiles is {}", cell.name()),
            None => "no combination is known to compile".to_owned(),
        };
        match self.cell(driver, kernel) {
            Some(Cell { why: Some(why), .. }) => {
                let (driver, kernel) = (driver.to_string(), kernel.to_string());
                Err(Error::Incompatible { driver, kernel, why: why.clone(), alternative: alternative() })
            }
            Some(_) => Ok(()),
            None if untried => Ok(()),
            None => Err(Error::Untested {
                driver: driver.to_string(),
                driver_suite: driver_suite.to_owned(),
                kernel: kernel.to_string(),
                kernel_suite: kernel_suite.to_owned(),
                alternative: alternative(),
            }),
        }
    }

    /// Returns the most similar combination that compiles. A different kernel is preferred to
    /// a different driver, because the driver determines the supported GPUs and CUDA versions.
    #[must_use]
    pub fn nearest(&self, driver: &Version, kernel: &Version) -> Option<&Cell> {
        let working = self.cells.iter().filter(|cell| cell.builds);
        working.min_by(|a, b| {
            compare_distance(&a.driver, &b.driver, driver).then_with(|| compare_distance(&a.kernel, &b.kernel, kernel))
        })
    }

    /// Returns all rows in machine-readable form.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        self.cells.iter().map(|cell| self.row(cell)).collect()
    }

    /// Returns `cell` in machine-readable form.
    #[must_use]
    pub fn row(&self, cell: &Cell) -> Row {
        Row {
            driver: cell.driver.to_string(),
            driver_suite: cell.driver_suite.clone(),
            kernel: cell.kernel.to_string(),
            kernel_suite: cell.kernel_suite.clone(),
            builds: cell.builds,
            patches: self.patches(&cell.driver, &cell.kernel).map(|patch| patch.name.clone()).collect(),
            why: cell.why.clone(),
        }
    }
}

/// Orders `a` and `b` by their distance to `to`: first by the number of leading
/// components in common, then by the difference of the next component, then by the
/// order of versions.
fn compare_distance(a: &Version, b: &Version, to: &Version) -> Ordering {
    let shared = |one: &Version| (0..4).take_while(|index| one.number(*index) == to.number(*index)).count();
    let difference = |one: &Version| one.number(shared(one)).abs_diff(to.number(shared(one)));
    let by_numbers = shared(b).cmp(&shared(a)).then(difference(a).cmp(&difference(b)));
    by_numbers.then_with(|| if a <= to && b <= to { b.cmp(a) } else { a.cmp(b) })
}

fn is_plain(file: &str) -> bool {
    !file.is_empty() && Path::new(file).components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    const CELLS: &str = r#"
        [[cell]]
        driver = "550.163.01"
        driver-suite = "trixie"
        kernel = "6.12.107"
        kernel-suite = "trixie"
        builds = true
        [[cell]]
        driver = "550.163.01"
        driver-suite = "trixie"
        kernel = "6.12.95"
        kernel-suite = "bookworm-backports"
        builds = true
        [[cell]]
        driver = "550.163.01"
        driver-suite = "trixie"
        kernel = "7.2.13"
        kernel-suite = "sid"
        builds = false
        why = "a function is gone"
        [[cell]]
        driver = "535.261.03"
        driver-suite = "bookworm"
        kernel = "6.1.176"
        kernel-suite = "bookworm"
        builds = true
    "#;

    fn refuse(driver: &str, kernel: &str) -> String {
        let table = Table::parse(CELLS).unwrap();
        table.gate((&version(driver), "trixie"), (&version(kernel), "sid"), false).unwrap_err().to_string()
    }

    #[test]
    fn incompatible_then_error_has_reason_and_alternative() {
        let text = refuse("550.163.01", "7.2.13");
        for words in ["550.163.01", "7.2.13", "a function is gone", "kernel 6.12.107 (trixie)"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn untested_then_error_has_alternative_and_test_command() {
        let text = refuse("550.163.01", "6.12.96");
        for words in ["not been tested", "kernel 6.12.95 (bookworm-backports)", "--kernel 6.12.96 --kernel-suite sid"] {
            assert!(text.contains(words), "{text}");
        }
        // The same driver with a distant kernel is preferred to another driver.
        assert!(refuse("535.261.03", "6.12.107").contains("driver 535.261.03 (bookworm) with kernel 6.1.176"));
        assert!(refuse("570.10", "6.12.107").contains("driver 550.163.01 (trixie) with kernel 6.12.107"));
        let empty = Table::parse("cell = []").unwrap();
        let error = empty.gate((&version("1"), "a"), (&version("2"), "b"), false).unwrap_err().to_string();
        assert!(error.contains("no combination is known"), "{error}");
    }

    #[test]
    fn known_then_ok_and_untested_only_with_untried() {
        let table = Table::parse(CELLS).unwrap();
        let gate = |kernel: &str, untried| {
            table.gate((&version("550.163.01"), "trixie"), (&version(kernel), "trixie"), untried)
        };
        gate("6.12.107", false).unwrap();
        gate("6.12.108", true).unwrap();
        assert!(
            matches!(gate("7.2.13", true), Err(Error::Incompatible { .. })),
            "known failures are refused with untried as well"
        );
    }

    #[test]
    fn inconsistent_table_then_error() {
        let twice = format!("{CELLS}{CELLS}");
        let patch = |file: &str, find: &str, reason: &str| {
            format!(
                "cell = []\n[[patch]]\nname = \"p\"\ndrivers = [\"1\"]\nkernels = [\"<2\"]\nfile = \"{file}\"\n\
                 find = \"{find}\"\nreplace = \"b\"\nreason = \"{reason}\"\n"
            )
        };
        assert!(Table::parse(&patch("a.c", "a", "r")).is_ok());
        for (text, word) in [
            (twice, "twice"),
            (CELLS.replace("builds = false", "builds = true"), "`why`"),
            (CELLS.replace("why = \"a function is gone\"", ""), "`why`"),
            (patch("../a.c", "a", "r"), "without .."),
            (patch("/a.c", "a", "r"), "without .."),
            (patch("a.c", "b", "r"), "changes nothing"),
            (patch("a.c", "", "r"), "changes nothing"),
            (patch("a.c", "a", " "), "reason is empty"),
        ] {
            let error = Table::parse(&text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(matches!(Table::parse("colour = 1"), Err(Error::Table(_))));
    }

    #[test]
    fn built_in_table_is_valid() {
        let table = Table::own().unwrap();
        let patches = |driver: &str, kernel: &str| {
            table.patches(&version(driver), &version(kernel)).map(|patch| patch.name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(patches("550.163.01", "6.12.107"), ["pci-resize-resource-exclude-bars"]);
        assert!(patches("550.163.01", "6.12.95").is_empty());
        assert!(patches("535.261.03", "6.1.176").is_empty());
        for driver in ["550.163.01", "535.261.03"] {
            assert!(table.cells.iter().any(|cell| cell.builds && cell.driver == version(driver)), "{driver}");
        }
    }
}
