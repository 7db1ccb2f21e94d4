//! Cgroup limits (cgroup v2): converts OCI resources to files and values.
//!
//! In a configuration an absent number means "unchanged", and -1 "no limit", the kernel's `max`.
//! OCI uses cgroup v1 semantics: shares are converted to a weight, and the swap limit includes the
//! memory limit.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use oci_spec::runtime::{LinuxBlockIo, LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxResources, LinuxThrottleDevice};

use crate::error::{Error, Result};

/// Default period of CPU quotas, µs.
const PERIOD: u64 = 100_000;

/// A cgroup file and its new value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    file: String,
    text: String,
    /// Alternative if the file does not exist.
    instead: Option<(String, String)>,
    /// Whether a missing file is acceptable, because the value limits nothing.
    optional: bool,
}

fn setting(file: impl Into<String>, text: impl Into<String>) -> Setting {
    Setting { file: file.into(), text: text.into(), instead: None, optional: false }
}

fn limit(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

/// Merges the changes in `given` into `before`.
#[must_use]
pub fn merge(before: &LinuxResources, given: &LinuxResources) -> LinuxResources {
    let mut all = before.clone();
    if let Some(new) = given.memory() {
        let mut memory = before.memory().unwrap_or_default();
        memory.set_swap(new.swap().or(swap_of(&memory, new.limit())));
        memory.set_limit(new.limit().or(memory.limit()));
        memory.set_reservation(new.reservation().or(memory.reservation()));
        all.set_memory(Some(memory));
    }
    if let Some(new) = given.cpu() {
        let mut cpu = before.cpu().clone().unwrap_or_default();
        cpu.set_shares(new.shares().or(cpu.shares()));
        cpu.set_quota(new.quota().or(cpu.quota()));
        cpu.set_period(new.period().or(cpu.period()));
        cpu.set_cpus(new.cpus().clone().or(cpu.cpus().clone()));
        cpu.set_mems(new.mems().clone().or(cpu.mems().clone()));
        all.set_cpu(Some(cpu));
    }
    if let Some(new) = given.pids() {
        all.set_pids(Some(*new));
    }
    if let Some(new) = given.hugepage_limits() {
        let mut limits = before.hugepage_limits().clone().unwrap_or_default();
        limits.retain(|old| new.iter().all(|limit| limit.page_size() != old.page_size()));
        limits.extend(new.iter().cloned());
        all.set_hugepage_limits(Some(limits));
    }
    if let Some(new) = given.block_io() {
        all.set_block_io(Some(new.clone()));
    }
    all
}

/// Returns the swap limit after a change of the memory limit, which it includes: the swap share
/// stays the same. Removing the memory limit removes this one too.
fn swap_of(before: &LinuxMemory, limit: Option<i64>) -> Option<i64> {
    match (limit, before.limit(), before.swap()) {
        (Some(-1), _, _) => Some(-1),
        (Some(new), Some(old), Some(swap)) if old >= 0 && swap >= old => Some(new.saturating_add(swap - old)),
        (_, _, swap) => swap,
    }
}

/// Returns the settings for the changes in `given`; `all` is the merged configuration.
///
/// # Errors
/// Contradictory or invalid numbers.
pub fn settings(given: &LinuxResources, all: &LinuxResources) -> Result<Vec<Setting>> {
    let mut settings = Vec::new();
    if let Some(new) = given.memory() {
        memory(&mut settings, new, &all.memory().unwrap_or_default())?;
    }
    if let Some(new) = given.cpu() {
        cpu(&mut settings, new, all.cpu().as_ref().unwrap_or(new))?;
    }
    if let Some(pids) = given.pids() {
        settings.push(setting("pids.max", limit(pids.limit())));
    }
    for hugepages in given.hugepage_limits().iter().flatten() {
        huge(&mut settings, hugepages)?;
    }
    if let Some(io) = given.block_io() {
        block(&mut settings, io);
    }
    Ok(settings)
}

fn memory(settings: &mut Vec<Setting>, new: &LinuxMemory, all: &LinuxMemory) -> Result<()> {
    for (what, value) in [("limit", new.limit()), ("reservation", new.reservation()), ("swap", new.swap())] {
        if value.is_some_and(|value| value < -1) {
            let value = value.unwrap_or_default();
            return Err(Error::invalid(format!("memory {what} {value}: must be bytes or -1 (no limit)")));
        }
    }
    if new.limit().is_some() || new.swap().is_some() {
        match (all.swap(), all.limit()) {
            (None, _) => {}
            (Some(-1), _) => {
                settings.push(Setting { optional: true, ..setting("memory.swap.max", "max") });
            }
            (Some(swap), Some(limit)) if limit >= 0 && swap >= limit => {
                let only = swap - limit;
                settings.push(Setting { optional: only == 0, ..setting("memory.swap.max", only.to_string()) });
            }
            (Some(swap), limit) => {
                let limit = limit.map_or("none".to_owned(), |limit| limit.to_string());
                let message = format!("memory swap {swap} includes the memory limit ({limit}), so it cannot be lower");
                return Err(Error::invalid(message));
            }
        }
    }
    settings.extend(new.limit().map(|value| setting("memory.max", limit(value))));
    settings.extend(new.reservation().map(|value| setting("memory.low", limit(value))));
    Ok(())
}

/// Converts cgroup v1 shares (2 to 262144, default 1024) to a cgroup v2 weight (1 to 10000, default
/// 100): the curve through both ends and the default that container runtimes use.
fn weight(shares: u64) -> u64 {
    const MIN: u64 = 2;
    const MAX: u64 = 1 << 18;
    if shares <= MIN {
        return 1;
    }
    if shares >= MAX {
        return 10_000;
    }
    #[expect(clippy::cast_precision_loss, reason = "below 2^18")]
    let l = (shares as f64).log2();
    let weight = 10f64.powf((l * l + 125.0 * l) / 612.0 - 7.0 / 34.0).ceil();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and 10000")]
    let weight = weight.clamp(1.0, 10_000.0) as u64;
    weight
}

fn cpu(settings: &mut Vec<Setting>, new: &LinuxCpu, all: &LinuxCpu) -> Result<()> {
    settings.extend(new.shares().map(|shares| setting("cpu.weight", weight(shares).to_string())));
    if new.quota().is_some() || new.period().is_some() {
        let quota = all.quota().unwrap_or(-1);
        if quota < -1 {
            return Err(Error::invalid(format!("CPU quota {quota}: must be µs or -1 (no limit)")));
        }
        settings.push(setting("cpu.max", format!("{} {}", limit(quota), all.period().unwrap_or(PERIOD))));
    }
    for (file, list) in [("cpuset.cpus", new.cpus()), ("cpuset.mems", new.mems())] {
        settings.extend(list.as_ref().map(|list| setting(file, list)));
    }
    Ok(())
}

fn huge(settings: &mut Vec<Setting>, hugepages: &LinuxHugepageLimit) -> Result<()> {
    let size = hugepages.page_size();
    let digits = size.trim_end_matches(|c: char| c.is_ascii_uppercase());
    let unit = &size[digits.len()..];
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) || !["KB", "MB", "GB"].contains(&unit) {
        let size: String = size.chars().take(40).collect();
        return Err(Error::invalid(format!("huge page size {size:?} is not like 2MB or 1GB")));
    }
    let text = if hugepages.limit() == i64::MAX { "max".to_owned() } else { limit(hugepages.limit()) };
    settings.push(setting(format!("hugetlb.{size}.max"), &text));
    settings.push(Setting { optional: true, ..setting(format!("hugetlb.{size}.rsvd.max"), text) });
    Ok(())
}

