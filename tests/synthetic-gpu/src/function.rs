//! One PCI function as a vfio-user device: regions, interrupts, reset.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_INFO_EVENTFD, VFIO_IRQ_INFO_NORESIZE, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS,
    VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
    vfio_region_info, vfio_region_sparse_mmap_area,
};
use vfio_user::{DmaMapFlags, DmaUnmapFlags, IrqInfo, ServerBackend, ServerRegion, SparseArea};

use crate::config_space::{CONFIG_SIZE, ConfigSpace, Effect};
use crate::device::Device;
use crate::profile::{Backing, Bar};
use crate::registers::{self, Registers};

/// Serial numbers begin with the vendor's OUI, as real ones do.
const SERIAL_PREFIX: u64 = 0x0004_4b00_0000_0000;

/// A served function.
#[derive(Debug)]
pub struct Function {
    config: ConfigSpace,
    registers: Registers,
    bars: Vec<Bar>,
    /// The memfd of each memory BAR, by BAR index.
    memory: Vec<(u8, OwnedFd)>,
    /// The eventfd of each MSI-X vector that the guest has enabled.
    vectors: Vec<Option<File>>,
}

impl Function {
    /// Creates the function of the device at this position of the command line.
    ///
    /// # Errors
    /// The memfd of a BAR cannot be created.
    pub fn new(device: &Device, index: u16) -> io::Result<Self> {
        let profile = device.profile;
        let mut bars = profile.bars.to_vec();
        if let (Some(size), Some(large)) = (device.bar, profile.large_bar()) {
            for bar in bars.iter_mut().filter(|bar| bar.index == large.index) {
                bar.size = size;
            }
        }
        let serial = SERIAL_PREFIX | u64::from(profile.device) << 16 | u64::from(index);
        let lab = |offset, value| (registers::LAB_BASE + offset, value);
        let initial = vec![
            lab(registers::LAB_ATTACH_MS, device.attach_ms.or(profile.attach_ms).unwrap_or(0)),
            lab(registers::LAB_FAIL_CODE, device.fail.map_or(0, u32::from)),
            lab(registers::LAB_HANG, u32::from(device.hang)),
        ];
        let read_only = vec![
            (registers::PMC_BOOT_0, profile.boot_0),
            (registers::PMC_BOOT_42, registers::boot_42(profile.boot_0)),
            lab(registers::LAB_MAGIC, registers::LAB_MAGIC_VALUE),
            lab(registers::LAB_INDEX, u32::from(index)),
        ];
        let bar0 = bars.iter().find(|bar| bar.index == 0).map_or(0, |bar| bar.size);
        let mut memory = Vec::new();
        for bar in bars.iter().filter(|bar| bar.backing == Backing::Memory) {
            let fd = memfd_create(format!("{}-{index}-bar{}", profile.name, bar.index), MemfdFlags::CLOEXEC)?;
            ftruncate(&fd, bar.size)?;
            memory.push((bar.index, fd));
        }
        Ok(Self {
            config: ConfigSpace::new(profile, &bars, serial),
            registers: Registers::new(usize::try_from(bar0).map_err(io::Error::other)?, initial, read_only),
            bars,
            memory,
            vectors: (0..profile.msix.vectors).map(|_| None).collect(),
        })
    }

    /// Returns the regions in the order of VFIO's PCI indexes.
    pub(crate) fn regions(&self) -> Vec<ServerRegion> {
        (0..VFIO_PCI_NUM_REGIONS).map(|index| self.region(index)).collect()
    }

