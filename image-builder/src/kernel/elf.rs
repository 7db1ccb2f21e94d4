//! What is read of kernels and modules, which are ELF files: the PVH note and `.modinfo`; and the removal of BTF.
//!
//! goblin parses the headers and checks counts and offsets against the length of the file. Only the needed tables are
//! parsed, because `Elf::parse` also reads symbols, and rejects a file for an error in any table.

use goblin::container::{Container, Ctx, Endian};
use goblin::elf::note::NoteDataIterator;
use goblin::elf::program_header::PT_NOTE;
use goblin::elf::{Elf, Header, ProgramHeader, SectionHeader};
use goblin::strtab::Strtab;

/// x86-64: 64 bits, little-endian.
const CTX: Ctx = Ctx { container: Container::Big, le: Endian::Little };

/// The note with the address of the 32-bit PVH entry point
/// (`XEN_ELFNOTE_PHYS32_ENTRY`).
const PHYS32_ENTRY: u32 = 18;

/// Alignment of names and contents of the kernel's notes, whatever the program header says.
const NOTE_ALIGNMENT: usize = 4;

/// Parses the ELF header.
fn header(file: &[u8]) -> Result<Header, String> {
    match file.get(..6) {
        // Class 2: 64 bits. Data 1: little-endian.
        Some(b"\x7fELF\x02\x01") => {
            Elf::parse_header(file).map_err(|error| format!("failed to parse the ELF header: {error}"))
        }
        Some([0x7f, b'E', b'L', b'F', ..]) => Err("not a 64-bit little-endian ELF file".to_owned()),
        _ => Err("not an ELF file".to_owned()),
    }
}

/// Converts an offset or a count of the file.
fn size(value: u64) -> Result<usize, String> {
    usize::try_from(value).map_err(|_| format!("{value} is outside of the file"))
}

/// Returns the physical address of the PVH entry point of `vmlinux`.
pub(super) fn pvh_entry(vmlinux: &[u8]) -> Result<u64, String> {
    let header = header(vmlinux)?;
    let headers = ProgramHeader::parse(vmlinux, size(header.e_phoff)?, header.e_phnum.into(), CTX)
        .map_err(|error| format!("failed to parse the program headers: {error}"))?;
    let mut notes = headers.iter().filter(|header| header.p_type == PT_NOTE);
    let entry = notes.find_map(|header| pvh_note(vmlinux.get(header.file_range())?));
    entry.ok_or_else(|| "the kernel has no PVH entry note: it was built without CONFIG_PVH".to_owned())
}

/// Returns the address in the PVH note, if it is among these notes.
fn pvh_note(data: &[u8]) -> Option<u64> {
    let mut notes = NoteDataIterator { data, size: data.len(), offset: 0, ctx: (NOTE_ALIGNMENT, CTX) };
    // The iterator ends after an error.
    let entry = notes.find_map(|note| note.ok().filter(|note| note.n_type == PHYS32_ENTRY && note.name == "Xen"))?;
    match entry.desc.len() {
        4 => entry.desc.first_chunk().map(|bytes| u32::from_le_bytes(*bytes).into()),
        8 => entry.desc.first_chunk().map(|bytes| u64::from_le_bytes(*bytes)),
        _ => None,
    }
}

/// The contents of a module's `.modinfo` section.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModuleInfo {
    /// Modules it depends on, as spelled there.
    pub depends: Vec<String>,
    /// The kernel release it was built for (first word of `vermagic`).
    pub release: Option<String>,
    /// Aliases: patterns of the devices that it drives, and other names.
    pub aliases: Vec<String>,
    /// Soft dependencies: `pre: A B`, `post: C`.
    pub softdeps: Vec<String>,
    /// Firmware files below `/lib/firmware` that it may request.
    pub firmware: Vec<String>,
}

