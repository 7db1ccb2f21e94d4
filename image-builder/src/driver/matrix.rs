//! The table of drivers and kernels: what compiles, with which patches, and
//! what does not and why.

use std::cmp::Ordering;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::version::{Range, Version};

/// The table that belongs to this version of the image builder.
pub const TABLE: &str = include_str!("../../driver/matrix.toml");

/// Why a driver is not built for a kernel.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The table itself is wrong.
    #[error("the table of drivers and kernels is not as it should be")]
    Table(#[from] Box<toml::de::Error>),
    /// The table does not hold together.
    #[error("the table of drivers and kernels: {0}")]
    Odd(String),
    /// It is known not to compile.
    #[error("driver {driver} does not compile for kernel {kernel}: {why}; {instead}")]
    Red {
        /// The driver.
        driver: String,
        /// The kernel.
        kernel: String,
        /// The reason in the table.
        why: String,
        /// The nearest cell that works.
        instead: String,
    },
    /// Nobody has tried.
    #[error(
        "driver {driver} has not been tried with kernel {kernel}; {instead}. To try it: image-builder matrix --build \
         --driver {driver} --driver-suite {driver_suite} --kernel {kernel} --kernel-suite {kernel_suite}"
    )]
    Unknown {
        /// The driver.
        driver: String,
        /// Where it comes from.
        driver_suite: String,
        /// The kernel.
        kernel: String,
        /// Where it comes from.
        kernel_suite: String,
        /// The nearest cell that works.
        instead: String,
    },
}

/// The table.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// What has been tried.
    #[serde(rename = "cell")]
    pub cells: Vec<Cell>,
    /// Edits of drivers' sources.
    #[serde(default, rename = "patch")]
    pub patches: Vec<Patch>,
}

/// One driver with one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cell {
    /// The driver's version.
    pub driver: Version,
    /// The suite it comes from.
    pub driver_suite: String,
    /// The kernel's version, without Debian's part.
    pub kernel: Version,
    /// The suite it comes from.
    pub kernel_suite: String,
    /// Whether it compiles.
    pub builds: bool,
    /// If it does not: what stands in the way.
    #[serde(default)]
    pub why: Option<String>,
}

impl Cell {
    /// Whether it is about this driver and this kernel.
    #[must_use]
    pub fn is_about(&self, driver: &Version, kernel: &Version) -> bool {
        self.driver == *driver && self.kernel == *kernel
    }

    /// How messages name it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("driver {} ({}) with kernel {} ({})", self.driver, self.driver_suite, self.kernel, self.kernel_suite)
    }
}

/// An edit of a driver's source that some kernels need.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Patch {
    /// A name for people.
    pub name: String,
    /// Drivers whose source has the text.
    pub drivers: Vec<Range>,
    /// Kernels that need it edited.
    pub kernels: Vec<Range>,
    /// The file, relative to the driver's source.
    pub file: String,
    /// What stands there, exactly once.
    pub find: String,
    /// What should stand there.
    pub replace: String,
    /// How the kernel's headers show that they need it.
    pub evidence: Option<Evidence>,
    /// Why.
    pub reason: String,
}

/// A text in the kernel's headers.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The file, relative to the kernel's headers.
    pub file: String,
    /// What it says.
    pub has: String,
}

impl Patch {
    /// Whether it is meant for this driver.
    #[must_use]
    pub fn is_of(&self, driver: &Version) -> bool {
        self.drivers.iter().any(|range| range.holds(driver))
    }

    /// Whether it is meant for this driver and this kernel.
    #[must_use]
    pub fn applies(&self, driver: &Version, kernel: &Version) -> bool {
        self.is_of(driver) && self.kernels.iter().any(|range| range.holds(kernel))
    }
}

/// What the table says about a driver and a kernel, for machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The driver's version.
    pub driver: String,
    /// The suite it comes from.
    pub driver_suite: String,
    /// The kernel's version.
    pub kernel: String,
    /// The suite it comes from.
    pub kernel_suite: String,
    /// Whether it compiles.
    pub builds: bool,
    /// Names of the patches it needs.
    pub patches: Vec<String>,
    /// If it does not compile: what stands in the way.
    pub why: Option<String>,
}

impl Table {
    /// The table that belongs to this version of the image builder.
    ///
    /// # Errors
    /// Only when it is wrong, which a test rules out.
    pub fn own() -> Result<Self, Error> {
        Self::parse(TABLE)
    }

