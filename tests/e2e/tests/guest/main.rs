//! Scenarios of one guest (tier T1): a real kernel, our PID 1 and agent,
//! synthetic GPUs with the stand-in driver, real containers.
#![expect(clippy::unwrap_used, reason = "a scenario that cannot go on has failed")]

mod agent_in_guest;
mod agent_life;
mod attach;
mod command;
mod containers;
mod daemons;
mod devices;
mod doors;
mod extensions;
mod failures;
mod faults;
mod first_light;
mod gpu_test;
mod grown;
mod image_boot;
mod kernel_modules;
mod logs;
mod modes;
mod orphans;
mod packed;
mod packet_filter;
mod plugged;
mod ports;
mod real_driver;
mod service_vm;
mod settings;
mod storages;
mod support;
mod verified;
mod way_down;
