//! Converts resource limits.
//!
//! Zero means "not set" and -1 "no limit". Omitted is what cgroup v2 does not support (kernel
//! memory, swappiness, real-time shares, network classes, leaf weights). Block I/O limits are
//! passed through: shims send none, as their device numbers would be the host's.

use firstlight_agent_api::oci;
use oci_spec::runtime::{
    LinuxBlockIo, LinuxCpu, LinuxDeviceCgroup, LinuxDeviceCgroupBuilder, LinuxDeviceType, LinuxHugepageLimit,
    LinuxHugepageLimitBuilder, LinuxMemory, LinuxPidsBuilder, LinuxResources, LinuxThrottleDevice,
    LinuxThrottleDeviceBuilder, LinuxWeightDevice, LinuxWeightDeviceBuilder,
};

use super::{ConvertError, Result, parse_name, some};

/// Converts limits and device rules.
///
/// # Errors
/// A device rule has unknown values, or a number is out of range.
pub fn resources(message: Option<&oci::LinuxResources>) -> Result<LinuxResources> {
    let mut resources = LinuxResources::default();
    let Some(message) = message else { return Ok(resources) };
    resources.set_devices(Some(message.Devices.iter().map(rule).collect::<Result<_>>()?));
    if let Some(given) = message.Memory.as_ref() {
        let mut memory = LinuxMemory::default();
        memory.set_limit(set(given.Limit)).set_reservation(set(given.Reservation)).set_swap(set(given.Swap));
        resources.set_memory(Some(memory));
    }
    if let Some(given) = message.CPU.as_ref() {
        let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        let mut cpu = LinuxCpu::default();
        cpu.set_shares(set(given.Shares)).set_quota(set(given.Quota)).set_period(set(given.Period));
        cpu.set_cpus(text(&given.Cpus)).set_mems(text(&given.Mems));
        resources.set_cpu(Some(cpu));
    }
    if let Some(limit) = message.Pids.as_ref().and_then(|pids| set(pids.Limit)) {
        resources.set_pids(Some(LinuxPidsBuilder::default().limit(limit).build()?));
    }
    if !message.HugepageLimits.is_empty() {
        resources.set_hugepage_limits(Some(message.HugepageLimits.iter().map(hugepages).collect::<Result<_>>()?));
    }
    if let Some(given) = message.BlockIO.as_ref() {
        resources.set_block_io(Some(block(given)?));
    }
    Ok(resources)
}

fn block(message: &oci::LinuxBlockIO) -> Result<LinuxBlockIo> {
    let mut io = LinuxBlockIo::default();
    let weight = |weight: u32| -> Result<Option<u16>> {
        let wrong = || ConvertError::Range { what: "block I/O weight", value: weight.into() };
        set(weight).map(|_| u16::try_from(weight).map_err(|_| wrong())).transpose()
    };
    let weights: Vec<LinuxWeightDevice> = message
        .WeightDevice
        .iter()
        .map(|device| {
            let builder = LinuxWeightDeviceBuilder::default().major(device.Major).minor(device.Minor);
            let entry = match weight(device.Weight)? {
                Some(weight) => builder.weight(weight),
                None => builder,
            }
            .build()?;
            Ok(entry)
        })
        .collect::<Result<_>>()?;
    let throttles = |devices: &[oci::LinuxThrottleDevice]| -> Result<Option<Vec<LinuxThrottleDevice>>> {
        let all = devices.iter().map(|device| {
            let builder = LinuxThrottleDeviceBuilder::default().major(device.Major).minor(device.Minor);
            Ok(builder.rate(device.Rate).build()?)
        });
        Ok(some(&all.collect::<Result<Vec<_>>>()?))
    };
    io.set_weight(weight(message.Weight)?)
        .set_weight_device(some(&weights))
        .set_throttle_read_bps_device(throttles(&message.ThrottleReadBpsDevice)?)
        .set_throttle_write_bps_device(throttles(&message.ThrottleWriteBpsDevice)?)
        .set_throttle_read_iops_device(throttles(&message.ThrottleReadIOPSDevice)?)
        .set_throttle_write_iops_device(throttles(&message.ThrottleWriteIOPSDevice)?);
    Ok(io)
}

