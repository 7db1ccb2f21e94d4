//! The table of fuzz targets.

mod device_rules;
mod fabric;
mod frames;
mod images;
mod kernel_configs;
mod kernel_modules;
mod logs;
mod module_maps;
mod policies;

use std::panic::catch_unwind;
use std::path::Path;

use firstlight_boot_record::{Assembler, BootRecord};
use firstlight_cdi::{DeviceName, Spec};
use firstlight_cmdline::CommandLine;
use firstlight_init_control::{FromInit, ToInit};
use protobuf::Message as _;

/// A parser of untrusted input and its seeds.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) seeds: &'static [&'static [u8]],
    /// Parses one input; must not panic.
    pub(crate) read: fn(&[u8]),
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const RECORD: &[u8] = br#"{"schema":"firstlight.boot-record/1","init_version":"1","kernel":{"release":"6","command_line":"quiet",
"milestones":[{"name":"init-exec","at_us":5}]},"pid1_start_us":7,"state":"booting","units":[{"name":"gpu-attach[0000:01:00.0]",
"need":["nodes"],"severity":"degraded","deadline_us":9,"start_us":1,"outcome":"ok","detail":"","pci":"0000:01:00.0"}],"gpus":[],
"events":[{"at_us":1,"kind":"container-started","object":"c","detail":""}]}"#;

