//! Many short-lived processes: no output and no exit code is lost.

use std::time::Instant;

use crate::resources::{assert_released, when_idle};
use crate::support::{Agent, amount, with_agent};

/// The number of processes without `SHORT_PROCESSES`. The goal is 10 000, which takes many minutes in an emulated
/// guest.
const DEFAULT: usize = 500;

/// Concurrent processes.
const CONCURRENT: usize = 4;

/// Processes before the baseline of the agent's resources is taken.
const WARM_UP: usize = 4 * CONCURRENT;

async fn one(agent: &Agent, number: usize) {
    let name = format!("e{number}");
    let code = i32::try_from(number % 200).unwrap();
    agent.exec("c1", &name, &format!("echo out{number}; echo end{number}; exit {code}")).await.unwrap();
    let expected = format!("out{number}\nend{number}\n");
    // Shims read the output before they wait; both orders must lose nothing.
    if number.is_multiple_of(2) {
        assert_eq!(agent.output("c1", &name).await, expected);
        assert_eq!(agent.wait("c1", &name).await.unwrap(), code);
    } else {
        assert_eq!(agent.wait("c1", &name).await.unwrap(), code);
        assert_eq!(agent.output("c1", &name).await, expected);
    }
}

#[test]
fn output_of_short_processes_is_never_lost() {
    with_agent(async |agent| {
        let all = amount("SHORT_PROCESSES", DEFAULT);
        agent.sandbox().await;
        agent.run("c1", "sleep 100000").await;
        let run = async |numbers: std::ops::Range<usize>| {
            let lane = async |lane: usize| {
                for number in numbers.clone().skip(lane).step_by(CONCURRENT) {
                    one(&agent, number).await;
                }
            };
            tokio::join!(lane(0), lane(1), lane(2), lane(3));
        };
        run(0..WARM_UP).await;
        let before = when_idle(&agent).await;
        let begin = Instant::now();
        run(WARM_UP..WARM_UP + all).await;
        let took = begin.elapsed();
        println!(
            "figures: {all} short processes, {CONCURRENT} at a time, in {:.1} s: {:.0} per second; no output or exit code lost",
            took.as_secs_f64(),
            f64::from(u32::try_from(all).unwrap()) / took.as_secs_f64()
        );
        assert_released(&agent, before).await;
        agent.remove("c1").await.unwrap();
    });
}
