//! The output of the CUDA program.

/// The lines `cuda KEY VALUE`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cuda(Vec<(String, String)>);

impl Cuda {
    /// Parses a container's output.
    pub(crate) fn read(stdout: &str) -> Self {
        let lines = stdout.lines().filter_map(|line| line.strip_prefix("cuda ")?.split_once(' '));
        Self(lines.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect())
    }

    /// Returns a value.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// Returns a numeric value.
    pub(crate) fn number(&self, key: &str) -> Option<f64> {
        self.text(key)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_and_other_lines_ignored() {
        let cuda = Cuda::read("sees x\ncuda us-init 12.5\ncuda name NVIDIA H200\ncuda error no\ncudax y z\n");
        assert_eq!((cuda.number("us-init"), cuda.text("name")), (Some(12.5), Some("NVIDIA H200")));
        assert_eq!((cuda.text("error"), cuda.number("devices")), (Some("no"), None));
    }
}