    fn region(&self, index: u32) -> ServerRegion {
        let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
        let mut region = ServerRegion {
            region_info: vfio_region_info {
                argsz: u32::try_from(size_of::<vfio_region_info>()).unwrap_or_default(),
                index,
                ..Default::default()
            },
            sparse_areas: Vec::new(),
            mmap_fd: None,
        };
        if index == VFIO_PCI_CONFIG_REGION_INDEX {
            region.region_info.flags = access;
            region.region_info.size = CONFIG_SIZE as u64;
        } else if let Some(bar) = self.bars.iter().find(|bar| u32::from(bar.index) == index) {
            region.region_info.flags = access;
            region.region_info.size = bar.size;
            if let Some((_, fd)) = self.memory.iter().find(|(index, _)| *index == bar.index) {
                region.region_info.flags |= VFIO_REGION_INFO_FLAG_MMAP;
                // Without a sparse area the library does not send the descriptor.
                region.sparse_areas =
                    vec![SparseArea { area: vfio_region_sparse_mmap_area { offset: 0, size: bar.size } }];
                region.mmap_fd = Some(fd.as_raw_fd());
            }
        }
        region
    }

    /// Returns the interrupts in the order of VFIO's PCI indexes: MSI-X, and the error interrupt, which is never
    /// raised but whose absence makes QEMU warn.
    pub(crate) fn irqs(&self) -> Vec<IrqInfo> {
        let vectors = u32::try_from(self.vectors.len()).unwrap_or_default();
        (0..VFIO_PCI_NUM_IRQS)
            .map(|index| {
                let count = match index {
                    VFIO_PCI_MSIX_IRQ_INDEX => vectors,
                    VFIO_PCI_ERR_IRQ_INDEX => 1,
                    _ => 0,
                };
                IrqInfo { index, flags: VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_NORESIZE, count }
            })
            .collect()
    }

    /// Performs a function level reset. The memory keeps its content, as a GPU's does: scrubbing it is up to its users.
    pub(crate) fn function_reset(&mut self) {
        self.config.reset();
        self.registers.reset();
    }

    /// Resets the function after the VMM has disconnected, and drops its interrupts.
    pub(crate) fn disconnected(&mut self) {
        self.function_reset();
        self.vectors.fill_with(|| None);
    }

    fn raise(&self, vector: u32) -> io::Result<()> {
        let file = usize::try_from(vector).ok().and_then(|vector| self.vectors.get(vector)?.as_ref());
        match file {
            Some(mut file) => file.write_all(&1u64.to_ne_bytes()),
            None => Ok(()),
        }
    }

    fn bar_memory(&self, region: u32) -> Option<(&OwnedFd, u64)> {
        let bar = self.bars.iter().find(|bar| u32::from(bar.index) == region)?;
        let (_, fd) = self.memory.iter().find(|(index, _)| *index == bar.index)?;
        Some((fd, bar.size))
    }
}

