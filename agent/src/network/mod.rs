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

use crate::agent::Agent;
use crate::background;
use crate::error::{Error, Result};

/// Serialises network changes: each consists of several netlink requests, so two concurrent changes
/// would interfere.
#[derive(Debug, Default)]
pub struct ChangeLock(tokio::sync::Mutex<()>);

fn proc(root: &Path) -> PathBuf {
    root.join("proc")
}

impl Agent {
    /// Runs a network change to completion, after earlier ones.
    async fn change<T, F>(self: &Arc<Self>, change: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Path) -> Result<T> + Send + 'static,
    {
        let agent = Arc::clone(self);
        background::to_completion(async move {
            let _lock = agent.network.0.lock().await;
            let root = agent.paths.root.clone();
            background::blocking(move || change(&root)).await
        })
        .await
    }

    /// Configures an interface as requested, and returns the request.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` says `Link not found` if there is no such
    /// interface (yet), otherwise what the kernel rejected.
    pub async fn update_interface(self: &Arc<Self>, request: UpdateInterfaceRequest) -> Result<Interface> {
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
    pub async fn update_routes(self: &Arc<Self>, request: UpdateRoutesRequest) -> Result<Routes> {
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
    pub async fn add_neighbours(self: &Arc<Self>, request: AddARPNeighborsRequest) -> Result<()> {
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
        let root = self.paths.root.clone();
        background::blocking(move || iptables::save(&root, request.is_ipv6)).await
    }

    /// Replaces the iptables rules; returns the program's output.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: the image has no such program. `INTERNAL`: it failed.
    pub async fn set_iptables(self: &Arc<Self>, request: SetIPTablesRequest) -> Result<Vec<u8>> {
        self.change(move |root| iptables::restore(root, request.is_ipv6, &request.data)).await
    }
}
