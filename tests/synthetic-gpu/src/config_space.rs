//! PCI configuration space: 4 KiB, a mask of writable bits, and the registers whose writes have side effects.

use crate::profile::{Bar, Profile};

/// Bytes of an extended configuration space.
pub const CONFIG_SIZE: usize = 4096;

/// Offsets of the capabilities.
mod at {
    pub(super) const PM: u8 = 0x60;
    pub(super) const MSIX: u8 = 0x70;
    pub(super) const PCIE: u8 = 0x80;
    pub(super) const VPD: u8 = 0xc0;
    pub(super) const DSN: usize = 0x100;
}

const CAP_PM: u8 = 0x01;
const CAP_VPD: u8 = 0x03;
const CAP_PCIE: u8 = 0x10;
const CAP_MSIX: u8 = 0x11;
const EXT_CAP_DSN: u32 = 0x0003;

const BASE_ADDRESS_0: usize = 0x10;
const CAPABILITY_POINTER: usize = 0x34;
const DEVICE_CONTROL: usize = at::PCIE as usize + 8;
/// Bit 15 of Device Control: initiate a function level reset.
const INITIATE_FLR: u16 = 1 << 15;
/// Bit 15 of the VPD address: set by the device when the data are valid.
const VPD_DONE: u16 = 1 << 15;

/// The side effect of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// No side effect.
    None,
    /// Reset the function; the configuration space has been reset already.
    FunctionReset,
}

/// One function's configuration space.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: Box<[u8; CONFIG_SIZE]>,
    /// Mask of the writable bits.
    writable: Box<[u8; CONFIG_SIZE]>,
    initial: Box<[u8; CONFIG_SIZE]>,
    vpd: Vec<u8>,
}

impl ConfigSpace {
    /// Creates the space of a function with this identity, these BARs (the profile's or resized ones) and this
    /// device serial number.
    pub fn new(profile: &Profile, bars: &[Bar], serial: u64) -> Self {
        let mut space = Self {
            bytes: Box::new([0; CONFIG_SIZE]),
            writable: Box::new([0; CONFIG_SIZE]),
            initial: Box::new([0; CONFIG_SIZE]),
            vpd: profile.vpd_model.map(|model| vpd(profile.name, model)).unwrap_or_default(),
        };
        space.put16(0x00, profile.vendor);
        space.put16(0x02, profile.device);
        // Memory space, bus master, SERR and interrupt disable.
        space.allow16(0x04, 0x0546);
        // Status: capability list present.
        space.put16(0x06, 0x0010);
        space.put32(0x08, profile.class << 8 | u32::from(profile.revision));
        space.allow8(0x0c, 0xff);
        for bar in bars {
            space.put_bar(bar);
        }
        space.put16(0x2c, profile.subsystem_vendor);
        space.put16(0x2e, profile.subsystem_device);
        space.allow8(0x3c, 0xff);
        space.put_capabilities(profile);
        space.put32(at::DSN, EXT_CAP_DSN | 1 << 16);
        space.put(at::DSN + 4, &serial.to_le_bytes());
        space.initial = space.bytes.clone();
        space
    }

