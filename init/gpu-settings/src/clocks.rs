//! Clocks that a GPU is held to. NVML does not say which ones it is held to
//! now, so they are set even if nothing changes by it.

use firstlight_gpu_settings_protocol::Clocks;
use firstlight_sys::nvml::{Gpu, NvmlError};

use crate::step::Todo;

/// Clocks that are named one by one.
const FEW: usize = 8;

/// Clocks that a GPU can have, the lowest first.
struct Range(Vec<u32>);

impl Range {
    fn of(asked: Result<Vec<u32>, NvmlError>) -> Result<Self, String> {
        let mut clocks = asked.map_err(|error| format!("its clocks cannot be read: {error}"))?;
        clocks.sort_unstable();
        clocks.dedup();
        if clocks.is_empty() { Err("it names no clock that it can have".to_owned()) } else { Ok(Self(clocks)) }
    }

    fn has(&self, low: u32, high: u32) -> bool {
        self.0.first().is_some_and(|least| *least <= low) && self.0.last().is_some_and(|most| high <= *most)
    }

    fn words(&self) -> String {
        let (least, most) = (self.0.first().copied().unwrap_or_default(), self.0.last().copied().unwrap_or_default());
        if self.0.len() <= FEW {
            let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
            return format!("{} MHz", all.join(", "));
        }
        format!("{least} to {most} MHz in {} steps", self.0.len())
    }
}

fn memory_range(gpu: Gpu<'_>) -> Result<Range, String> {
    Range::of(gpu.memory_clocks())
}

/// With memory at its fastest, as it is under load.
fn processors_range(gpu: Gpu<'_>) -> Result<Range, String> {
    let memory = memory_range(gpu)?.0.last().copied().unwrap_or_default();
    Range::of(gpu.clocks(memory))
}

pub(crate) fn tell_memory(gpu: Gpu<'_>) -> Result<String, String> {
    Ok(format!("takes {}", memory_range(gpu)?.words()))
}

pub(crate) fn tell_processors(gpu: Gpu<'_>) -> Result<String, String> {
    Ok(format!("takes {}", processors_range(gpu)?.words()))
}

pub(crate) fn memory(gpu: Gpu<'_>, wanted: Clocks) -> Result<Todo<'_>, String> {
    prepare(wanted, || memory_range(gpu), move |between| gpu.lock_memory_clock(between))
}

pub(crate) fn processors(gpu: Gpu<'_>, wanted: Clocks) -> Result<Todo<'_>, String> {
    prepare(wanted, || processors_range(gpu), move |between| gpu.lock_clocks(between))
}

fn prepare<'a>(
    wanted: Clocks,
    range: impl FnOnce() -> Result<Range, String>,
    set: impl FnOnce(Option<(u32, u32)>) -> Result<(), NvmlError> + 'a,
) -> Result<Todo<'a>, String> {
    let (low, high) = match wanted {
        Clocks::Default => {
            let words = "as the GPU likes".to_owned();
            return Ok(Todo::change(words.clone(), move || {
                set(None).map(|()| words).map_err(|error| format!("they cannot be let go: {error}"))
            }));
        }
        Clocks::Between(low, high) => (low, high),
    };
    let words = if low == high { format!("{low} MHz") } else { format!("{low} to {high} MHz") };
    let range = range()?;
    if !range.has(low, high) {
        return Err(format!("{words} was asked for, and this GPU has {}; ask for a clock of these", range.words()));
    }
    let done = words.clone();
    Ok(Todo::change(words.clone(), move || match set(Some((low, high))) {
        Ok(()) => Ok(done),
        Err(error) if error.code == NvmlError::NOT_SUPPORTED => {
            Err(format!("{words} was asked for: {error}; the clock of this GPU cannot be held, leave it out"))
        }
        Err(error) => Err(format!("{words} was asked for, and not set: {error}; this GPU has {}", range.words())),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_formatted_compactly() {
        let few = Range::of(Ok(vec![3201, 2619, 3201])).unwrap();
        assert_eq!((few.words().as_str(), few.has(2619, 3201), few.has(2618, 3201)), ("2619, 3201 MHz", true, false));
        let many = Range::of(Ok((0..110).map(|step| 345 + 15 * step).collect())).unwrap();
        assert_eq!((many.words().as_str(), many.has(350, 1980)), ("345 to 1980 MHz in 110 steps", true));
        assert!(Range::of(Ok(Vec::new())).is_err());
    }
}
