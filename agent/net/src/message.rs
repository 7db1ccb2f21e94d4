//! Encodes requests and decodes responses.

use netlink_packet_core::{
    NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload, NlaBuffer, NlasIterator, Parseable,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;

/// The length of `struct nlmsghdr`.
const HEADER: usize = 16;

/// `NLM_F_DUMP_INTR`: the list changed while it was dumped.
const INTERRUPTED: u16 = 0x10;

/// `NLM_F_CAPPED` and `NLM_F_ACK_TLVS` of an error: only the request's header is echoed; extended-ack attributes
/// follow.
const CAPPED: u16 = 0x100;
const ACK_TLVS: u16 = 0x200;

/// `NLMSGERR_ATTR_MSG`.
const ATTRIBUTE_MESSAGE: u16 = 1;

/// The message types that are parsed (`linux/netlink.h`, `linux/rtnetlink.h`): error and done, links, addresses,
/// routes, neighbours. No others, because the parsing crate panics on some truncated ones.
const KINDS: &[u16] = &[2, 3, 16, 20, 24, 28];

/// One message of a response.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A list entry.
    Entry(RouteNetlinkMessage),
    /// A malformed message. The other entries of a list are still valid.
    Malformed(String),
    /// The end, and whether the list changed during the dump.
    Done { interrupted: bool },
    /// An error, with the kernel's extended-ack message.
    Refused(Errno, String),
}

/// Encodes a request.
pub(crate) fn request(message: RouteNetlinkMessage, flags: u16, sequence: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = sequence;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Decodes a datagram's messages with this sequence number; the error says why the rest cannot be decoded.
pub(crate) fn answers(datagram: &[u8], sequence: u32) -> Result<Vec<Answer>, String> {
    let mut answers = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let buffer = NetlinkBuffer::new_checked(rest).map_err(|error| error.to_string())?;
        let length = usize::try_from(buffer.length()).unwrap_or(usize::MAX);
        let (message, after) = rest.split_at_checked(length).ok_or("truncated message")?;
        // Skip the alignment padding between messages.
        rest = after.get(length.next_multiple_of(4) - length..).unwrap_or_default();
        if buffer.sequence_number() == sequence {
            answers.push(answer(message, buffer.flags()));
        }
    }
    Ok(answers)
}

fn answer(bytes: &[u8], flags: u16) -> Answer {
    let kind = NetlinkBuffer::new_checked(&bytes).map_or(0, |buffer| buffer.message_type());
    if !KINDS.contains(&kind) {
        return Answer::Malformed(format!("unexpected message type {kind}"));
    }
    let parsed = NetlinkBuffer::new_checked(&bytes).and_then(|buffer| NetlinkMessage::parse(&buffer));
    let interrupted = flags & INTERRUPTED != 0;
    match parsed.map(|message| message.payload) {
        Ok(NetlinkPayload::InnerMessage(entry)) => Answer::Entry(entry),
        Ok(NetlinkPayload::Done(done)) if done.code < 0 => Answer::Refused(errno(done.code), String::new()),
        Ok(NetlinkPayload::Done(_)) => Answer::Done { interrupted },
        Ok(NetlinkPayload::Error(error)) if error.raw_code() == 0 => Answer::Done { interrupted },
        Ok(NetlinkPayload::Error(error)) => Answer::Refused(errno(error.raw_code()), ext_ack(&error.header, flags)),
        Ok(_) => Answer::Malformed("unexpected payload".to_owned()),
        Err(error) => Answer::Malformed(error.to_string()),
    }
}

/// Converts an error code; rustix accepts only -4095..0.
fn errno(code: i32) -> Errno {
    if (-4095..0).contains(&code) { Errno::from_raw_os_error(-code) } else { Errno::PROTO }
}