    /// Reads a table.
    ///
    /// # Errors
    /// Not TOML, unknown keys, or cells and patches that make no sense.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let table: Self = toml::from_str(text).map_err(Box::new)?;
        for (index, cell) in table.cells.iter().enumerate() {
            if table.cells[..index].iter().any(|other| other.is_about(&cell.driver, &cell.kernel)) {
                return Err(Error::Odd(format!("{} is there twice", cell.name())));
            }
            if cell.builds == cell.why.is_some() {
                return Err(Error::Odd(format!("{}: a `why` for what does not build, and only for that", cell.name())));
            }
        }
        for patch in &table.patches {
            let odd = |what: &str| Err(Error::Odd(format!("patch {}: {what}", patch.name)));
            let files = [Some(&patch.file), patch.evidence.as_ref().map(|evidence| &evidence.file)];
            if files.into_iter().flatten().any(|file| !is_plain(file)) {
                return odd("a file is given relative to the source, without ..");
            }
            if patch.find.is_empty() || patch.find == patch.replace {
                return odd("it changes nothing");
            }
            if patch.reason.trim().is_empty() {
                return odd("it has no reason");
            }
        }
        Ok(table)
    }

    /// The patches that `driver` needs for `kernel`, in the table's order.
    pub fn patches(&self, driver: &Version, kernel: &Version) -> impl Iterator<Item = &Patch> {
        self.patches.iter().filter(|patch| patch.applies(driver, kernel))
    }

    /// The cell of `driver` and `kernel`, if it has been tried.
    #[must_use]
    pub fn cell(&self, driver: &Version, kernel: &Version) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.is_about(driver, kernel))
    }

    /// Lets through what is known to compile; also, if `untried` is set, what
    /// nobody has tried.
    ///
    /// # Errors
    /// [`Error::Red`] and [`Error::Unknown`], with the nearest cell that works.
    pub fn gate(&self, driver: (&Version, &str), kernel: (&Version, &str), untried: bool) -> Result<(), Error> {
        let ((driver, driver_suite), (kernel, kernel_suite)) = (driver, kernel);
        let instead = || match self.nearest(driver, kernel) {
            Some(cell) => format!("the nearest that does: {}", cell.name()),
            None => "nothing is known that does".to_owned(),
        };
        match self.cell(driver, kernel) {
            Some(Cell { why: Some(why), .. }) => {
                let (driver, kernel) = (driver.to_string(), kernel.to_string());
                Err(Error::Red { driver, kernel, why: why.clone(), instead: instead() })
            }
            Some(_) => Ok(()),
            None if untried => Ok(()),
            None => Err(Error::Unknown {
                driver: driver.to_string(),
                driver_suite: driver_suite.to_owned(),
                kernel: kernel.to_string(),
                kernel_suite: kernel_suite.to_owned(),
                instead: instead(),
            }),
        }
    }

    /// The cell that compiles and differs least: rather another kernel than
    /// another driver, because the driver decides which GPUs and which CUDA.
    #[must_use]
    pub fn nearest(&self, driver: &Version, kernel: &Version) -> Option<&Cell> {
        let works = self.cells.iter().filter(|cell| cell.builds);
        works.min_by(|a, b| nearer(&a.driver, &b.driver, driver).then_with(|| nearer(&a.kernel, &b.kernel, kernel)))
    }

    /// Everything the table says, for machines.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        self.cells.iter().map(|cell| self.row(cell)).collect()
    }

    /// What the table says about `cell`.
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

/// Orders `a` and `b` by how near they are to `to`: first those that share more
/// numbers with it from the front, then those with the smaller difference
/// behind them, then those with fewer versions in between.
fn nearer(a: &Version, b: &Version, to: &Version) -> Ordering {
    let shared = |one: &Version| (0..4).take_while(|index| one.number(*index) == to.number(*index)).count();
    let apart = |one: &Version| one.number(shared(one)).abs_diff(to.number(shared(one)));
    let by_numbers = shared(b).cmp(&shared(a)).then(apart(a).cmp(&apart(b)));
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

    fn refusal(driver: &str, kernel: &str) -> String {
        let table = Table::parse(CELLS).unwrap();
        table.gate((&version(driver), "trixie"), (&version(kernel), "sid"), false).unwrap_err().to_string()
    }

    #[test]
    fn a_red_cell_says_why_and_what_works() {
        let text = refusal("550.163.01", "7.2.13");
        for words in ["550.163.01", "7.2.13", "a function is gone", "kernel 6.12.107 (trixie)"] {
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn an_unknown_cell_names_the_nearest_and_how_to_try() {
        let text = refusal("550.163.01", "6.12.96");
        for words in ["not been tried", "kernel 6.12.95 (bookworm-backports)", "--kernel 6.12.96 --kernel-suite sid"] {
            assert!(text.contains(words), "{text}");
        }
        // The same driver with a far kernel rather than another driver.
        assert!(refusal("535.261.03", "6.12.107").contains("driver 535.261.03 (bookworm) with kernel 6.1.176"));
        assert!(refusal("570.10", "6.12.107").contains("driver 550.163.01 (trixie) with kernel 6.12.107"));
        let empty = Table::parse("cell = []").unwrap();
        let error = empty.gate((&version("1"), "a"), (&version("2"), "b"), false).unwrap_err().to_string();
        assert!(error.contains("nothing is known"), "{error}");
    }

    #[test]
    fn what_is_known_and_what_is_dared_passes() {
        let table = Table::parse(CELLS).unwrap();
        let gate = |kernel: &str, untried| {
            table.gate((&version("550.163.01"), "trixie"), (&version(kernel), "trixie"), untried)
        };
        gate("6.12.107", false).unwrap();
        gate("6.12.108", true).unwrap();
        assert!(matches!(gate("7.2.13", true), Err(Error::Red { .. })), "red stays red");
    }

    #[test]
    fn a_table_that_contradicts_itself_is_refused() {
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
            (patch("a.c", "a", " "), "no reason"),
        ] {
            let error = Table::parse(&text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        assert!(matches!(Table::parse("colour = 1"), Err(Error::Table(_))));
    }

    #[test]
    fn our_own_table_is_sound() {
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
