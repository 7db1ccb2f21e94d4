//! An agent in a separate network namespace, and means to inspect it.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;

use firstlight_agent_api::agent::{
    ARPNeighbors, AddARPNeighborsRequest, Routes, UpdateInterfaceRequest, UpdateRoutesRequest,
};
use firstlight_agent_api::types::{ARPNeighbor, IPAddress, Interface, Route};
use rustix::io::Errno;

use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::support::{Agent, not_runnable, short};

/// As the default script; the new sysfs shows the new network namespace.
const SCRIPT: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup || true
[ -e /var/run ] || ln -s /run /var/run
exec "$AGENT"
"#;

pub(super) fn run(test: impl AsyncFnOnce(Fixture)) {
    assert!(rustix::process::geteuid().is_root(), "network namespaces cannot be created here: not root");
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        test(Fixture { agent: Agent::start_as(&["--mount", "--net"], SCRIPT, dir, &[]).await }).await;
    });
}

pub(super) struct Fixture {
    pub(super) agent: Agent,
}

/// Returns an interface as shims request it.
pub(super) fn interface_request(name: &str, mac: &str, addresses: &[(&str, &str)]) -> Interface {
    let addresses = addresses.iter().map(|(address, mask)| IPAddress {
        address: (*address).into(),
        mask: (*mask).into(),
        ..Default::default()
    });
    Interface {
        device: name.into(),
        name: name.into(),
        hwAddr: mac.into(),
        IPAddresses: addresses.collect(),
        ..Default::default()
    }
}

pub(super) fn route(dest: &str, gateway: &str, device: &str) -> Route {
    Route { dest: dest.into(), gateway: gateway.into(), device: device.into(), ..Default::default() }
}

pub(super) fn refusal(error: ttrpc::Error) -> (ttrpc::Code, String) {
    let ttrpc::Error::RpcStatus(status) = error else { panic!("not an RPC status: {error}") };
    (status.code(), status.message)
}

impl Fixture {
    /// Runs a script in the agent's network namespace and returns its output.
    pub(super) fn inside(&self, script: &str) -> String {
        self.attempt(script).unwrap_or_else(|text| panic!("{script}: {text}"))
    }

    /// As [`Self::inside`]; the output is an error if the script failed.
    fn attempt(&self, script: &str) -> Result<String, String> {
        let pid = self.agent.pids()[0].to_string();
        let output = Command::new("nsenter").args(["-t", &pid, "-m", "-n", "/bin/sh", "-c", script]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(text) } else { Err(text) }
    }

    /// Creates a NIC with a connected peer.
    pub(super) fn nic(&self, name: &str, mac: &str) {
        let others = || {
            let all = self.inside("ls /sys/class/net");
            all.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let before = others();
        let add = format!("ip link add {name} address {mac} type veth");
        if let Err(text) = self.attempt(&add) {
            // EOPNOTSUPP: the kernel does not know the link kind.
            if text.contains("not supported") {
                not_runnable("this kernel has no veth (modprobe veth)");
            }
            panic!("{add}: {text}");
        }
        let peer = others().into_iter().find(|it| it != name && !before.contains(it)).unwrap();
        // Avoids names that tests use.
        self.inside(&format!("ip link set {peer} name far-{name} && ip link set far-{name} up"));
    }

    /// Reads a sysfs file of an interface.
    pub(super) fn sysfs(&self, name: &str, file: &str) -> Option<String> {
        let path = self.agent.inside(&format!("/sys/class/net/{name}/{file}"));
        fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    }

    /// Reads a table of `/proc/net` of the namespace.
    pub(super) fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/net/{file}", self.agent.pids()[0])).unwrap()
    }

    /// Returns the largest packet that the kernel sends there unfragmented.
    pub(super) fn largest_packet(&self, to: [u8; 4]) -> usize {
        /// Of IPv4 and UDP.
        const HEADERS: usize = 28;
        let namespace = fs::File::open(format!("/proc/{}/ns/net", self.agent.pids()[0])).unwrap();
        let measure = move || {
            // Changes only this thread, which then exits.
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
            let fits = |size: &usize| match socket.send_to(&vec![0; size - HEADERS], (Ipv4Addr::from(to), 9)) {
                Err(error) if error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error()) => false,
                other => other.is_ok(),
            };
            (HEADERS..9000).rev().find(fits).unwrap()
        };
        std::thread::spawn(measure).join().unwrap()
    }

    /// Returns the number of sockets that the agent's server has open.
    pub(super) fn sockets(&self) -> usize {
        let dir = fs::read_dir(format!("/proc/{}/fd", self.agent.pids()[0])).unwrap();
        let links = dir.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    }

    pub(super) async fn update(&self, interface: Interface) -> ttrpc::Result<Interface> {
        let request = UpdateInterfaceRequest { interface: Some(interface).into(), ..Default::default() };
        self.agent.calls.update_interface(short(), &request).await
    }

    pub(super) async fn update_routes(&self, routes: Vec<Route>) -> ttrpc::Result<Vec<Route>> {
        let routes = Some(Routes { Routes: routes, ..Default::default() }).into();
        let request = UpdateRoutesRequest { routes, ..Default::default() };
        self.agent.calls.update_routes(short(), &request).await.map(|reply| reply.Routes)
    }

    pub(super) async fn add_neighbours(&self, all: Vec<ARPNeighbor>) -> ttrpc::Result<()> {
        let neighbors = Some(ARPNeighbors { ARPNeighbors: all, ..Default::default() }).into();
        let request = AddARPNeighborsRequest { neighbors, ..Default::default() };
        self.agent.calls.add_arp_neighbors(short(), &request).await.map(|_| ())
    }
}
