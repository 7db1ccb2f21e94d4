//! Minimal ELF parser for kernels and modules: the PVH note and `.modinfo`.
//!
//! Files are 64-bit little-endian, as on x86-64. Every offset comes
//! from the file and is checked against its length.

/// The note with the address of the 32-bit PVH entry point
/// (`XEN_ELFNOTE_PHYS32_ENTRY`).
const PHYS32_ENTRY: u32 = 18;
/// Program header type of notes.
const PT_NOTE: u32 = 4;

/// Returns the physical address of the PVH entry point of `vmlinux`.
pub(super) fn pvh_entry(vmlinux: &[u8]) -> Result<u64, String> {
    let elf = Elf::new(vmlinux)?;
    let mut offset = elf.u64(32).ok_or("no program headers")?;
    let (size, count) = (elf.u16(54).unwrap_or(0), elf.u16(56).unwrap_or(0));
    for _ in 0..count {
        if offset > vmlinux.len() as u64 {
            return Err("program headers outside the file".to_owned());
        }
        let is_note = elf.u32(offset) == Some(PT_NOTE);
        if is_note
            && let Some(notes) = elf.slice(elf.u64(offset + 8), elf.u64(offset + 32))
            && let Some(entry) = pvh_note(notes)
        {
            return Ok(entry);
        }
        offset += u64::from(size);
    }
    Err("the kernel has no PVH entry note: it was built without CONFIG_PVH".to_owned())
}

fn pvh_note(notes: &[u8]) -> Option<u64> {
    let elf = Elf(notes);
    let mut at = 0u64;
    loop {
        let (name_size, size, kind) = (elf.u32(at)?, elf.u32(at + 4)?, elf.u32(at + 8)?);
        let name = at + 12;
        let data = name + u64::from(name_size).next_multiple_of(4);
        if kind == PHYS32_ENTRY && elf.slice(Some(name), Some(u64::from(name_size)))? == b"Xen\0" {
            return match size {
                4 => elf.u32(data).map(u64::from),
                8 => elf.u64(data),
                _ => None,
            };
        }
        at = data + u64::from(size).next_multiple_of(4);
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
    let elf = Elf::new(module)?;
    let section = elf.section(".modinfo").ok_or("no .modinfo section: not a kernel module")?;
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
    let headers: Vec<u64> = {
        let elf = Elf::new(module)?;
        BTF_SECTIONS.iter().filter_map(|name| elf.header(name)).collect()
    };
    if headers.is_empty() {
        return Ok(());
    }
    for header in headers {
        let at = usize::try_from(header).map_err(|_| "a section header is outside the file")?;
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

struct Elf<'a>(&'a [u8]);

impl<'a> Elf<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, String> {
        match bytes.get(..6) {
            // Class 2: 64 bits. Data 1: little-endian.
            Some(b"\x7fELF\x02\x01") => Ok(Self(bytes)),
            Some([0x7f, b'E', b'L', b'F', ..]) => Err("not a 64-bit little-endian ELF file".to_owned()),
            _ => Err("not an ELF file".to_owned()),
        }
    }

    fn slice(&self, offset: Option<u64>, length: Option<u64>) -> Option<&'a [u8]> {
        let start = usize::try_from(offset?).ok()?;
        let end = start.checked_add(usize::try_from(length?).ok()?)?;
        self.0.get(start..end)
    }

    fn bytes<const N: usize>(&self, offset: u64) -> Option<[u8; N]> {
        self.0.get(usize::try_from(offset).ok()?..)?.first_chunk().copied()
    }

    fn u16(&self, offset: u64) -> Option<u16> {
        self.bytes(offset).map(u16::from_le_bytes)
    }

    fn u32(&self, offset: u64) -> Option<u32> {
        self.bytes(offset).map(u32::from_le_bytes)
    }

    fn u64(&self, offset: u64) -> Option<u64> {
        self.bytes(offset).map(u64::from_le_bytes)
    }

    /// Returns the contents of the section whose header is at `header`.
    fn body(&self, header: u64) -> Option<&'a [u8]> {
        self.slice(self.u64(header.checked_add(24)?), self.u64(header.checked_add(32)?))
    }

    /// Returns the offset of the header of the section `name`.
    fn header(&self, name: &str) -> Option<u64> {
        let table = self.u64(40)?;
        let (size, count, names) = (self.u16(58)?, self.u16(60)?, self.u16(62)?);
        let header = |index: u16| table.checked_add(u64::from(index) * u64::from(size));
        let names = self.body(header(names)?)?;
        (0..count).filter_map(header).find(|header| {
            let start = self.u32(*header).and_then(|start| usize::try_from(start).ok());
            let found = start.and_then(|start| names.get(start..)?.split(|byte| *byte == 0).next());
            found == Some(name.as_bytes())
        })
    }

    /// Returns the contents of the section `name`.
    fn section(&self, name: &str) -> Option<&'a [u8]> {
        self.body(self.header(name)?)
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
        assert!(Elf::new(&signed).unwrap().section(".BTF").is_some());
        strip_btf(&mut signed).unwrap();
        assert_eq!(signed.len(), typed.len());
        assert!(Elf::new(&signed).unwrap().section(".BTF").is_none());
        let mut untouched = plain.clone();
        strip_btf(&mut untouched).unwrap();
        assert_eq!(untouched, plain, "a module without BTF is unchanged");
        let mut broken = typed;
        broken.extend_from_slice(&u32::MAX.to_be_bytes());
        broken.extend_from_slice(SIGNATURE_MARKER);
        assert!(strip_btf(&mut broken).is_err());
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
