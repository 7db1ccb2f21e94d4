//! The guest's network, changed over the wire and looked at without our code.
//! NICs are halves of veth pairs in a network namespace of the test's own.

mod interfaces;
mod requests;
mod routes;
mod stand;
