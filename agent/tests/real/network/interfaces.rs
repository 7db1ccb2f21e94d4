//! `UpdateInterface` and `ListInterfaces`.

use std::time::Duration;

use firstlight_agent_api::agent::ListInterfacesRequest;
use firstlight_agent_api::health::CheckRequest;
use firstlight_agent_api::types::IPFamily;

use super::fixture::{Fixture, interface_request, refusal, route, run};
use crate::support::short;

const A: &str = "02:00:00:00:00:0a";
const B: &str = "02:00:00:00:00:0b";
const C: &str = "02:00:00:00:00:0c";

fn flags(fixture: &Fixture, name: &str) -> u32 {
    u32::from_str_radix(fixture.sysfs(name, "flags").unwrap().trim_start_matches("0x"), 16).unwrap()
}

fn macs(fixture: &Fixture, names: &[&str]) -> Vec<Option<String>> {
    names.iter().map(|name| fixture.sysfs(name, "address")).collect()
}

#[test]
fn nic_is_configured_as_requested_and_update_is_idempotent() {
    run(async |fixture: Fixture| {
        fixture.nic("ens1", A);
        let index = fixture.sysfs("ens1", "ifindex");
        let mut request = interface_request("eth0", A, &[("10.1.0.5", "16"), ("fd01::5", "64")]);
        (request.mtu, request.raw_flags) = (1400, 0x80);
        let sockets = fixture.sockets();
        assert_eq!(fixture.update(request.clone()).await.unwrap(), request);

        let check = |fixture: &Fixture| {
            assert_eq!(fixture.sysfs("ens1", "ifindex"), None);
            assert_eq!(fixture.sysfs("eth0", "ifindex"), index);
            assert_eq!(fixture.sysfs("eth0", "mtu").as_deref(), Some("1400"));
            assert_eq!(flags(fixture, "eth0") & 0x81, 0x81, "up and without ARP");
            // The local table lists each of a host's own addresses twice.
            assert_eq!(fixture.proc("fib_trie").matches("10.1.0.5").count(), 2);
            let v6 = fixture.proc("if_inet6");
            // Flags 82: IFA_F_PERMANENT and IFA_F_NODAD, so usable at once.
            let ours = v6.lines().filter(|line| line.starts_with("fd010000000000000000000000000005"));
            let ours: Vec<Vec<&str>> = ours.map(|line| line.split_whitespace().collect()).collect();
            assert_eq!(
                ours.iter().map(|fields| (fields[2], fields[4], fields[5])).collect::<Vec<_>>(),
                [("40", "82", "eth0")]
            );
        };
        check(&fixture);
        // A repeated request changes nothing: even routes stay, which would vanish if the interface were taken down.
        fixture.inside("ip route add 10.9.0.0/16 via 10.1.0.1 dev eth0 onlink");
        fixture.update(request).await.unwrap();
        check(&fixture);
        assert!(fixture.proc("route").contains("eth0\t0000090A"), "{}", fixture.proc("route"));
        assert_eq!(fixture.sockets(), sockets, "netlink sockets are closed");

        // Renamed while up, with an additional address.
        fixture.update(interface_request("net7", A, &[("10.2.0.5", "16")])).await.unwrap();
        assert_eq!(fixture.sysfs("net7", "ifindex"), index);
        let own = fixture.proc("fib_trie");
        assert!(own.contains("10.1.0.5") && own.contains("10.2.0.5"), "{own}");
    });
}

#[test]
fn nic_names_are_swapped_without_changing_hardware_addresses() {
    run(async |fixture: Fixture| {
        fixture.nic("eth0", A);
        fixture.nic("eth1", B);
        fixture.inside("ip link set eth0 up");
        // The host's eth0 appeared as eth1 and vice versa.
        fixture.update(interface_request("eth0", B, &[("10.1.0.5", "16")])).await.unwrap();
        assert_eq!(macs(&fixture, &["eth0", "eth1"]), [Some(B.to_owned()), Some(A.to_owned())]);
        assert_eq!((flags(&fixture, "eth0") & 1, flags(&fixture, "eth1") & 1), (1, 1), "both are up");
        fixture.update(interface_request("eth1", A, &[("10.2.0.5", "16")])).await.unwrap();
        assert_eq!(macs(&fixture, &["eth0", "eth1"]), [Some(B.to_owned()), Some(A.to_owned())]);
        assert!(!fixture.inside("ls /sys/class/net").contains("swap"));

        // Concurrent requests are serialized: each completes its swap.
        let swaps =
            (0..16).map(|n| fixture.update(interface_request(if n % 2 == 0 { "eth0" } else { "eth1" }, A, &[])));
        let check = CheckRequest::default();
        let (all, health) = tokio::join!(futures::future::join_all(swaps), fixture.agent.health.check(short(), &check));
        assert!(health.is_ok() && all.iter().all(Result::is_ok), "{all:?}");
        let mut now = macs(&fixture, &["eth0", "eth1"]);
        now.sort();
        assert_eq!(now, [Some(A.to_owned()), Some(B.to_owned())]);
    });
}