/// Returns the extended-ack message of an error in parentheses; it follows the echoed request.
fn ext_ack(repeated: &[u8], flags: u16) -> String {
    let length = repeated.first_chunk::<4>().map_or(0, |length| u32::from_ne_bytes(*length));
    let length = if flags & CAPPED == 0 { usize::try_from(length).unwrap_or(usize::MAX) } else { HEADER };
    let attributes = length.checked_next_multiple_of(4).and_then(|at| repeated.get(at..)).unwrap_or_default();
    if flags & ACK_TLVS == 0 || attributes.is_empty() {
        return String::new();
    }
    let found =
        NlasIterator::new(attributes).filter_map(Result::ok).find(|attribute| attribute.kind() == ATTRIBUTE_MESSAGE);
    let text = found.map(|attribute: NlaBuffer<&[u8]>| String::from_utf8_lossy(attribute.value()).into_owned());
    let text: String = text.unwrap_or_default().chars().filter(|letter| !letter.is_control()).take(200).collect();
    if text.is_empty() { text } else { format!(" ({text})") }
}

/// Returns how many messages of a datagram can be decoded; for fuzz tests.
#[must_use]
pub fn count_readable(datagram: &[u8]) -> usize {
    let sequence = datagram.get(8..12).and_then(<[u8]>::first_chunk).map_or(0, |number| u32::from_ne_bytes(*number));
    let all = answers(datagram, sequence).unwrap_or_default();
    all.iter().filter(|answer| !matches!(answer, Answer::Malformed(_))).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_route::link::{LinkAttribute, LinkMessage};
    use proptest::prelude::*;

    fn link(name: &str) -> RouteNetlinkMessage {
        let mut link = LinkMessage::default();
        link.attributes.push(LinkAttribute::IfName(name.to_owned()));
        RouteNetlinkMessage::NewLink(link)
    }

    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER + payload.len()).unwrap();
        let mut bytes =
            [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &7u32.to_ne_bytes(), &[0; 4]]
                .concat();
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn responses_with_another_sequence_number_are_skipped() {
        let mut bytes = request(link("a"), 0, 6);
        bytes.extend(request(link("bcde"), 0, 7));
        bytes.extend(message(3, INTERRUPTED, &0i32.to_ne_bytes()));
        let all = answers(&bytes, 7).unwrap();
        let [Answer::Entry(entry), Answer::Done { interrupted: true }] = &all[..] else { panic!("{all:?}") };
        assert_eq!(*entry, link("bcde"));
    }

    #[test]
    fn refusal_has_the_extended_ack_message() {
        let echoed = request(link("a"), 0, 7);
        let mut ext_ack = vec![];
        ext_ack.extend(u16::try_from(4 + 6).unwrap().to_ne_bytes());
        ext_ack.extend(ATTRIBUTE_MESSAGE.to_ne_bytes());
        ext_ack.extend(b"no mtu");
        let code = (-22i32).to_ne_bytes();
        let whole = message(2, ACK_TLVS, &[&code[..], &echoed, &ext_ack].concat());
        let capped = message(2, ACK_TLVS | CAPPED, &[&code[..], &echoed[..HEADER], &ext_ack].concat());
        for bytes in [whole, capped] {
            let all = answers(&bytes, 7).unwrap();
            let [Answer::Refused(Errno::INVAL, ext_ack)] = &all[..] else { panic!("{all:?}") };
            assert_eq!(ext_ack, " (no mtu)");
        }
        assert!(matches!(answers(&message(2, 0, &[0; 20]), 7).unwrap()[..], [Answer::Done { interrupted: false }]));
        assert!(matches!(answers(&message(3, 0, &code), 7).unwrap()[..], [Answer::Refused(Errno::INVAL, _)]));
    }

    #[test]
    fn malformed_entry_does_not_hide_the_others() {
        let mut bytes = message(16, 0, &[1, 2, 3]);
        bytes.extend(request(link("a"), 0, 7));
        assert!(matches!(answers(&bytes, 7).unwrap()[..], [Answer::Malformed(_), Answer::Entry(_)]));
        assert!(answers(&bytes[..bytes.len() - 3], 7).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u16..60, flags: u16) {
            prop_assert!(count_readable(&bytes) <= bytes.len());
            let _ = count_readable(&message(kind, flags, &bytes));
        }
    }

    #[test]
    fn unexpected_message_types_are_not_parsed() {
        // RTM_NEWPREFIX with a cache entry of one byte.
        let prefix = message(52, 0, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 2, 0, 0, 0, 0, 0]);
        assert_eq!(count_readable(&prefix), 0);
    }
}
