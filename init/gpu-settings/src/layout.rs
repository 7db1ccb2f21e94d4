//! Instances of a GPU in MIG mode: what there is, what is asked for, and the
//! way from one to the other. Each GPU instance has one compute instance that
//! is all of it.

use firstlight_gpu_settings_protocol::{InstanceCount, Profile as Asked};
use firstlight_sys::nvml::{Gpu, GpuInstance, Placement, Profile};

use crate::place;
use crate::step::Todo;

fn plain(error: impl ToString) -> String {
    error.to_string()
}

/// What a GPU can be divided into, with what there is room for now.
pub(crate) fn words(gpu: Gpu<'_>, kinds: &[Profile]) -> String {
    let all = kinds.iter().map(|kind| {
        let free = gpu.remaining_capacity(kind.id).map_or_else(|_| String::new(), |free| format!("{free} free "));
        format!("{} ({}: {free}of {})", kind.name, kind.id, kind.most)
    });
    all.collect::<Vec<_>>().join(", ")
}

/// The kinds that were asked for, one per instance.
pub(crate) fn resolve<'a>(
    gpu: Gpu<'_>,
    kinds: &'a [Profile],
    parts: &[InstanceCount],
) -> Result<Vec<&'a Profile>, String> {
    let mut all = Vec::new();
    for part in parts {
        let is_it = |kind: &&Profile| match &part.profile {
            Asked::Name(name) => kind.name.eq_ignore_ascii_case(name),
            Asked::Id(id) => kind.id == *id,
        };
        let Some(kind) = kinds.iter().find(is_it) else {
            return Err(format!("there is no profile {}; this GPU has {}", part.profile, words(gpu, kinds)));
        };
        all.extend((0..part.count).map(|_| kind));
    }
    for kind in kinds {
        let count = all.iter().filter(|other| other.id == kind.id).count();
        if u32::try_from(count).is_ok_and(|count| count > kind.most) {
            return Err(format!("{count} of {} were asked for; this GPU has {}", kind.name, words(gpu, kinds)));
        }
    }
    Ok(all)
}

/// All instances of a GPU.
fn instances<'a>(gpu: Gpu<'a>, kinds: &[Profile]) -> Result<Vec<GpuInstance<'a>>, String> {
    let mut all = Vec::new();
    for kind in kinds {
        let found = gpu.instances(kind.id);
        all.extend(found.map_err(|error| format!("its instances of {} cannot be read: {error}", kind.name))?);
    }
    Ok(all)
}

