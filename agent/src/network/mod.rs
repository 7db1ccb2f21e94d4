//! The guest's network, as shims ask for it. Containers share it.
//!
//! The kernel is spoken to by `firstlight-net`, in a thread that may wait.

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
use crate::error::{Error, Result};
use crate::work;

/// Who may change the network now. Changes are several requests to the kernel
/// each, so two at a time would undo each other's premises.
#[derive(Debug, Default)]
pub struct Turn(tokio::sync::Mutex<()>);

fn proc(root: &Path) -> PathBuf {
    root.join("proc")
}

impl Agent {
    /// Runs a change of the network to its end, after those that came before.
    async fn change<T, F>(self: &Arc<Self>, change: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Path) -> Result<T> + Send + 'static,
    {
        let agent = Arc::clone(self);
        work::whole(async move {
            let _turn = agent.network.0.lock().await;
            let root = agent.paths.root.clone();
            work::blocking(move || change(&root)).await
        })
        .await
    }

    /// Brings an interface to what the request wants, and repeats the request's words.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` says `Link not found` when
    /// there is no such interface (yet), and else what the kernel refused.
    pub async fn update_interface(self: &Arc<Self>, request: UpdateInterfaceRequest) -> Result<Interface> {
        let wanted = request.interface.into_option().ok_or_else(|| Error::invalid("interface: there is none"))?;
        let checked = check::interface(&wanted)?;
        // Waited for before it is this one's turn: others need not wait for a device.
        let now = match &checked.place {
            Some(place) => {
                Some(self.hotplug.net_by_pci(place).await.map_err(|error| error.during("interface.devicePath"))?)
            }
            None => None,
        };
        let interface = checked.with_device(now.as_deref())?;
        self.change(move |root| {
            let configured = Netlink::open().and_then(|mut netlink| configure(&mut netlink, &interface, &proc(root)));
            configured.map_err(|error| reply::error("update interface", &error))
        })
        .await?;
        Ok(wanted)
    }

    /// Puts routes into the main table, and returns what is in it then.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` the route that the kernel refused.
    pub async fn update_routes(self: &Arc<Self>, request: UpdateRoutesRequest) -> Result<Routes> {
        let wanted = request.routes.into_option().ok_or_else(|| Error::invalid("routes: there are none"))?;
        let routes = check::routes(&wanted.Routes)?;
        self.change(move |root| {
            let mut netlink = Netlink::open().map_err(|error| reply::error("update routes", &error))?;
            replace_routes(&mut netlink, &routes, &proc(root))
                .and_then(|()| reply::routes(&mut netlink))
                .map_err(|error| reply::error("update routes", &error))
        })
        .await
    }

    /// Makes neighbours known.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` names the field; `INTERNAL` the neighbour that the kernel refused.
    pub async fn add_neighbours(self: &Arc<Self>, request: AddARPNeighborsRequest) -> Result<()> {
        let wanted = request.neighbors.into_option().ok_or_else(|| Error::invalid("neighbors: there are none"))?;
        let neighbours = check::neighbours(&wanted.ARPNeighbors)?;
        self.change(move |root| {
            Netlink::open()
                .and_then(|mut netlink| replace_neighbours(&mut netlink, &neighbours, &proc(root)))
                .map_err(|error| reply::error("add neighbours", &error))
        })
        .await
    }

    /// Every interface with its addresses.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub async fn list_interfaces(&self) -> Result<Interfaces> {
        let list = || Netlink::open().and_then(|mut netlink| reply::interfaces(&mut netlink));
        work::blocking(move || list().map_err(|error| reply::error("list interfaces", &error))).await
    }

    /// The main table's routes.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub async fn list_routes(&self) -> Result<Routes> {
        let list = || Netlink::open().and_then(|mut netlink| reply::routes(&mut netlink));
        work::blocking(move || list().map_err(|error| reply::error("list routes", &error))).await
    }

    /// The packet filter's rules, as `iptables-save` writes them.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: the image has no such program. `INTERNAL`: it failed.
    pub async fn get_iptables(&self, request: GetIPTablesRequest) -> Result<Vec<u8>> {
        let root = self.paths.root.clone();
        work::blocking(move || iptables::save(&root, request.is_ipv6)).await
    }

    /// Replaces the packet filter's rules; what the program writes is returned.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION`: the image has no such program. `INTERNAL`: it failed.
    pub async fn set_iptables(self: &Arc<Self>, request: SetIPTablesRequest) -> Result<Vec<u8>> {
        self.change(move |root| iptables::restore(root, request.is_ipv6, &request.data)).await
    }
}
