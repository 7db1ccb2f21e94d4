//! An NFS 4 server on the host, in user space, on the loopback interface, without
//! privileges. It stores files in memory.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::server::{Server, free_port};
use super::tree::{Members, Recipe, Tree, io_error};
use super::{Error, Toolbox};

const GANESHA: Recipe = Recipe {
    label: "nfs-ganesha",
    suite: "bookworm",
    packages: &["nfs-ganesha", "nfs-ganesha-mem"],
    members: Members::WithDependencies,
    keep: |path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let library = ["lib", "lib64", "usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/ganesha"];
        path == Path::new(PROGRAM)
            || (library.iter().any(|dir| path.starts_with(dir)) && (name.contains(".so") || name == "ganesha"))
    },
};

const PROGRAM: &str = "usr/bin/ganesha.nfsd";

/// Its library directories; the C library's first.
const LIBRARIES: &[&str] = &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/ganesha"];

/// Possible paths of the dynamic loader.
const LOADERS: &[&str] =
    &["lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"];

/// The directory that clients mount.
pub const EXPORT: &str = "/export";

/// A running NFS server; dropping it kills the server.
#[derive(Debug)]
pub struct FileServer(Server);

impl FileServer {
    /// Returns its port on the loopback interface.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.0.port
    }
}

fn configuration(port: u16, plugins: &Path, state: &Path) -> String {
    let (plugins, state) = (plugins.display(), state.display());
    format!(
        "NFS_CORE_PARAM {{ NFS_Protocols = 4; NFS_Port = {port}; Bind_addr = 127.0.0.1; Enable_NLM = false;\n\
         Enable_RQUOTA = false; Plugins_Dir = \"{plugins}\"; }}\n\
         NFSV4 {{ Graceless = true; RecoveryBackend = \"fs\"; RecoveryRoot = \"{state}\";\n\
         Only_Numeric_Owners = true; UseGetpwnam = true; DomainName = \"lab\"; }}\n\
         EXPORT {{ Export_Id = 1; Path = \"{EXPORT}\"; Pseudo = \"{EXPORT}\"; Access_Type = RW;\n\
         Squash = No_Root_Squash; SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = MEM; }} }}\n\
         MEM {{ Inode_Size = 1114112; }}\n"
    )
}

impl Toolbox {
    /// Starts an NFS server that exports an empty [`EXPORT`].
    ///
    /// # Errors
    /// A package cannot be fetched, or the server does not listen; the error has the end of its log.
    pub fn file_server(&self) -> Result<FileServer, Error> {
        let tree = Tree::prepare(&self.cache, &GANESHA, self.progress)?;
        let dir = tempfile::tempdir().map_err(|error| io_error("make", &std::env::temp_dir(), error))?;
        let at = |name: &str| dir.path().join(name);
        let port = free_port()?;
        let text = configuration(port, &tree.root.join("usr/lib/x86_64-linux-gnu/ganesha"), dir.path());
        let file = at("ganesha.conf");
        fs::write(&file, text).map_err(|error| io_error("write", &file, error))?;

        // bookworm also has libraries in /lib.
        let libraries: Vec<String> = LIBRARIES.iter().map(|dir| tree.root.join(dir).display().to_string()).collect();
        let mut command = Command::new(tree.file(LOADERS)?);
        command.arg("--library-path").arg(libraries.join(":")).arg(tree.file(&[PROGRAM])?);
        command.arg("-F").arg("-f").arg(&file).args(["-L", "STDOUT", "-N", "NIV_EVENT"]);
        command.arg("-p").arg(at("pid"));
        Ok(FileServer(Server::start("nfs-ganesha", command, port, dir)?))
    }
}
