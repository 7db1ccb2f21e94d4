//! The debug console: a root shell per connection from the host, on its own port and only with
//! `agent.debug_console`.

mod session;

use std::ffi::CStr;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::vsock;

/// Tried in this order: that of the image's development kit, then the usual ones.
const SHELLS: &[&CStr] = &[c"/run/kata-extensions/devkit/bin/devkit-sh", c"/bin/bash", c"/bin/sh"];

/// Maximum number of concurrent sessions.
const MAX_SESSIONS: usize = 8;

/// Serves a shell to each connection, forever.
pub(crate) async fn serve(port: u32) {
    let listener = match vsock::listen(port) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!(
                "agent.debug_console_vport={port}: failed to listen: {error}; the debug console is unavailable"
            );
            return;
        }
    };
    log::warn!("debug console: vsock port {port} gives root shells to the host (agent.debug_console)");
    let slots = Arc::new(Semaphore::new(MAX_SESSIONS));
    loop {
        let stream = vsock::accept_next(&listener, "debug console").await;
        // Above the maximum the connection is closed.
        let Ok(permit) = Arc::clone(&slots).try_acquire_owned() else { continue };
        tokio::spawn(async move {
            if let Err(error) = session::run(stream, SHELLS).await {
                log::error!("debug console: {error}");
            }
            drop(permit);
        });
    }
}
