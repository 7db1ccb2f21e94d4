//! A guest's interfaces, addresses, routes and neighbours, by rtnetlink.
//!
//! Synchronous on purpose: the kernel does the work of a request inside the
//! `send` of it and takes its one lock for all interfaces meanwhile, so callers
//! that serve others run this beside them, on a thread that may wait.
//!
//! Nothing here trusts its caller's texts ([`Name`], [`Mac`] and [`Network`] are
//! checked when they are made) or the shape of what the kernel answers.
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
pub use message::readable;
pub use names::{Mac, Name, NotAMac, NotAName};
pub use neighbour::{Neighbour, replace_neighbours};
pub use netlink::Netlink;
pub use network::{Network, NotANetwork, has_ipv6};
pub use route::{Family, ListedRoute, ONLINK, Route, replace_routes};