    /// Reads; bytes beyond the end are 0xff.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        let Ok(start) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(self.bytes.iter().skip(start)) {
            *to = *from;
        }
    }

    /// Writes the writable bits.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        let Ok(start) = usize::try_from(offset) else { return Effect::None };
        for (at, value) in (start..CONFIG_SIZE).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | value & mask;
        }
        let touches = |at: usize| start <= at && at < start.saturating_add(data.len());
        // The bit with the side effect is in the high byte of each register.
        if touches(usize::from(at::VPD) + 3) && !self.vpd.is_empty() {
            self.complete_vpd_access();
        }
        if touches(DEVICE_CONTROL + 1) && self.get16(DEVICE_CONTROL) & INITIATE_FLR != 0 {
            self.reset();
            return Effect::FunctionReset;
        }
        Effect::None
    }

    /// Restores the state after power-on.
    pub fn reset(&mut self) {
        self.bytes = self.initial.clone();
    }

    /// Adds a BAR. Its size bits are read-only: software determines the size by writing ones and reading back.
    fn put_bar(&mut self, bar: &Bar) {
        let at = BASE_ADDRESS_0 + 4 * usize::from(bar.index);
        // Memory, 64-bit, prefetchable.
        self.put32(at, 0xc);
        self.writable[at..at + 8].copy_from_slice(&(!(bar.size - 1) & !0xf).to_le_bytes());
    }

    fn put_capabilities(&mut self, profile: &Profile) {
        let vpd = profile.vpd_model.is_some();
        self.bytes[CAPABILITY_POINTER] = at::PM;

        let pm = usize::from(at::PM);
        self.put(pm, &[CAP_PM, at::MSIX]);
        // Version 3, no power management events; no soft reset on D3hot.
        self.put16(pm + 2, 0x0003);
        self.put16(pm + 4, 0x0008);
        self.allow16(pm + 4, 0x0003);

        let msix = usize::from(at::MSIX);
        self.put(msix, &[CAP_MSIX, at::PCIE]);
        self.put16(msix + 2, profile.msix.vectors.saturating_sub(1) & 0x7ff);
        self.allow16(msix + 2, 0xc000);
        // Both in BAR0: the low three bits are the BAR's index.
        self.put32(msix + 4, profile.msix.table & !7);
        self.put32(msix + 8, profile.msix.pba & !7);

        let pcie = usize::from(at::PCIE);
        self.put(pcie, &[CAP_PCIE, if vpd { at::VPD } else { 0 }]);
        // Version 2, endpoint.
        self.put16(pcie + 2, 0x0002);
        // 256 bytes of payload, role-based errors, function level reset.
        self.put32(pcie + 4, 1 << 28 | 1 << 15 | 1);
        self.put16(DEVICE_CONTROL, 0x2810);
        self.allow16(DEVICE_CONTROL, 0xffff);
        // Sixteen lanes of 32 GT/s, in Link Capabilities and Link Status.
        self.put32(pcie + 0x0c, 16 << 4 | 5);
        self.allow16(pcie + 0x10, 0x01c3);
        self.put16(pcie + 0x12, 16 << 4 | 5);
        // Completion timeout can be disabled.
        self.put32(pcie + 0x24, 1 << 4);
        self.allow16(pcie + 0x28, 0x001f);
        self.put32(pcie + 0x2c, 0x3e);

        if vpd {
            let vpd = usize::from(at::VPD);
            self.put(vpd, &[CAP_VPD, 0]);
            self.allow16(vpd + 2, 0xffff);
        }
    }

    /// Completes a VPD access. A clear top bit of the address is a read of four bytes. The data are read-only, so
    /// a write completes without effect.
    fn complete_vpd_access(&mut self) {
        let register = usize::from(at::VPD) + 2;
        let address = self.get16(register);
        if address & VPD_DONE == 0 {
            let start = usize::from(address & !3);
            let mut data = [0; 4];
            for (to, from) in data.iter_mut().zip(self.vpd.iter().skip(start)) {
                *to = *from;
            }
            self.put(register + 2, &data);
        }
        self.put16(register, address ^ VPD_DONE);
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn put(&mut self, at: usize, data: &[u8]) {
        self.bytes[at..at + data.len()].copy_from_slice(data);
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.put(at, &value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_le_bytes());
    }

    fn allow8(&mut self, at: usize, mask: u8) {
        self.writable[at] = mask;
    }

    fn allow16(&mut self, at: usize, mask: u16) {
        self.writable[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }
}

/// Builds the vital product data: a name, a part number and optionally the `SMDL` keyword, which distinguishes a
/// management bridge from a network card.
fn vpd(name: &str, model: &str) -> Vec<u8> {
    let mut data = Vec::new();
    let mut large = |tag: u8, body: &[u8]| {
        data.push(tag);
        data.extend(u16::try_from(body.len()).unwrap_or_default().to_le_bytes());
        data.extend(body);
    };
    large(0x82, format!("Synthetic {name}").as_bytes());
    let mut keywords = Vec::new();
    let mut keyword = |name: &[u8; 2], value: &str| {
        keywords.extend(name);
        keywords.push(u8::try_from(value.len()).unwrap_or_default());
        keywords.extend(value.as_bytes());
    };
    keyword(b"PN", "FL-SYNTHETIC");
    if !model.is_empty() {
        keyword(b"VA", &format!("MLX:MN=MLNX:SMDL={model}"));
    }
    // The checksum byte makes the sum of all bytes up to it 0.
    keyword(b"RV", "\0");
    large(0x90, &keywords);
    let sum = data.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(last) = data.last_mut() {
        *last = sum.wrapping_neg();
    }
    data.push(0x78);
    data
}

#[cfg(test)]
mod tests;
