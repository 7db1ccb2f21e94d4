//! Locks the clocks of a GPU. NVML does not report the current lock, so clocks are
//! always set, even if the value is unchanged.

use firstlight_gpu_settings_protocol::Clocks;
use firstlight_sys::nvml::{Gpu, NvmlError};

use crate::step::Plan;

/// Maximum number of clocks that a message lists individually.
const MAX_LISTED: usize = 8;

/// The supported clocks of a GPU in MHz, ascending.
struct SupportedClocks(Vec<u32>);

impl SupportedClocks {
    fn of(clocks: Result<Vec<u32>, NvmlError>) -> Result<Self, String> {
        let mut clocks = clocks.map_err(|error| format!("failed to read the supported clocks: {error}"))?;
        clocks.sort_unstable();
        clocks.dedup();
        if clocks.is_empty() { Err("the GPU reports no supported clocks".to_owned()) } else { Ok(Self(clocks)) }
    }

    /// Returns whether the range from `low` to `high` is within the supported clocks.
    fn contains(&self, low: u32, high: u32) -> bool {
        self.0.first().is_some_and(|min| *min <= low) && self.0.last().is_some_and(|max| high <= *max)
    }

    /// Formats the clocks: a few individually, many as a range.
    fn describe(&self) -> String {
        let (min, max) = (self.0.first().copied().unwrap_or_default(), self.0.last().copied().unwrap_or_default());
        if self.0.len() <= MAX_LISTED {
            let all: Vec<String> = self.0.iter().map(ToString::to_string).collect();
            return format!("{} MHz", all.join(", "));
        }
        format!("{min} to {max} MHz in {} steps", self.0.len())
    }
}

/// Reads the supported memory clocks.
fn memory_clocks(gpu: Gpu<'_>) -> Result<SupportedClocks, String> {
    SupportedClocks::of(gpu.memory_clocks())
}

/// Reads the supported SM clocks at the highest memory clock, which is used under load.
fn sm_clocks(gpu: Gpu<'_>) -> Result<SupportedClocks, String> {
    let memory = memory_clocks(gpu)?.0.last().copied().unwrap_or_default();
    SupportedClocks::of(gpu.clocks(memory))
}

pub(crate) fn report_memory(gpu: Gpu<'_>) -> Result<String, String> {
    Ok(format!("supports {}", memory_clocks(gpu)?.describe()))
}

pub(crate) fn report_sm(gpu: Gpu<'_>) -> Result<String, String> {
    Ok(format!("supports {}", sm_clocks(gpu)?.describe()))
}

pub(crate) fn lock_memory(gpu: Gpu<'_>, requested: Clocks) -> Result<Plan<'_>, String> {
    prepare(requested, || memory_clocks(gpu), move |between| gpu.lock_memory_clock(between))
}

pub(crate) fn lock_sm(gpu: Gpu<'_>, requested: Clocks) -> Result<Plan<'_>, String> {
    prepare(requested, || sm_clocks(gpu), move |between| gpu.lock_clocks(between))
}

fn prepare<'a>(
    requested: Clocks,
    supported: impl FnOnce() -> Result<SupportedClocks, String>,
    set: impl FnOnce(Option<(u32, u32)>) -> Result<(), NvmlError> + 'a,
) -> Result<Plan<'a>, String> {
    let (low, high) = match requested {
        Clocks::Default => {
            let description = "default".to_owned();
            return Ok(Plan::change(description.clone(), move || {
                set(None).map(|()| description).map_err(|error| format!("failed to unlock the clocks: {error}"))
            }));
        }
        Clocks::Between(low, high) => (low, high),
    };
    let description = if low == high { format!("{low} MHz") } else { format!("{low} to {high} MHz") };
    let supported = supported()?;
    if !supported.contains(low, high) {
        return Err(format!(
            "requested {description}, but this GPU supports {}; request a supported clock",
            supported.describe()
        ));
    }
    let done = description.clone();
    Ok(Plan::change(description.clone(), move || match set(Some((low, high))) {
        Ok(()) => Ok(done),
        Err(error) if error.code == NvmlError::NOT_SUPPORTED => Err(format!(
            "failed to lock the clocks at {description}: {error}; this GPU does not support locked clocks, remove the setting"
        )),
        Err(error) => Err(format!(
            "failed to lock the clocks at {description}: {error}; this GPU supports {}",
            supported.describe()
        )),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supported_clocks_are_formatted_compactly() {
        let few = SupportedClocks::of(Ok(vec![3201, 2619, 3201])).unwrap();
        assert_eq!(
            (few.describe().as_str(), few.contains(2619, 3201), few.contains(2618, 3201)),
            ("2619, 3201 MHz", true, false)
        );
        let many = SupportedClocks::of(Ok((0..110).map(|step| 345 + 15 * step).collect())).unwrap();
        assert_eq!((many.describe().as_str(), many.contains(350, 1980)), ("345 to 1980 MHz in 110 steps", true));
        assert!(SupportedClocks::of(Ok(Vec::new())).is_err());
    }
}
