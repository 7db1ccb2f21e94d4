//! What the command line wants as root.

use firstlight_cmdline::CommandLine;

/// Longest name and UUID of a mapped device, bytes.
const LONGEST: (usize, usize) = (127, 128);

/// PID 1 of the root, where `init=` names no other.
pub const INITS: &[&str] = &["/sbin/init", "/init"];

/// Why a command line cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A parameter is missing.
    #[error("the kernel command line has no {0}")]
    Missing(&'static str),
    /// A parameter has a value that is not taken.
    #[error("{param}={value:?}: {what}")]
    Value {
        /// The parameter.
        param: &'static str,
        /// Its value, cut to 200 characters.
        value: String,
        /// What is wrong with it.
        what: &'static str,
    },
}

fn wrong(param: &'static str, value: &str, what: &'static str) -> Error {
    Error::Value { param, value: value.chars().take(200).collect(), what }
}

/// A read-only device of the device mapper with one `verity` target, as
/// `dm-mod.create=NAME,UUID,,ro,0 SECTORS verity 1 DATA HASHES ...` describes it
/// (the kernel's `Documentation/admin-guide/device-mapper/dm-init.rst`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Its name.
    pub name: String,
    /// Its UUID; may be empty.
    pub uuid: String,
    /// Its length in sectors of 512 bytes.
    pub sectors: u64,
    /// Parameters of the target, from its version on.
    pub parameters: String,
    /// Data device and hash device, below `/dev`.
    pub devices: [String; 2],
    /// The root hash, as it is written.
    pub root_hash: String,
}

impl Mapping {
    /// Reads a description.
    ///
    /// # Errors
    /// It is of another form, of several devices, of another target or not read-only.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let wrong = |what| wrong("dm-mod.create", text, what);
        if text.contains(';') {
            return Err(wrong("one device is taken, not several"));
        }
        let mut fields = text.splitn(5, ',');
        let mut field = || fields.next().ok_or_else(|| wrong("it is NAME,UUID,MINOR,FLAGS,TABLE"));
        let [name, uuid, minor, flags, table] = [field()?, field()?, field()?, field()?, field()?];
        let plain = |text: &str, most| text.len() <= most && text.bytes().all(|byte| byte.is_ascii_graphic());
        if name.is_empty() || name.contains('/') || !plain(name, LONGEST.0) || !plain(uuid, LONGEST.1) {
            return Err(wrong("its name or UUID is empty, too long or no plain word"));
        }
        if !minor.is_empty() {
            return Err(wrong("a minor number cannot be chosen; leave it empty"));
        }
        if flags != "ro" {
            return Err(wrong("only read-only devices are taken: the fourth field is ro"));
        }
        if table.contains(',') {
            return Err(wrong("one target is taken, not several"));
        }
        let words: Vec<&str> = table.split_ascii_whitespace().collect();
        let [start, length, kind, parameters @ ..] = words.as_slice() else {
            return Err(wrong("its table is 0 SECTORS verity PARAMETERS"));
        };
        if (*start, *kind) != ("0", "verity") {
            return Err(wrong("its table is one verity target from sector 0 on"));
        }
        let sectors = length.parse().ok().filter(|sectors| *sectors > 0);
        let sectors = sectors.ok_or_else(|| wrong("its length is no number of sectors"))?;
        let [_version, data, hashes, _, _, _, _, _, root_hash, _salt, ..] = parameters else {
            return Err(wrong("a verity target has ten parameters"));
        };
        if !is_device(data) || !is_device(hashes) {
            return Err(wrong("its devices are named /dev/NAME"));
        }
        Ok(Self {
            name: name.to_owned(),
            uuid: uuid.to_owned(),
            sectors,
            parameters: parameters.join(" "),
            devices: [(*data).to_owned(), (*hashes).to_owned()],
            root_hash: (*root_hash).to_owned(),
        })
    }
}

/// `/dev/` and one name.
fn is_device(path: &str) -> bool {
    path.strip_prefix("/dev/").is_some_and(|name| {
        !name.is_empty()
            && !name.starts_with('.')
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    })
}

/// The root that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The device that has to be made first.
    pub mapping: Option<Mapping>,
    /// The device with the file system.
    pub root: String,
    /// Its kind.
    pub kind: String,
    /// Its options.
    pub options: String,
    /// PID 1 in it.
    pub init: Option<String>,
}

