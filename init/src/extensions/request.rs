//! Extensions that the kernel command line requests.

use firstlight_cmdline::Param;
use firstlight_verity::{Params, ParamsError, extension};

/// Maximum number of characters of rejected text in an error.
const SHOWN: usize = 60;

/// A requested extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtensionRequest {
    /// Its name.
    pub name: String,
    /// The dm-verity parameters of its disk.
    pub params: Params,
}

/// An invalid extension parameter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRequest {
    /// An invalid extension name.
    #[error("kernel parameter {0:?}: {source}", source = extension::InvalidName)]
    Name(String),
    /// A parameter without a value: the disk would be mounted without verification.
    #[error(
        "extension {0}: its kernel parameter has no value, and no disk is mounted unchecked: build it with [verity], \
         and take the value from its image.json (verity.params)"
    )]
    Unchecked(String),
    /// A parameter whose value is not a set of dm-verity parameters.
    #[error("extension {name}: {source}; take the value from its image.json (verity.params)")]
    Params {
        /// The extension.
        name: String,
        /// The parse error.
        source: ParamsError,
    },
    /// An extension that is requested more than once.
    #[error("extension {0}: its kernel parameter is given twice; leave one")]
    Twice(String),
}

/// All requested extensions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtensionRequests {
    /// Valid requests.
    pub requested: Vec<ExtensionRequest>,
    /// Invalid requests.
    pub rejected: Vec<InvalidRequest>,
}

impl ExtensionRequests {
    /// Parses a parameter; returns `false` if it is not an extension parameter.
    pub fn take(&mut self, param: &Param) -> bool {
        let Some(name) = extension::name_from_parameter(&param.key) else { return false };
        match requested(name, param) {
            Ok(requested) if self.has(&requested.name) => self.rejected.push(InvalidRequest::Twice(requested.name)),
            Ok(requested) => self.requested.push(requested),
            Err(rejected) => self.rejected.push(rejected),
        }
        true
    }

    /// Returns whether the command line has no extension parameter, valid or not.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requested.is_empty() && self.rejected.is_empty()
    }

    /// Returns whether an extension with this name is requested.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.requested.iter().any(|requested| requested.name == name)
    }
}

fn requested(name: &str, param: &Param) -> Result<ExtensionRequest, InvalidRequest> {
    let name = match extension::check(name) {
        Ok(()) => name.to_owned(),
        Err(_) => return Err(InvalidRequest::Name(param.key.chars().take(SHOWN).collect())),
    };
    match param.value.as_deref() {
        None | Some("") => Err(InvalidRequest::Unchecked(name)),
        Some(value) => match value.parse() {
            Ok(params) => Ok(ExtensionRequest { name, params }),
            Err(error) => {
                let ParamsError { key, reason } = error;
                let source = ParamsError { key: key.chars().take(SHOWN).collect(), reason };
                Err(InvalidRequest::Params { name, source })
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firstlight_cmdline::CommandLine;
    use proptest::prelude::*;

    fn requests(line: &str) -> ExtensionRequests {
        let mut requests = ExtensionRequests::default();
        for param in CommandLine::parse(line).iter() {
            requests.take(param);
        }
        requests
    }

    fn params(blocks: u64) -> String {
        let root = "ab".repeat(32);
        format!("root_hash={root},salt=00ff,data_blocks={blocks},data_block_size=4096,hash_block_size=4096")
    }

    #[test]
    fn parameters_of_kata_runtimes_are_accepted() {
        let line = format!(
            "quiet kata.extension.gpu.verity_params={} kata.extension.a_b-1.verity_params=\"{}\"",
            params(7),
            params(8)
        );
        let requests = requests(&line);
        assert_eq!(requests.rejected, []);
        let found: Vec<_> = requests.requested.iter().map(|one| (one.name.as_str(), one.params.data_blocks)).collect();
        assert_eq!(found, [("gpu", 7), ("a_b-1", 8)]);
        assert!(requests.has("gpu") && !requests.has("a") && !requests.is_empty());
    }

    #[test]
    fn other_parameters_are_ignored() {
        for line in
            ["", "kata.extension.gpu", "kata.extension.gpu.other=1", "extension.gpu.verity_params=1", "agent.log=x"]
        {
            assert!(requests(line).is_empty(), "{line}");
        }
    }

    #[test]
    fn rejected_parameter_error_has_its_name_and_a_hint() {
        let good = params(7);
        let rows = [
            (
                format!("kata.extension.GPU.verity_params={good}"),
                "kata.extension.GPU.verity_params\": invalid extension name; expected 1 to 10",
            ),
            (format!("kata.extension.../x.verity_params={good}"), "1 to 10"),
            (format!("kata.extension..verity_params={good}"), "1 to 10"),
            (format!("kata.extension.eleven-long.verity_params={good}"), "1 to 10"),
            ("kata.extension.gpu.verity_params".to_owned(), "extension gpu: its kernel parameter has no value"),
            ("kata.extension.gpu.verity_params=".to_owned(), "no value"),
            (
                "kata.extension.gpu.verity_params=x".to_owned(),
                "extension gpu: invalid dm-verity parameters: x: expected KEY",
            ),
            (format!("kata.extension.gpu.verity_params={good},x=1"), "x: unknown key"),
            (format!("kata.extension.gpu.verity_params={}", params(0)), "data_blocks"),
            (format!("kata.extension.gpu.verity_params={}", good.replace("abab", "ab")), "64 hexadecimal digits"),
            (format!("kata.extension.gpu.verity_params={}", good.replace("00ff", "0 ")), "salt"),
            (format!("kata.extension.gpu.verity_params={}", good.replace("_size=4096", "_size=512")), "4096"),
        ];
        for (line, words) in rows {
            let requests = requests(&line);
            assert!(requests.requested.is_empty(), "{line}");
            let text = requests.rejected[0].to_string();
            assert!(text.contains(words), "{line}: {text}");
        }
        let twice = requests(&format!("kata.extension.a.verity_params={good} kata.extension.a.verity-params={good}"));
        assert_eq!((twice.requested.len(), &twice.rejected[..]), (1, &[InvalidRequest::Twice("a".to_owned())][..]));
    }

    proptest! {
        #[test]
        fn arbitrary_command_line_does_not_panic(name in "[a-z_./-]{0,14}", value in "[a-z_=,0-9-]{0,90}") {
            let requests = requests(&format!("kata.extension.{name}.verity_params={value}"));
            prop_assert_eq!(requests.requested.len() + requests.rejected.len(), 1);
            prop_assert!(requests.requested.iter().all(|one| extension::check(&one.name).is_ok()));
            prop_assert!(requests.rejected.iter().all(|one| one.to_string().len() < 400));
        }
    }
}