/// Reads the `.modinfo` section of an uncompressed module.
pub(super) fn module_info(module: &[u8]) -> Result<ModuleInfo, String> {
    let sections = Sections::parse(module)?;
    let section = sections.body(".modinfo").ok_or("no .modinfo section: not a kernel module")?;
    let mut info = ModuleInfo::default();
    for pair in section.split(|byte| *byte == 0).filter_map(|pair| std::str::from_utf8(pair).ok()) {
        match pair.split_once('=') {
            Some(("depends", names)) => {
                info.depends.extend(names.split(',').filter(|name| !name.is_empty()).map(str::to_owned));
            }
            Some(("alias", pattern)) => info.aliases.push(pattern.to_owned()),
            Some(("firmware", file)) => info.firmware.push(file.to_owned()),
            Some(("softdep", softdep)) => info.softdeps.push(softdep.to_owned()),
            Some(("vermagic", magic)) => info.release = magic.split(' ').next().map(str::to_owned),
            _ => {}
        }
    }
    Ok(info)
}

/// Sections of type information, which the kernel parses on every module load.
const BTF_SECTIONS: &[&str] = &[".BTF", ".BTF.base"];

/// The end of a signed module; preceded by 12 bytes (`struct module_signature`) that end with the
/// signature's length, big-endian, and those by the signature.
const SIGNATURE_MARKER: &[u8] = b"~Module signature appended~\n";

/// Hides a module's type information (BTF) from the kernel, which otherwise
/// spends most of the load time on it, and removes the signature, which becomes
/// invalid: the kernel accepts an unsigned module unless it enforces signatures,
/// but never one with an invalid signature.
pub(super) fn strip_btf(module: &mut Vec<u8>) -> Result<(), String> {
    let sections = Sections::parse(module)?;
    let headers: Vec<usize> = BTF_SECTIONS.iter().filter_map(|name| sections.header_offset(name)).collect();
    if headers.is_empty() {
        return Ok(());
    }
    for at in headers {
        // The kernel finds sections by name; this clears the name.
        module
            .get_mut(at..)
            .and_then(|rest| rest.first_chunk_mut::<4>())
            .ok_or("a section header is truncated")?
            .fill(0);
    }
    if let Some(rest) = module.strip_suffix(SIGNATURE_MARKER) {
        let length =
            rest.last_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes)).ok_or("the signature has no length")?;
        let taken = usize::try_from(length).ok().and_then(|length| length.checked_add(12));
        let end =
            taken.and_then(|taken| rest.len().checked_sub(taken)).ok_or("the signature is longer than the module")?;
        module.truncate(end);
    }
    Ok(())
}

/// The sections of a module.
struct Sections<'a> {
    file: &'a [u8],
    /// Offset of the section header table.
    table: usize,
    headers: Vec<SectionHeader>,
    names: Strtab<'a>,
}

impl<'a> Sections<'a> {
    fn parse(file: &'a [u8]) -> Result<Self, String> {
        let header = header(file)?;
        let entry = SectionHeader::size(CTX);
        if usize::from(header.e_shentsize) != entry {
            return Err(format!("its section headers have {} bytes instead of {entry}", header.e_shentsize));
        }
        let table = size(header.e_shoff)?;
        let headers = SectionHeader::parse(file, table, header.e_shnum.into(), CTX)
            .map_err(|error| format!("failed to parse the section headers: {error}"))?;
        let names = headers.get(usize::from(header.e_shstrndx)).ok_or("it has no section names")?;
        let names = Strtab::parse(file, size(names.sh_offset)?, size(names.sh_size)?, 0)
            .map_err(|error| format!("failed to parse the section names: {error}"))?;
        Ok(Self { file, table, headers, names })
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.headers.iter().position(|header| self.names.get_at(header.sh_name) == Some(name))
    }

    /// Returns the offset of the section's header.
    fn header_offset(&self, name: &str) -> Option<usize> {
        self.index(name)?.checked_mul(SectionHeader::size(CTX))?.checked_add(self.table)
    }

