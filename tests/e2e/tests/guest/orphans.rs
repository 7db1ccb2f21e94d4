//! PID 1 reaps orphaned processes in any number.

use std::time::Duration;

use firstlight_e2e::lab;
use tokio::time::{sleep, timeout};

use crate::gpu_hotplug::{CONSOLE, shell, shell_within};
use crate::support::{Files, ready};

/// Orphans per batch, and the number of batches unless the variable sets another.
const EACH: u32 = 1000;
const BATCHES: u32 = 20;
const VARIABLE: &str = "FIRSTLIGHT_ORPHAN_BATCHES";

/// Timeout of a batch: an emulated guest forks hundreds of processes a second, a few dozen on a busy machine.
const BATCH_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum number of zombies at any moment.
const ZOMBIES: u32 = 8;

/// Maximum growth of PID 1, KiB: memory that its allocator retains after a burst.
const GROWTH: u32 = 512;

/// Returns the number after the last `name`: earlier ones may be the terminal's echo of the input.
fn number(text: &str, name: &str) -> u32 {
    let rest = text.rsplit(name).next().unwrap_or_default();
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    assert!(!digits.is_empty(), "no {name} in {text:?}");
    digits.parse().unwrap()
}

#[test]
fn thousands_of_orphans_are_reaped_without_growth_of_pid_1() {
    let files = Files::make();
    let scenario = files
        .scenario_of(lab().orphans().unwrap().initrd, Vec::new())
        .parameter("agent.debug_console")
        .parameter(&format!("agent.debug_console_vport={CONSOLE}"));
    scenario.watched(async |vm| {
        let agent = ready(vm).await;
        let measure = "echo rss=$(grep VmRSS /proc/1/status | tr -dc 0-9). zombies=$(cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ').";
        let before = number(&shell(vm, measure).await, "rss=");
        let batches = std::env::var(VARIABLE).map_or(BATCHES, |text| text.parse().unwrap());
        let line = format!("orphans {batches} {EACH}");
        let making = shell_within(vm, &line, BATCH_TIMEOUT * batches);
        let mut answered = 0;
        {
            let mut making = std::pin::pin!(making);
            // The agent replies while the orphans exit.
            let said = loop {
                match timeout(Duration::from_millis(500), &mut making).await {
                    Ok(said) => break said,
                    Err(_) => agent.check().await.unwrap(),
                }
                answered += 1;
            };
            assert_eq!(number(&said, "made "), batches * EACH, "{said}");
        }
        assert!(answered > 0, "the batches ended before the first check of the agent");
        sleep(Duration::from_secs(1)).await;
        let after = shell(vm, measure).await;
        assert!(number(&after, "zombies=") <= ZOMBIES, "{after}");
        assert!(number(&after, "rss=") <= before + GROWTH, "{before} KiB became {after}");
        let record = agent.boot_record().await.unwrap();
        assert!(!record.events.iter().any(|event| event.kind == "agent-exited"), "{:?}", record.events);
        let _ = agent.destroy_sandbox().await;
        timeout(Duration::from_secs(60), vm.wait()).await.expect("the guest powers off").unwrap();
        let record = vm.console().record().unwrap();
        let reaped = record.event("orphans").map(|event| event.detail.clone()).unwrap_or_default();
        let reaped: u32 = reaped.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_default();
        println!("  {reaped} orphans were reaped; PID 1 had {before} KiB before: {}", after.trim());
        assert!(reaped >= batches * EACH, "{reaped} reaped");
    });
}
