//! The daemon's module map: a file beside the journal, and the check before partitions of several GPUs are given.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firstlight_module_map::{Entry, MAX_FILE, ModuleMap, ObservedGpu, Saved, Verification};
use firstlight_partitions::Gpus;
use firstlight_pci::Address;

use crate::error::EngineError;
use crate::snapshot::FabricSnapshot;

/// The module map and how it may be used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModuleMapState {
    /// The map, if there is a valid one.
    pub map: Option<ModuleMap>,
    /// What is wrong with the file, if it cannot be read.
    pub damage: Option<String>,
    /// The baseboard's serial number, if it was given.
    pub serial: Option<String>,
    /// Partitions of several GPUs are given without verification.
    pub unverified_allowed: bool,
}

impl ModuleMapState {
    /// Returns whether the map is verified.
    #[must_use]
    pub fn verification(&self, snapshot: &FabricSnapshot, quarantined: Gpus) -> Verification {
        if let Some(damage) = &self.damage {
            return Verification::Damaged(damage.clone());
        }
        let listed = snapshot.listed.iter().flat_map(|one| &one.gpus);
        let sighting =
            |gpu: &firstlight_sys::nvfm::Gpu| ObservedGpu { module: gpu.physical_id, uuid: gpu.uuid.clone() };
        let seen: Vec<ObservedGpu> = listed.map(sighting).collect();
        Verification::of(self.map.as_ref(), self.serial.as_deref(), snapshot.table.gpus(), quarantined, &seen)
    }

    /// Returns the baseboard's serial number: the given one, or else the map's.
    #[must_use]
    pub fn serial(&self) -> Option<&str> {
        self.serial.as_deref().or(self.map.as_ref().map(|map| map.baseboard.as_str()))
    }

    /// Returns why the map is not verified, and what to run.
    #[must_use]
    pub fn problem(&self, snapshot: &FabricSnapshot, quarantined: Gpus) -> Option<String> {
        let verification = self.verification(snapshot, quarantined);
        let is_said = verification.is_verified() || snapshot.table.gpus().count() < 2 || self.unverified_allowed;
        let damage = self.damage.is_some();
        (damage || !is_said).then(|| {
            let (reason, remedy) = (verification.reason(), verification.remedy(self.serial()));
            let what = if self.unverified_allowed { "" } else { ", so only single GPUs are given" };
            format!("the module map is not verified{what}: {reason}; {remedy}")
        })
    }

    /// Refuses a partition unless the map is verified.
    ///
    /// # Errors
    /// Why the map is not verified, and what to run.
    pub fn permits(&self, what: &str, snapshot: &FabricSnapshot, quarantined: Gpus) -> Result<(), EngineError> {
        let verification = self.verification(snapshot, quarantined);
        if self.unverified_allowed || verification.is_verified() {
            return Ok(());
        }
        let remedy = verification.remedy(self.serial());
        Err(EngineError::UnverifiedMap { what: what.to_owned(), reason: verification.reason(), remedy })
    }

    /// Returns the entries of these GPUs, as far as the map has them.
    pub fn locations(&self, gpus: Gpus) -> impl Iterator<Item = (u32, &Entry)> {
        let entry = move |id: u32| Some((id, self.map.as_ref()?.entries.get(&id)?));
        gpus.ids().filter_map(entry)
    }

    /// Returns the GPUs at these addresses.
    ///
    /// # Errors
    /// The map has no GPU at one of them.
    pub fn at(&self, places: &[Address]) -> Result<Gpus, EngineError> {
        let module = |pci: &Address| {
            let there = || self.map.iter().flat_map(|map| map.entries.values().map(|entry| entry.pci)).collect();
            let found = self.map.as_ref().and_then(|map| map.at(*pci));
            found.ok_or_else(|| EngineError::AddressNotInMap { pci: *pci, there: there() })
        };
        let ids: Vec<u32> = places.iter().map(module).collect::<Result<_, _>>()?;
        Ok(Gpus::of(ids).unwrap_or_default())
    }
}

/// The module map and its file.
#[derive(Debug, Default)]
pub struct ModuleMapStore {
    path: Option<PathBuf>,
    saved: Saved,
    known: Arc<ModuleMapState>,
}

/// The stage of writing the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WriteStage {
    /// The temporary file was created.
    Made,
    /// Half of it was written.
    Half,
    /// It was written completely.
    Written,
    /// It was synced.
    Synced,
    /// It was renamed.
    Renamed,
}

impl ModuleMapStore {
    /// Reads the file at `path`. With a file that cannot be read the daemon starts without a map and reports a
    /// problem.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let mut known = ModuleMapState::default();
        let saved = read(path).unwrap_or_else(|damage| {
            known.damage = Some(damage);
            Saved::default()
        });
        known.map = saved.map.clone();
        Self { path: Some(path.to_owned()), saved, known: Arc::new(known) }
    }

    /// Sets the baseboard's serial number: a map of another baseboard is ignored.
    #[must_use]
    pub fn with_serial(mut self, serial: Option<String>) -> Self {
        Arc::make_mut(&mut self.known).serial = serial;
        self
    }

    /// Sets whether partitions of several GPUs are given without verification.
    #[must_use]
    pub fn allow_unverified(mut self, unverified_allowed: bool) -> Self {
        Arc::make_mut(&mut self.known).unverified_allowed = unverified_allowed;
        self
    }

    /// Returns the current state.
    #[must_use]
    pub fn known(&self) -> &Arc<ModuleMapState> {
        &self.known
    }

    /// Returns the summary of a completed request.
    #[must_use]
    pub fn request_summary(&self, request: &str) -> Option<&str> {
        self.saved.summary(request)
    }

    /// Replaces or deletes the map on the disk, for that request.
    ///
    /// # Errors
    /// The file cannot be written; the old one stays.
    pub fn set(&mut self, request: &str, summary: &str, map: Option<ModuleMap>) -> Result<(), EngineError> {
        self.set_seen(request, summary, map, &mut |_| Ok(()))
    }

    fn set_seen(
        &mut self,
        request: &str,
        summary: &str,
        map: Option<ModuleMap>,
        reached: &mut dyn FnMut(WriteStage) -> io::Result<()>,
    ) -> Result<(), EngineError> {
        let mut saved = self.saved.clone();
        saved.map = map;
        saved.remember(request.to_owned(), summary.to_owned());
        if let Some(path) = &self.path {
            let bytes = saved.written().map_err(io::Error::from).and_then(|bytes| match bytes.len() {
                ..=MAX_FILE => Ok(bytes),
                // A longer file could not be read again.
                _ => Err(io::ErrorKind::FileTooLarge.into()),
            });
            let written = bytes.and_then(|bytes| write(path, &bytes, reached));
            written.map_err(|source| EngineError::MapFile { path: path.clone(), source })?;
        }
        let known = Arc::make_mut(&mut self.known);
        (known.map, known.damage) = (saved.map.clone(), None);
        self.saved = saved;
        Ok(())
    }
}