fn block(settings: &mut Vec<Setting>, io: &LinuxBlockIo) {
    // Scales weights from 10..1000 to 1..10000.
    let scaled = |weight: u16| 1 + u64::from(weight.max(10) - 10) * 9999 / 990;
    if let Some(weight) = io.weight() {
        let instead = Some(("io.bfq.weight".to_owned(), weight.to_string()));
        settings.push(Setting { instead, ..setting("io.weight", format!("default {}", scaled(weight))) });
    }
    for device in io.weight_device().iter().flatten() {
        if let Some(weight) = device.weight() {
            let name = format!("{}:{}", device.major(), device.minor());
            let instead = Some(("io.bfq.weight".to_owned(), format!("{name} {weight}")));
            settings.push(Setting { instead, ..setting("io.weight", format!("{name} {}", scaled(weight))) });
        }
    }
    let kinds: [(&str, &Option<Vec<LinuxThrottleDevice>>); 4] = [
        ("rbps", io.throttle_read_bps_device()),
        ("wbps", io.throttle_write_bps_device()),
        ("riops", io.throttle_read_iops_device()),
        ("wiops", io.throttle_write_iops_device()),
    ];
    for (key, devices) in kinds {
        for device in devices.iter().flatten() {
            let rate = if device.rate() == 0 { "max".to_owned() } else { device.rate().to_string() };
            settings.push(setting("io.max", format!("{}:{} {key}={rate}", device.major(), device.minor())));
        }
    }
}

