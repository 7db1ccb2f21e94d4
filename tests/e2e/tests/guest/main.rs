//! Scenarios of one guest (tier T1): a real kernel, our PID 1 and agent,
//! synthetic GPUs with the stand-in driver, real containers.
#![expect(clippy::unwrap_used, reason = "a scenario whose setup fails has failed")]

mod agent_in_guest;
mod agent_life;
mod attach;
mod command;
mod daemons;
mod devices;
mod extensions;
mod failures;
mod faults;
mod first_light;
mod gpu_hotplug;
mod gpu_test;
mod guest_mode;
mod hardening;
mod hotplug_cpu_memory;
mod image_boot;
mod initramfs_compression;
mod kernel_modules;
mod logs;
mod orphans;
mod packet_filter;
mod ports;
mod real_driver;
mod service_vm;
mod settings;
mod shared_failing_gpu;
mod shared_gpus;
mod shared_without_driver;
mod shared_without_gpus;
mod shutdown;
mod storages;
mod support;
mod verity_root;
