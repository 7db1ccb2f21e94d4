//! The module map, as the daemon keeps it: in a file beside the journal, and in
//! front of whoever wants more than one GPU.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firstlight_module_map::{Entry, LONGEST, ModuleMap, Saved, Sighting, Standing};
use firstlight_partitions::Gpus;
use firstlight_pci::Address;

use crate::look::Look;
use crate::refused::Refused;

/// What is known of the map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// The map, if there is one that can be read.
    pub map: Option<ModuleMap>,
    /// What is wrong with the file.
    pub damage: Option<String>,
    /// The baseboard's serial number, if the daemon was told.
    pub serial: Option<String>,
    /// Several GPUs are given all the same.
    pub allowed: bool,
}

impl Known {
    /// How far the map is to be relied on.
    #[must_use]
    pub fn standing(&self, look: &Look, barred: Gpus) -> Standing {
        if let Some(damage) = &self.damage {
            return Standing::Damaged(damage.clone());
        }
        let listed = look.listed.iter().flat_map(|one| &one.gpus);
        let sighting = |gpu: &firstlight_sys::nvfm::Gpu| Sighting { module: gpu.physical_id, uuid: gpu.uuid.clone() };
        let seen: Vec<Sighting> = listed.map(sighting).collect();
        Standing::of(self.map.as_ref(), self.serial.as_deref(), look.table.gpus(), barred, &seen)
    }

    /// The baseboard's serial number, as the daemon or else the map says.
    #[must_use]
    pub fn serial(&self) -> Option<&str> {
        self.serial.as_deref().or(self.map.as_ref().map(|map| map.baseboard.as_str()))
    }

    /// What is wrong with a map by which nothing is given, and what to do.
    #[must_use]
    pub fn trouble(&self, look: &Look, barred: Gpus) -> Option<String> {
        let standing = self.standing(look, barred);
        let is_said = standing.is_verified() || look.table.gpus().count() < 2 || self.allowed;
        let damage = self.damage.is_some();
        (damage || !is_said).then(|| {
            let (why, advice) = (standing.why(), standing.advice(self.serial()));
            let what = if self.allowed { "" } else { ", so nobody is given more than one GPU" };
            format!("which GPU is which is not verified{what}: {why}; {advice}")
        })
    }

    /// Whether GPUs may be given by the map.
    ///
    /// # Errors
    /// Why not, and what to run.
    pub fn permits(&self, what: &str, look: &Look, barred: Gpus) -> Result<(), Refused> {
        let standing = self.standing(look, barred);
        if self.allowed || standing.is_verified() {
            return Ok(());
        }
        let advice = standing.advice(self.serial());
        Err(Refused::Unverified { what: what.to_owned(), why: standing.why(), advice })
    }

    /// Where these GPUs are, as far as the map says.
    pub fn placed(&self, gpus: Gpus) -> impl Iterator<Item = (u32, &Entry)> {
        let entry = move |id: u32| Some((id, self.map.as_ref()?.entries.get(&id)?));
        gpus.ids().filter_map(entry)
    }

    /// The GPUs at these places.
    ///
    /// # Errors
    /// The map does not have one.
    pub fn at(&self, places: &[Address]) -> Result<Gpus, Refused> {
        let module = |pci: &Address| {
            let there = || self.map.iter().flat_map(|map| map.entries.values().map(|entry| entry.pci)).collect();
            let found = self.map.as_ref().and_then(|map| map.at(*pci));
            found.ok_or_else(|| Refused::NotInMap { pci: *pci, there: there() })
        };
        let ids: Vec<u32> = places.iter().map(module).collect::<Result<_, _>>()?;
        Ok(Gpus::of(ids).unwrap_or_default())
    }
}

/// The map and its file.
#[derive(Debug, Default)]
pub struct Modules {
    path: Option<PathBuf>,
    saved: Saved,
    known: Arc<Known>,
}

/// What has been done when a map is about to be the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    /// There is an empty file beside the old one.
    Made,
    /// Half of it was written.
    Half,
    /// All of it was.
    Written,
    /// And is on the disk.
    Synced,
    /// It has the old one's name.
    Renamed,
}

impl Modules {
    /// What the file at `path` says. One that cannot be read is no map: the daemon
    /// begins nevertheless, and tells of it.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let mut known = Known::default();
        let saved = read(path).unwrap_or_else(|damage| {
            known.damage = Some(damage);
            Saved::default()
        });
        known.map = saved.map.clone();
        Self { path: Some(path.to_owned()), saved, known: Arc::new(known) }
    }

    /// With the baseboard's serial number: a map of another one is none.
    #[must_use]
    pub fn on(mut self, serial: Option<String>) -> Self {
        Arc::make_mut(&mut self.known).serial = serial;
        self
    }

    /// Whether several GPUs are given by a map that is not verified.
    #[must_use]
    pub fn allowing(mut self, allowed: bool) -> Self {
        Arc::make_mut(&mut self.known).allowed = allowed;
        self
    }

    /// What is known.
    #[must_use]
    pub fn known(&self) -> &Arc<Known> {
        &self.known
    }

    /// What that request asked for, if it was done.
    #[must_use]
    pub fn asked(&self, request: &str) -> Option<&str> {
        self.saved.asked(request)
    }

    /// Puts another map on the disk, or none, for that request.
    ///
    /// # Errors
    /// It cannot be written; the old one stays.
    pub fn set(&mut self, request: &str, asked: &str, map: Option<ModuleMap>) -> Result<(), Refused> {
        self.set_seen(request, asked, map, &mut |_| Ok(()))
    }

    fn set_seen(
        &mut self,
        request: &str,
        asked: &str,
        map: Option<ModuleMap>,
        reached: &mut dyn FnMut(Reached) -> io::Result<()>,
    ) -> Result<(), Refused> {
        let mut saved = self.saved.clone();
        saved.map = map;
        saved.remember(request.to_owned(), asked.to_owned());
        if let Some(path) = &self.path {
            let bytes = saved.written().map_err(io::Error::from).and_then(|bytes| match bytes.len() {
                ..=LONGEST => Ok(bytes),
                // It would not be read again.
                _ => Err(io::ErrorKind::FileTooLarge.into()),
            });
            let written = bytes.and_then(|bytes| write(path, &bytes, reached));
            written.map_err(|source| Refused::MapFile { path: path.clone(), source })?;
        }
        let known = Arc::make_mut(&mut self.known);
        (known.map, known.damage) = (saved.map.clone(), None);
        self.saved = saved;
        Ok(())
    }
}

