//! Which InfiniBand port leads to the NVSwitches.
//!
//! From NVLink 5 on, the switches are behind a bridge that is a ConnectX-7 to
//! its ids; only its vital product data tells it from a NIC for data.

use std::fs;
use std::path::Path;

use crate::root::Root;

/// What the vital product data of such a bridge says.
const MARK: &[u8] = b"SW_MNG";

/// Bit of a port's capabilities: no subnet manager may run there.
const NO_SUBNET_MANAGER: u32 = 1 << 10;

/// The first port on which the subnet manager of the fabric can run, as daemons take it.
///
/// # Errors
/// There is none; what was seen.
pub fn of_switches(root: &Root) -> Result<String, String> {
    let dir = root.path("/sys/class/infiniband");
    let entries = fs::read_dir(&dir)
        .map_err(|error| format!("cannot read {}: {error}; is the module mlx5_ib loaded?", dir.display()))?;
    let (mut devices, mut bridges) = (0, 0);
    let mut found = Vec::new();
    for device in entries.flatten() {
        devices += 1;
        if !is_bridge(&device.path()) {
            continue;
        }
        bridges += 1;
        let name = device.file_name();
        let ports = fs::read_dir(device.path().join("ports")).into_iter().flatten().flatten();
        // mlx5_2 comes before mlx5_10.
        found.extend(ports.filter_map(|port| Some((name.len(), name.clone(), port.file_name(), guid(&port.path())?))));
    }
    found.into_iter().min().map(|(.., guid)| guid).ok_or_else(|| {
        format!(
            "no InfiniBand port for the NVSwitches: {devices} devices, {bridges} of them bridges (marked SW_MNG), \
             none of these with a port that allows a subnet manager"
        )
    })
}

fn is_bridge(device: &Path) -> bool {
    fs::read(device.join("device/vpd")).is_ok_and(|vpd| vpd.windows(MARK.len()).any(|part| part == MARK))
}

/// The port's GUID: the last half of its first address, `fe80:...:1122:3344:5566:7788`.
fn guid(port: &Path) -> Option<String> {
    let capabilities = fs::read_to_string(port.join("cap_mask")).ok()?;
    let capabilities = u32::from_str_radix(capabilities.trim().trim_start_matches("0x"), 16).ok()?;
    let address = fs::read_to_string(port.join("gids/0")).ok()?;
    let words: Vec<&str> = address.trim().split(':').collect();
    let digits = words.get(4..).filter(|_| words.len() == 8)?.concat();
    let value = u64::from_str_radix(&digits, 16).ok()?;
    (value != 0 && capabilities & NO_SUBNET_MANAGER == 0).then(|| format!("0x{value:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(root: &Path, name: &str, vpd: &str, capabilities: &str, address: &str) {
        let port = root.join(format!("sys/class/infiniband/{name}/ports/1"));
        fs::create_dir_all(port.join("gids")).unwrap();
        fs::create_dir_all(root.join(format!("sys/class/infiniband/{name}/device"))).unwrap();
        fs::write(root.join(format!("sys/class/infiniband/{name}/device/vpd")), vpd).unwrap();
        fs::write(port.join("cap_mask"), capabilities).unwrap();
        fs::write(port.join("gids/0"), address).unwrap();
    }

    #[test]
    fn first_bridge_that_allows_a_subnet_manager_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        assert!(of_switches(&root).unwrap_err().contains("mlx5_ib"));
        device(dir.path(), "mlx5_1", "MLX ordinary NIC", "0x0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
        assert!(of_switches(&root).unwrap_err().contains("1 devices, 0 of them bridges"));
        device(dir.path(), "mlx5_2", "SMDL=SW_MNG", "0x2651ec48", "fe80:0000:0000:0000:0000:0000:0000:0002\n");
        device(dir.path(), "mlx5_3", "SMDL=SW_MNG", "0x2651e848", "fe80:0000:0000:0000:0000:0000:0000:0000\n");
        device(dir.path(), "mlx5_10", "SMDL=SW_MNG", "0x2651e848", "fe80:0000:0000:0000:b83f:d203:00a5:0010\n");
        device(dir.path(), "mlx5_4", "SMDL=SW_MNG", "0x2651e848", "fe80:0000:0000:0000:b83f:d203:00a5:0004\n");
        assert_eq!(of_switches(&root).unwrap(), "0xb83fd20300a50004");
    }

    #[test]
    fn invalid_port_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        device(dir.path(), "mlx5_0", "SW_MNG", "zz", "fe80::1");
        device(dir.path(), "mlx5_1", "SW_MNG", "0x0", "a:b");
        device(dir.path(), "mlx5_2", "SW_MNG", "0x0", "1:2:3:4:ffffff:ffffff:ffffff:f");
        assert!(of_switches(&Root::at(dir.path())).is_err());
    }
}
