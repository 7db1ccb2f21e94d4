//! The debug console: a root shell for whoever connects from the host, on its
//! own port and only with `agent.debug_console`.

mod session;

use std::ffi::CStr;
use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::vsock;

/// Tried in this order: a development kit that an image brings, then the usual ones.
const SHELLS: &[&CStr] = &[c"/run/kata-extensions/devkit/bin/devkit-sh", c"/bin/bash", c"/bin/sh"];

/// Sessions at a time.
const MOST: usize = 8;

/// Gives each connection a shell, for ever.
pub(crate) async fn serve(port: u32) {
    let listener = match vsock::listen(port) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("agent.debug_console_vport={port}: cannot listen: {error}; there is no debug console");
            return;
        }
    };
    log::warn!("debug console: vsock port {port} gives root shells to the host (agent.debug_console)");
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        let stream = vsock::next(&listener, "debug console").await;
        // Beyond them the connection is closed, which is all the answer that a terminal can show.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        tokio::spawn(async move {
            if let Err(error) = session::run(stream, SHELLS).await {
                log::error!("debug console: {error}");
            }
            drop(place);
        });
    }
}