fn set<T: PartialEq + Default>(value: T) -> Option<T> {
    if value == T::default() { None } else { Some(value) }
}

fn rule(message: &oci::LinuxDeviceCgroup) -> Result<LinuxDeviceCgroup> {
    let kind = if message.Type.is_empty() { LinuxDeviceType::A } else { parse_name("device type", &message.Type)? };
    if !message.Access.chars().all(|c| "rwm".contains(c)) {
        let text = message.Access.chars().take(60).collect();
        return Err(ConvertError::Unknown { what: "device access", text });
    }
    let mut rule =
        LinuxDeviceCgroupBuilder::default().allow(message.Allow).typ(kind).access(&message.Access).build()?;
    // Major 0 is unused, so zero and below mean "any"; minor 0 is valid.
    rule.set_major(Some(message.Major).filter(|major| *major > 0));
    rule.set_minor(Some(message.Minor).filter(|minor| *minor >= 0 && rule.major().is_some()));
    Ok(rule)
}

fn hugepages(message: &oci::LinuxHugepageLimit) -> Result<LinuxHugepageLimit> {
    let limit = i64::try_from(message.Limit).unwrap_or(i64::MAX);
    Ok(LinuxHugepageLimitBuilder::default().page_size(&message.Pagesize).limit(limit).build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_not_set_and_minus_one_is_no_limit() {
        let mut message = oci::LinuxResources::new();
        message.Memory.mut_or_insert_default().Limit = -1;
        message.CPU.mut_or_insert_default().Quota = -1;
        message.CPU.mut_or_insert_default().Shares = 512;
        message.Pids.mut_or_insert_default();
        let resources = resources(Some(&message)).unwrap();
        let memory = resources.memory().unwrap();
        assert_eq!((memory.limit(), memory.reservation(), memory.swap()), (Some(-1), None, None));
        let cpu = resources.cpu().clone().unwrap();
        assert_eq!((cpu.quota(), cpu.shares(), cpu.period(), cpu.cpus()), (Some(-1), Some(512), None, &None));
        assert!(resources.pids().is_none() && resources.hugepage_limits().is_none());
    }

    #[test]
    fn block_io_limits_are_converted() {
        let mut message = oci::LinuxResources::new();
        let io = message.BlockIO.mut_or_insert_default();
        io.Weight = 500;
        io.WeightDevice.push(oci::LinuxWeightDevice { Major: 8, Weight: 70_000, ..Default::default() });
        io.ThrottleReadBpsDevice.push(oci::LinuxThrottleDevice { Major: 8, Rate: 7, ..Default::default() });
        assert!(resources(Some(&message)).unwrap_err().to_string().contains("70000"));
        message.BlockIO.mut_or_insert_default().WeightDevice.clear();
        let io = resources(Some(&message)).unwrap().block_io().clone().unwrap();
        assert_eq!((io.weight(), io.throttle_read_bps_device().clone().unwrap()[0].rate()), (Some(500), 7));
        assert!(io.throttle_write_bps_device().is_none());
    }

    #[test]
    fn device_rule_wildcards_are_retained() {
        let rule_of = |kind: &str, major, minor, access: &str| {
            rule(&oci::LinuxDeviceCgroup {
                Allow: true,
                Type: kind.into(),
                Major: major,
                Minor: minor,
                Access: access.into(),
                ..Default::default()
            })
        };
        let one = rule_of("c", 1, 0, "rw").unwrap();
        assert_eq!((one.major(), one.minor()), (Some(1), Some(0)));
        let all = rule_of("", 0, 0, "rwm").unwrap();
        assert_eq!((all.typ(), all.major(), all.minor()), (Some(LinuxDeviceType::A), None, None));
        assert_eq!(rule_of("b", -1, -1, "m").unwrap().major(), None);
        assert!(rule_of("z", 1, 1, "r").unwrap_err().to_string().contains("\"z\""));
        assert!(rule_of("c", 1, 1, "rx").unwrap_err().to_string().contains("rx"));
    }
}