fn read(path: &Path) -> Result<Saved, String> {
    let told = |what: String| {
        format!(
            "{} is not readable as a module map: {what}; keep a copy of it, a new map takes its place",
            path.display()
        )
    };
    let mut bytes = Vec::new();
    let most = u64::try_from(LONGEST).unwrap_or(u64::MAX) + 1;
    match File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes)) {
        Ok(_) => Saved::read(&bytes).map_err(|damage| told(damage.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Saved::default()),
        Err(error) => Err(told(error.to_string())),
    }
}

/// Whoever is killed at whatever step leaves the old file or the new one.
fn write(path: &Path, bytes: &[u8], reached: &mut dyn FnMut(Reached) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    // Of a daemon that was killed.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    reached(Reached::Made)?;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    file.write_all(first)?;
    reached(Reached::Half)?;
    file.write_all(second)?;
    reached(Reached::Written)?;
    file.sync_all()?;
    reached(Reached::Synced)?;
    fs::rename(&new, path)?;
    reached(Reached::Renamed)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::tests::dir;
    use firstlight_module_map::{Claim, Evidence};
    use std::os::unix::fs::PermissionsExt as _;

    fn map(bus: &str) -> ModuleMap {
        let pci = format!("0000:{bus}:00.0").parse().unwrap();
        let claim = Claim { module: 1, pci, uuid: None, serial: None };
        ModuleMap::merged(None, "S1", &[claim], &Evidence::Operator, false).unwrap().map
    }

    #[test]
    fn whoever_is_killed_at_whatever_step_leaves_the_old_map_or_the_new_one() {
        let steps = [Reached::Made, Reached::Half, Reached::Written, Reached::Synced, Reached::Renamed];
        for last in steps {
            let dir = dir();
            let path = dir.path().join("module-map.json");
            let mut modules = Modules::open(&path);
            modules.set("r1", "a", Some(map("01"))).unwrap();
            let mut killed = |step| if step == last { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) };
            let error = modules.set_seen("r2", "b", Some(map("02")), &mut killed).unwrap_err().to_string();
            assert!(error.contains("module-map.json"), "{error}");
            let again = Modules::open(&path);
            let (bus, request) = if last == Reached::Renamed { ("02", Some("b")) } else { ("01", None) };
            assert_eq!((&again.known().map, &again.known().damage), (&Some(map(bus)), &None), "{last:?}");
            assert_eq!((again.asked("r1"), again.asked("r2")), (Some("a"), request), "{last:?}");
            // It goes on from there, whatever was left beside it.
            let mut again = again;
            again.set("r3", "c", Some(map("03"))).unwrap();
            assert_eq!(Modules::open(&path).known().map, Some(map("03")));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left over");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn what_could_not_be_read_again_is_not_written() {
        let dir = dir();
        let path = dir.path().join("module-map.json");
        let mut modules = Modules::open(&path);
        modules.set("r1", "a", Some(map("01"))).unwrap();
        let error = modules.set("r2", &"a".repeat(LONGEST), Some(map("02"))).unwrap_err().to_string();
        assert!(error.contains("module-map.json") && error.contains("the module map is as it was"), "{error}");
        assert_eq!((&modules.known().map, modules.asked("r2")), (&Some(map("01")), None));
        assert_eq!(Modules::open(&path).known().map, Some(map("01")));
    }

    #[test]
    fn a_damaged_file_is_no_map_and_told() {
        let dir = dir();
        let path = dir.path().join("module-map.json");
        assert_eq!(*Modules::open(&path).known().as_ref(), Known::default());
        let mut modules = Modules::open(&path);
        modules.set("r1", "a", Some(map("01"))).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(60);
        fs::write(&path, &bytes).unwrap();
        let mut damaged = Modules::open(&path);
        let known = damaged.known();
        let damage = known.damage.clone().unwrap();
        assert!(damage.contains("at byte 60") && damage.contains("keep a copy"), "{damage}");
        assert!(known.map.is_none());
        let trouble = known.trouble(&Look::default(), Gpus::NONE).unwrap();
        assert!(trouble.contains("at byte 60") && trouble.contains("fmctl inventory nvml"), "{trouble}");
        damaged.set("r2", "b", Some(map("02"))).unwrap();
        assert_eq!((&damaged.known().map, &damaged.known().damage), (&Some(map("02")), &None));
        // A directory is no file.
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        assert!(Modules::open(&other).known().damage.is_some());
        let mut modules = Modules::open(&other);
        assert!(modules.set("r", "a", None).is_err() && modules.known().damage.is_some(), "it is as it was");
    }
}
