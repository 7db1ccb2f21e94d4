//! Generates messages, clients and server traits from `proto/`.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs, io};

use protobuf::descriptor::field_descriptor_proto::Type;
use protobuf::reflect::{EnumDescriptor, FieldDescriptor, MessageDescriptor, OneofDescriptor};
use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize, ProtobufCustomizeCallback};

/// File stem, whether it has services, and the module's documentation.
const FILES: &[(&str, bool, &str)] = &[
    ("agent", true, "Sandboxes, containers, processes and their streams."),
    ("csi", false, "Volume statistics."),
    ("firstlight", true, "Firstlight's own services."),
    ("health", true, "Liveness and version."),
    ("oci", false, "The OCI configuration on the wire; zero means \"not set\"."),
    ("types", false, "Network objects."),
];

/// Lints that the generators' output does not meet. Their size casts are bounded by ttrpc's 4 MiB messages.
const GENERATED: &str = "#[allow(clippy::cast_possible_truncation, unreachable_pub, rust_2018_idioms)]";

fn main() -> io::Result<()> {
    let out = env::var("OUT_DIR").map_err(io::Error::other)?;
    let out = Path::new(&out);
    println!("cargo::rerun-if-changed=proto");
    let mut generator = Codegen::new();
    if env::var_os("CARGO_FEATURE_SERDE").is_some() {
        generator.rust_protobuf_customize_callback(Json);
    }
    generator
        .out_dir(out)
        .include("proto")
        .inputs(FILES.iter().map(|(stem, ..)| format!("proto/{stem}.proto")))
        .rust_protobuf()
        // Without reflection the descriptors and their tables stay out of the binary.
        .rust_protobuf_customize(ProtobufCustomize::default().lite_runtime(true))
        .customize(Customize { async_all: true, ..Customize::default() })
        .run()?;
    // The generators' own mod.rs starts with an inner attribute, which include! rejects.
    let mut modules = String::new();
    for (stem, services, what) in FILES {
        declare(out, &mut modules, stem, what)?;
        if *services {
            declare(out, &mut modules, &format!("{stem}_ttrpc"), &format!("Client and server of: {what}"))?;
        }
    }
    fs::write(out.join("mod.rs"), modules)
}

/// Makes messages serialisable: fields by their generated names, enums as
/// numbers, unset messages as null, one-ofs by the name of the set variant,
/// unknown fields omitted. Kata's agent passes policies the same format.
struct Json;

impl Json {
    fn with(attribute: &str) -> ProtobufCustomize {
        ProtobufCustomize::default().before(attribute)
    }
}

impl ProtobufCustomizeCallback for Json {
    fn message(&self, _: &MessageDescriptor) -> ProtobufCustomize {
        Self::with("#[derive(::serde::Serialize)]")
    }

    fn oneof(&self, _: &OneofDescriptor) -> ProtobufCustomize {
        Self::with("#[derive(::serde::Serialize)]")
    }

    fn enumeration(&self, _: &EnumDescriptor) -> ProtobufCustomize {
        ProtobufCustomize::default()
    }

    fn field(&self, field: &FieldDescriptor) -> ProtobufCustomize {
        match (field.proto().type_(), field.is_singular()) {
            (Type::TYPE_ENUM, true) => Self::with("#[serde(serialize_with = \"crate::json::number\")]"),
            (Type::TYPE_MESSAGE, true) => Self::with("#[serde(serialize_with = \"crate::json::message\")]"),
            _ => ProtobufCustomize::default(),
        }
    }

    fn special_field(&self, _: &MessageDescriptor, _: &str) -> ProtobufCustomize {
        Self::with("#[serde(skip)]")
    }
}

/// Declares a module, and removes the line from its file that would override the crate's
/// `forbid(unsafe_code)`; the files have no unsafe code.
fn declare(out: &Path, modules: &mut String, stem: &str, what: &str) -> io::Result<()> {
    let path = out.join(stem).with_extension("rs");
    let text = fs::read_to_string(&path)?;
    fs::write(&path, text.replace("#![allow(unsafe_code)]\n", ""))?;
    writeln!(modules, "#[doc = {what:?}]\n{GENERATED}\npub mod {stem};").map_err(io::Error::other)
}