    /// Returns the section's contents.
    fn body(&self, name: &str) -> Option<&'a [u8]> {
        self.file.get(self.headers.get(self.index(name)?)?.file_range()?)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
        bytes[at..at + value.len()].copy_from_slice(value);
    }

    /// Builds a module with only a `.modinfo` section.
    pub(in crate::kernel) fn module(pairs: &[&str]) -> Vec<u8> {
        let info: Vec<u8> = pairs.iter().flat_map(|pair| pair.bytes().chain([0])).collect();
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut bytes = vec![0; 64];
        put(&mut bytes, 0, b"\x7fELF\x02\x01\x01");
        let info_at = bytes.len() as u64;
        bytes.extend_from_slice(&info);
        let names_at = bytes.len() as u64;
        bytes.extend_from_slice(names);
        let table = bytes.len() as u64;
        for (name, at, size) in [(0u32, 0u64, 0usize), (1, info_at, info.len()), (10, names_at, names.len())] {
            let mut header = [0; 64];
            put(&mut header, 0, &name.to_le_bytes());
            put(&mut header, 24, &at.to_le_bytes());
            put(&mut header, 32, &(size as u64).to_le_bytes());
            bytes.extend_from_slice(&header);
        }
        put(&mut bytes, 40, &table.to_le_bytes());
        put(&mut bytes, 58, &64u16.to_le_bytes());
        put(&mut bytes, 60, &3u16.to_le_bytes());
        put(&mut bytes, 62, &2u16.to_le_bytes());
        bytes
    }

    fn vmlinux(notes: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        put(&mut bytes, 0, b"\x7fELF\x02\x01\x01");
        put(&mut bytes, 32, &64u64.to_le_bytes());
        put(&mut bytes, 54, &56u16.to_le_bytes());
        put(&mut bytes, 56, &1u16.to_le_bytes());
        put(&mut bytes, 64, &PT_NOTE.to_le_bytes());
        put(&mut bytes, 72, &120u64.to_le_bytes());
        put(&mut bytes, 96, &(notes.len() as u64).to_le_bytes());
        bytes.extend_from_slice(notes);
        bytes
    }

    fn note(name: &[u8], kind: u32, data: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [u32::try_from(name.len()).unwrap(), u32::try_from(data.len()).unwrap(), kind] {
            note.extend_from_slice(&word.to_le_bytes());
        }
        for part in [name, data] {
            note.extend_from_slice(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn pvh_note_is_found_among_others() {
        let mut notes = note(b"Linux\0", 1, &[1, 2, 3]);
        notes.extend(note(b"GNU\0", PHYS32_ENTRY, &[9; 4]));
        assert!(pvh_entry(&vmlinux(&notes)).unwrap_err().contains("CONFIG_PVH"));
        notes.extend(note(b"Xen\0", PHYS32_ENTRY, &0x0100_0000u64.to_le_bytes()));
        assert_eq!(pvh_entry(&vmlinux(&notes)), Ok(0x0100_0000));
        assert_eq!(pvh_entry(&vmlinux(&note(b"Xen\0", PHYS32_ENTRY, &5u32.to_le_bytes()))), Ok(5));
    }

    #[test]
    fn stripping_btf_removes_the_signature() {
        let plain = module(&["depends=a"]);
        // Padded to the length of ".modinfo", which it replaces in the section name table.
        let mut typed = plain.clone();
        let at = typed.windows(8).position(|window| window == b".modinfo").unwrap();
        typed[at..at + 8].copy_from_slice(b".BTF\0\0\0\0");
        let mut signed = typed.clone();
        signed.extend_from_slice(b"SIGNATURE");
        signed.extend_from_slice(&[0; 8]);
        signed.extend_from_slice(&9u32.to_be_bytes());
        signed.extend_from_slice(SIGNATURE_MARKER);
        assert!(Sections::parse(&signed).unwrap().body(".BTF").is_some());
        strip_btf(&mut signed).unwrap();
        assert_eq!(signed.len(), typed.len());
        assert!(Sections::parse(&signed).unwrap().body(".BTF").is_none());
        let mut untouched = plain.clone();
        strip_btf(&mut untouched).unwrap();
        assert_eq!(untouched, plain, "a module without BTF is unchanged");
        let mut broken = typed;
        broken.extend_from_slice(&u32::MAX.to_be_bytes());
        broken.extend_from_slice(SIGNATURE_MARKER);
        assert!(strip_btf(&mut broken).is_err());
    }

    #[test]
    fn pvh_note_with_invalid_size_is_not_an_entry() {
        for notes in [note(b"Xen\0", PHYS32_ENTRY, &[1; 5]), note(b"Xen\0", PHYS32_ENTRY, &[1; 8])[..16].to_vec()] {
            assert!(pvh_entry(&vmlinux(&notes)).unwrap_err().contains("CONFIG_PVH"));
        }
    }

    #[test]
    fn counts_and_offsets_outside_of_the_file_are_rejected() {
        for (at, bytes, reason) in [
            (40, &u64::MAX.to_le_bytes()[..], "failed to parse the section headers"),
            (58, &63u16.to_le_bytes(), "its section headers have 63 bytes instead of 64"),
            (60, &u16::MAX.to_le_bytes(), "failed to parse the section headers"),
            (62, &3u16.to_le_bytes(), "it has no section names"),
        ] {
            let mut bad = module(&["depends="]);
            put(&mut bad, at, bytes);
            let error = module_info(&bad).unwrap_err();
            assert!(error.starts_with(reason), "{error}");
            assert_eq!(strip_btf(&mut bad), Err(error));
        }
        let mut bad = vmlinux(&[]);
        put(&mut bad, 56, &3u16.to_le_bytes());
        assert!(pvh_entry(&bad).unwrap_err().starts_with("failed to parse the program headers"));
        put(&mut bad, 56, &1u16.to_le_bytes());
        put(&mut bad, 32, &u64::MAX.to_le_bytes());
        assert!(pvh_entry(&bad).unwrap_err().starts_with("failed to parse the program headers"));
    }

    #[test]
    fn modinfo_is_read() {
        let bytes = module(&[
            "license=GPL",
            "depends=vsock,vmw_common",
            "vermagic=6.12.95 SMP mod_unload",
            "alias=virtio:d00000001v*",
            "softdep=pre: a",
        ]);
        let info = module_info(&bytes).unwrap();
        assert_eq!((info.aliases.join(" "), info.softdeps.join(" ")), ("virtio:d00000001v*".into(), "pre: a".into()));
        assert_eq!(info.depends, ["vsock", "vmw_common"]);
        assert_eq!(info.release.as_deref(), Some("6.12.95"));
        assert_eq!(module_info(&module(&["depends="])).unwrap(), ModuleInfo::default());
        assert!(module_info(b"\x7fELF\x01\x01").unwrap_err().contains("64-bit"));
        assert!(module_info(b"text").unwrap_err().contains("not an ELF"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(mut bytes in proptest::collection::vec(any::<u8>(), 6..400), header in any::<bool>()) {
            if header {
                put(&mut bytes, 0, b"\x7fELF\x02\x01");
            }
            let _ = module_info(&bytes);
            let _ = pvh_entry(&bytes);
            let _ = strip_btf(&mut bytes);
        }

        #[test]
        fn damaged_files_do_not_panic(at in 0usize..2000, with in any::<u8>()) {
            let mut bytes = module(&["depends=a,b"]);
            let at_module = at % bytes.len();
            bytes[at_module] = with;
            let _ = module_info(&bytes);
            let mut bytes = vmlinux(&note(b"Xen\0", PHYS32_ENTRY, &[0; 8]));
            let at_kernel = at % bytes.len();
            bytes[at_kernel] = with;
            let _ = pvh_entry(&bytes);
        }
    }
}