#[test]
fn missing_nic_is_link_not_found_until_plugged() {
    run(async |fixture: Fixture| {
        fixture.nic("eth0", A);
        let request = interface_request("eth0", B, &[("10.1.0.5", "16")]);
        let (code, message) = refusal(fixture.update(request.clone()).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        assert!(message.contains("Link not found") && message.contains(B), "{message}");
        // An interface that merely has the name is unchanged.
        assert_eq!(macs(&fixture, &["eth0"]), [Some(A.to_owned())]);
        assert_eq!(flags(&fixture, "eth0") & 1, 0);

        // As a shim does: retry every 20 ms while the error has this text.
        let shim = async {
            for _ in 0..200 {
                match fixture.update(request.clone()).await {
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
            fixture.nic("ens9", B);
        };
        let (found, ()) = tokio::join!(shim, plug);
        assert!(found);
        assert_eq!(macs(&fixture, &["eth0", "ens9"]), [Some(B.to_owned()), Some(A.to_owned())]);
    });
}

#[test]
fn nic_at_a_pci_path_gets_the_requested_hardware_address() {
    run(async |fixture: Fixture| {
        fixture.nic("ens1", A);
        fixture.nic("ens2", B);
        // veth devices have no PCI address, so a fake sysfs tree provides one.
        let place = "/sys/devices/pci0000:00/0000:00:02.0";
        fixture.inside(&format!(
            "mount -t tmpfs tmpfs /sys && mkdir -p {place}/pci_bus/0000:01 {place}/0000:01:00.0/virtio0/net/ens2"
        ));
        let mut request = interface_request("eth0", C, &[("10.1.0.5", "16")]);
        request.devicePath = "02/00".into();
        fixture.update(request.clone()).await.unwrap();
        fixture.inside("umount /sys");
        assert_eq!(macs(&fixture, &["eth0", "ens1", "ens2"]), [Some(C.to_owned()), Some(A.to_owned()), None]);
        assert_eq!(flags(&fixture, "eth0") & 1, 1);
    });
}

#[test]
fn ipv6_is_skipped_where_disabled() {
    run(async |fixture: Fixture| {
        fixture.nic("eth0", A);
        fixture.inside("echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6");
        fixture.update(interface_request("eth0", A, &[("fd01::5", "64"), ("10.1.0.5", "16")])).await.unwrap();
        fixture
            .update_routes(vec![route("fd02::/64", "fd01::1", "eth0"), route("", "10.1.0.1", "eth0")])
            .await
            .unwrap();
        assert!(!fixture.proc("if_inet6").contains("fd01"), "{}", fixture.proc("if_inet6"));
        assert!(fixture.proc("route").contains("eth0\t00000000\t0100010A"), "{}", fixture.proc("route"));
    });
}

#[test]
fn failed_step_is_reported_with_the_interface() {
    run(async |fixture: Fixture| {
        fixture.nic("ens1", A);
        let mut request = interface_request("eth0", A, &[]);
        request.mtu = 1_000_000;
        let (code, message) = refusal(fixture.update(request).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        for part in ["interface eth0", A, "step \"set MTU 1000000\"", "Invalid argument", "maximum"] {
            assert!(message.contains(part), "{part} in {message}");
        }
    });
}

#[test]
fn listed_interfaces_match_the_kernel() {
    run(async |fixture: Fixture| {
        fixture.nic("eth0", A);
        fixture.inside("ip link set lo up");
        fixture.update(interface_request("eth0", A, &[("10.1.0.5", "16")])).await.unwrap();
        let listed =
            fixture.agent.calls.list_interfaces(short(), &ListInterfacesRequest::new()).await.unwrap().Interfaces;
        let names: Vec<&str> = listed.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names.len(), fixture.inside("ls /sys/class/net").split_whitespace().count());
        for it in &listed {
            assert_eq!(fixture.sysfs(&it.name, "address"), Some(it.hwAddr.clone()));
            assert_eq!(fixture.sysfs(&it.name, "mtu"), Some(it.mtu.to_string()));
            // sysfs does not show the other flags, such as IFF_RUNNING.
            assert_eq!(flags(&fixture, &it.name) & 0x1089, it.raw_flags & 0x1089, "{}", it.name);
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
