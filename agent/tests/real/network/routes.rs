//! `UpdateRoutes`, `ListRoutes` and `AddARPNeighbors`.

use firstlight_agent_api::agent::ListRoutesRequest;
use firstlight_agent_api::types::{ARPNeighbor, IPAddress, Route};

use super::fixture::{Fixture, interface_request, refusal, route, run};
use crate::support::short;

const MAC: &str = "02:00:00:00:00:0a";

async fn with_eth0(fixture: &Fixture) {
    fixture.nic("eth0", MAC);
    fixture
        .update(interface_request("eth0", MAC, &[("10.1.0.5", "24"), ("10.1.0.6", "24"), ("fd01::5", "64")]))
        .await
        .unwrap();
}

/// Returns the lines of `/proc/net/route` as destination, gateway, flags and mask.
fn table(fixture: &Fixture) -> Vec<[String; 4]> {
    let text = fixture.proc("route");
    let lines = text.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let mut all: Vec<_> = lines.map(|fields| [1, 2, 3, 7].map(|at| fields[at].clone())).collect();
    all.sort();
    all
}

fn line(fields: [&str; 4]) -> [String; 4] {
    fields.map(str::to_owned)
}

#[test]
fn routes_are_set_in_any_order_and_idempotently() {
    run(async |fixture: Fixture| {
        with_eth0(&fixture).await;
        // The first's gateway is reached by the second, and the third's by no route (onlink).
        let request = vec![
            route("", "169.254.1.1", "eth0"),
            Route { scope: 253, ..route("169.254.1.1/32", "", "eth0") },
            Route { flags: 4, mtu: 1300, source: "10.1.0.6".into(), ..route("10.7.0.0/16", "192.0.2.1", "eth0") },
            route("fd07::/48", "fd01::1", "eth0"),
            Route { source: "fd01::5".into(), ..route("fd08::/48", "", "eth0") },
        ];
        let expected = [
            line(["00000000", "0101FEA9", "0003", "00000000"]),
            line(["0000010A", "00000000", "0001", "00FFFFFF"]),
            line(["0000070A", "010200C0", "0003", "0000FFFF"]),
            line(["0101FEA9", "00000000", "0005", "FFFFFFFF"]),
        ];
        for round in 0..2 {
            let listed = fixture.update_routes(request.clone()).await.unwrap();
            assert_eq!(table(&fixture), expected, "round {round}");
            let shown = fixture.inside("ip route");
            let ours = shown.lines().find(|line| line.starts_with("10.7.0.0/16 via 192.0.2.1 dev eth0"));
            let ours = ours.unwrap_or_default();
            assert!(ours.contains("src 10.1.0.6") && ours.contains("onlink"), "{shown}");
            assert_eq!(fixture.largest_packet([10, 7, 0, 1]), 1300);
            assert_eq!(fixture.largest_packet([10, 1, 0, 9]), 1500);
            for requested in &request {
                let same = |it: &&Route| {
                    (&it.dest, &it.gateway, &it.device) == (&requested.dest, &requested.gateway, &requested.device)
                };
                let found: Vec<&Route> = listed.iter().filter(same).collect();
                assert_eq!(found.len(), 1, "{requested:?} in {listed:?}");
                assert_eq!((found[0].mtu, &found[0].source), (requested.mtu, &requested.source), "{requested:?}");
                assert_eq!(found[0].flags & 4, requested.flags & 4);
            }
            let v6 = fixture.proc("ipv6_route");
            for (network, gateway) in
                [("fd07", "fd010000000000000000000000000001"), ("fd08", "00000000000000000000000000000000")]
            {
                let begin = format!("{network}{:0<28} 30", "");
                let lines: Vec<&str> = v6.lines().filter(|line| line.starts_with(&begin)).collect();
                assert!(lines.len() == 1 && lines[0].contains(gateway) && lines[0].ends_with("eth0"), "{lines:?}");
            }
        }
        // Another gateway replaces the first.
        fixture.update_routes(vec![route("", "10.1.0.1", "eth0")]).await.unwrap();
        let defaults: Vec<_> = table(&fixture).into_iter().filter(|fields| fields[0] == "00000000").collect();
        assert_eq!(defaults, [line(["00000000", "0100010A", "0003", "00000000"])]);
        let listed = fixture.agent.calls.list_routes(short(), &ListRoutesRequest::new()).await.unwrap().Routes;
        let v4 = listed.iter().filter(|it| it.family.value() == 0).count();
        assert_eq!(v4, table(&fixture).len(), "the main table and no other: {listed:?}");
    });
}