/// Writes the settings to a cgroup, in order.
///
/// # Errors
/// The first rejected setting, with file and value; those before it are in effect.
pub fn apply(cgroup: &Path, settings: &[Setting]) -> Result<()> {
    for setting in settings {
        let (mut file, mut text) = (&setting.file, &setting.text);
        let mut written = write(&cgroup.join(file), text);
        if let (Err(error), Some(instead)) = (&written, &setting.instead)
            && error.kind() == ErrorKind::NotFound
        {
            (file, text) = (&instead.0, &instead.1);
            written = write(&cgroup.join(file), text);
        }
        match written {
            Err(error) if error.kind() == ErrorKind::NotFound && setting.optional => {}
            Err(error) => {
                let hint = match error.kind() {
                    ErrorKind::NotFound => "; the controller is disabled in the kernel or in a parent cgroup",
                    ErrorKind::InvalidInput => "; invalid value",
                    _ => "",
                };
                return Err(Error::internal(format!("failed to write {text:?} to {file}: {error}{hint}")));
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

/// Never creates a file: a missing one means a disabled controller.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::runtime::{
        LinuxHugepageLimitBuilder, LinuxPidsBuilder, LinuxThrottleDeviceBuilder, LinuxWeightDeviceBuilder,
    };
    use proptest::prelude::*;

    fn texts(given: &LinuxResources, before: &LinuxResources) -> Vec<String> {
        let all = merge(before, given);
        settings(given, &all).unwrap().iter().map(|s| format!("{}={}", s.file, s.text)).collect()
    }

    fn of_memory(limit: Option<i64>, swap: Option<i64>) -> LinuxResources {
        let mut memory = LinuxMemory::default();
        memory.set_limit(limit).set_swap(swap);
        let mut resources = LinuxResources::default();
        resources.set_memory(Some(memory));
        resources
    }

    fn of_cpu(quota: Option<i64>, period: Option<u64>) -> LinuxResources {
        let mut cpu = LinuxCpu::default();
        cpu.set_quota(quota).set_period(period);
        let mut resources = LinuxResources::default();
        resources.set_cpu(Some(cpu));
        resources
    }

    #[test]
    fn no_limit_is_written_as_max() {
        let before = of_memory(Some(100), Some(150));
        assert_eq!(texts(&of_memory(Some(-1), None), &before), ["memory.swap.max=max", "memory.max=max"]);
        assert_eq!(texts(&of_cpu(Some(-1), None), &of_cpu(Some(5000), Some(20_000))), ["cpu.max=max 20000"]);
        let mut pids = LinuxResources::default();
        pids.set_pids(Some(LinuxPidsBuilder::default().limit(-1i64).build().unwrap()));
        assert_eq!(texts(&pids, &LinuxResources::default()), ["pids.max=max"]);
    }

    #[test]
    fn unset_values_are_taken_from_the_previous_configuration() {
        let nothing = LinuxResources::default();
        let texts_of_memory = |limit| texts(&of_memory(Some(limit), None), &of_memory(Some(100), Some(150)));
        assert_eq!(texts_of_memory(80), ["memory.swap.max=50", "memory.max=80"]);
        assert_eq!(texts_of_memory(400), ["memory.swap.max=50", "memory.max=400"]);
        // No swap, which some clients set with every memory limit: the memory limit can still be
        // raised alone.
        let all = merge(&of_memory(Some(100), Some(100)), &of_memory(Some(200), None));
        assert_eq!((all.memory().unwrap().limit(), all.memory().unwrap().swap()), (Some(200), Some(200)));
        let most = merge(&of_memory(Some(1), Some(i64::MAX)), &of_memory(Some(i64::MAX), None));
        assert_eq!(most.memory().unwrap().swap(), Some(i64::MAX));
        for swap in [None, Some(-1)] {
            let all = merge(&of_memory(Some(100), swap), &of_memory(Some(200), None));
            assert_eq!(all.memory().unwrap().swap(), swap);
        }
        assert_eq!(texts(&of_memory(None, Some(130)), &of_memory(Some(100), None)), ["memory.swap.max=30"]);
        assert_eq!(texts(&of_cpu(None, Some(50_000)), &of_cpu(Some(7000), None)), ["cpu.max=7000 50000"]);
        assert_eq!(texts(&of_cpu(Some(7000), None), &nothing), ["cpu.max=7000 100000"]);
        assert!(texts(&nothing, &of_memory(Some(1), Some(2))).is_empty());
        let all = merge(&of_memory(Some(100), Some(150)), &of_cpu(Some(1), None));
        assert_eq!((all.memory().unwrap().limit(), all.cpu().clone().unwrap().quota()), (Some(100), Some(1)));
    }

    #[test]
    fn contradictory_limits_are_rejected_with_their_numbers() {
        for (given, part) in [
            (of_memory(Some(100), Some(50)), "swap 50"),
            (of_memory(None, Some(50)), "none"),
            (of_memory(Some(-2), None), "limit -2"),
            (of_cpu(Some(-7), None), "quota -7"),
        ] {
            let error = settings(&given, &given).unwrap_err();
            assert!(error.message.contains(part) && error.code == ttrpc::Code::INVALID_ARGUMENT, "{error}");
        }
    }

    #[test]
    fn shares_are_converted_to_weights() {
        for (shares, expected) in [(0, 1), (2, 1), (1024, 100), (1 << 18, 10_000), (u64::MAX, 10_000)] {
            assert_eq!(weight(shares), expected, "{shares}");
        }
    }

    #[test]
    fn huge_page_and_block_io_limits_are_converted() {
        let pages = |size: &str, limit: i64| {
            let mut given = LinuxResources::default();
            let limit = LinuxHugepageLimitBuilder::default().page_size(size).limit(limit).build().unwrap();
            given.set_hugepage_limits(Some(vec![limit]));
            given
        };
        let nothing = LinuxResources::default();
        assert_eq!(texts(&pages("2MB", 4096), &nothing), ["hugetlb.2MB.max=4096", "hugetlb.2MB.rsvd.max=4096"]);
        for bad in ["../2MB", "2", "MB", "2MB/x", "2mb"] {
            assert!(settings(&pages(bad, 1), &nothing).is_err(), "{bad}");
        }
        let mut io = LinuxBlockIo::default();
        let device = || LinuxThrottleDeviceBuilder::default().major(8).minor(0);
        io.set_weight(Some(1000))
            .set_weight_device(Some(vec![
                LinuxWeightDeviceBuilder::default().major(8).minor(1).weight(10u16).build().unwrap(),
            ]))
            .set_throttle_read_bps_device(Some(vec![device().rate(9u64).build().unwrap()]))
            .set_throttle_write_iops_device(Some(vec![device().rate(0u64).build().unwrap()]));
        let mut given = LinuxResources::default();
        given.set_block_io(Some(io));
        let expected = ["io.weight=default 10000", "io.weight=8:1 1", "io.max=8:0 rbps=9", "io.max=8:0 wiops=max"];
        assert_eq!(texts(&given, &nothing), expected);
    }

    #[test]
    fn write_error_has_file_and_value_and_no_file_is_created() {
        let dir = tempfile::tempdir().unwrap();
        let error = apply(dir.path(), &[setting("memory.max", "7")]).unwrap_err();
        assert!(error.message.contains("\"7\" to memory.max") && error.message.contains("controller"), "{error}");
        apply(dir.path(), &[Setting { optional: true, ..setting("memory.swap.max", "max") }]).unwrap();
        fs::write(dir.path().join("io.bfq.weight"), "").unwrap();
        let instead = Some(("io.bfq.weight".to_owned(), "55".to_owned()));
        apply(dir.path(), &[Setting { instead, ..setting("io.weight", "default 1") }]).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("io.bfq.weight")).unwrap(), "55");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    proptest! {
        #[test]
        fn any_limits_are_settings_or_an_error(limit: Option<i64>, swap: Option<i64>, quota: Option<i64>, size in "\\PC{0,8}") {
            let mut given = of_memory(limit, swap);
            given.set_cpu(of_cpu(quota, None).cpu().clone());
            let pages = LinuxHugepageLimitBuilder::default().page_size(size).limit(1i64).build().unwrap();
            given.set_hugepage_limits(Some(vec![pages]));
            for one in settings(&given, &merge(&LinuxResources::default(), &given)).unwrap_or_default() {
                prop_assert!(!one.file.contains('/') && !one.text.is_empty() && !one.text.contains("max -"));
            }
        }
    }
}
