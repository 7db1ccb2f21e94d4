//! Counts the interrupts of a PCI function, as a sign of activity.

use std::fs;

use firstlight_pci::Address;

use crate::root::Root;

/// Returns the number of interrupts of a function's MSI vectors since the vectors were set up;
/// `None` if it has none.
#[must_use]
pub fn of(root: &Root, pci: Address) -> Option<u64> {
    let vectors = fs::read_dir(root.path(&format!("/sys/bus/pci/devices/{pci}/msi_irqs"))).ok()?;
    let vectors: Vec<String> =
        vectors.flatten().filter_map(|entry| Some(format!("{}:", entry.file_name().to_str()?))).collect();
    let table = fs::read_to_string(root.path("/proc/interrupts")).ok()?;
    count(&table, &vectors)
}

/// Returns the sum over all processors of the rows of these vectors.
fn count(table: &str, vectors: &[String]) -> Option<u64> {
    let rows = table.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let row = words.next()?;
        let numbers = words.map_while(|word| word.parse::<u64>().ok());
        vectors.iter().any(|vector| vector == row).then(|| numbers.fold(0, u64::saturating_add))
    });
    rows.reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_all_vectors_and_processors_are_summed() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        let pci: Address = "0000:01:00.0".parse().unwrap();
        assert_eq!(of(&root, pci), None, "no such device");
        let vectors = dir.path().join("sys/bus/pci/devices/0000:01:00.0/msi_irqs");
        fs::create_dir_all(&vectors).unwrap();
        fs::create_dir(dir.path().join("proc")).unwrap();
        fs::write(
            dir.path().join("proc/interrupts"),
            "           CPU0       CPU1\n  9:  7 7 IO-APIC 9-fasteoi acpi\n \
             24:  3  4  PCI-MSIX-0000:01:00.0 0-edge nvidia\n 124: 90 90 PCI-MSI x\n 25: 1 0 PCI-MSIX y\nNMI: 5 5\n",
        )
        .unwrap();
        assert_eq!(of(&root, pci), None, "no vectors");
        fs::write(vectors.join("24"), "msix\n").unwrap();
        assert_eq!(of(&root, pci), Some(7));
        fs::write(vectors.join("25"), "msix\n").unwrap();
        assert_eq!(of(&root, pci), Some(8));
    }
}
