//! `modules.alias`: the modules that drive a device, by the device's modalias.

use super::glob::matches;

/// Maximum length of a modalias in bytes. It is controlled by the host, which defines the devices;
/// those of the kernel are below 100.
pub const LONGEST: usize = 256;

/// Patterns and modules of the lines `alias PATTERN MODULE`.
pub fn lines(list: &str) -> impl Iterator<Item = (&str, &str)> {
    list.lines().filter_map(|line| {
        let mut words = line.strip_prefix("alias ")?.split_ascii_whitespace();
        match (words.next(), words.next(), words.next()) {
            (Some(pattern), Some(module), None) => Some((pattern, module)),
            _ => None,
        }
    })
}

/// Returns the modules that drive any of the devices, without duplicates, in the list's order.
#[must_use]
pub fn find<'a>(list: impl Iterator<Item = (&'a str, &'a str)>, devices: &[String]) -> Vec<&'a str> {
    let mut found: Vec<&str> = Vec::new();
    for (pattern, module) in list {
        let wanted = |device: &String| device.len() <= LONGEST && matches(pattern, device);
        if !found.contains(&module) && devices.iter().any(wanted) {
            found.push(module);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIST: &str = "# Aliases extracted from modules themselves.\n\
        alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci\n\
        alias pci:v*d*sv*sd*bc01sc08i02* nvme\n\
        alias virtio:d00000001v* virtio_net\n\
        alias virtio:d00000001v* virtio_other\n\
        alias too many words here\nalias few\nother virtio:* x\n";

    #[test]
    fn each_module_of_a_device_is_found_once() {
        let devices = [
            "virtio:d00000001v00001AF4",
            "virtio:d00000001v00001AF4",
            "pci:v00001B36d00000010sv00001AF4sd00001100bc01sc08i02",
        ];
        let devices = devices.map(str::to_owned);
        assert_eq!(find(lines(LIST), &devices), ["nvme", "virtio_net", "virtio_other"]);
        assert_eq!(find(lines(LIST), &[]), [""; 0]);
        let long = format!("virtio:d00000001v{}", "0".repeat(LONGEST));
        assert_eq!(find(lines(LIST), &[long]), [""; 0], "longer than any device is");
    }

    proptest! {
        #[test]
        fn arbitrary_list_does_not_panic(list in any::<String>(), device in any::<String>()) {
            let _ = find(lines(&list), &[device]);
        }
    }
}
