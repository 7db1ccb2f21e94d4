//! Generates messages, clients and server traits from `proto/`.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs, io};

use protobuf::descriptor::field_descriptor_proto::Type;
use protobuf::reflect::{EnumDescriptor, FieldDescriptor, MessageDescriptor, OneofDescriptor};
use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize, ProtobufCustomizeCallback};

/// File stem, whether it holds services, and what it is, for the module's documentation.
const FILES: &[(&str, bool, &str)] = &[
    ("agent", true, "Sandboxes, containers, processes and their streams."),
    ("csi", false, "Volume statistics."),
    ("firstlight", true, "What a Firstlight guest serves of its own."),
    ("health", true, "Liveness and version."),
    ("oci", false, "The OCI configuration as the wire carries it; zero is \"not set\"."),
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
    // The generators' own mod.rs begins with an inner attribute, which include! refuses.
    let mut modules = String::new();
    for (stem, services, what) in FILES {
        declare(out, &mut modules, stem, what)?;
        if *services {
            declare(out, &mut modules, &format!("{stem}_ttrpc"), &format!("Client and server of: {what}"))?;
        }
    }
    fs::write(out.join("mod.rs"), modules)
}

/// Makes messages serialisable: fields by the generated names, enums as their
/// numbers, messages that are not set as null, one-ofs by the name of what is
/// set, unknown fields left out. That is what Kata's agent hands to policies.
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

/// Adds a module, and takes a line out of its file that would lift the crate's `forbid(unsafe_code)`;
/// the files hold no unsafe code.
fn declare(out: &Path, modules: &mut String, stem: &str, what: &str) -> io::Result<()> {
    let path = out.join(stem).with_extension("rs");
    let text = fs::read_to_string(&path)?;
    fs::write(&path, text.replace("#![allow(unsafe_code)]\n", ""))?;
    writeln!(modules, "#[doc = {what:?}]\n{GENERATED}\npub mod {stem};").map_err(io::Error::other)
}