#[test]
fn two_nics_can_have_the_same_ipv6_network() {
    run(async |fixture: Fixture| {
        with_eth0(&fixture).await;
        fixture.nic("eth1", "02:00:00:00:00:0b");
        fixture.update(interface_request("eth1", "02:00:00:00:00:0b", &[("fd02::5", "64")])).await.unwrap();
        let both = vec![route("fd09::/64", "", "eth0"), route("fd09::/64", "", "eth1")];
        for _ in 0..2 {
            fixture.update_routes(both.clone()).await.unwrap();
            let table = fixture.proc("ipv6_route");
            let mut found: Vec<&str> = table
                .lines()
                .filter(|line| line.starts_with("fd09"))
                .filter_map(|line| line.split_whitespace().last())
                .collect();
            found.sort_unstable();
            assert_eq!(found, ["eth0", "eth1"]);
        }
    });
}

#[test]
fn invalid_routes_are_reported_and_change_nothing() {
    run(async |fixture: Fixture| {
        with_eth0(&fixture).await;
        let before = table(&fixture);
        let request = vec![route("10.7.0.0/16", "", "eth0"), route("10.8.0.0/16", "", "eth9")];
        let (code, message) = refusal(fixture.update_routes(request).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        for part in ["route 1", "eth9", "lo, "] {
            assert!(message.contains(part), "{part} in {message}");
        }
        assert_eq!(table(&fixture), before, "nothing was changed");
        let (_, message) =
            refusal(fixture.update_routes(vec![route("10.8.0.0/16", "192.0.2.9", "eth0")]).await.unwrap_err());
        for part in ["route 0 (10.8.0.0/16 via 192.0.2.9 dev eth0)", "Network is unreachable", "invalid gateway"] {
            assert!(message.contains(part), "{part} in {message}");
        }
    });
}

fn neighbour(address: &str, mac: &str, state: i32) -> ARPNeighbor {
    let address = IPAddress { address: address.into(), ..Default::default() };
    ARPNeighbor {
        toIPAddress: Some(address).into(),
        device: "eth0".into(),
        lladdr: mac.into(),
        state,
        ..Default::default()
    }
}

#[test]
fn neighbours_are_added_and_replaced() {
    run(async |fixture: Fixture| {
        with_eth0(&fixture).await;
        let known = |address: &str| -> Option<(String, String)> {
            let table = fixture.proc("arp");
            let line = table.lines().find(|line| line.split_whitespace().next() == Some(address))?;
            let fields: Vec<&str> = line.split_whitespace().collect();
            Some((fields[2].to_owned(), fields[3].to_owned()))
        };
        fixture.add_neighbours(vec![]).await.unwrap();
        let v6 = ARPNeighbor { flags: 0x80, ..neighbour("fd01::9", "02:00:00:00:00:99", 0x80) };
        fixture.add_neighbours(vec![neighbour("10.1.0.9", "02:00:00:00:00:09", 0), v6]).await.unwrap();
        assert_eq!(known("10.1.0.9"), Some(("0x6".into(), "02:00:00:00:00:09".into())), "permanent");
        let six = fixture.inside("ip -6 neigh show");
        let line = six.lines().find(|line| line.starts_with("fd01::9 ")).unwrap_or_default();
        for part in ["02:00:00:00:00:99", "router", "PERMANENT"] {
            assert!(line.contains(part), "{part} in {six}");
        }
        fixture.add_neighbours(vec![neighbour("10.1.0.9", "02:00:00:00:00:0c", 0x04)]).await.unwrap();
        assert_eq!(known("10.1.0.9"), Some(("0x2".into(), "02:00:00:00:00:0c".into())), "stale");

        let elsewhere = ARPNeighbor { device: "eth9".into(), ..neighbour("10.1.0.8", MAC, 0) };
        let all = vec![neighbour("10.1.0.7", MAC, 0), elsewhere];
        let (_, message) = refusal(fixture.add_neighbours(all).await.unwrap_err());
        assert!(message.contains("neighbour 1 names interface eth9"), "{message}");
        assert_eq!(known("10.1.0.7"), None, "nothing was changed");
    });
}
