//! What a GPU may take from its supply.

use firstlight_gpu_settings_protocol::Power;
use firstlight_sys::nvml::Gpu;

use crate::step::Todo;

fn watts(milliwatts: u32) -> String {
    if milliwatts.is_multiple_of(1000) {
        format!("{} W", milliwatts / 1000)
    } else {
        format!("{}.{:03} W", milliwatts / 1000, milliwatts % 1000)
    }
}

struct Limits {
    least: u32,
    most: u32,
    default: u32,
    now: u32,
}

fn limits(gpu: Gpu<'_>) -> Result<Limits, String> {
    let read = || {
        let (least, most) = gpu.power_limits()?;
        Ok(Limits { least, most, default: gpu.default_power_limit()?, now: gpu.power_limit()? })
    };
    read().map_err(|error: firstlight_sys::nvml::NvmlError| format!("its power limits cannot be read: {error}"))
}

pub(crate) fn tell(gpu: Gpu<'_>) -> Result<String, String> {
    let Limits { least, most, default, now } = limits(gpu)?;
    Ok(format!("{}; takes {} to {}, by default {}", watts(now), watts(least), watts(most), watts(default)))
}

pub(crate) fn prepare(gpu: Gpu<'_>, wanted: Power) -> Result<Todo<'_>, String> {
    let Limits { least, most, default, now } = limits(gpu)?;
    let limit = match wanted {
        Power::Default => default,
        Power::Watts(watts) => watts.saturating_mul(1000),
    };
    if !(least..=most).contains(&limit) {
        return Err(format!(
            "{} was asked for, and this GPU takes {} to {}, by default {}; give it a limit in between",
            watts(limit),
            watts(least),
            watts(most),
            watts(default)
        ));
    }
    if now == limit {
        return Ok(Todo::Nothing(watts(now)));
    }
    let words = format!("{}, before {}", watts(limit), watts(now));
    let done = words.clone();
    Ok(Todo::change(words, move || {
        let set = gpu.set_power_limit(limit).and_then(|()| gpu.power_limit());
        let after = set.map_err(|error| {
            format!(
                "{} was asked for, and not set: {error}; this GPU takes {} to {}",
                watts(limit),
                watts(least),
                watts(most)
            )
        })?;
        if after != limit {
            let after = watts(after);
            return Err(format!(
                "{} was set without an error, and the GPU says {after}; does the host or the board hold it?",
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
    fn watts_are_written_as_read() {
        assert_eq!((watts(700_000), watts(325_050)), ("700 W".to_owned(), "325.050 W".to_owned()));
    }
}
