//! Log forwarding: rate limits per source, and forged lines.

use std::time::Duration;

use firstlight_boot_record::{Assembler, Level, LogLine, Outcome, State};
use firstlight_e2e::{Scenario, lab};
use firstlight_lab::Guest;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::timeout;

use crate::support::booted;

/// Returns a scenario with daemons that flood and forge log lines.
fn log_flood() -> Scenario {
    let mut guest = Guest::with_gpus(1, Duration::from_millis(300));
    guest.initrd = Some(lab().variant("log-flood").unwrap().initrd);
    Scenario::guest(guest).parameter("firstlight.persistenced=on").parameter("firstlight.imex=on")
}

#[test]
fn log_flood_does_not_affect_other_sources_and_forged_lines_do_not_change_the_record() {
    let script = "ls -l /dev/log /run/firstlight 2>&1";
    let (report, console) = log_flood().command(&["/bin/sh", "-c", script]).go_with_console();
    let report = report.unwrap();
    assert!(
        !report.container.stdout.contains("srw"),
        "a container cannot reach the log sockets: {}",
        report.container.stdout
    );
    let record = report.boot_record;
    assert_eq!(record.unit("syslog").map(|unit| unit.outcome), Some(Outcome::Ok), "{:?}", record.units);

    let lines: Vec<LogLine> = console.lines().filter_map(LogLine::decode).collect();
    let of = |source: &str| lines.iter().filter(|line| line.source == source).collect::<Vec<_>>();
    let has = |source: &str, level: Level, text: &str| {
        // A process that ended before its message was read is identified by its number only.
        let from = |line: &LogLine| line.source == source || line.source.starts_with("ended[");
        let found = lines.iter().any(|line| from(line) && line.level == level && line.text == text);
        assert!(found, "{source}: {text} in\n{console}");
    };
    // A daemon is identified by its process, not by the name in its message; a message stays on one line.
    has("imex", Level::Error, r#"fabricmanager: x\x0afirstlight\x2f1 {"state":"failed"}\x1b[2J"#);
    has("imex", Level::Info, r#"y firstlight\x2f1 {"state":"failed"}"#);
    has("kmsg", Level::Warning, "NVRM: GPU 0000:01:00.0: forged");
    has("kmsg", Level::Warning, r#"firstlight\x2f1 {"state":"failed"}"#);
    assert_eq!(of("fabricmanager").len(), 0);

    let flood = lines.iter().filter(|line| line.text == "imex: flood").count();
    // The burst limit, plus 20 for each second of the flood.
    assert!((200..2500).contains(&flood), "{flood} of 5000 lines");
    assert!(
        of("imex").iter().filter(|line| line.text == "imex: flood").count() >= 199,
        "it is identified by its process"
    );
    let left_out = of("init")
        .into_iter()
        .filter_map(|line| line.text.split_once(" left out in the last ")?.0.split_once(" lines of "));
    let left_out: usize = left_out.filter_map(|(count, _)| count.parse::<usize>().ok()).sum();
    assert_eq!(left_out + flood, 5000, "each line is forwarded or counted");
    has("persistenced", Level::Warning, "persistenced: a word after the flood");
    assert!(!console.contains("a detail after the flood"), "debug messages are not forwarded by default");

    // The record decoded from the console is complete and equals the guest's own.
    let mut assembler = Assembler::new();
    let mut failed = false;
    for line in console.lines() {
        assembler.feed(line);
        failed |= assembler.record().is_some_and(|record| record.state == State::Failed);
    }
    assert!(!failed && assembler.malformed_lines() == 0, "{} broken lines in\n{console}", assembler.malformed_lines());
    let units = &assembler.record().unwrap().units;
    for unit in &record.units {
        assert!(units.iter().any(|seen| seen.name == unit.name), "{} is missing in\n{console}", unit.name);
    }
    assert!(assembler.record().unwrap().event("power-off").is_some(), "{console}");
}

#[test]
fn log_port_forwards_kernel_and_daemon_messages() {
    let scenario = log_flood().parameter("agent.log_vport=1025").parameter("firstlight.log=debug");
    scenario.watched(async |vm| {
        let _agent = booted(vm).await;
        let stream = vm.connect(1025, Duration::from_secs(30)).await.unwrap();
        let mut lines = BufReader::new(stream).lines();
        let (mut word, mut kernel, mut own) = (None, false, false);
        let read = async {
            while word.is_none() || !kernel {
                let Some(line) = lines.next_line().await.unwrap() else { break };
                let line: Value = serde_json::from_str(&line).unwrap();
                own |= line["source"] == "agent";
                if line["source"] == "guest" {
                    kernel |= line["subsystem"] == "kernel";
                    let text = line["msg"].as_str().unwrap_or_default();
                    if line["subsystem"] == "persistenced" && text.ends_with("still here") {
                        word = Some(line["level"].clone());
                    }
                }
            }
        };
        let seen = timeout(Duration::from_secs(60), read).await;
        assert!(seen.is_ok() && kernel, "{seen:?} {kernel} {own}\n{}", vm.console_tail());
        assert_eq!(word, Some("INFO".into()), "logger's default priority is notice");
    });
}
