//! Sets the power limit of a GPU.

use firstlight_gpu_settings_protocol::Power;
use firstlight_sys::nvml::Gpu;

use crate::step::Plan;

fn watts(milliwatts: u32) -> String {
    if milliwatts.is_multiple_of(1000) {
        format!("{} W", milliwatts / 1000)
    } else {
        format!("{}.{:03} W", milliwatts / 1000, milliwatts % 1000)
    }
}

/// Power limits in milliwatts.
struct Limits {
    min: u32,
    max: u32,
    default: u32,
    current: u32,
}

fn limits(gpu: Gpu<'_>) -> Result<Limits, String> {
    let read = || {
        let (min, max) = gpu.power_limits()?;
        Ok(Limits { min, max, default: gpu.default_power_limit()?, current: gpu.power_limit()? })
    };
    read().map_err(|error: firstlight_sys::nvml::NvmlError| format!("failed to read the power limits: {error}"))
}

pub(crate) fn report(gpu: Gpu<'_>) -> Result<String, String> {
    let Limits { min, max, default, current } = limits(gpu)?;
    Ok(format!("{}; supports {} to {}, default {}", watts(current), watts(min), watts(max), watts(default)))
}

pub(crate) fn prepare(gpu: Gpu<'_>, requested: Power) -> Result<Plan<'_>, String> {
    let Limits { min, max, default, current } = limits(gpu)?;
    let limit = match requested {
        Power::Default => default,
        Power::Watts(watts) => watts.saturating_mul(1000),
    };
    if !(min..=max).contains(&limit) {
        return Err(format!(
            "requested {}, but this GPU supports {} to {}, default {}; request a supported limit",
            watts(limit),
            watts(min),
            watts(max),
            watts(default)
        ));
    }
    if current == limit {
        return Ok(Plan::Nothing(watts(current)));
    }
    let description = format!("{} (previously {})", watts(limit), watts(current));
    let done = description.clone();
    Ok(Plan::change(description, move || {
        let set = gpu.set_power_limit(limit).and_then(|()| gpu.power_limit());
        let after = set.map_err(|error| {
            format!(
                "failed to set the power limit to {}: {error}; this GPU supports {} to {}",
                watts(limit),
                watts(min),
                watts(max)
            )
        })?;
        if after != limit {
            let after = watts(after);
            return Err(format!(
                "the power limit was set to {} without an error, but is {after}; check for limits of the host or the board",
                watts(limit)
            ));
        }
        Ok(done)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watts_are_formatted_with_fraction_if_needed() {
        assert_eq!((watts(700_000), watts(325_050)), ("700 W".to_owned(), "325.050 W".to_owned()));
    }
}
