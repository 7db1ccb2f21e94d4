//! Whether GPUs may be given by what the map says.

use firstlight_partitions::Gpus;

use crate::map::ModuleMap;

/// A GPU that somebody sees in its place now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Its module id.
    pub module: u32,
    /// Its UUID; empty if whoever sees it does not know.
    pub uuid: String,
}

/// How far a map is to be relied on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Every GPU was measured.
    Verified,
    /// There is no map.
    None,
    /// There was one that cannot be read.
    Damaged(String),
    /// It is of another baseboard.
    OtherBaseboard {
        /// The map's.
        map: String,
        /// The one that is there.
        is: String,
    },
    /// Another GPU is in that place than was measured.
    OtherGpu {
        /// The module.
        module: u32,
        /// In the map.
        was: String,
        /// What is there.
        is: String,
    },
    /// It says nothing of some, and of others only what an operator says.
    Unverified {
        /// Nothing is said of these.
        missing: Gpus,
        /// These are somebody's word.
        told: Gpus,
    },
}

impl Standing {
    /// Of a map on a baseboard of which FM lists these GPUs and sees those; `is` is the
    /// baseboard's serial number, if somebody has said it. GPUs that nobody may have
    /// need no entry: a dead one cannot be measured.
    #[must_use]
    pub fn of(map: Option<&ModuleMap>, is: Option<&str>, listed: Gpus, barred: Gpus, seen: &[Sighting]) -> Self {
        let Some(map) = map else { return Self::None };
        if let Some(is) = is.filter(|is| **is != map.baseboard) {
            return Self::OtherBaseboard { map: map.baseboard.clone(), is: is.to_owned() };
        }
        for one in seen.iter().filter(|one| !one.uuid.is_empty()) {
            let was = map.entries.get(&one.module).and_then(|entry| entry.uuid.as_ref());
            if let Some(was) = was.filter(|was| **was != one.uuid) {
                return Self::OtherGpu { module: one.module, was: was.clone(), is: one.uuid.clone() };
            }
        }
        let needed = listed.without(barred);
        let missing = needed.without(map.modules());
        let told = needed.without(missing).without(map.measured());
        if missing.is_empty() && told.is_empty() { Self::Verified } else { Self::Unverified { missing, told } }
    }

    /// Whether several GPUs may be given by it.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        *self == Self::Verified
    }

    /// What is wrong with it, in a few words.
    #[must_use]
    pub fn why(&self) -> String {
        match self {
            Self::Verified => "every GPU was measured".to_owned(),
            Self::None => "there is no module map".to_owned(),
            Self::Damaged(what) => what.clone(),
            Self::OtherBaseboard { map, is } => format!("the module map is of baseboard {map}, and this is {is}"),
            Self::OtherGpu { module, was, is } => {
                format!("the module map has GPU {was} at module {module}, and the fabric manager lists {is} there")
            }
            Self::Unverified { missing, told } => {
                let part = |gpus: &Gpus, text: &str| (!gpus.is_empty()).then(|| format!("{text} GPUs {gpus}"));
                let parts = [part(missing, "says nothing of"), part(told, "has only an operator's word for")];
                format!("the module map {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", and "))
            }
        }
    }

    /// What to run; `serial` is the baseboard's, if it is known.
    #[must_use]
    pub fn advice(&self, serial: Option<&str>) -> String {
        let serial = serial.unwrap_or("SERIAL");
        let replace =
            if matches!(self, Self::OtherBaseboard { .. } | Self::OtherGpu { .. }) { " --replace" } else { "" };
        if self.is_verified() {
            return String::new();
        }
        format!(
            "run fmctl inventory nvml FILE --serial {serial}{replace} with what an inventory guest has measured, or fmctl inventory \
             probe --gpus PCI,.. --serial {serial}{replace} --check COMMAND"
        )
    }
}
