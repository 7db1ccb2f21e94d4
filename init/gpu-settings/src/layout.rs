//! Changes the MIG layout of a GPU from the current to the requested instances. Each
//! GPU instance has one compute instance of its full size.

use firstlight_gpu_settings_protocol::{InstanceCount, Profile as RequestedProfile};
use firstlight_sys::nvml::{Gpu, GpuInstance, Placement, Profile};

use crate::placement;
use crate::step::Plan;

fn to_text(error: impl ToString) -> String {
    error.to_string()
}

/// Formats the profiles of a GPU with the number of free and total instances.
pub(crate) fn describe_profiles(gpu: Gpu<'_>, profiles: &[Profile]) -> String {
    let all = profiles.iter().map(|profile| {
        let free = gpu.remaining_capacity(profile.id).map_or_else(|_| String::new(), |free| format!("{free} free "));
        format!("{} ({}: {free}of {})", profile.name, profile.id, profile.most)
    });
    all.collect::<Vec<_>>().join(", ")
}

/// Returns the requested profiles, one per instance.
pub(crate) fn resolve<'a>(
    gpu: Gpu<'_>,
    profiles: &'a [Profile],
    parts: &[InstanceCount],
) -> Result<Vec<&'a Profile>, String> {
    let mut all = Vec::new();
    for part in parts {
        let is_requested = |profile: &&Profile| match &part.profile {
            RequestedProfile::Name(name) => profile.name.eq_ignore_ascii_case(name),
            RequestedProfile::Id(id) => profile.id == *id,
        };
        let Some(profile) = profiles.iter().find(is_requested) else {
            return Err(format!("unknown profile {}; this GPU has {}", part.profile, describe_profiles(gpu, profiles)));
        };
        all.extend((0..part.count).map(|_| profile));
    }
    for profile in profiles {
        let count = all.iter().filter(|other| other.id == profile.id).count();
        if u32::try_from(count).is_ok_and(|count| count > profile.most) {
            return Err(format!(
                "requested {count} of {}, but this GPU has {}",
                profile.name,
                describe_profiles(gpu, profiles)
            ));
        }
    }
    Ok(all)
}

/// Returns all GPU instances of a GPU.
fn instances<'a>(gpu: Gpu<'a>, profiles: &[Profile]) -> Result<Vec<GpuInstance<'a>>, String> {
    let mut all = Vec::new();
    for profile in profiles {
        let found = gpu.instances(profile.id);
        all.extend(found.map_err(|error| format!("failed to read the instances of {}: {error}", profile.name))?);
    }
    Ok(all)
}

/// Returns the id of the compute instance profile with the full size of a GPU instance.
fn full_compute_profile(instance: &GpuInstance<'_>) -> Result<u32, String> {
    let profiles = instance.compute_profiles().map_err(to_text)?;
    let full = profiles.iter().max_by_key(|profile| (profile.slices, profile.multiprocessors));
    full.map(|profile| profile.id).ok_or_else(|| format!("GPU instance {} supports no compute instance", instance.id))
}

/// The compute instances of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ComputeInstances {
    /// One compute instance of full size.
    Full,
    /// None.
    None,
    /// Any other number or size.
    Other,
}

/// Reads the compute instances of a GPU instance.
fn compute_instances(instance: &GpuInstance<'_>) -> Result<ComputeInstances, String> {
    let full = full_compute_profile(instance)?;
    let mut found = Vec::new();
    for profile in instance.compute_profiles().map_err(to_text)? {
        found.extend(instance.compute_instances(profile.id).map_err(to_text)?.iter().map(|compute| compute.profile));
    }
    Ok(match found[..] {
        [] => ComputeInstances::None,
        [one] if one == full => ComputeInstances::Full,
        _ => ComputeInstances::Other,
    })
}

/// Fails if processes compute on the GPU.
pub(crate) fn check_unused(gpu: Gpu<'_>) -> Result<(), String> {
    // Processes that NVML does not report here make the destruction of their instance fail.
    let processes = gpu.processes().unwrap_or_default();
    if processes.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = processes.iter().take(8).map(ToString::to_string).collect();
    Err(format!(
        "{} compute processes use the GPU ({}), so its instances are not changed; terminate them first",
        processes.len(),
        ids.join(", ")
    ))
}

