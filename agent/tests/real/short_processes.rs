//! Many short processes: no output and no exit is lost.

use std::time::Instant;

use crate::held::{at_rest, back_at};
use crate::support::{Agent, amount, with_agent};

/// How many run in one test unless `SHORT_PROCESSES` says otherwise. The goal
/// is 10 000, which takes a translated guest many minutes.
const DEFAULT: usize = 500;

/// How many at a time.
const ABREAST: usize = 4;

/// How many before what the agent holds is looked at.
const WARM: usize = 4 * ABREAST;

async fn one(agent: &Agent, number: usize) {
    let name = format!("e{number}");
    let code = i32::try_from(number % 200).unwrap();
    agent.exec("c1", &name, &format!("echo out{number}; echo end{number}; exit {code}")).await.unwrap();
    let expected = format!("out{number}\nend{number}\n");
    // Shims read before they fetch the code; both orders lose nothing.
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
                for number in numbers.clone().skip(lane).step_by(ABREAST) {
                    one(&agent, number).await;
                }
            };
            tokio::join!(lane(0), lane(1), lane(2), lane(3));
        };
        run(0..WARM).await;
        let before = at_rest(&agent).await;
        let begin = Instant::now();
        run(WARM..WARM + all).await;
        let took = begin.elapsed();
        println!(
            "figures: {all} short processes, {ABREAST} at a time, in {:.1} s: {:.0} per second; none lost a byte or its code",
            took.as_secs_f64(),
            f64::from(u32::try_from(all).unwrap()) / took.as_secs_f64()
        );
        back_at(&agent, before).await;
        agent.remove("c1").await.unwrap();
    });
}