fn read(path: &Path) -> Result<Saved, String> {
    let damaged = |what: String| {
        format!("{} cannot be read as a module map: {what}; keep a copy of it; a new map replaces it", path.display())
    };
    let mut bytes = Vec::new();
    let most = u64::try_from(MAX_FILE).unwrap_or(u64::MAX) + 1;
    match File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes)) {
        Ok(_) => Saved::read(&bytes).map_err(|damage| damaged(damage.to_string())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Saved::default()),
        Err(error) => Err(damaged(error.to_string())),
    }
}

/// Writes atomically: a crash at any stage leaves the old file or the new one.
fn write(path: &Path, bytes: &[u8], reached: &mut dyn FnMut(WriteStage) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    // Left by a daemon that was killed.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    reached(WriteStage::Made)?;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    file.write_all(first)?;
    reached(WriteStage::Half)?;
    file.write_all(second)?;
    reached(WriteStage::Written)?;
    file.sync_all()?;
    reached(WriteStage::Synced)?;
    fs::rename(&new, path)?;
    reached(WriteStage::Renamed)?;
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
    fn map_write_interrupted_at_any_stage_leaves_the_old_or_the_new_map() {
        let steps = [WriteStage::Made, WriteStage::Half, WriteStage::Written, WriteStage::Synced, WriteStage::Renamed];
        for last in steps {
            let dir = dir();
            let path = dir.path().join("module-map.json");
            let mut modules = ModuleMapStore::open(&path);
            modules.set("r1", "a", Some(map("01"))).unwrap();
            let mut killed = |step| if step == last { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) };
            let error = modules.set_seen("r2", "b", Some(map("02")), &mut killed).unwrap_err().to_string();
            assert!(error.contains("module-map.json"), "{error}");
            let again = ModuleMapStore::open(&path);
            let (bus, request) = if last == WriteStage::Renamed { ("02", Some("b")) } else { ("01", None) };
            assert_eq!((&again.known().map, &again.known().damage), (&Some(map(bus)), &None), "{last:?}");
            assert_eq!((again.request_summary("r1"), again.request_summary("r2")), (Some("a"), request), "{last:?}");
            // The next update succeeds, whatever temporary file was left.
            let mut again = again;
            again.set("r3", "c", Some(map("03"))).unwrap();
            assert_eq!(ModuleMapStore::open(&path).known().map, Some(map("03")));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left over");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn map_too_long_to_be_read_is_not_written() {
        let dir = dir();
        let path = dir.path().join("module-map.json");
        let mut modules = ModuleMapStore::open(&path);
        modules.set("r1", "a", Some(map("01"))).unwrap();
        let error = modules.set("r2", &"a".repeat(MAX_FILE), Some(map("02"))).unwrap_err().to_string();
        assert!(error.contains("module-map.json") && error.contains("the module map is unchanged"), "{error}");
        assert_eq!((&modules.known().map, modules.request_summary("r2")), (&Some(map("01")), None));
        assert_eq!(ModuleMapStore::open(&path).known().map, Some(map("01")));
    }

    #[test]
    fn damaged_map_file_is_ignored_and_reported() {
        let dir = dir();
        let path = dir.path().join("module-map.json");
        assert_eq!(*ModuleMapStore::open(&path).known().as_ref(), ModuleMapState::default());
        let mut modules = ModuleMapStore::open(&path);
        modules.set("r1", "a", Some(map("01"))).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(60);
        fs::write(&path, &bytes).unwrap();
        let mut damaged = ModuleMapStore::open(&path);
        let known = damaged.known();
        let damage = known.damage.clone().unwrap();
        assert!(damage.contains("at byte 60") && damage.contains("keep a copy"), "{damage}");
        assert!(known.map.is_none());
        let problem = known.problem(&FabricSnapshot::default(), Gpus::NONE).unwrap();
        assert!(problem.contains("at byte 60") && problem.contains("fmctl inventory nvml"), "{problem}");
        damaged.set("r2", "b", Some(map("02"))).unwrap();
        assert_eq!((&damaged.known().map, &damaged.known().damage), (&Some(map("02")), &None));
        // A directory instead of a file.
        let other = dir.path().join("other");
        fs::create_dir(&other).unwrap();
        assert!(ModuleMapStore::open(&other).known().damage.is_some());
        let mut modules = ModuleMapStore::open(&other);
        assert!(modules.set("r", "a", None).is_err() && modules.known().damage.is_some(), "it is unchanged");
    }
}
