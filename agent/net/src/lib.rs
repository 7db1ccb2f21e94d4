//! Configures a guest's interfaces, addresses, routes and neighbours through rtnetlink.
//!
//! Synchronous on purpose: the kernel carries out a request inside its `send` and holds the RTNL lock meanwhile,
//! so callers run this on a thread that may block.
//!
//! Untrusted input: the caller's texts ([`Name`], [`Mac`] and [`Network`] are validated on construction) and the
//! format of the kernel's responses.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod address;
mod error;
mod interface;
mod link;
mod message;
mod names;
mod neighbour;
mod netlink;
mod network;
mod route;

pub use address::LinkAddress;
pub use error::{Error, Result};
pub use interface::{Interface, Target, configure};
pub use link::{Link, NOARP, UP};
pub use message::count_readable;
pub use names::{InvalidMac, InvalidName, Mac, Name};
pub use neighbour::{Neighbour, replace_neighbours};
pub use netlink::Netlink;
pub use network::{InvalidNetwork, Network, has_ipv6};
pub use route::{Family, ListedRoute, ONLINK, Route, replace_routes};
