//! Network calls, verified without the agent's code. NICs are veth devices in a separate network namespace.

mod fixture;
mod interfaces;
mod requests;
mod routes;