/// The kind of compute instance that is all of its GPU instance.
fn whole(instance: &GpuInstance<'_>) -> Result<u32, String> {
    let kinds = instance.compute_profiles().map_err(plain)?;
    let whole = kinds.iter().max_by_key(|kind| (kind.slices, kind.multiprocessors));
    whole.map(|kind| kind.id).ok_or_else(|| format!("GPU instance {} can have no compute instance", instance.id))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inside {
    /// One compute instance that is all of it.
    Whole,
    Nothing,
    Other,
}

fn inside(instance: &GpuInstance<'_>) -> Result<Inside, String> {
    let whole = whole(instance)?;
    let mut found = Vec::new();
    for kind in instance.compute_profiles().map_err(plain)? {
        found.extend(instance.compute_instances(kind.id).map_err(plain)?.iter().map(|compute| compute.profile));
    }
    Ok(match found[..] {
        [] => Inside::Nothing,
        [one] if one == whole => Inside::Whole,
        _ => Inside::Other,
    })
}

/// Fails if processes compute on the GPU.
pub(crate) fn unused(gpu: Gpu<'_>) -> Result<(), String> {
    // Processes that NVML does not report here make the destruction of their instance fail.
    let processes = gpu.processes().unwrap_or_default();
    if processes.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = processes.iter().take(8).map(ToString::to_string).collect();
    Err(format!(
        "{} processes compute on it ({}), so its instances are not changed; end them first",
        processes.len(),
        ids.join(", ")
    ))
}

/// Destroys all instances.
pub(crate) fn destroy_all(gpu: Gpu<'_>) -> Result<(), String> {
    let kinds = gpu.profiles().map_err(plain)?;
    let all = instances(gpu, &kinds)?;
    // Compute instances first: if one is in use, no GPU instance is destroyed.
    for instance in &all {
        destroy_inside(instance)?;
    }
    for instance in all {
        let id = instance.id;
        instance.destroy().map_err(|error| {
            format!("failed to destroy GPU instance {id}: {error}; check for processes that use it")
        })?;
    }
    Ok(())
}

fn destroy_inside(instance: &GpuInstance<'_>) -> Result<(), String> {
    for kind in instance.compute_profiles().map_err(plain)? {
        for compute in instance.compute_instances(kind.id).map_err(plain)? {
            let id = compute.id;
            compute.destroy().map_err(|error| {
                format!(
                    "failed to destroy compute instance {id} of GPU instance {}: {error}; check for processes that use it",
                    instance.id
                )
            })?;
        }
    }
    Ok(())
}

fn names(kinds: &[&Profile]) -> String {
    kinds.iter().map(|kind| kind.name.as_str()).collect::<Vec<_>>().join(",")
}

/// What is left to do on a GPU that is in MIG mode.
pub(crate) fn prepare<'a>(gpu: Gpu<'a>, parts: &[InstanceCount]) -> Result<Todo<'a>, String> {
    let kinds = gpu.profiles().map_err(|error| format!("its profiles cannot be read: {error}"))?;
    let wanted = resolve(gpu, &kinds, parts)?;
    let now = instances(gpu, &kinds)?;
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids
    };
    let same = sorted(now.iter().map(|instance| instance.profile).collect())
        == sorted(wanted.iter().map(|kind| kind.id).collect());
    let contents: Vec<Inside> = now.iter().map(inside).collect::<Result<_, _>>()?;
    let asked = names(&wanted);
    if same && contents.iter().all(|inside| *inside == Inside::Whole) {
        return Ok(Todo::Nothing(asked));
    }
    if same && !contents.contains(&Inside::Other) {
        let words = format!("{asked}, before without all compute instances");
        return Ok(Todo::change(words.clone(), move || {
            for (instance, _) in now.iter().zip(contents).filter(|(_, inside)| *inside == Inside::Nothing) {
                make_inside(instance)?;
            }
            Ok(words)
        }));
    }
    let mut choices = Vec::new();
    for kind in &wanted {
        choices
            .push(gpu.placements(kind.id).map_err(|error| format!("places of {} cannot be read: {error}", kind.name))?);
    }
    let Some(places) = place::places(&choices) else {
        return Err(format!("{asked} do not fit beside each other; this GPU has {}", words(gpu, &kinds)));
    };
    if !now.is_empty() {
        unused(gpu)?;
    }
    let before = match now.len() {
        0 => "without instances".to_owned(),
        _ => now.iter().map(|instance| name_of(&kinds, instance)).collect::<Vec<_>>().join(","),
    };
    let words = format!("{asked}, before {before}");
    let plan: Vec<(String, u32, Placement)> =
        wanted.iter().zip(places).map(|(kind, place)| (kind.name.clone(), kind.id, place)).collect();
    Ok(Todo::change(words.clone(), move || {
        destroy_all(gpu)?;
        for (name, kind, place) in &plan {
            if let Err(error) = make(gpu, *kind, *place) {
                let after = match destroy_all(gpu) {
                    Ok(()) => "the GPU is without instances now".to_owned(),
                    Err(error) => format!("those that were made before it are left: {error}"),
                };
                return Err(format!("{name} at slice {} of {asked} cannot be made: {error}; {after}", place.start));
            }
        }
        Ok(words)
    }))
}

fn name_of(kinds: &[Profile], instance: &GpuInstance<'_>) -> String {
    let kind = kinds.iter().find(|kind| kind.id == instance.profile);
    kind.map_or_else(|| format!("profile {}", instance.profile), |kind| kind.name.clone())
}

fn make(gpu: Gpu<'_>, kind: u32, place: Placement) -> Result<(), String> {
    make_inside(&gpu.create_instance(kind, place).map_err(plain)?)
}

fn make_inside(instance: &GpuInstance<'_>) -> Result<(), String> {
    instance.create_compute_instance(whole(instance)?).map(drop).map_err(plain)
}
