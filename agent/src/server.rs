//! The ttrpc listener, and the agent's start sequence.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use firstlight_init_control::ToInit;
use futures::StreamExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio_vsock::{VsockAddr, VsockListener};
use ttrpc::r#async::transport::Listener;

use crate::agent::Agent;
use crate::clock::now_us;
use crate::config::Config;
use crate::control::Control;
use crate::gpu::{Source, View};
use crate::idle::Idle;
use crate::paths::Paths;
use crate::policy;
use crate::runtime::Runtime;
use crate::stream::MAX_REPLY;
use crate::{console, log as agent_log, service, vsock};

/// Serves until the runtime exits. Nothing that can block comes before the bind, except the policy:
/// if the image has one, nothing is served without it.
///
/// # Errors
/// The policy is unusable, the address cannot be bound, or the runtime has exited. PID 1 handles
/// all of these.
pub async fn serve(config: Config, runtime: OwnedFd) -> io::Result<()> {
    let paths = Paths::below("/".as_ref());
    let gate = Arc::new(policy::from_image(&config, &paths).await?);
    let listener = bind(&config.address).map_err(|error| io::Error::other(format!("{}: {error}", config.address)))?;
    let bound_us = now_us();
    let runtime = Runtime::new(runtime)?;
    let (sender, view) = watch::channel(View::default());
    let control = config.control.as_deref().map(|path| Control::connect(path, sender));
    let gpus = if control.is_some() { Source::Init(view) } else { Source::Files };
    let agent = Agent::new(&config, paths, Arc::clone(&runtime), control.clone(), gpus);
    let idle = Arc::new(Idle::default());
    let mut server = ttrpc::r#async::Server::new().add_listener(listener);
    server = server.register_service(service::all(&agent, &gate, &idle, control.as_ref()));
    server.start().await.map_err(io::Error::other)?;
    if let Some(control) = &control {
        control.send(ToInit::Listening { at_us: bound_us });
    }
    if let Some((port, queue)) = config.log_port.zip(agent_log::queue()) {
        tokio::spawn(agent_log::port::serve(port, queue));
    }
    if let Some(port) = config.console_port.filter(|_| config.console) {
        tokio::spawn(console::serve(port));
    }
    tokio::spawn(async move { idle.run().await });
    Err(runtime.serve(|container, name, code| agent.containers.ended(container, name, code)).await)
}

/// Binds an address: `vsock://CID:PORT` (`-1` is any), `unix://PATH` or `tcp://HOST:PORT`.
fn bind(address: &str) -> io::Result<Listener> {
    if let Some(rest) = address.strip_prefix("vsock://") {
        return bind_vsock(rest);
    }
    if let Some(path) = address.strip_prefix("unix://").filter(|path| !path.starts_with('@')) {
        // A stale socket of an earlier agent would make the bind fail.
        let _ = std::fs::remove_file(path);
    }
    let listener = Listener::bind(address)?.map(|socket| socket.map(Capped));
    Ok(Listener::new(vsock::retry_accept(listener, "requests")))
}

fn bind_vsock(text: &str) -> io::Result<Listener> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "not vsock://CID:PORT");
    let (cid, port) = text.split_once(':').ok_or_else(wrong)?;
    let cid = if cid == "-1" { u32::MAX } else { cid.parse().map_err(|_| wrong())? };
    let port = port.parse().map_err(|_| wrong())?;
    let listener = VsockListener::bind(VsockAddr::new(cid, port))?;
    let accepted = futures::stream::unfold(listener, |listener| async {
        Some((vsock::accept(&listener).await.map(Capped), listener))
    });
    Ok(Listener::new(vsock::retry_accept(accepted, "requests")))
}

/// A stream whose writes are split into pieces: some vsock devices never complete a write of 64
/// KiB.
struct Capped<S>(S);

impl<S: AsyncRead + Unpin> AsyncRead for Capped<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Capped<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let most = buf.len().min(MAX_REPLY);
        Pin::new(&mut self.0).poll_write(cx, &buf[..most])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        run(async {
            for address in ["", "vsock://x:1", "vsock://1", "vsock://-1:x", "ftp://x"] {
                assert!(bind(address).is_err(), "{address}");
            }
        });
    }

    #[test]
    fn stale_socket_is_replaced() {
        run(async {
            let dir = tempfile::tempdir().unwrap();
            let address = format!("unix://{}", dir.path().join("a.sock").display());
            drop(bind(&address).unwrap());
            bind(&address).unwrap();
        });
    }

    #[test]
    fn large_replies_are_split() {
        run(async {
            let (ours, mut theirs) = tokio::net::UnixStream::pair().unwrap();
            let mut capped = Capped(ours);
            let data = vec![5; 3 * MAX_REPLY];
            assert_eq!(capped.write(&data).await.unwrap(), MAX_REPLY);
            capped.write_all(&data[MAX_REPLY..]).await.unwrap();
            drop(capped);
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).await.unwrap();
            assert_eq!(all.len(), data.len());
        });
    }
}
