use super::*;
use crate::profile::{PROFILES, profile};
use proptest::prelude::*;

fn space(name: &str) -> ConfigSpace {
    let profile = profile(name).unwrap();
    ConfigSpace::new(profile, profile.bars, 0x0004_4b00_2330_0001)
}

fn read16(space: &ConfigSpace, at: u64) -> u16 {
    let mut data = [0; 2];
    space.read(at, &mut data);
    u16::from_le_bytes(data)
}

fn read32(space: &ConfigSpace, at: u64) -> u32 {
    let mut data = [0; 4];
    space.read(at, &mut data);
    u32::from_le_bytes(data)
}

/// Walks the capability list as the kernel's `pci_find_capability` does.
fn capabilities(space: &ConfigSpace) -> Vec<(u8, u64)> {
    let mut found = Vec::new();
    let mut at = u64::from(read16(space, 0x34) & 0xff);
    while at != 0 {
        assert!(at >= 0x40 && at.is_multiple_of(4) && found.len() < 48, "bad pointer {at:#x} after {found:x?}");
        let [id, next] = read16(space, at).to_le_bytes();
        found.push((id, at));
        at = u64::from(next);
    }
    found
}

#[test]
fn identity_matches_the_profile() {
    for row in PROFILES {
        let space = space(row.name);
        assert_eq!(read16(&space, 0x00), row.vendor);
        assert_eq!(read16(&space, 0x02), row.device);
        assert_eq!(read32(&space, 0x08) >> 8, row.class);
        assert_eq!(read16(&space, 0x2c), row.subsystem_vendor);
        assert_eq!(read16(&space, 0x2e), row.subsystem_device);
    }
    let h200 = space("h200");
    assert_eq!((read16(&h200, 0), read16(&h200, 2), read32(&h200, 8)), (0x10de, 0x2335, 0x0302_00a1));
}

#[test]
fn bars_report_their_size() {
    for row in PROFILES {
        let mut space = space(row.name);
        let mut sizes = Vec::new();
        for index in [0u64, 2, 4] {
            let at = 0x10 + 4 * index;
            space.write(at, &[0xff; 8]);
            let value = u64::from(read32(&space, at)) | u64::from(read32(&space, at + 4)) << 32;
            if value != 0 {
                assert_eq!(value & 0xf, 0xc, "64-bit prefetchable memory");
                sizes.push((index, (!(value & !0xf)).wrapping_add(1)));
            }
        }
        let expected: Vec<_> = row.bars.iter().map(|bar| (u64::from(bar.index), bar.size)).collect();
        assert_eq!(sizes, expected, "{}", row.name);
    }
}

#[test]
fn capability_chain_is_complete() {
    for row in PROFILES {
        let space = space(row.name);
        assert_ne!(read16(&space, 0x06) & 0x10, 0, "status lacks the capability bit");
        let ids: Vec<u8> = capabilities(&space).iter().map(|(id, _)| *id).collect();
        let mut expected = vec![CAP_PM, CAP_MSIX, CAP_PCIE];
        expected.extend(row.vpd_model.map(|_| CAP_VPD));
        assert_eq!(ids, expected, "{}", row.name);
    }
}

#[test]
fn msix_points_into_bar0() {
    let space = space("h100");
    let (_, at) = capabilities(&space).into_iter().find(|(id, _)| *id == CAP_MSIX).unwrap();
    assert_eq!(read16(&space, at + 2) & 0x7ff, 8);
    assert_eq!(read32(&space, at + 4), 0xb9_0000);
    assert_eq!(read32(&space, at + 8), 0xba_0000);
}

#[test]
fn serial_number_is_an_extended_capability() {
    let space = space("b200");
    assert_eq!(read32(&space, 0x100), 0x0001_0003);
    assert_eq!(read32(&space, 0x104), 0x2330_0001);
    assert_eq!(read32(&space, 0x108), 0x0004_4b00);
}

#[test]
fn function_level_reset_restores_the_initial_values() {
    let mut space = space("h100");
    assert_eq!(space.write(0x04, &0x0006u16.to_le_bytes()), Effect::None);
    space.write(0x10, &0xe000_0000u32.to_le_bytes());
    let (_, pcie) = capabilities(&space).into_iter().find(|(id, _)| *id == CAP_PCIE).unwrap();
    assert_ne!(read32(&space, pcie + 4) & 1 << 28, 0, "no FLR announced");
    assert_eq!(space.write(pcie + 8, &0xa810u16.to_le_bytes()), Effect::FunctionReset);
    assert_eq!(read16(&space, 0x04), 0);
    assert_eq!(read32(&space, 0x10), 0xc);
    assert_eq!(read16(&space, pcie + 8) & INITIATE_FLR, 0);
}

/// Reads the vital product data as a driver does: address, wait, data.
fn read_vpd(space: &mut ConfigSpace, length: u16) -> Vec<u8> {
    let (_, at) = capabilities(space).into_iter().find(|(id, _)| *id == CAP_VPD).unwrap();
    let mut data = Vec::new();
    for address in (0..length).step_by(4) {
        space.write(at + 2, &address.to_le_bytes());
        assert_eq!(read16(space, at + 2), address | VPD_DONE);
        data.extend(read32(space, at + 4).to_le_bytes());
    }
    data
}

#[test]
fn only_the_bridge_has_the_smdl_keyword() {
    let has_model = |name| {
        let data = read_vpd(&mut space(name), 128);
        assert_eq!(data[0], 0x82);
        data.windows(11).any(|window| window == b"SMDL=SW_MNG")
    };
    assert!(has_model("cx7"));
    assert!(!has_model("cx7-nic"));
}

#[test]
fn vpd_checksum_is_zero() {
    let data = vpd("cx7", "SW_MNG");
    let (end, checked) = data.split_last().unwrap();
    assert_eq!(*end, 0x78);
    assert_eq!(checked.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
}

proptest! {
    #[test]
    fn arbitrary_writes_keep_identity_capabilities_and_sizes(
        row in 0..PROFILES.len(),
        writes in proptest::collection::vec((0u64..5000, proptest::collection::vec(any::<u8>(), 0..9)), 0..40),
    ) {
        let name = PROFILES[row].name;
        let mut space = space(name);
        let before = capabilities(&space);
        for (at, data) in writes {
            space.write(at, &data);
        }
        prop_assert_eq!(capabilities(&space), before);
        prop_assert_eq!(read16(&space, 2), PROFILES[row].device);
        prop_assert_eq!(read32(&space, 0x10) & 0xf, 0xc);
        let mut beyond = [0; 4];
        space.read(4094, &mut beyond);
        prop_assert_eq!(beyond, [0, 0, 0xff, 0xff]);
    }
}