/// QEMU maps the memory BARs, so these messages are for registers, configuration space, and memory that a VMM
/// does not map.
impl ServerBackend for Function {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            self.config.read(offset, data);
        } else if region == 0 {
            self.registers.read(offset, data);
        } else {
            data.fill(0xff);
            if let Some((fd, size)) = self.bar_memory(region)
                && offset < size
            {
                rustix::io::pread(fd, data, offset)?;
            }
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if region == VFIO_PCI_CONFIG_REGION_INDEX {
            if self.config.write(offset, data) == Effect::FunctionReset {
                self.function_reset();
            }
        } else if region == 0 {
            if let Some(vector) = self.registers.write(offset, data) {
                self.raise(vector)?;
            }
        } else if let Some((fd, size)) = self.bar_memory(region) {
            let room = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX);
            rustix::io::pwrite(fd, &data[..data.len().min(room)], offset)?;
        }
        Ok(())
    }

    /// The device never reads the guest's memory.
    fn dma_map(&mut self, _: DmaMapFlags, _: u64, _: u64, _: u64, _: Option<File>) -> io::Result<()> {
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        self.function_reset();
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, flags: u32, start: u32, count: u32, fds: Vec<File>) -> io::Result<()> {
        if index != VFIO_PCI_MSIX_IRQ_INDEX {
            return Ok(());
        }
        if flags & VFIO_IRQ_SET_DATA_NONE != 0 && count == 0 {
            self.vectors.fill_with(|| None);
        } else if flags & VFIO_IRQ_SET_DATA_EVENTFD != 0 {
            let range = self.vectors.iter_mut().skip(usize::try_from(start).unwrap_or(usize::MAX));
            let mut fds = fds.into_iter();
            // A vector without a descriptor is disabled.
            for vector in range.take(usize::try_from(count).unwrap_or(usize::MAX)) {
                *vector = fds.next();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn function(text: &str) -> Function {
        Function::new(&text.parse().unwrap(), 3).unwrap()
    }

    fn lab(function: &mut Function, offset: u64) -> u32 {
        let mut data = [0; 4];
        function.region_read(0, registers::LAB_BASE + offset, &mut data).unwrap();
        u32::from_le_bytes(data)
    }

    #[test]
    fn options_reach_registers_and_regions() {
        let mut function = function("h200:bar=64G:attach-ms=700:fail=0x56");
        assert_eq!(lab(&mut function, registers::LAB_ATTACH_MS), 700);
        assert_eq!(lab(&mut function, registers::LAB_FAIL_CODE), 0x56);
        assert_eq!(lab(&mut function, registers::LAB_HANG), 0);
        assert_eq!(lab(&mut function, registers::LAB_INDEX), 3);
        let regions = function.regions();
        assert_eq!(regions[2].region_info.size, 64 << 30);
        assert_eq!(regions[4].region_info.size, 32 << 20);
        assert!(regions[2].mmap_fd.is_some() && regions[2].sparse_areas.len() == 1);
        assert!(regions[0].mmap_fd.is_none(), "BAR0 must trap");
        assert_eq!(regions[7].region_info.size, 4096);
    }

    #[test]
    fn both_chip_identity_registers_agree() {
        let identity = |name: &str| {
            let mut function = function(name);
            [registers::PMC_BOOT_0, registers::PMC_BOOT_42].map(|offset| {
                let mut data = [0; 4];
                function.region_write(0, offset, &[0xff; 4]).unwrap();
                function.region_read(0, offset, &mut data).unwrap();
                u32::from_le_bytes(data)
            })
        };
        assert_eq!(identity("h100"), [0x1800_00a1, 0x180a_1000]);
        assert_eq!(identity("p100"), [0x1300_00a1, 0x130a_1000]);
        assert_eq!(identity("nvswitch"), [0, 0]);
    }

    #[test]
    fn doorbell_raises_an_enabled_vector() {
        let mut function = function("h100");
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let sent = File::from(event.try_clone().unwrap());
        function.set_irqs(VFIO_PCI_MSIX_IRQ_INDEX, VFIO_IRQ_SET_DATA_EVENTFD, 2, 1, vec![sent]).unwrap();
        let ring = |function: &mut Function, vector: u32| {
            function.region_write(0, registers::LAB_BASE + registers::LAB_DOORBELL, &vector.to_le_bytes()).unwrap();
        };
        ring(&mut function, 1);
        ring(&mut function, 99);
        let mut count = [0; 8];
        assert!(rustix::io::read(&event, &mut count).is_err());
        ring(&mut function, 2);
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        function.disconnected();
        ring(&mut function, 2);
        assert!(rustix::io::read(&event, &mut count).is_err());
    }

    #[test]
    fn unmapped_memory_keeps_its_content_over_a_reset() {
        let mut function = function("h100:bar=1M");
        function.region_write(2, (1 << 20) - 2, &[7, 8, 9]).unwrap();
        function.reset().unwrap();
        let mut data = [0; 3];
        function.region_read(2, (1 << 20) - 2, &mut data).unwrap();
        assert_eq!(data, [7, 8, 0xff]);
    }

    #[test]
    fn function_level_reset_restores_the_lab_registers() {
        let mut function = function("h100:attach-ms=5");
        function.region_write(0, registers::LAB_BASE + registers::LAB_ATTACH_MS, &9u32.to_le_bytes()).unwrap();
        function.region_write(VFIO_PCI_CONFIG_REGION_INDEX, 0x88, &0x8000u16.to_le_bytes()).unwrap();
        assert_eq!(lab(&mut function, registers::LAB_ATTACH_MS), 5);
    }
}
