//! What a run reports while it lasts: steps, and the container's output line by line.

use crate::agent::Output;

/// Longest line of output, bytes: a longer one is reported in parts.
const MAX_LINE: usize = 8192;

/// One report of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress<'a> {
    /// A step of the run, as a sentence.
    Step(&'a str),
    /// A line of the container's output, without line end and control characters.
    Line(Output, &'a str),
}

impl std::fmt::Display for Progress<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Step(text) => f.write_str(text),
            Self::Line(Output::Stdout, line) => write!(f, "  | {line}"),
            Self::Line(Output::Stderr, line) => write!(f, "  ! {line}"),
        }
    }
}

/// Splits an output stream into lines.
#[derive(Debug)]
pub(super) struct Lines {
    output: Output,
    partial: Vec<u8>,
}

impl Lines {
    pub(super) fn new(output: Output) -> Self {
        Self { output, partial: Vec::new() }
    }

    /// Reports all lines that `bytes` completes. The end of the stream, an empty slice, completes the last one.
    pub(super) fn feed(&mut self, bytes: &[u8], report: &mut dyn FnMut(Progress<'_>)) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            for piece in part.chunks(MAX_LINE) {
                self.partial.extend_from_slice(piece);
                if piece.ends_with(b"\n") || self.partial.len() >= MAX_LINE {
                    self.flush(report);
                }
            }
        }
        if bytes.is_empty() && !self.partial.is_empty() {
            self.flush(report);
        }
    }

    fn flush(&mut self, report: &mut dyn FnMut(Progress<'_>)) {
        let bytes = std::mem::take(&mut self.partial);
        report(Progress::Line(self.output, &sanitize(&String::from_utf8_lossy(&bytes))));
    }
}

/// Removes control characters: container output is untrusted input to the terminal.
pub(super) fn sanitize(line: &str) -> String {
    line.chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(parts: &[&[u8]]) -> Vec<String> {
        let (mut all, mut lines) = (Vec::new(), Lines::new(Output::Stdout));
        for part in parts.iter().chain([&&b""[..]]) {
            lines.feed(part, &mut |progress| all.push(progress.to_string()));
        }
        all
    }

    #[test]
    fn lines_are_reported_when_complete_and_without_control_characters() {
        assert_eq!(lines(&[b"a", b"b\nc\n", b"\x1b[31mred\tx"]), ["  | ab", "  | c", "  | [31mred\tx"]);
        assert_eq!(lines(&[]), Vec::<String>::new());
        let mut seen = Vec::new();
        let mut stderr = Lines::new(Output::Stderr);
        stderr.feed(b"now\nlater", &mut |progress| seen.push(progress.to_string()));
        assert_eq!(seen, ["  ! now"]);
    }

    #[test]
    fn endless_line_is_reported_in_parts() {
        let all = lines(&[&[b'x'; 3 * MAX_LINE]]);
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|line| line.len() == MAX_LINE + 4));
    }

    proptest! {
        #[test]
        fn splitting_the_stream_changes_no_line(text in "[a-z\n]{0,200}", at in 0_usize..200) {
            let bytes = text.as_bytes();
            let at = at.min(bytes.len());
            let whole: Vec<String> = if bytes.is_empty() { Vec::new() } else { lines(&[bytes]) };
            let parts: Vec<&[u8]> = [&bytes[..at], &bytes[at..]].into_iter().filter(|part| !part.is_empty()).collect();
            prop_assert_eq!(lines(&parts), whole);
        }
    }
}
