//! A file server of the host: NFS 4 in user space, on the loopback, without any
//! rights. What clients write is in its memory.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

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
            || (library.iter().any(|folder| path.starts_with(folder)) && (name.contains(".so") || name == "ganesha"))
    },
};

const PROGRAM: &str = "usr/bin/ganesha.nfsd";

/// Where its libraries are, the C library's first.
const LIBRARIES: &[&str] = &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/ganesha"];

/// Where a program's loader may be.
const LOADERS: &[&str] =
    &["lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"];

/// How long it may take to listen.
const LISTEN: Duration = Duration::from_secs(30);

/// The folder that clients mount.
pub const EXPORT: &str = "/export";

/// A file server that ends when this is dropped.
#[derive(Debug)]
pub struct FileServer {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl Drop for FileServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl FileServer {
    /// Its port on the loopback.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
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
    /// Starts a file server that serves an empty [`EXPORT`].
    ///
    /// # Errors
    /// A package that cannot be had, or a server that does not listen; with its last words.
    pub fn file_server(&self) -> Result<FileServer, Error> {
        let tree = Tree::prepare(&self.cache, &GANESHA, self.progress)?;
        let folder = tempfile::tempdir().map_err(|error| io_error("make", &std::env::temp_dir(), error))?;
        let at = |name: &str| folder.path().join(name);
        let failed = |path: PathBuf| move |error| Error::from(io_error("write", &path, error));
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = free.map_err(failed(at("port")))?.port();
        let text = configuration(port, &tree.root.join("usr/lib/x86_64-linux-gnu/ganesha"), folder.path());
        fs::write(at("ganesha.conf"), text).map_err(failed(at("ganesha.conf")))?;
        let log = File::create(at("log")).map_err(failed(at("log")))?;
        let errors = log.try_clone().map_err(failed(at("log")))?;

        // This suite has libraries in /lib as well.
        let libraries: Vec<String> =
            LIBRARIES.iter().map(|folder| tree.root.join(folder).display().to_string()).collect();
        let mut command = Command::new(tree.file(LOADERS)?);
        command.arg("--library-path").arg(libraries.join(":")).arg(tree.file(&[PROGRAM])?);
        firstlight_sys::child::die_with_parent(&mut command);
        command.arg("-F").arg("-f").arg(at("ganesha.conf")).args(["-L", "STDOUT", "-N", "NIV_EVENT"]);
        command.arg("-p").arg(at("pid"));
        let child = command.stdin(Stdio::null()).stdout(log).stderr(errors).spawn();
        let child = child.map_err(|error| Error::from(io_error("run", &tree.root.join(PROGRAM), error)))?;
        let mut server = FileServer { child, port, folder };
        let begin = Instant::now();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        while TcpStream::connect(address).is_err() {
            let ended = server.child.try_wait().ok().flatten().is_some();
            if ended || begin.elapsed() > LISTEN {
                let said = fs::read(server.folder.path().join("log")).unwrap_or_default();
                let said = String::from_utf8_lossy(&said);
                let last = said.lines().rev().take(8).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>();
                return Err(Error::FileServer { port, what: last.join("\n") });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}
