//! Driver `overlayfs`: overlay mounts.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::mount::{Detached, Mounted, SetupError};
use super::options::Options;
use super::safe_path::{self, Kind, MountPoint, by_descriptor};
use super::scratch::{self, Scratch};
use super::{Job, Resource, Resources};
use crate::error::{Error, Result};
use crate::paths::Paths;

/// Driver option that requests a directory.
const CREATE_DIRECTORY: &str = "io.katacontainers.volume.overlayfs.create_directory=";

/// Option that requests a writable layer in memory.
const WRITABLE: &str = "io.katacontainers.fs-opt.overlay-rw";

/// The kernel's option that adds one lower layer.
const LAYER: &str = "lowerdir+";

/// The kernel's limit.
const MAX_LAYERS: usize = 500;

/// Lower layers, topmost first, and the writable layer.
#[derive(Debug, Default)]
pub(super) struct Layers<T = PathBuf> {
    pub(super) lower: Vec<T>,
    /// upperdir and workdir.
    pub(super) upper: Option<(T, T)>,
}

/// Splits layers at colons that are not escaped by a backslash.
fn split(text: &str) -> Vec<PathBuf> {
    let mut all = vec![String::new()];
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        match (c, all.last_mut()) {
            (':', _) => all.push(String::new()),
            ('\\', Some(last)) => last.extend(rest.next()),
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    all.into_iter().filter(|path| !path.is_empty()).map(PathBuf::from).collect()
}

impl Layers {
    /// Removes the layers from a storage's options.
    fn take(options: &mut Options) -> Result<Self> {
        let lower = options.take("lowerdir").map(|text| split(&text)).unwrap_or_default();
        let upper = match (options.take("upperdir"), options.take("workdir")) {
            (Some(upper), Some(work)) => Some((upper.into(), work.into())),
            (None, None) => None,
            _ => return Err(Error::invalid("upperdir and workdir require each other")),
        };
        if lower.is_empty() {
            return Err(Error::invalid("an overlay requires the option lowerdir"));
        }
        if lower.len() > MAX_LAYERS {
            return Err(Error::invalid(format!("{} layers; the kernel's limit is {MAX_LAYERS}", lower.len())));
        }
        Ok(Self { lower, upper })
    }

    /// Opens every layer without following links, which the kernel would follow.
    fn open(&self) -> Result<Layers<OwnedFd>> {
        let open = |path: &PathBuf| safe_path::existing(path).map_err(|error| error.during("layer"));
        let lower = self.lower.iter().map(open).collect::<Result<_>>()?;
        let upper = match &self.upper {
            Some((upper, work)) => Some((open(upper)?, open(work)?)),
            None => None,
        };
        Ok(Layers { lower, upper })
    }

    /// Mounts the layers.
    pub(super) fn mount(&self, paths: &Paths, target: &Path, options: &Options) -> Result<Mounted> {
        let layers = self.open()?;
        let mount = layers.create(options, |all| Detached::filesystem("overlay", Some("overlay"), all))?;
        mount.attach(&paths.run, MountPoint::create(&paths.run, target, Kind::Directory)?, options)
    }
}

impl Layers<OwnedFd> {
    /// Creates an overlay by `create`, with one option per layer, because a single option can exceed
    /// the kernel's limit. Kernels before 6.8 know only the single option.
    fn create<T>(
        &self,
        options: &Options,
        mut create: impl FnMut(&Options) -> std::result::Result<T, SetupError>,
    ) -> Result<T> {
        let lower: Vec<String> = self.lower.iter().map(by_descriptor).collect();
        let one_each = lower.iter().map(|layer| (LAYER, layer.clone())).collect();
        match create(&self.options(options, one_each)) {
            Err(error) if error.may_not_know(LAYER) => {
                Ok(create(&self.options(options, vec![("lowerdir", lower.join(":"))]))?)
            }
            result => Ok(result?),
        }
    }

    /// Adds the layers to other options.
    fn options(&self, options: &Options, lower: Vec<(&str, String)>) -> Options {
        let mut all = options.clone();
        let upper = self.upper.iter();
        let upper =
            upper.flat_map(|(upper, work)| [("upperdir", by_descriptor(upper)), ("workdir", by_descriptor(work))]);
        all.data.extend(lower.into_iter().chain(upper).map(|(name, value)| (name.to_owned(), Some(value))));
        all
    }
}

/// Creates a writable layer in a tmpfs of its own, which is released with its content.
fn writable(paths: &Paths) -> Result<(Mounted, PathBuf, PathBuf)> {
    let options = Options::of(&["mode=0755".to_owned()])?;
    let at = scratch::fresh(&paths.run, "overlay");
    let memory = Detached::filesystem("tmpfs", Some("overlay-rw"), &options)?;
    let memory = memory.attach(&paths.run, MountPoint::create(&paths.run, &at, Kind::Directory)?, &options)?;
    let (upper, work) = (at.join("upper"), at.join("work"));
    drop((scratch::inside(&at, "upper")?, scratch::inside(&at, "work")?));
    Ok((memory, upper, work))
}

pub(super) fn make(job: &Job<'_>) -> Result<Resources> {
    let mut made = Resources::default();
    let dirs = job.storage.driver_options.iter().filter_map(|option| option.strip_prefix(CREATE_DIRECTORY));
    for dir in dirs {
        if let Some(scratch) = Scratch::make(&job.paths.run, Path::new(dir))? {
            made.add(Resource::Scratch(scratch));
        }
    }
    let mut options = job.options.clone();
    let mut layers = Layers::take(&mut options)?;
    if job.options.agent_options.iter().any(|option| option == WRITABLE) {
        if layers.upper.is_some() {
            return Err(Error::invalid(format!("{WRITABLE} and upperdir are mutually exclusive")));
        }
        let (memory, upper, work) = writable(job.paths)?;
        made.add(Resource::Mount(memory));
        layers.upper = Some((upper, work));
    }
    let mount = layers.mount(job.paths, Path::new(&job.storage.mount_point), &options)?;
    made.add(Resource::Mount(mount));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn layers_are_parsed_from_the_options() {
        let mut options = Options::of(&["lowerdir=/a:/b\\:c,upperdir=/u,workdir=/w,ro,index=off".to_owned()]).unwrap();
        let layers = Layers::take(&mut options).unwrap();
        assert_eq!(layers.lower, [PathBuf::from("/a"), PathBuf::from("/b:c")]);
        assert_eq!(layers.upper, Some(("/u".into(), "/w".into())));
        assert_eq!(options.data.len(), 2, "{options:?}");
        for (text, part) in [("ro", "lowerdir"), ("lowerdir=/a,upperdir=/u", "require each other")] {
            let error = Layers::take(&mut Options::of(&[text.to_owned()]).unwrap()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn layer_behind_a_symlink_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc", root.path().join("layer")).unwrap();
        let layers = Layers { lower: vec![root.path().join("layer")], upper: None };
        assert!(layers.open().unwrap_err().to_string().contains("symbolic link"));
    }

    /// Returns the options of each attempt to create an overlay of two layers and a writable one,
    /// and its result. `create` is given the number of the attempt.
    fn attempts(create: impl Fn(usize) -> std::result::Result<(), SetupError>) -> (Vec<Vec<String>>, Result<()>) {
        let open = || OwnedFd::from(std::fs::File::open("/").unwrap());
        let layers = Layers { lower: vec![open(), open()], upper: Some((open(), open())) };
        let options = Options::of(&["index=off".to_owned()]).unwrap();
        let mut attempts: Vec<Vec<String>> = Vec::new();
        let result = layers.create(&options, |all| {
            let shown = |(name, value): &(String, Option<String>)| {
                // Descriptors differ.
                let layers = value.iter().flat_map(|value| value.split(':')).count();
                format!("{name} {layers}")
            };
            attempts.push(all.data.iter().map(shown).collect());
            create(attempts.len())
        });
        (attempts, result)
    }

    fn rejected(name: &str, errno: Errno) -> SetupError {
        SetupError::Option { name: name.to_owned(), errno, error: Error::invalid(format!("rejected: {name}")) }
    }

    const ONE_EACH: &[&str] = &["index 1", "lowerdir+ 1", "lowerdir+ 1", "upperdir 1", "workdir 1"];

    #[test]
    fn kernel_without_the_option_per_layer_gets_the_single_one() {
        let (made, result) = attempts(|_| Ok(()));
        result.unwrap();
        assert_eq!(made, [ONE_EACH]);
        let (made, result) = attempts(|number| if number == 1 { Err(rejected(LAYER, Errno::INVAL)) } else { Ok(()) });
        result.unwrap();
        assert_eq!(made[1], ["index 1", "lowerdir 2", "upperdir 1", "workdir 1"]);
    }

    #[test]
    fn other_errors_are_reported_without_a_second_attempt() {
        for error in [
            rejected(LAYER, Errno::NOTDIR),
            rejected("upperdir", Errno::INVAL),
            // Text is not searched.
            SetupError::Step(Error::internal("overlay: lowerdir+ is too deep")),
        ] {
            let (made, result) = attempts(|_| Err(error.clone()));
            assert_eq!((made.len(), result), (1, Err(error.into())));
        }
    }
}
