//! `UpdateRoutes`, `ListRoutes` and `AddARPNeighbors`.

use firstlight_agent_api::agent::ListRoutesRequest;
use firstlight_agent_api::types::{ARPNeighbor, IPAddress, Route};

use super::stand::{Stand, refusal, route, run, wanted};
use crate::support::short;

const MAC: &str = "02:00:00:00:00:0a";

async fn with_eth0(stand: &Stand) {
    stand.nic("eth0", MAC);
    stand.update(wanted("eth0", MAC, &[("10.1.0.5", "24"), ("10.1.0.6", "24"), ("fd01::5", "64")])).await.unwrap();
}

/// Lines of `/proc/net/route` as destination, gateway, flags and mask.
fn table(stand: &Stand) -> Vec<[String; 4]> {
    let text = stand.proc("route");
    let lines = text.lines().skip(1).map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let mut all: Vec<_> = lines.map(|words| [1, 2, 3, 7].map(|at| words[at].clone())).collect();
    all.sort();
    all
}

fn line(words: [&str; 4]) -> [String; 4] {
    words.map(str::to_owned)
}

#[test]
fn routes_are_there_in_any_order_and_a_second_time() {
    run(async |stand: Stand| {
        with_eth0(&stand).await;
        // The gateway of the first is behind the second, and nobody says where the third's is.
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
            let listed = stand.update_routes(request.clone()).await.unwrap();
            assert_eq!(table(&stand), expected, "round {round}");
            let shown = stand.inside("ip route");
            let ours = shown.lines().find(|line| line.starts_with("10.7.0.0/16 via 192.0.2.1 dev eth0"));
            let ours = ours.unwrap_or_default();
            assert!(ours.contains("src 10.1.0.6") && ours.contains("onlink"), "{shown}");
            assert_eq!(stand.largest_packet([10, 7, 0, 1]), 1300);
            assert_eq!(stand.largest_packet([10, 1, 0, 9]), 1500);
            for asked in &request {
                let same =
                    |it: &&Route| (&it.dest, &it.gateway, &it.device) == (&asked.dest, &asked.gateway, &asked.device);
                let found: Vec<&Route> = listed.iter().filter(same).collect();
                assert_eq!(found.len(), 1, "{asked:?} in {listed:?}");
                assert_eq!((found[0].mtu, &found[0].source), (asked.mtu, &asked.source), "{asked:?}");
                assert_eq!(found[0].flags & 4, asked.flags & 4);
            }
            let v6 = stand.proc("ipv6_route");
            for (network, gateway) in
                [("fd07", "fd010000000000000000000000000001"), ("fd08", "00000000000000000000000000000000")]
            {
                let begin = format!("{network}{:0<28} 30", "");
                let lines: Vec<&str> = v6.lines().filter(|line| line.starts_with(&begin)).collect();
                assert!(lines.len() == 1 && lines[0].contains(gateway) && lines[0].ends_with("eth0"), "{lines:?}");
            }
        }
        // Another gateway takes the place of the first.
        stand.update_routes(vec![route("", "10.1.0.1", "eth0")]).await.unwrap();
        let defaults: Vec<_> = table(&stand).into_iter().filter(|words| words[0] == "00000000").collect();
        assert_eq!(defaults, [line(["00000000", "0100010A", "0003", "00000000"])]);
        let listed = stand.agent.calls.list_routes(short(), &ListRoutesRequest::new()).await.unwrap().Routes;
        let v4 = listed.iter().filter(|it| it.family.value() == 0).count();
        assert_eq!(v4, table(&stand).len(), "the main table and no other: {listed:?}");
    });
}

#[test]
fn two_nics_keep_the_same_ipv6_network() {
    run(async |stand: Stand| {
        with_eth0(&stand).await;
        stand.nic("eth1", "02:00:00:00:00:0b");
        stand.update(wanted("eth1", "02:00:00:00:00:0b", &[("fd02::5", "64")])).await.unwrap();
        let both = vec![route("fd09::/64", "", "eth0"), route("fd09::/64", "", "eth1")];
        for _ in 0..2 {
            stand.update_routes(both.clone()).await.unwrap();
            let table = stand.proc("ipv6_route");
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
fn routes_that_cannot_be_are_named_and_none_is_half_done() {
    run(async |stand: Stand| {
        with_eth0(&stand).await;
        let before = table(&stand);
        let request = vec![route("10.7.0.0/16", "", "eth0"), route("10.8.0.0/16", "", "eth9")];
        let (code, message) = refusal(stand.update_routes(request).await.unwrap_err());
        assert_eq!(code, ttrpc::Code::INTERNAL);
        for part in ["route 1", "eth9", "lo, "] {
            assert!(message.contains(part), "{part} in {message}");
        }
        assert_eq!(table(&stand), before, "nothing was changed");
        let (_, message) =
            refusal(stand.update_routes(vec![route("10.8.0.0/16", "192.0.2.9", "eth0")]).await.unwrap_err());
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
fn neighbours_are_known_and_replaced() {
    run(async |stand: Stand| {
        with_eth0(&stand).await;
        let known = |address: &str| -> Option<(String, String)> {
            let table = stand.proc("arp");
            let line = table.lines().find(|line| line.split_whitespace().next() == Some(address))?;
            let words: Vec<&str> = line.split_whitespace().collect();
            Some((words[2].to_owned(), words[3].to_owned()))
        };
        stand.add_neighbours(vec![]).await.unwrap();
        let v6 = ARPNeighbor { flags: 0x80, ..neighbour("fd01::9", "02:00:00:00:00:99", 0x80) };
        stand.add_neighbours(vec![neighbour("10.1.0.9", "02:00:00:00:00:09", 0), v6]).await.unwrap();
        assert_eq!(known("10.1.0.9"), Some(("0x6".into(), "02:00:00:00:00:09".into())), "permanent");
        let six = stand.inside("ip -6 neigh show");
        let line = six.lines().find(|line| line.starts_with("fd01::9 ")).unwrap_or_default();
        for part in ["02:00:00:00:00:99", "router", "PERMANENT"] {
            assert!(line.contains(part), "{part} in {six}");
        }
        stand.add_neighbours(vec![neighbour("10.1.0.9", "02:00:00:00:00:0c", 0x04)]).await.unwrap();
        assert_eq!(known("10.1.0.9"), Some(("0x2".into(), "02:00:00:00:00:0c".into())), "stale");

        let elsewhere = ARPNeighbor { device: "eth9".into(), ..neighbour("10.1.0.8", MAC, 0) };
        let all = vec![neighbour("10.1.0.7", MAC, 0), elsewhere];
        let (_, message) = refusal(stand.add_neighbours(all).await.unwrap_err());
        assert!(message.contains("neighbour 1 names interface eth9"), "{message}");
        assert_eq!(known("10.1.0.7"), None, "nothing was changed");
    });
}
