//! Scenarios of one guest (tier T1): a real kernel, our PID 1 and agent,
//! synthetic GPUs with the stand-in driver, real containers.
#![expect(clippy::unwrap_used, reason = "a scenario that cannot go on has failed")]

mod agent_in_guest;
mod agent_life;
mod command;
mod containers;
mod devices;
mod faults;
mod first_light;
mod gpu_test;
mod grown;
mod ports;
mod storages;
mod support;
