//! Root file system parameters of the kernel command line.

use firstlight_cmdline::CommandLine;

/// Longest name and UUID of a mapped device, bytes.
const LONGEST: (usize, usize) = (127, 128);

/// Programs tried as PID 1 of the root when `init=` is absent.
pub const INITS: &[&str] = &["/sbin/init", "/init"];

/// Invalid or missing root parameter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A parameter is missing.
    #[error("the kernel command line has no {0}")]
    Missing(&'static str),
    /// A parameter has an unsupported value.
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
    /// Parameters of the verity target, starting with its version.
    pub parameters: String,
    /// Data device and hash device, below `/dev`.
    pub devices: [String; 2],
    /// The root hash, unparsed.
    pub root_hash: String,
}

impl Mapping {
    /// Parses the value of `dm-mod.create=`.
    ///
    /// # Errors
    /// The syntax is wrong, or it describes several devices, another target or a writable device.
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
        let sectors = sectors.ok_or_else(|| wrong("its length is not a number of sectors"))?;
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

/// Reports whether the path is `/dev/NAME`.
fn is_device(path: &str) -> bool {
    path.strip_prefix("/dev/").is_some_and(|name| {
        !name.is_empty()
            && !name.starts_with('.')
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    })
}

/// Root parameters of the kernel command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootParams {
    /// The dm-verity device to create first.
    pub mapping: Option<Mapping>,
    /// The block device with the root file system.
    pub root: String,
    /// File system type (`rootfstype=`).
    pub kind: String,
    /// Mount options (`rootflags=`).
    pub options: String,
    /// Program to run as PID 1 (`init=`).
    pub init: Option<String>,
}

impl RootParams {
    /// Reads the root parameters from a command line.
    ///
    /// # Errors
    /// `root=` or `rootfstype=` is missing or unsupported, or `dm-mod.create=` is invalid.
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

    /// Returns the block devices that the kernel's drivers have to provide.
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

    fn params(text: &str) -> Result<RootParams, Error> {
        RootParams::of(&CommandLine::parse(text))
    }

    #[test]
    fn parameters_of_image_builder_and_kata_runtimes_are_accepted() {
        let text = format!("quiet dm-mod.create=\"{CREATE}\" root=/dev/dm-0 ro rootfstype=erofs panic=1");
        let params = params(&text).unwrap();
        let mapping = params.mapping.clone().unwrap();
        assert_eq!((mapping.name.as_str(), mapping.uuid.as_str(), mapping.sectors), ("dm-verity", "", 736_328));
        assert_eq!(mapping.parameters, "1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 abcd 1234");
        assert_eq!(mapping.root_hash, "abcd");
        assert_eq!(params.devices(), ["/dev/vda1", "/dev/vda2"]);
        assert_eq!((params.root.as_str(), params.kind.as_str(), params.init), ("/dev/dm-0", "erofs", None));
    }

    #[test]
    fn root_without_verity_is_accepted() {
        let params = params("root=/dev/vda1 rootfstype=ext4 rootflags=noload init=/bin/x").unwrap();
        assert_eq!((params.devices(), params.options.as_str()), (vec!["/dev/vda1"], "noload"));
        assert_eq!((params.mapping.clone(), params.init.as_deref()), (None, Some("/bin/x")));
    }

    #[test]
    fn unsupported_value_is_reported_with_its_parameter() {
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
            let error = params(&text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_command_line_does_not_panic(text in "(?s).{0,300}") {
            let _ = params(&text);
        }

        #[test]
        fn corrupted_dm_mod_create_is_rejected_or_still_valid(at in 0..CREATE.len(), byte in 32u8..127) {
            let mut text = CREATE.as_bytes().to_vec();
            text[at] = byte;
            if let Ok(mapping) = Mapping::parse(&String::from_utf8(text).unwrap()) {
                prop_assert!(mapping.sectors > 0 && mapping.devices.iter().all(|device| is_device(device)));
            }
        }
    }
}
