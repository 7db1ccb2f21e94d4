//! The module metadata of an image (`modules.dep`, `modules.alias`, `modprobe.d`) and aliases of devices.

use firstlight_init::modules::config::{Config, parse_softdep};
use firstlight_init::modules::dep::Dependencies;
use firstlight_init::modules::name::{same, stem};
use firstlight_init::modules::{alias, glob};

use super::text;

pub(super) const LISTS: &[&[u8]] = &[
    b"kernel/net/vsock.ko.xz:\nkernel/net/a-b.ko: kernel/net/c.ko.zst kernel/net/vsock.ko.xz\nextra/nvidia.ko:\n",
    b"a.ko: b.ko\nb.ko: a.ko\nno line\n:\nlast.ko: x",
];

pub(super) const ALIASES: &[&[u8]] = &[
    b"alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci\nalias virtio:d00000001v* virtio_net\npci:v00001AF4d00001041sv0",
    b"alias a[!0-9]*\\?c x-y\nalias one\nab?c",
];

pub(super) const SOFTDEPS: &[&[u8]] = &[b"xts pre: ecb a_b post: c", b"dummy post: ifb pre:", b"x y"];

pub(super) const CONFIGURATIONS: &[&[u8]] = &[
    b"# x\noptions nvidia NVreg_A=1 \\\n  B=\"x y\"\nalias eth* virtio-net\nblacklist a b\nsoftdep x pre: a post: b\n",
    b"install x /bin/false\nremove x true\nwhat\nweakdep a b\nalias a\noptions x\nsoftdep x a\n",
];

/// Every line of the list is found by its module's name, unless an earlier line has the same name.
pub(super) fn list(bytes: &[u8]) {
    let text = text(bytes);
    let list = Dependencies::new(text.clone());
    for line in text.lines().take(64) {
        let Some((file, _)) = line.split_once(':') else { continue };
        let name = stem(file);
        let found = list.find(name).map(|line| same(name, stem(line.file)));
        assert_eq!(found, Some(true), "{name:?}");
    }
    let _ = list.find("no such module").map(|line| line.needs().count());
}

/// The last line is the device's modalias.
pub(super) fn aliases(bytes: &[u8]) {
    let text = text(bytes);
    let (list, device) = text.rsplit_once('\n').unwrap_or(("", &text));
    let found = alias::find(alias::lines(list), &[device.to_owned()]);
    assert!(
        found
            .iter()
            .all(|module| alias::lines(list).any(|(pattern, name)| name == *module && glob::matches(pattern, device)))
    );
}

pub(super) fn softdep(bytes: &[u8]) {
    if let Some(soft) = parse_softdep(&text(bytes)) {
        assert!(
            soft.before
                .iter()
                .chain(&soft.after)
                .all(|name| !name.is_empty() && !name.contains(|c: char| c.is_ascii_whitespace()))
        );
    }
}

/// No accepted option contains a byte that ends a parameter string or a module name.
pub(super) fn configuration(bytes: &[u8]) {
    let mut config = Config::default();
    config.take(&text(bytes), "x.conf");
    assert!(config.options.iter().all(|(module, options)| !module.contains(' ') && !options.contains(['\0', '\n'])));
    assert!(config.complaints.len() <= 16 && config.complaints.iter().all(|text| text.len() < 300));
    let _ = (config.options("nvidia"), config.soft_dependencies("x"), config.blacklisted("a"));
}
