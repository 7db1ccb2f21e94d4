//! The guest's network, as configured by shims. Containers share it.
//!
//! `firstlight-net` speaks rtnetlink, in the blocking pool.

mod check;
mod iptables;
mod reply;
mod tool;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use firstlight_agent_api::agent::{
    AddARPNeighborsRequest, GetIPTablesRequest, Interfaces, Routes, SetIPTablesRequest, UpdateInterfaceRequest,
    UpdateRoutesRequest,
};
use firstlight_agent_api::types::Interface;
use firstlight_net::{Netlink, configure, replace_neighbours, replace_routes};
use tokio::sync::Mutex;

use crate::background;
use crate::error::{Error, Result};
use crate::hotplug::Hotplug;
use crate::paths::Paths;

fn proc(root: &Path) -> PathBuf {
    root.join("proc")
}

/// Configures the guest's network. Changes are serialised: each consists of several netlink
/// requests, so two concurrent changes would interfere.
#[derive(Debug)]
pub struct Network {
    root: PathBuf,
    hotplug: Hotplug,
    changes: Arc<Mutex<()>>,
}

impl Network {
    /// Creates the component.
    #[must_use]
    pub fn new(paths: &Paths, hotplug: &Hotplug) -> Self {
        Self { root: paths.root.clone(), hotplug: hotplug.clone(), changes: Arc::default() }
    }

    /// Runs a network change to completion, after earlier ones.
    async fn change<T, F>(&self, change: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Path) -> Result<T> + Send + 'static,
    {
        let (root, changes) = (self.root.clone(), Arc::clone(&self.changes));
        background::to_completion(async move {
            let _lock = changes.lock().await;
            background::blocking(move || change(&root)).await
        })
        .await
    }

    /// Configures an interface as requested, and returns the request.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` says `Link not found` if there is no such
    /// interface (yet), otherwise what the kernel rejected.
    pub async fn update_interface(&self, request: UpdateInterfaceRequest) -> Result<Interface> {
        let interface = request.interface.into_option().ok_or_else(|| Error::invalid("interface: missing"))?;
        let checked = check::interface(&interface)?;
        // Waits before it takes the lock: other changes need not wait for a device.
        let now = match &checked.pci_path {
            Some(path) => {
                Some(self.hotplug.net_by_pci(path).await.map_err(|error| error.during("interface.devicePath"))?)
            }
            None => None,
        };
        let config = checked.with_device(now.as_deref())?;
        self.change(move |root| {
            let configured = Netlink::open().and_then(|mut netlink| configure(&mut netlink, &config, &proc(root)));
            configured.map_err(|error| reply::error("update interface", &error))
        })
        .await?;
        Ok(interface)
    }

    /// Adds or replaces routes in the main table, and returns its content.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` the route that the kernel rejected.
    pub async fn update_routes(&self, request: UpdateRoutesRequest) -> Result<Routes> {
        let requested = request.routes.into_option().ok_or_else(|| Error::invalid("routes: missing"))?;
        let routes = check::routes(&requested.Routes)?;
        self.change(move |root| {
            let mut netlink = Netlink::open().map_err(|error| reply::error("update routes", &error))?;
            replace_routes(&mut netlink, &routes, &proc(root))
                .and_then(|()| reply::routes(&mut netlink))
                .map_err(|error| reply::error("update routes", &error))
        })
        .await
    }

    /// Adds or replaces neighbours (ARP and NDP entries).
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` the neighbour that the kernel rejected.
    pub async fn add_neighbours(&self, request: AddARPNeighborsRequest) -> Result<()> {
        let requested = request.neighbors.into_option().ok_or_else(|| Error::invalid("neighbors is missing"))?;
        let neighbours = check::neighbours(&requested.ARPNeighbors)?;
        self.change(move |root| {
            Netlink::open()
                .and_then(|mut netlink| replace_neighbours(&mut netlink, &neighbours, &proc(root)))
                .map_err(|error| reply::error("add neighbours", &error))
        })
        .await
    }

    /// Lists all interfaces with their addresses.
    ///
    /// # Errors
    /// The netlink request failed.
    pub async fn list_interfaces(&self) -> Result<Interfaces> {
        let list = || Netlink::open().and_then(|mut netlink| reply::interfaces(&mut netlink));
        background::blocking(move || list().map_err(|error| reply::error("list interfaces", &error))).await
    }

    /// Lists the routes of the main table.
    ///
    /// # Errors
    /// The netlink request failed.
    pub async fn list_routes(&self) -> Result<Routes> {
        let list = || Netlink::open().and_then(|mut netlink| reply::routes(&mut netlink));
        background::blocking(move || list().map_err(|error| reply::error("list routes", &error))).await
    }

    /// Returns the iptables rules, as `iptables-save` writes them.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: the image has no such program. `INTERNAL`: it failed.
    pub async fn get_iptables(&self, request: GetIPTablesRequest) -> Result<Vec<u8>> {
        let root = self.root.clone();
        background::blocking(move || iptables::save(&root, request.is_ipv6)).await
    }

    /// Replaces the iptables rules; returns the program's output.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: the image has no such program. `INTERNAL`: it failed.
    pub async fn set_iptables(&self, request: SetIPTablesRequest) -> Result<Vec<u8>> {
        self.change(move |root| iptables::restore(root, request.is_ipv6, &request.data)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_runtime::run;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    fn network(root: &Path) -> Network {
        let paths = Paths::below(root);
        Network::new(&paths, &Hotplug::new(&paths, Duration::ZERO))
    }

    #[test]
    fn changes_run_one_after_another() {
        run(async {
            let (network, active) = (network(Path::new("/r")), Arc::new(AtomicU32::new(0)));
            let change = || {
                let active = Arc::clone(&active);
                network.change(move |root| {
                    assert_eq!((root, active.fetch_add(1, Ordering::SeqCst)), (Path::new("/r"), 0));
                    std::thread::sleep(Duration::from_millis(20));
                    active.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                })
            };
            let (first, second, third) = tokio::join!(change(), change(), change());
            assert_eq!((first, second, third), (Ok(()), Ok(()), Ok(())));
        });
    }

    #[test]
    fn change_is_completed_even_if_its_caller_disconnects() {
        run(async {
            let (network, done) = (network(Path::new("/r")), Arc::new(AtomicU32::new(0)));
            let seen = Arc::clone(&done);
            let change = network.change(move |_| {
                std::thread::sleep(Duration::from_millis(100));
                seen.store(1, Ordering::SeqCst);
                Ok(())
            });
            assert!(tokio::time::timeout(Duration::from_millis(20), change).await.is_err());
            let seen = Arc::clone(&done);
            let next = network.change(move |_| Ok(seen.load(Ordering::SeqCst)));
            assert_eq!(next.await, Ok(1), "it waits for the first change");
        });
    }

    #[test]
    fn missing_fields_and_programs_are_reported() {
        run(async {
            let root = tempfile::tempdir().unwrap();
            let network = network(root.path());
            for (error, part) in [
                (network.update_interface(UpdateInterfaceRequest::new()).await.unwrap_err(), "interface: missing"),
                (network.update_routes(UpdateRoutesRequest::new()).await.unwrap_err(), "routes: missing"),
                (network.add_neighbours(AddARPNeighborsRequest::new()).await.unwrap_err(), "neighbors is missing"),
                (network.get_iptables(GetIPTablesRequest::new()).await.unwrap_err(), "package iptables"),
                (network.set_iptables(SetIPTablesRequest::new()).await.unwrap_err(), "package iptables"),
            ] {
                assert!(error.message.contains(part), "{part} in {error}");
            }
        });
    }
}
