//! `modules.dep`: the file of each module, and the files of its dependencies.

use super::name::{fold, same, stem};

/// An index of the lines of `modules.dep` by module name.
///
/// A distribution's kernel has thousands of lines and an image needs dozens of modules, so the text
/// is scanned once. The hash table holds offsets into the text only.
#[derive(Debug, Default)]
pub struct Dependencies {
    text: String,
    /// Line index plus one, 0 for an empty slot; the length is a power of two.
    table: Vec<u32>,
}

/// The line of one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    /// Offset of the line in the text, which identifies the line.
    pub at: usize,
    /// The module's file, relative to the directory of `modules.dep`.
    pub file: &'a str,
    needs: &'a str,
}

impl<'a> Line<'a> {
    /// The files of the module's dependencies in load order; `depmod` writes them in reverse.
    pub fn needs(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.needs.split_ascii_whitespace().rev()
    }
}

fn hash(name: &str) -> usize {
    // FNV-1a: names are short, and collisions give no attacker an advantage.
    let hash =
        name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(fold(byte))).wrapping_mul(0x0100_0193));
    usize::try_from(hash).unwrap_or_default()
}

impl Dependencies {
    /// Indexes the text of `modules.dep`.
    #[must_use]
    pub fn new(text: String) -> Self {
        let mut this = Self { text, table: Vec::new() };
        let lines = this.text.bytes().filter(|byte| *byte == b'\n').count() + 1;
        let mut table = vec![0_u32; (lines * 2).next_power_of_two()];
        let mut at = 0;
        while at < this.text.len() {
            let end = this.text[at..].find('\n').map_or(this.text.len(), |length| at + length);
            // Offsets have 32 bits; a text of 4 GiB or more is ignored.
            if let (Some(line), Ok(mark)) = (this.line(at), u32::try_from(at + 1)) {
                let mut slot = hash(stem(line.file)) & (table.len() - 1);
                // At most half of the slots are used.
                while table[slot] != 0 {
                    slot = (slot + 1) & (table.len() - 1);
                }
                table[slot] = mark;
            }
            at = end + 1;
        }
        this.table = table;
        this
    }

    fn line(&self, at: usize) -> Option<Line<'_>> {
        let rest = self.text.get(at..)?;
        let line = &rest[..rest.find('\n').unwrap_or(rest.len())];
        let (file, needs) = line.split_once(':')?;
        Some(Line { at, file, needs })
    }

    /// Returns the line of a module; the first one if there are several.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<Line<'_>> {
        let last = self.table.len().checked_sub(1)?;
        let mut slot = hash(name) & last;
        loop {
            let at = usize::try_from(*self.table.get(slot)?).ok()?.checked_sub(1)?;
            match self.line(at) {
                Some(line) if same(stem(line.file), name) => return Some(line),
                _ => slot = (slot + 1) & last,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn modules_are_found_by_dash_or_underscore_and_the_first_line_applies() {
        let list = Dependencies::new(
            "kernel/net/vsock.ko.xz:\n\
             kernel/net/a-b.ko.xz: kernel/net/common.ko.xz kernel/net/vsock.ko.xz\n\
             no line at all\n\
             updates/a_b.ko: x.ko\nlast.ko: y.ko"
                .to_owned(),
        );
        let line = list.find("a_b").unwrap();
        assert_eq!(line.file, "kernel/net/a-b.ko.xz");
        assert_eq!(line.needs().collect::<Vec<_>>(), ["kernel/net/vsock.ko.xz", "kernel/net/common.ko.xz"]);
        assert_eq!(list.find("last").unwrap().needs().collect::<Vec<_>>(), ["y.ko"]);
        assert_eq!(list.find("vsock").unwrap().needs().count(), 0);
        for none in ["", "a", "no line at all", "common"] {
            assert_eq!(list.find(none), None, "{none}");
        }
        assert_eq!(Dependencies::default().find("a"), None);
        assert_eq!(Dependencies::new(String::new()).find("a"), None);
    }

    proptest! {
        #[test]
        fn lookup_equals_linear_search(text in "([ab_-]{1,3}\\.ko(\\.xz)?:?[ abko.]{0,6}\n?){0,40}", name in "[ab_-]{1,3}") {
            let searched = text.lines().find_map(|line| {
                let (file, _) = line.split_once(':')?;
                same(stem(file), &name).then(|| file.to_owned())
            });
            let list = Dependencies::new(text);
            prop_assert_eq!(list.find(&name).map(|line| line.file.to_owned()), searched);
        }

        #[test]
        fn arbitrary_text_is_a_list(text in any::<String>(), name in any::<String>()) {
            let _ = Dependencies::new(text).find(&name);
        }
    }
}
