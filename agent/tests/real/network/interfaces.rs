//! `UpdateInterface` and `ListInterfaces`.

use std::time::Duration;

use firstlight_agent_api::agent::ListInterfacesRequest;
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::types::IPFamily;

use super::stand::{Stand, refusal, route, run, wanted};
use crate::support::short;

const A: &str = "02:00:00:00:00:0a";
const B: &str = "02:00:00:00:00:0b";
const C: &str = "02:00:00:00:00:0c";

fn flags(stand: &Stand, name: &str) -> u32 {
    u32::from_str_radix(stand.sysfs(name, "flags").unwrap().trim_start_matches("0x"), 16).unwrap()
}

fn macs(stand: &Stand, names: &[&str]) -> Vec<Option<String>> {
    names.iter().map(|name| stand.sysfs(name, "address")).collect()
}

#[test]
fn a_nic_gets_all_that_was_asked_for_and_keeps_it() {
    run(async |stand: Stand| {
        stand.nic("ens1", A);
        let index = stand.sysfs("ens1", "ifindex");
        let mut request = wanted("eth0", A, &[("10.1.0.5", "16"), ("fd01::5", "64")]);
        (request.mtu, request.raw_flags) = (1400, 0x80);
        let sockets = stand.sockets();
        assert_eq!(stand.update(request.clone()).await.unwrap(), request);

        let there = |stand: &Stand| {
            assert_eq!(stand.sysfs("ens1", "ifindex"), None);
            assert_eq!(stand.sysfs("eth0", "ifindex"), index);
            assert_eq!(stand.sysfs("eth0", "mtu").as_deref(), Some("1400"));
            assert_eq!(flags(stand, "eth0") & 0x81, 0x81, "up and without ARP");
            // The local table lists each of a host's own addresses twice.
            assert_eq!(stand.proc("fib_trie").matches("10.1.0.5").count(), 2);
            let v6 = stand.proc("if_inet6");
            // Flags 82: permanent, and usable at once.
            let ours = v6.lines().filter(|line| line.starts_with("fd010000000000000000000000000005"));
            let ours: Vec<Vec<&str>> = ours.map(|line| line.split_whitespace().collect()).collect();
            assert_eq!(
                ours.iter().map(|words| (words[2], words[4], words[5])).collect::<Vec<_>>(),
                [("40", "82", "eth0")]
            );
        };
        there(&stand);
        // A second time nothing happens: not even the routes go, as they would if it were taken down.
        stand.inside("ip route add 10.9.0.0/16 via 10.1.0.1 dev eth0 onlink");
        stand.update(request).await.unwrap();
        there(&stand);
        assert!(stand.proc("route").contains("eth0\t0000090A"), "{}", stand.proc("route"));
        assert_eq!(stand.sockets(), sockets, "netlink sockets are closed");

        // It is renamed while it runs, and one more address is added to those it has.
        stand.update(wanted("net7", A, &[("10.2.0.5", "16")])).await.unwrap();
        assert_eq!(stand.sysfs("net7", "ifindex"), index);
        let own = stand.proc("fib_trie");
        assert!(own.contains("10.1.0.5") && own.contains("10.2.0.5"), "{own}");
    });
}

#[test]
fn names_are_swapped_and_hardware_addresses_stay() {
    run(async |stand: Stand| {
        stand.nic("eth0", A);
        stand.nic("eth1", B);
        stand.inside("ip link set eth0 up");
        // What the host calls eth0 came up as eth1, and the other way round.
        stand.update(wanted("eth0", B, &[("10.1.0.5", "16")])).await.unwrap();
        assert_eq!(macs(&stand, &["eth0", "eth1"]), [Some(B.to_owned()), Some(A.to_owned())]);
        assert_eq!((flags(&stand, "eth0") & 1, flags(&stand, "eth1") & 1), (1, 1), "both are up");
        stand.update(wanted("eth1", A, &[("10.2.0.5", "16")])).await.unwrap();
        assert_eq!(macs(&stand, &["eth0", "eth1"]), [Some(B.to_owned()), Some(A.to_owned())]);
        assert!(!stand.inside("ls /sys/class/net").contains("swap"));

        // Requests that come at once take turns: each leaves a whole swap.
        let swaps = (0..16).map(|n| stand.update(wanted(if n % 2 == 0 { "eth0" } else { "eth1" }, A, &[])));
        let check = CheckRequest::default();
        let (all, health) = tokio::join!(futures::future::join_all(swaps), stand.agent.health.check(short(), &check));
        assert!(health.is_ok() && all.iter().all(Result::is_ok), "{all:?}");
        let mut now = macs(&stand, &["eth0", "eth1"]);
        now.sort();
        assert_eq!(now, [Some(A.to_owned()), Some(B.to_owned())]);
    });
}

