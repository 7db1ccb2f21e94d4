//! Programs that PID 1 keeps running beside the agent.
//!
//! [`table`] says which there are and what each needs; [`launch`] prepares one
//! start; [`life`] decides, and is pure; [`group`], [`output`] and [`ready`] touch
//! the machine; [`daemon`] combines them. The supervisor reports the events.

pub mod cgroup;
pub mod config;
pub mod daemon;
pub mod guid;
pub mod launch;
pub mod lifecycle;
pub mod output;
pub mod ready;
pub mod table;
