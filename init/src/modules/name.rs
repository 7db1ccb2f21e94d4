//! Module names, in which `-` and `_` are equal.

pub(super) fn fold(byte: u8) -> u8 {
    if byte == b'-' { b'_' } else { byte }
}

/// Returns whether two names denote the same module.
#[must_use]
pub fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).all(|(a, b)| fold(a) == fold(b))
}

/// Returns whether a list contains a name.
#[must_use]
pub fn has(list: &[String], name: &str) -> bool {
    list.iter().any(|one| same(one, name))
}

/// Returns the module name of a file: `foo-bar` for `kernel/drivers/x/foo-bar.ko.xz`.
#[must_use]
pub fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.find(".ko").map_or(name, |end| &name[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_compression_are_read_from_the_file_name() {
        for (path, name) in [("a/b/foo.ko", "foo"), ("foo.ko.zst", "foo"), ("foo", "foo"), ("a/", "")] {
            assert_eq!(stem(path), name);
        }
        assert!(same("nvidia-uvm", "nvidia_uvm") && !same("nvidia-uvm", "nvidia"));
    }
}