impl Wanted {
    /// Reads a command line.
    ///
    /// # Errors
    /// `root=` or `rootfstype=` is missing or is not taken, or `dm-mod.create=` is not.
    pub fn of(line: &CommandLine) -> Result<Self, Error> {
        let mapping = line.value("dm-mod.create").map(Mapping::parse).transpose()?;
        let root = line.value("root").ok_or(Error::Missing("root=, the device with the root file system"))?;
        if !is_device(root) {
            return Err(wrong("root", root, "a device is named /dev/NAME here; labels and UUIDs are not looked up"));
        }
        let kind = line.value("rootfstype").ok_or(Error::Missing("rootfstype=, such as erofs"))?;
        if kind.is_empty() || !kind.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(wrong("rootfstype", kind, "one kind of file system is named"));
        }
        let init = line.value("init").map(str::to_owned);
        if let Some(init) = init.as_deref().filter(|init| !init.starts_with('/')) {
            return Err(wrong("init", init, "a path begins with /"));
        }
        let options = line.value("rootflags").unwrap_or_default().to_owned();
        Ok(Self { mapping, root: root.to_owned(), kind: kind.to_owned(), options, init })
    }

    /// The devices that have to come by themselves.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        match &self.mapping {
            Some(mapping) => mapping.devices.iter().map(String::as_str).collect(),
            None => vec![&self.root],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CREATE: &str = "dm-verity,,,ro,0 736328 verity 1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 abcd 1234";

    fn wanted(text: &str) -> Result<Wanted, Error> {
        Wanted::of(&CommandLine::parse(text))
    }

    #[test]
    fn what_image_builder_and_katas_runtimes_write_is_taken() {
        let text = format!("quiet dm-mod.create=\"{CREATE}\" root=/dev/dm-0 ro rootfstype=erofs panic=1");
        let wanted = wanted(&text).unwrap();
        let mapping = wanted.mapping.clone().unwrap();
        assert_eq!((mapping.name.as_str(), mapping.uuid.as_str(), mapping.sectors), ("dm-verity", "", 736_328));
        assert_eq!(mapping.parameters, "1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 abcd 1234");
        assert_eq!(mapping.root_hash, "abcd");
        assert_eq!(wanted.devices(), ["/dev/vda1", "/dev/vda2"]);
        assert_eq!((wanted.root.as_str(), wanted.kind.as_str(), wanted.init), ("/dev/dm-0", "erofs", None));
    }

    #[test]
    fn a_root_need_not_be_verified() {
        let wanted = wanted("root=/dev/vda1 rootfstype=ext4 rootflags=noload init=/bin/x").unwrap();
        assert_eq!((wanted.devices(), wanted.options.as_str()), (vec!["/dev/vda1"], "noload"));
        assert_eq!((wanted.mapping.clone(), wanted.init.as_deref()), (None, Some("/bin/x")));
    }

    #[test]
    fn whatever_is_not_taken_is_named_with_its_parameter() {
        let with = |create: &str| format!("dm-mod.create=\"{create}\" root=/dev/dm-0 rootfstype=erofs");
        let rows = [
            (String::new(), "no root="),
            ("root=/dev/vda1".to_owned(), "no rootfstype="),
            ("root=LABEL=x rootfstype=erofs".to_owned(), "root=\"LABEL=x\""),
            ("root=/dev/../etc rootfstype=erofs".to_owned(), "root="),
            ("root=/dev/vda1 rootfstype=a,b".to_owned(), "rootfstype="),
            ("root=/dev/vda1 rootfstype=erofs init=sh".to_owned(), "init=\"sh\""),
            (with("x"), "NAME,UUID"),
            (with(&format!("{CREATE};{CREATE}")), "not several"),
            (with(&format!("{CREATE},0 1 linear")), "not several"),
            (with(&CREATE.replace(",ro,", ",rw,")), "read-only"),
            (with(&CREATE.replace(",,,", ",,3,")), "minor"),
            (with(&CREATE.replace("dm-verity", "a/b")), "name"),
            (with(&CREATE.replace("verity 1", "linear 1")), "verity target"),
            (with(&CREATE.replace("0 736328", "8 736328")), "sector 0"),
            (with(&CREATE.replace("736328", "0")), "sectors"),
            (with(&CREATE.replace("abcd 1234", "abcd")), "ten parameters"),
            (with(&CREATE.replace("/dev/vda2", "8:2")), "/dev/NAME"),
        ];
        for (text, words) in rows {
            let error = wanted(&text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_line_may_come(text in "(?s).{0,300}") {
            let _ = wanted(&text);
        }

        #[test]
        fn a_damaged_description_is_refused_or_stays_one(at in 0..CREATE.len(), byte in 32u8..127) {
            let mut text = CREATE.as_bytes().to_vec();
            text[at] = byte;
            if let Ok(mapping) = Mapping::parse(&String::from_utf8(text).unwrap()) {
                prop_assert!(mapping.sectors > 0 && mapping.devices.iter().all(|device| is_device(device)));
            }
        }
    }
}
