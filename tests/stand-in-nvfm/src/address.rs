//! The manager's address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use firstlight_fake_fm::codes;

use crate::abi::{ADDRESS_BYTES, INET, UNIX, VSOCK};

const PORT: u16 = 6666;

/// A valid address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// By TCP.
    Inet(SocketAddr),
    /// By a Unix socket.
    Unix(PathBuf),
    /// A vsock address: connections always fail.
    Vsock,
}

impl Address {
    /// Parses the two address fields of a connection.
    pub(crate) fn parse(kind: u32, bytes: &[u8; ADDRESS_BYTES]) -> Result<Self, i32> {
        let end = bytes.iter().position(|byte| *byte == 0).ok_or(codes::BAD_PARAM)?;
        let text = std::str::from_utf8(&bytes[..end]).map_err(|_| codes::BAD_PARAM)?;
        if text.is_empty() {
            return Err(codes::BAD_PARAM);
        }
        let parsed = match kind {
            INET => inet(text).map(Self::Inet),
            UNIX => Some(Self::Unix(text.into())),
            VSOCK => vsock(text).then_some(Self::Vsock),
            _ => None,
        };
        parsed.ok_or(codes::BAD_PARAM)
    }
}

/// `ip` or `ip:port`: the manager binds to IPv4 addresses only.
fn inet(text: &str) -> Option<SocketAddr> {
    let (host, port) = match text.split_once(':') {
        None => (text, PORT),
        Some((host, port)) => (host, port.parse().ok()?),
    };
    let host: Ipv4Addr = host.parse().ok()?;
    Some(SocketAddr::new(IpAddr::V4(host), port))
}

/// `cid:port`.
fn vsock(text: &str) -> bool {
    text.split_once(':').is_some_and(|(cid, port)| cid.parse::<u32>().is_ok() && port.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_by_kind() {
        let parse = |kind, text: &str| {
            let mut bytes = [0; ADDRESS_BYTES];
            bytes[..text.len()].copy_from_slice(text.as_bytes());
            Address::parse(kind, &bytes)
        };
        assert_eq!(parse(INET, "127.0.0.1"), Ok(Address::Inet("127.0.0.1:6666".parse().unwrap())));
        assert_eq!(parse(INET, "127.0.0.1:7000"), Ok(Address::Inet("127.0.0.1:7000".parse().unwrap())));
        assert_eq!(parse(UNIX, "/run/fm"), Ok(Address::Unix("/run/fm".into())));
        assert_eq!(parse(VSOCK, "3:6666"), Ok(Address::Vsock));
        let wrong = [(0, "127.0.0.1"), (4, "x"), (INET, ""), (INET, "/run/fm"), (INET, "1.2.3.4:x"), (VSOCK, "3")];
        assert!(wrong.iter().all(|(kind, text)| parse(*kind, text) == Err(codes::BAD_PARAM)));
        assert_eq!(Address::parse(UNIX, &[b'a'; ADDRESS_BYTES]), Err(codes::BAD_PARAM), "it does not end");
    }
}
