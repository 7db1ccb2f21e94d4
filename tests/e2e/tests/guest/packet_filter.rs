//! The packet filter, with the image's iptables programs and the modules that
//! PID 1 loads: rules that a shim sets apply to containers' packets.

use firstlight::agent::Agent;
use firstlight_agent_api::agent::{GetIPTablesRequest, SetIPTablesRequest};
use firstlight_e2e::lab;
use ttrpc::context::with_duration;

use crate::support::{CALL, Files, output, ready};

async fn get(agent: &Agent, is_ipv6: bool) -> String {
    let request = GetIPTablesRequest { is_ipv6, ..Default::default() };
    let data = agent.calls().get_ip_tables(with_duration(CALL), &request).await.unwrap().data;
    String::from_utf8(data).unwrap()
}

async fn set(agent: &Agent, is_ipv6: bool, rules: &str) -> Result<(), String> {
    let request = SetIPTablesRequest { is_ipv6, data: rules.into(), ..Default::default() };
    let call = agent.calls().set_ip_tables(with_duration(CALL), &request).await;
    call.map(drop).map_err(|error| error.to_string())
}

/// Returns rules in the output format of iptables-save: of every table, with
/// every match and target for which PID 1 loads a module.
fn rules(is_ipv6: bool) -> Vec<(&'static str, Vec<String>)> {
    let (host, reject) =
        if is_ipv6 { ("::1/128", "icmp6-port-unreachable") } else { ("127.0.0.1/32", "icmp-port-unreachable") };
    let other = if is_ipv6 { "[2001:db8::7]:70" } else { "192.0.2.7:70" };
    let proxy = if is_ipv6 { "::1" } else { "127.0.0.1" };
    let text = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>();
    vec![
        ("raw", text(&["-A PREROUTING -p udp -m udp --dport 9 -j CT --notrack"])),
        (
            "mangle",
            [
                text(&[
                    "-A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
                    "-A OUTPUT -m owner --uid-owner 4711 -j MARK --set-xmark 0x2/0xffffffff",
                    "-A OUTPUT -m mark --mark 0x2 -j CONNMARK --save-mark --nfmask 0xffffffff --ctmask 0xffffffff",
                ]),
                vec![format!("-A PREROUTING -p tcp -m tcp --dport 7 -j TPROXY --on-port 7000 --on-ip {proxy} --tproxy-mark 0x1/0x1")],
            ]
            .concat(),
        ),
        (
            "nat",
            vec![
                format!("-A OUTPUT -d {host} -p tcp -m tcp --dport 8081 -j REDIRECT --to-ports 8080"),
                format!("-A PREROUTING -p tcp -m multiport --dports 70,71 -j DNAT --to-destination {other}"),
                "-A POSTROUTING -o eth0 -j MASQUERADE".to_owned(),
            ],
        ),
        (
            "filter",
            [
                text(&[
                    "-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
                    "-A INPUT -m state --state INVALID -j DROP",
                    "-A INPUT -m addrtype --dst-type MULTICAST -m limit --limit 3/min -j LOG --log-prefix \"seen \"",
                    "-A INPUT -p tcp -m tcp --dport 8083 -m comment --comment \"not this one\" -j REJECT --reject-with tcp-reset",
                ]),
                vec![format!("-A INPUT -p udp -m udp --dport 8084 -j REJECT --reject-with {reject}")],
            ]
            .concat(),
        ),
    ]
}

/// Returns all rules in the input format of `iptables-restore`.
fn restored(is_ipv6: bool) -> String {
    let table = |(name, rules): (&str, Vec<String>)| format!("*{name}\n{}\nCOMMIT\n", rules.join("\n"));
    rules(is_ipv6).into_iter().map(table).collect()
}

#[test]
fn iptables_rules_are_enforced_and_invalid_rules_change_nothing() {
    let files = Files::make();
    // Starts two servers, then connects to three ports of each address family.
    let script = "for p in 8080 8083; do nc -ll -p $p -e echo $p & done; \
        for p in 8080 8083; do n=0; until grep -q \":$(printf %04X $p) .* 0A \" /proc/net/tcp /proc/net/tcp6 || [ $n -ge 600 ]; \
        do sleep 0.1; n=$((n+1)); done; done; \
        for a in 127.0.0.1 ::1; do for p in 8080 8081 8083; do echo $a $p $(nc -w 20 $a $p < /dev/null 2> /dev/null); done; done";
    let reached = |of_8081: &str, of_8083: &str| -> String {
        ["127.0.0.1", "::1"].map(|at| format!("{at} 8080 8080\n{at} 8081{of_8081}\n{at} 8083{of_8083}\n")).concat()
    };
    let initrd = lab().packet_filter().unwrap().initrd;
    files.scenario_of(initrd, Vec::new()).watched(async |vm| {
        let agent = ready(vm).await;
        assert_eq!([get(&agent, false).await, get(&agent, true).await], ["", ""]);
        assert_eq!(output(&agent, &files.request("before", script, &[])).await, reached("", " 8083"));

        for is_ipv6 in [false, true] {
            set(&agent, is_ipv6, &restored(is_ipv6)).await.unwrap();
            let printed = get(&agent, is_ipv6).await;
            for (table, mut rules) in rules(is_ipv6) {
                let (_, rest) =
                    printed.split_once(&format!("*{table}\n")).unwrap_or_else(|| panic!("{table} in {printed}"));
                let lines = rest.split("COMMIT").next().unwrap().lines().filter(|line| line.starts_with("-A"));
                let mut lines: Vec<_> = lines.map(str::trim_end).collect();
                // Sorted by chain: the kernel lists rules chain by chain.
                lines.sort_by_key(|rule| rule.split(' ').nth(1));
                rules.sort_by_key(|rule| rule.split(' ').nth(1).map(str::to_owned));
                assert_eq!(lines, rules, "{table} of {printed}");
            }
        }
        assert_eq!(output(&agent, &files.request("after", script, &[])).await, reached(" 8080", ""));

        // One invalid line leaves all rules unchanged, and the error quotes it.
        let plain =
            |text: String| text.lines().filter(|line| !line.starts_with(['#', ':'])).collect::<Vec<_>>().join("\n");
        for (is_ipv6, rules, parts) in [
            (false, "*filter\n-A INPUT -j DROP\n-A INPUT -j NOWHERE\nCOMMIT\n", ["NOWHERE", "line"]),
            (true, "*nat\n-A OUTPUT --no-such-option\nCOMMIT\n", ["no-such-option", "line"]),
            (false, "*filter\n-A INPUT -s 2001:db8::1 -j DROP\nCOMMIT\n", ["2001:db8::1", "line"]),
            (true, "*filter\n-A INPUT -m string --string x --algo bm -j DROP\nCOMMIT\n", ["string", "kernel module"]),
            (true, "what is this\n", ["ip6tables-nft-restore", "line"]),
        ] {
            let before = plain(get(&agent, is_ipv6).await);
            let error = set(&agent, is_ipv6, rules).await.unwrap_err();
            println!("  {error}");
            for part in parts {
                assert!(error.contains(part), "{part} in {error}");
            }
            assert_eq!(plain(get(&agent, is_ipv6).await), before, "{rules}");
        }
        assert_eq!(output(&agent, &files.request("still", script, &[])).await, reached(" 8080", ""));
    });
}
