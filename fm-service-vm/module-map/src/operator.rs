//! An operator's table: TOML or JSON, every GPU by module id.
//!
//! ```toml
//! [baseboard_modules]
//! 1 = "0000:86:00.0"
//! 2 = { pci = "0000:b8:00.0", serial = "1650123456789" }
//! ```

use std::fmt;

use firstlight_partitions::MODULE_ID_LIMIT;
use firstlight_pci::ParseAddressError;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor, value};

use crate::MAX_FILE;
use crate::claim::{Claim, ClaimError, checked};

/// An invalid table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The file is too long.
    #[error("it has more than {MAX_FILE} bytes, and a table of {MODULE_ID_LIMIT} GPUs has not")]
    TooLong,
    /// The file is not UTF-8.
    #[error("not UTF-8: {0}")]
    NotUtf8(std::str::Utf8Error),
    /// Invalid TOML or JSON; the parser's message has the position.
    #[error("{0}; a table is [baseboard_modules] with lines such as 1 = \"0000:86:00.0\", or the same as JSON")]
    Form(String),
    /// An invalid PCI address.
    #[error("module {module}: {error}")]
    Pci {
        /// The module id.
        module: u32,
        /// What is wrong with it.
        error: ParseAddressError,
    },
    /// The claims are invalid.
    #[error(transparent)]
    Claims(#[from] ClaimError),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    baseboard_modules: BaseboardModules,
}

/// A `Vec`, because a map would silently keep the last of two duplicates.
struct BaseboardModules(Vec<(u32, GpuRow)>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuRow {
    pci: String,
    #[serde(default)]
    uuid: Option<String>,
    #[serde(default)]
    serial: Option<String>,
}

/// An address, or a table with more fields.
struct Row(GpuRow);

impl<'de> Deserialize<'de> for Row {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Row;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a PCI address, or a table with pci, uuid and serial")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Row, E> {
                Ok(Row(GpuRow { pci: text.to_owned(), uuid: None, serial: None }))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Row, A::Error> {
                GpuRow::deserialize(value::MapAccessDeserializer::new(map)).map(Row)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for BaseboardModules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Rows;
        impl<'de> Visitor<'de> for Rows {
            type Value = BaseboardModules;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("module ids with PCI addresses")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<BaseboardModules, A::Error> {
                let mut rows: Vec<(u32, GpuRow)> = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    let module = key.parse::<u32>().ok().filter(|id| *id < MODULE_ID_LIMIT && key == id.to_string());
                    let wrong = || A::Error::custom(format!("invalid module id {:?}", crate::short(&key)));
                    let module = module.ok_or_else(wrong)?;
                    let Row(place) = map.next_value()?;
                    if rows.iter().any(|(other, _)| *other == module) {
                        return Err(A::Error::custom(format!("module {module} appears twice")));
                    }
                    rows.push((module, place));
                }
                Ok(BaseboardModules(rows))
            }
        }
        deserializer.deserialize_map(Rows)
    }
}

/// Parses an operator's table.
///
/// # Errors
/// It is invalid.
pub fn table(bytes: &[u8]) -> Result<Vec<Claim>, TableError> {
    if bytes.len() > MAX_FILE {
        return Err(TableError::TooLong);
    }
    let text = std::str::from_utf8(bytes).map_err(TableError::NotUtf8)?;
    let file: File = match text.trim_start().starts_with('{') {
        true => serde_json::from_str(text).map_err(|error| TableError::Form(error.to_string()))?,
        false => toml::from_str(text).map_err(|error| TableError::Form(located(text, &error)))?,
    };
    let BaseboardModules(rows) = file.baseboard_modules;
    let claim = |(module, GpuRow { pci, uuid, serial }): (u32, GpuRow)| {
        let pci = pci.parse().map_err(|error| TableError::Pci { module, error })?;
        Ok(Claim { module, pci, uuid, serial })
    };
    let claims: Vec<Claim> = rows.into_iter().map(claim).collect::<Result<_, TableError>>()?;
    checked(&claims)?;
    Ok(claims)
}

/// Formats the parser's message in one line, with the position.
fn located(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    match before {
        Some(before) => format!("line {}: {message}", before.matches('\n').count() + 1),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        table(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn toml_and_json_tables_are_equivalent() {
        let toml =
            "# DGX\n[baseboard_modules]\n1 = \"0000:86:00.0\"\n3 = { pci = \"0000:87:00.0\", serial = \"165\" }\n";
        let json =
            r#" {"baseboard_modules": {"1": "00000000:86:00.0", "3": {"pci": "0000:87:00.0", "serial": "165"}}}"#;
        let claims = table(toml.as_bytes()).unwrap();
        assert_eq!(claims, table(json.as_bytes()).unwrap());
        assert_eq!((claims[0].module, claims[0].pci.to_string().as_str()), (1, "0000:86:00.0"));
        assert_eq!(claims[1].serial.as_deref(), Some("165"));
    }

    #[test]
    fn errors_name_the_position() {
        for (text, part) in [
            ("[baseboard_modules]\n1 = \"86:00.0\"", "module 1: \"86:00.0\" is not a PCI address"),
            ("[baseboard_modules]\n1 = \"0000:86:00.0\"\n1 = \"0000:87:00.0\"", "line 3"),
            (
                "[baseboard_modules]\n1 = \"0000:86:00.0\"\n2 = \"0000:86:00.0\"",
                "0000:86:00.0 appears twice: for module 1 and for module 2",
            ),
            ("[baseboard_modules]\n64 = \"0000:86:00.0\"", "invalid module id \"64\""),
            ("[baseboard_modules]\n01 = \"0000:86:00.0\"", "invalid module id \"01\""),
            ("[baseboard_modules]\n1 = 7", "line 2: invalid type: integer"),
            ("[baseboard_modules]\n1 = { pci = \"0000:86:00.0\", slot = 1 }", "unknown field `slot`"),
            ("[baseboard_modules]\n1 = { pci = \"0000:86:00.0\", serial = \"a b\" }", "serial \"a b\" of module 1"),
            ("[gpus]\n", "unknown field `gpus`"),
            ("[baseboard_modules]\n", "it names no GPU"),
            ("", "missing field `baseboard_modules`"),
            (
                r#"{"baseboard_modules": {"1": "0000:86:00.0",
                "1": "0000:87:00.0"}}"#,
                "module 1 appears twice at line 2",
            ),
            (r#"{"baseboard_modules": {"-1": "0000:86:00.0"}}"#, "invalid module id \"-1\""),
        ] {
            let error = said(text);
            assert!(error.contains(part) && !error.contains('\n'), "{part} in {error}");
        }
        assert_eq!(table(&vec![b' '; MAX_FILE + 1]).unwrap_err(), TableError::TooLong);
        assert!(matches!(table(b"\xff"), Err(TableError::NotUtf8(_))));
    }
}