/// Every target.
pub(crate) const TARGETS: &[Target] = &[
    Target {
        name: "kernel-command-line",
        seeds: &[b"quiet a=1 b=\"x y\" firstlight.attach=parallel nvidia.NVreg_X=1"],
        read: |bytes| {
            let line = CommandLine::parse(&text(bytes));
            let _ = (line.value("firstlight.attach"), line.iter().count());
        },
    },
    Target {
        name: "pci-address",
        seeds: &[b"0000:01:00.0", b"10000:e1:1f.7"],
        read: |bytes| drop(text(bytes).parse::<firstlight_pci::Address>()),
    },
    Target {
        name: "netlink-answer",
        // A list entry for interface eth0, NLMSG_DONE, NLMSG_ERROR, and a route.
        seeds: &[
            b"\x28\0\0\0\x10\0\x02\0\x07\0\0\0\0\0\0\0\0\0\x01\0\x02\0\0\0\x01\0\0\0\0\0\0\0\x09\0\x03\0eth0",
            b"\x14\0\0\0\x03\0\x02\0\x07\0\0\0\0\0\0\0\0\0\0\0",
            b"\x24\0\0\0\x02\0\0\x03\x07\0\0\0\0\0\0\0\xea\xff\xff\xff\x28\0\0\0\x10\0\x05\0\x07\0\0\0\0\0\0\0",
            b"\x2c\0\0\0\x18\0\x02\0\x07\0\0\0\0\0\0\0\x02\x10\0\0\xfe\x04\0\x01\0\0\0\0\x08\0\x01\0\x0a\x01\0\0\x08\0\x04\0\x02\0\0\0",
        ],
        read: |bytes| {
            // Only the kernel writes these. netlink-packet-route 0.31 panics at a `struct ifa_cacheinfo` that is too
            // short, which the kernel never sends. Panics are caught: this target searches for hangs and aborts.
            let _ = catch_unwind(|| firstlight_net::count_readable(bytes));
        },
    },
    Target {
        name: "pci-path",
        seeds: &[b"02/03", b"10.3/00.1", b"20/00/02", b"00/01/02/03/04/05/06/07"],
        read: |bytes| {
            if let Ok(path) = text(bytes).parse::<firstlight_pci::PciPath>() {
                let _ = (path.to_string(), path.resolve(Path::new("/sys")));
            }
        },
    },
    Target {
        name: "uevent",
        seeds: &[
            b"add@/devices/pci0000:00/0000:00:02.0/0000:01:00.0/virtio5/block/vda\0ACTION=add\0DEVPATH=/devices/pci0000:00/0000:00:02.0/0000:01:00.0/virtio5/block/vda\0SUBSYSTEM=block\0MAJOR=254\0MINOR=0\0DEVNAME=vda\0SEQNUM=812\0",
            b"remove@/x\0ACTION=remove\0DEVPATH=/x\0SUBSYSTEM=memory\0",
        ],
        read: |bytes| {
            if let Some(event) = firstlight_uevent::Uevent::parse(bytes) {
                let _ = (event.can_add_device(), event.variable("DEVNAME"));
            }
        },
    },
    Target {
        name: "console",
        seeds: &[
            b"firstlight/1 {\"boot\":{\"init_version\":\"1\",\"kernel\":\"6\",\"pid1_start_us\":1}}\nfirstlight/1 {\"state\":\"ready\"}\n",
            b"[ 1.2] x firstlight/1 {\"event\":{\"at_us\":1,\"what\":\"power-off\"}}\n",
        ],
        read: |bytes| {
            let mut assembler = Assembler::new();
            text(bytes).lines().for_each(|line| assembler.feed(line));
            if let Some(record) = assembler.record() {
                let _ = (firstlight_boot_profile::table(record, firstlight_boot_profile::TableOptions { width: Some(100), all: true }), firstlight_boot_profile::svg(record));
            }
        },
    },
    Target { name: "boot-record", seeds: &[RECORD], read: |bytes| drop(BootRecord::from_json(&text(bytes))) },
    Target {
        name: "control-socket",
        seeds: &[b"\"subscribe\"\n", b"{\"listening\":{\"at_us\":1}}", b"{\"gpus\":{\"scanned\":true,\"gpus\":[]}}", RECORD],
        read: |bytes| {
            let _ = firstlight_init_control::decode::<ToInit>(bytes);
            let _ = firstlight_init_control::decode::<FromInit>(bytes);
        },
    },
    Target {
        name: "cdi-spec",
        seeds: &[
            br#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0","permissions":"rw"}],"env":["A=b"]}}]}"#,
        ],
        read: |bytes| drop(Spec::from_json(&text(bytes), Path::new("x"))),
    },
    Target {
        name: "cdi-name",
        seeds: &[b"nvidia.com/gpu=0", b"nvidia.com/gpu=0000:01:00.0"],
        read: |bytes| drop(text(bytes).parse::<DeviceName>()),
    },
    Target {
        name: "gpu-environment",
        seeds: &[b"nvidia.com/gpu=0,0000:01:00.0:a.b/c=all", b"0,GPU-1,00000000:0A:00.0", b"compute,utility,compat32", b"none"],
        read: |bytes| {
            let text = text(bytes);
            let _ = firstlight_agent::gpu::cdi_devices(&text);
            let _ = firstlight_agent::gpu::Visible::of(&[format!("NVIDIA_VISIBLE_DEVICES={text}")]);
            let _ = firstlight_cdi::Capabilities::parse(&text).0.devices().count();
        },
    },
    Target {
        name: "shim-oci-spec",
        // Version, process (terminal, args, environment, directory, a capability), root, a namespace, propagation.
        seeds: &[
            b"\x0a\x031.0\x12\x1d\x08\x01\x22\x02ls\x2a\x03A=b\x32\x01/\x3a\x0d\x0a\x0bCAP_NET_RAW\x1a\x04\x0a\x02/x\x42\x10\x32\x05\x0a\x03pid\x4a\x07rshared",
        ],
        read: |bytes| {
            if let Ok(message) = firstlight_agent_api::oci::Spec::parse_from_bytes(bytes) {
                let _ = firstlight_agent::convert::spec(&message);
            }
        },
    },
    Target { name: "device-rules", seeds: device_rules::SEEDS, read: device_rules::read },
    Target {
        name: "mountinfo",
        seeds: &[
            b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n",
            b"1 1 0:2 / / rw - rootfs rootfs rw\n31 1 0:20 / /run/a\\134b rw - tmpfs none rw,size=4k\n",
        ],
        read: |bytes| drop(firstlight_agent::storage::mountinfo::parse(bytes)),
    },
    Target {
        name: "storage-options",
        seeds: &[
            b"noexec\nnosuid\nmode=1777\nsize=67108864\nfsgid=7",
            b"lowerdir=/a:/b\\:c,upperdir=/u,workdir=/w\ncontext=\"a:b:c0,c1\",rro,rshared,X-kata.overlay-upper",
        ],
        read: |bytes| {
            let options: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
            drop(firstlight_agent::storage::Options::of(&options));
        },
    },
    Target {
        name: "agent-config",
        seeds: &[b"agent.log=debug agent.cdi_timeout=7 agent.server_addr=vsock://-1:1024"],
        read: |bytes| drop(firstlight_agent::config::Config::of(&CommandLine::parse(&text(bytes)), |_| None)),
    },
    Target { name: "ttrpc-frames", seeds: &[frames::CHECK, frames::MORE], read: frames::send },
    Target { name: "policy-request", seeds: policies::REQUESTS, read: policies::request },
    Target { name: "policy-text", seeds: policies::TEXTS, read: policies::load },
    Target { name: "policy-result", seeds: policies::RESULTS, read: policies::result },
    Target { name: "syslog", seeds: logs::DATAGRAMS, read: logs::datagram },
    Target { name: "daemon-output", seeds: logs::OUTPUTS, read: logs::output },
    Target { name: "log-line", seeds: logs::LINES, read: logs::line },
    Target {
        name: "kernel-log",
        seeds: &[
            b"6,812,2198765,-;Run /init as init process\n",
            b"3,900,3198765,-;NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x56:894)\n",
        ],
        read: |bytes| {
            let mut log = firstlight_init::kmsg::Log::default();
            text(bytes).lines().for_each(|line| {
                log.feed(line);
                let entry = firstlight_init::kmsg::Entry::parse(line);
                drop(entry.map(|entry| (entry.level(), entry.source())));
            });
            let _ = log.milestones().len();
        },
    },
    Target {
        name: "init-parameters",
        seeds: &[
            b"firstlight.attach=serial firstlight.attach-deadline=1500ms firstlight.on-failure=hold nvidia.NVreg_X=1 firstlight.atach=1",
            b"kata.extension.gpu.verity_params=root_hash=f211b9f1921ef726d57a72bf82be23a510076639fa8549ade10f85e214e0ddb4,salt=00ff,data_blocks=7,data_block_size=4096,hash_block_size=4096 kata.extension.a.verity_params=x",
        ],
        read: |bytes| {
            let params = firstlight_init::params::Params::from_command_line(&CommandLine::parse(&text(bytes)));
            let _ = params.for_module("nvidia");
            for request in &params.extensions.requested {
                // It becomes a directory's name and fields of a device-mapper table.
                assert!((1..=10).contains(&request.name.len()) && !request.name.contains(['/', '.', ' ']));
                assert_eq!(request.params.target("/dev/a", "/dev/b").split(' ').count(), 10);
            }
            params.extensions.rejected.iter().for_each(|rejected| assert!(rejected.to_string().len() < 1000));
        },
    },
    Target { name: "kernel-config", seeds: kernel_configs::CONFIGURATIONS, read: kernel_configs::configuration },
    Target { name: "kernel-fragment", seeds: kernel_configs::FRAGMENTS, read: kernel_configs::fragment_options },
    Target { name: "kernel-source", seeds: kernel_configs::SOURCES, read: kernel_configs::source },
    Target { name: "modules-dep", seeds: kernel_modules::LISTS, read: kernel_modules::list },
    Target { name: "modules-alias", seeds: kernel_modules::ALIASES, read: kernel_modules::aliases },
    Target { name: "modules-softdep", seeds: kernel_modules::SOFTDEPS, read: kernel_modules::softdep },
    Target { name: "modprobe-config", seeds: kernel_modules::CONFIGURATIONS, read: kernel_modules::configuration },
    Target {
        name: "agent-parameters",
        seeds: &[b"agent.log=debug agent.server_addr=vsock://-1:1024 agent.debug_console agent.debug_console_vport=1026 agent.mem_agent_enable=1"],
        read: |bytes| {
            let line = CommandLine::parse(&text(bytes));
            let config = firstlight_agent::config::Config::of(&line, |name| (name == "AGENT_ADDR").then(|| text(bytes)));
            assert!(config.cdi_timeout.as_secs() > 0 && config.log_port != Some(0));
        },
    },
    Target {
        name: "copied-path",
        seeds: &[b"/s/c1-volume/etc/app.conf", b"/s/../etc/passwd", b"/s//./a/..data"],
        read: |bytes| {
            for name in firstlight_agent::copy::names(Path::new("/s"), &text(bytes)).into_iter().flatten() {
                assert!(!name.contains(['/', '\0']) && !["", ".", ".."].contains(&name));
            }
        },
    },
    Target {
        name: "termination-log-source",
        seeds: &[
            br#"{"annotations":{"io.kubernetes.container.terminationMessagePath":"/dev/log"},"mounts":[{"destination":"/dev/log","source":"/run/x"}]}"#,
        ],
        read: |bytes| drop(firstlight_agent::guest::diagnostic::source(bytes)),
    },
    Target { name: "cpu-list", seeds: &[b"0-3,7\n", b"0"], read: |bytes| {
        let _ = firstlight_agent::guest::cpuset::count(&text(bytes));
    } },
    Target {
        name: "image-manifest",
        seeds: &[include_bytes!("../../lab/manifests/lab.toml")],
        read: |bytes| {
            let variables = firstlight_image_builder::image::manifest::Variables::new();
            let _ = firstlight_image_builder::image::manifest::Manifest::parse(&text(bytes), Path::new("x"), &variables);
        },
    },
    Target { name: "image-archive", seeds: images::ARCHIVES, read: images::archive },
    // The seeds are in the corpus.
    Target { name: "image-erofs", seeds: &[], read: images::file_system },
    Target { name: "image-partitions", seeds: &[&[0]], read: images::table },
    Target { name: "image-record", seeds: images::RECORDS, read: images::record },
    Target {
        name: "elf-interpreter",
        seeds: &[b"\x7fELF\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0@\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\08\0\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0x\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0/lib\0"],
        read: |bytes| {
            let loader = firstlight_init::driver_paths::interpreter::in_head(bytes);
            assert!(loader.is_none_or(|loader| loader.starts_with('/')));
        },
    },
    Target { name: "verity-parameters", seeds: images::PARAMETERS, read: images::parameters },
    Target {
        name: "image-saved",
        seeds: images::SAVED,
        read: images::saved,
    },
    Target {
        name: "image-supplied",
        seeds: images::SUPPLIED,
        read: images::supplied,
    },
    Target {
        name: "image-reference",
        seeds: &[b"docker://r.io:5000/a/b:tag", b"oci:path:v1", b"docker-archive:a.tar:busybox:1.36"],
        read: images::reference,
    },
    Target { name: "fabric-journal", seeds: fabric::RECORDS, read: fabric::journal },
    Target {
        name: "fabric-list",
        seeds: &[b"\x00\x00\x02\x01\x03\x01\x01\x01\x02\x02\x00\x01\x01", b"\x01\x01\x01\x05\x02\x01\x01\x05"],
        read: fabric::list,
    },
    Target { name: "module-map", seeds: module_maps::SEEDS, read: module_maps::read },
    Target {
        name: "oci-index",
        seeds: &[
            br#"{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":0,"platform":{"architecture":"amd64","os":"linux"}}]}"#,
        ],
        read: |bytes| {
            let Ok(dir) = tempfile::tempdir() else { return };
            let _ = std::fs::write(dir.path().join("oci-layout"), "{}");
            let _ = std::fs::write(dir.path().join("index.json"), bytes);
            let _ = firstlight_oci::Image::open(dir.path());
        },
    },
];
