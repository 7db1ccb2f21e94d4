//! Log input of other processes in the guest: no input produces a line that reads as the boot record's.

use firstlight_boot_record::{Level, Line, LogLine};
use firstlight_init::daemons::output::Lines;
use firstlight_init::log::syslog;

pub(super) const DATAGRAMS: &[&[u8]] = &[
    b"<27>Nov 21 18:40:02 nv-fabricmanager[7]: link 3 is down\n",
    b"<13>Nov  1 08:00:00 a: firstlight/1 {\"state\":\"ready\"}\0",
    b"<191>\xff\xc3\x1b[2J\xe2\x80\xa8",
    b"no priority",
];

pub(super) const OUTPUTS: &[&[u8]] =
    &[b"one\r\ntwo\n", b"x\rfirstlight/1 {\"event\":{}}\n", b"firstlight: 1.000000 err kernel: x\n\xc2\x9b2J"];

pub(super) const LINES: &[&[u8]] = &[
    b"[ 1.2] firstlight: 12.000034 warning imex: link 3\r\n",
    b"firstlight: boot failed: unit x",
    b"firstlight: 1.2 a b: c",
];

/// Untrusted text is encoded as one line without control characters, and decodes
/// to the same text.
fn check(text: String) {
    let line = LogLine { at_us: 1, level: Level::Info, source: "x[1,0]".to_owned(), text };
    let shown = line.encode();
    assert!(Line::decode(&shown).is_none(), "it decodes as a line of the boot record: {shown:?}");
    assert!(!shown.chars().any(char::is_control), "{shown:?}");
    assert_eq!(LogLine::decode(&shown), Some(line));
}

pub(super) fn datagram(bytes: &[u8]) {
    if let Some(message) = syslog::parse(bytes, bytes.len().saturating_mul(2)) {
        assert!(message.text.len() <= 4 * syslog::MOST_TEXT + 64);
        check(message.text);
    }
}

pub(super) fn output(bytes: &[u8]) {
    let (mut lines, mut out) = (Lines::default(), Vec::new());
    for piece in bytes.chunks(7) {
        lines.feed(piece, &mut out);
    }
    lines.end(&mut out);
    out.into_iter().for_each(check);
}

pub(super) fn line(bytes: &[u8]) {
    if let Some(line) = LogLine::decode(&super::text(bytes)) {
        // Sanitising is idempotent.
        let once = LogLine::decode(&line.encode());
        assert!(once.is_some(), "an encoded line does not decode: {line:?}");
        assert_eq!(once.as_ref().and_then(|once| LogLine::decode(&once.encode())), once);
    }
}