#[test]
fn a_missing_nic_is_not_found_until_it_is_there() {
    run(async |stand: Stand| {
        stand.nic("eth0", A);
        let request = wanted("eth0", B, &[("10.1.0.5", "16")]);
        let (code, message) = refusal(stand.update(request.clone()).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        assert!(message.contains("Link not found") && message.contains(B), "{message}");
        // One that merely has the name is not touched.
        assert_eq!(macs(&stand, &["eth0"]), [Some(A.to_owned())]);
        assert_eq!(flags(&stand, "eth0") & 1, 0);

        // As a shim does: again while the words are there, 20 ms apart.
        let shim = async {
            for _ in 0..200 {
                match stand.update(request.clone()).await {
                    Err(error) if refusal(error.clone()).1.contains("Link not found") => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    other => return other.is_ok(),
                }
            }
            false
        };
        let plug = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            stand.nic("ens9", B);
        };
        let (found, ()) = tokio::join!(shim, plug);
        assert!(found);
        assert_eq!(macs(&stand, &["eth0", "ens9"]), [Some(B.to_owned()), Some(A.to_owned())]);
    });
}

#[test]
fn a_nic_at_a_pci_path_gets_its_hardware_address() {
    run(async |stand: Stand| {
        stand.nic("ens1", A);
        stand.nic("ens2", B);
        // The namespace's NICs are on no bus, so a tree says where they are.
        let place = "/sys/devices/pci0000:00/0000:00:02.0";
        stand.inside(&format!(
            "mount -t tmpfs tmpfs /sys && mkdir -p {place}/pci_bus/0000:01 {place}/0000:01:00.0/virtio0/net/ens2"
        ));
        let mut request = wanted("eth0", C, &[("10.1.0.5", "16")]);
        request.devicePath = "02/00".into();
        stand.update(request.clone()).await.unwrap();
        stand.inside("umount /sys");
        assert_eq!(macs(&stand, &["eth0", "ens1", "ens2"]), [Some(C.to_owned()), Some(A.to_owned()), None]);
        assert_eq!(flags(&stand, "eth0") & 1, 1);
    });
}

#[test]
fn ipv6_is_passed_over_where_it_is_off() {
    run(async |stand: Stand| {
        stand.nic("eth0", A);
        stand.inside("echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6");
        stand.update(wanted("eth0", A, &[("fd01::5", "64"), ("10.1.0.5", "16")])).await.unwrap();
        stand.update_routes(vec![route("fd02::/64", "fd01::1", "eth0"), route("", "10.1.0.1", "eth0")]).await.unwrap();
        assert!(!stand.proc("if_inet6").contains("fd01"), "{}", stand.proc("if_inet6"));
        assert!(stand.proc("route").contains("eth0\t00000000\t0100010A"), "{}", stand.proc("route"));
    });
}

#[test]
fn a_step_that_fails_is_named_with_the_interface() {
    run(async |stand: Stand| {
        stand.nic("ens1", A);
        let mut request = wanted("eth0", A, &[]);
        request.mtu = 1_000_000;
        let (code, message) = refusal(stand.update(request).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        for part in ["interface eth0", A, "step \"set MTU 1000000\"", "Invalid argument", "maximum"] {
            assert!(message.contains(part), "{part} in {message}");
        }
    });
}

#[test]
fn interfaces_are_listed_as_the_kernel_has_them() {
    run(async |stand: Stand| {
        stand.nic("eth0", A);
        stand.inside("ip link set lo up");
        stand.update(wanted("eth0", A, &[("10.1.0.5", "16")])).await.unwrap();
        let listed =
            stand.agent.calls.list_interfaces(short(), &ListInterfacesRequest::new()).await.unwrap().Interfaces;
        let names: Vec<&str> = listed.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names.len(), stand.inside("ls /sys/class/net").split_whitespace().count());
        for it in &listed {
            assert_eq!(stand.sysfs(&it.name, "address"), Some(it.hwAddr.clone()));
            assert_eq!(stand.sysfs(&it.name, "mtu"), Some(it.mtu.to_string()));
            // The rest of the flags, such as IFF_RUNNING, sysfs does not show.
            assert_eq!(flags(&stand, &it.name) & 0x1089, it.raw_flags & 0x1089, "{}", it.name);
        }
        let find = |name: &str| listed.iter().find(|it| it.name == name).unwrap();
        let of = |name: &str, family| -> Vec<(String, String)> {
            let all = find(name).IPAddresses.iter().filter(|it| it.family.unwrap() == family);
            all.map(|it| (it.address.clone(), it.mask.clone())).collect()
        };
        assert_eq!(of("lo", IPFamily::v4), [("127.0.0.1".to_owned(), "8".to_owned())]);
        assert_eq!(of("lo", IPFamily::v6), [("::1".to_owned(), "128".to_owned())]);
        assert_eq!(of("eth0", IPFamily::v4), [("10.1.0.5".to_owned(), "16".to_owned())]);
        assert_eq!(find("eth0").type_, "veth");
    });
}