/// Destroys all instances.
pub(crate) fn destroy_all(gpu: Gpu<'_>) -> Result<(), String> {
    let profiles = gpu.profiles().map_err(to_text)?;
    let all = instances(gpu, &profiles)?;
    // Compute instances first: if one is in use, no GPU instance is destroyed.
    for instance in &all {
        destroy_compute_instances(instance)?;
    }
    for instance in all {
        let id = instance.id;
        instance.destroy().map_err(|error| {
            format!("failed to destroy GPU instance {id}: {error}; check for processes that use it")
        })?;
    }
    Ok(())
}

/// Destroys the compute instances of a GPU instance.
fn destroy_compute_instances(instance: &GpuInstance<'_>) -> Result<(), String> {
    for profile in instance.compute_profiles().map_err(to_text)? {
        for compute in instance.compute_instances(profile.id).map_err(to_text)? {
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

fn names(profiles: &[&Profile]) -> String {
    profiles.iter().map(|profile| profile.name.as_str()).collect::<Vec<_>>().join(",")
}

/// Plans the change to the requested instances on a GPU in MIG mode.
pub(crate) fn prepare<'a>(gpu: Gpu<'a>, parts: &[InstanceCount]) -> Result<Plan<'a>, String> {
    let profiles = gpu.profiles().map_err(|error| format!("failed to read the MIG profiles: {error}"))?;
    let requested = resolve(gpu, &profiles, parts)?;
    let current = instances(gpu, &profiles)?;
    let sorted = |mut ids: Vec<u32>| {
        ids.sort_unstable();
        ids
    };
    let same_profiles = sorted(current.iter().map(|instance| instance.profile).collect())
        == sorted(requested.iter().map(|profile| profile.id).collect());
    let contents: Vec<ComputeInstances> = current.iter().map(compute_instances).collect::<Result<_, _>>()?;
    let requested_names = names(&requested);
    if same_profiles && contents.iter().all(|compute| *compute == ComputeInstances::Full) {
        return Ok(Plan::Nothing(requested_names));
    }
    if same_profiles && !contents.contains(&ComputeInstances::Other) {
        let description = format!("{requested_names} (previously without all compute instances)");
        return Ok(Plan::change(description.clone(), move || {
            for (instance, _) in current.iter().zip(contents).filter(|(_, compute)| *compute == ComputeInstances::None)
            {
                create_full_compute_instance(instance)?;
            }
            Ok(description)
        }));
    }
    let mut choices = Vec::new();
    for profile in &requested {
        choices.push(
            gpu.placements(profile.id)
                .map_err(|error| format!("failed to read the placements of {}: {error}", profile.name))?,
        );
    }
    let Some(placements) = placement::find_placements(&choices) else {
        return Err(format!(
            "{requested_names} do not fit on this GPU, which has {}",
            describe_profiles(gpu, &profiles)
        ));
    };
    if !current.is_empty() {
        check_unused(gpu)?;
    }
    let previous = match current.len() {
        0 => "without instances".to_owned(),
        _ => current.iter().map(|instance| name_of(&profiles, instance)).collect::<Vec<_>>().join(","),
    };
    let description = format!("{requested_names} (previously {previous})");
    let plan: Vec<(String, u32, Placement)> = requested
        .iter()
        .zip(placements)
        .map(|(profile, placement)| (profile.name.clone(), profile.id, placement))
        .collect();
    Ok(Plan::change(description.clone(), move || {
        destroy_all(gpu)?;
        for (name, profile, placement) in &plan {
            if let Err(error) = create_instance(gpu, *profile, *placement) {
                let after = match destroy_all(gpu) {
                    Ok(()) => "all instances were destroyed again".to_owned(),
                    Err(error) => format!("the instances created before it remain: {error}"),
                };
                return Err(format!(
                    "failed to create {name} at slice {} of {requested_names}: {error}; {after}",
                    placement.start
                ));
            }
        }
        Ok(description)
    }))
}

fn name_of(profiles: &[Profile], instance: &GpuInstance<'_>) -> String {
    let profile = profiles.iter().find(|profile| profile.id == instance.profile);
    profile.map_or_else(|| format!("profile {}", instance.profile), |profile| profile.name.clone())
}

/// Creates a GPU instance with one compute instance of full size.
fn create_instance(gpu: Gpu<'_>, profile: u32, placement: Placement) -> Result<(), String> {
    create_full_compute_instance(&gpu.create_instance(profile, placement).map_err(to_text)?)
}

fn create_full_compute_instance(instance: &GpuInstance<'_>) -> Result<(), String> {
    instance.create_compute_instance(full_compute_profile(instance)?).map(drop).map_err(to_text)
}
