//! Units that mount file systems.

use super::{Inputs, Report, joined, not_needed, plain};
use crate::mounts::{self, When};
use crate::root::leave_first_root;

/// The runtime directory of PID 1; only root in the guest's own mount namespace can access it.
const OWN_DIRECTORY: &str = "/run/firstlight";

pub(super) fn first_mounts(_: &Inputs) -> Report {
    plain(mount_first())
}

fn mount_first() -> Result<String, String> {
    let moved = leave_first_root().map_err(|error| error.to_string())?;
    let count = mounts::mount_all(When::First).map_err(|errors| joined(&errors))?;
    mounts::make_links();
    match rustix::fs::mkdir(OWN_DIRECTORY, rustix::fs::Mode::RWXU) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(format!("failed to create {OWN_DIRECTORY}: {error}")),
    }
    let root = if moved { "; the root has a parent mount now" } else { "" };
    Ok(format!("{count} file systems{root}"))
}

pub(super) fn later_mounts(_: &Inputs) -> Report {
    let mut detail = match mounts::mount_all(When::Later) {
        Ok(count) => format!("{count} file systems"),
        // A kernel may lack these file systems.
        Err(errors) => format!("left out: {}", joined(&errors)),
    };
    match mounts::mount_all(When::Scratch) {
        Ok(0) => {}
        Ok(count) => detail.push_str(&format!("; scratch space for {count} directories")),
        Err(errors) => return plain(Err(format!("{detail}; {}", joined(&errors)))),
    }
    plain(Ok(detail))
}

pub(super) fn remount_root_read_only(inputs: &Inputs) -> Report {
    if inputs.params.root_writable {
        return not_needed("firstlight.root=rw".to_owned());
    }
    plain(mounts::remount_root_read_only().map(|()| "read-only".to_owned()).map_err(|error| {
        format!(
            "cannot make / read-only: {error}; is a file on it open for writing? firstlight.root=rw keeps it writable"
        )
    }))
}
