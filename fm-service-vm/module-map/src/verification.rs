//! Whether partitions of several GPUs may be given by the map.

use firstlight_partitions::Gpus;

use crate::map::ModuleMap;

/// A GPU that FM lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedGpu {
    /// Its module id.
    pub module: u32,
    /// Its UUID; empty if FM does not know it.
    pub uuid: String,
}

/// The result of the verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verification {
    /// Every GPU was measured.
    Verified,
    /// There is no map.
    None,
    /// The map cannot be read.
    Damaged(String),
    /// The map is of another baseboard.
    OtherBaseboard {
        /// The baseboard in the map.
        map: String,
        /// The actual baseboard.
        is: String,
    },
    /// FM lists another GPU in a module than was measured.
    OtherGpu {
        /// The module id.
        module: u32,
        /// In the map.
        was: String,
        /// As listed.
        is: String,
    },
    /// Some GPUs have no entry, or only an operator's statement.
    Unverified {
        /// GPUs without an entry.
        missing: Gpus,
        /// GPUs with only an operator's statement.
        stated: Gpus,
    },
}

impl Verification {
    /// Verifies a map against the GPUs that FM lists; `is` is the baseboard's serial number, if known. Quarantined
    /// GPUs need no entry: a dead one cannot be measured.
    #[must_use]
    pub fn of(
        map: Option<&ModuleMap>,
        is: Option<&str>,
        listed: Gpus,
        quarantined: Gpus,
        seen: &[ObservedGpu],
    ) -> Self {
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
        let needed = listed.without(quarantined);
        let missing = needed.without(map.modules());
        let stated = needed.without(missing).without(map.measured());
        if missing.is_empty() && stated.is_empty() { Self::Verified } else { Self::Unverified { missing, stated } }
    }

    /// Whether partitions of several GPUs may be given.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        *self == Self::Verified
    }

    /// Returns why the map is not verified.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::Verified => "every GPU was measured".to_owned(),
            Self::None => "there is no module map".to_owned(),
            Self::Damaged(what) => what.clone(),
            Self::OtherBaseboard { map, is } => format!("the module map is of baseboard {map}, and this is {is}"),
            Self::OtherGpu { module, was, is } => {
                format!("the module map has GPU {was} at module {module}, and the fabric manager lists {is} there")
            }
            Self::Unverified { missing, stated } => {
                let part = |gpus: &Gpus, text: &str| (!gpus.is_empty()).then(|| format!("{text} GPUs {gpus}"));
                let parts = [part(missing, "has no entry for"), part(stated, "has only operator statements for")];
                format!("the module map {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", and "))
            }
        }
    }

    /// Returns what to run; `serial` is the baseboard's, if known.
    #[must_use]
    pub fn remedy(&self, serial: Option<&str>) -> String {
        let serial = serial.unwrap_or("SERIAL");
        let replace =
            if matches!(self, Self::OtherBaseboard { .. } | Self::OtherGpu { .. }) { " --replace" } else { "" };
        if self.is_verified() {
            return String::new();
        }
        format!(
            "run fmctl inventory nvml FILE --baseboard-serial {serial}{replace} with what an inventory guest has measured, or fmctl inventory \
             probe --pci PCI,.. --baseboard-serial {serial}{replace} --check COMMAND"
        )
    }
}
