//! Invalid requests, iptables, and network statistics.

use std::time::Duration;

use firstlight_agent_api::agent::{
    GetIPTablesRequest, SetIPTablesRequest, StatsContainerRequest, UpdateInterfaceRequest, UpdateRoutesRequest,
};
use ttrpc::Code;

use super::fixture::{Fixture, interface_request, refusal, route, run};
use crate::support::{assert_containers_can_run, short};

const MAC: &str = "02:00:00:00:00:0a";

#[test]
fn invalid_requests_name_the_field_and_change_nothing() {
    run(async |fixture: Fixture| {
        fixture.nic("eth0", MAC);
        let state =
            |fixture: &Fixture| [fixture.inside("ip link show eth0"), fixture.proc("route"), fixture.proc("fib_trie")];
        let before = state(&fixture);
        let mut errors = Vec::new();
        for (field, request) in [
            ("interface.name", interface_request("../../eth0", MAC, &[])),
            ("interface.name", interface_request("eth0\0", MAC, &[])),
            ("interface.hwAddr", interface_request("eth1", "00:00:00:00:00:00", &[])),
            ("interface.IPAddresses[0]", interface_request("eth1", MAC, &[("10.0.0.5", "99")])),
            ("interface: ", interface_request("eth1", "", &[])),
        ] {
            errors.push((field, fixture.update(request).await.unwrap_err()));
        }
        let bus = firstlight_agent_api::types::Interface {
            devicePath: "../../etc".into(),
            ..interface_request("eth1", MAC, &[])
        };
        errors.push(("interface.devicePath", fixture.update(bus).await.unwrap_err()));
        let none = UpdateInterfaceRequest::new();
        errors.push(("interface: ", fixture.agent.calls.update_interface(short(), &none).await.unwrap_err()));
        let none = UpdateRoutesRequest::new();
        errors.push(("routes: ", fixture.agent.calls.update_routes(short(), &none).await.unwrap_err()));
        let many = vec![route("10.0.0.0/8", "", "eth0"); 100_000];
        errors.push(("routes: 100000", fixture.update_routes(many).await.unwrap_err()));
        for (field, error) in errors {
            let (code, message) = refusal(error);
            assert_eq!(code, Code::INVALID_ARGUMENT, "{message}");
            assert!(message.starts_with(field), "{field}: {message}");
        }
        assert_eq!(state(&fixture), before);
    });
}

#[test]
fn iptables_programs_are_the_images() {
    run(async |fixture: Fixture| {
        let get = async |is_ipv6| {
            let request = GetIPTablesRequest { is_ipv6, ..Default::default() };
            fixture.agent.calls.get_ip_tables(short(), &request).await.map(|reply| reply.data)
        };
        let set = async |rules: &[u8]| {
            let request = SetIPTablesRequest { is_ipv6: true, data: rules.into(), ..Default::default() };
            fixture.agent.calls.set_ip_tables(short(), &request).await.map(|reply| reply.data)
        };
        // Requires a root without ip6tables, so that the test controls the program.
        fixture.inside("for directory in /usr/sbin /sbin /usr/bin /usr/local/sbin; do [ ! -e $directory/ip6tables-save ] || exit 1; done");
        let (code, message) = refusal(get(true).await.unwrap_err());
        assert_eq!(code, Code::FAILED_PRECONDITION);
        assert!(message.contains("/usr/sbin/ip6tables-nft-save") && message.contains("package iptables"), "{message}");
        fixture.inside(
            r#"
            mkdir -p /run/sbin
            printf '#!/bin/sh\n[ "$*" = "--wait 5" ] && cat > /run/rules && echo done' > /run/sbin/ip6tables-nft-restore
            printf '#!/bin/sh\ncat /run/rules; [ -z "$AGENT_ADDR" ] || exit 3' > /run/sbin/ip6tables-nft-save
            chmod 755 /run/sbin/*
            mkdir -p /sbin
            mount --bind /run/sbin /sbin
            "#,
        );
        let rules = b"*filter\n:INPUT DROP [0:0]\nCOMMIT\n".repeat(10_000);
        assert_eq!(set(&rules).await.unwrap(), b"done\n");
        assert_eq!(get(true).await.unwrap(), rules);
        assert_eq!(refusal(get(false).await.unwrap_err()).0, Code::FAILED_PRECONDITION);
    });
}

#[test]
fn network_statistics_match_the_kernel() {
    assert_containers_can_run();
    run(async |fixture: Fixture| {
        fixture.nic("eth0", MAC);
        fixture.update(interface_request("eth0", MAC, &[("10.1.0.5", "24")])).await.unwrap();
        fixture.agent.sandbox().await;
        fixture.agent.run("c1", "sleep 1000").await;
        let request = StatsContainerRequest { container_id: "c1".into(), ..Default::default() };
        // Reaches the veth peer only.
        fixture.inside("ping -c 1 -W 1 10.1.0.9 || true");
        let counted = |name: &str| -> Vec<u64> {
            let table = fixture.proc("dev");
            let (_, figures) =
                table.lines().filter_map(|line| line.split_once(':')).find(|(it, _)| it.trim() == name).unwrap();
            figures.split_whitespace().map(|figure| figure.parse().unwrap()).collect()
        };
        // Retry until no packet is transmitted between the two reads.
        for _ in 0..50 {
            let before = counted("eth0");
            let stats = fixture.agent.calls.stats_container(short(), &request).await.unwrap().network_stats;
            if before == counted("eth0") {
                let eth0 = stats.iter().find(|it| it.name == "eth0").unwrap();
                let received = [eth0.rx_bytes, eth0.rx_packets, eth0.rx_errors, eth0.rx_dropped];
                assert_eq!(received, before[..4]);
                assert_eq!([eth0.tx_bytes, eth0.tx_packets, eth0.tx_errors, eth0.tx_dropped], before[8..12]);
                assert!(eth0.tx_packets > 0 && stats.iter().all(|it| it.name != "lo"));
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("eth0 is never idle");
    });
}
