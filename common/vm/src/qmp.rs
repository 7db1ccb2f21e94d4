//! QEMU's monitor (QMP): hotplug of devices, CPUs and memory.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::{Device, VmError};

/// Timeout of one command.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum line length; QEMU's longest reply to these commands is far shorter.
const MAX_LINE: u64 = 1 << 20;

/// A connection to the monitor. Events are ignored.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and negotiates capabilities.
    ///
    /// # Errors
    /// Nothing listens on the socket, or the peer is not a monitor.
    pub async fn connect(socket: &Path) -> Result<Self, VmError> {
        let wrong = |reason: String| VmError::Monitor { command: "connect".to_owned(), reason };
        let stream = UnixStream::connect(socket).await.map_err(|error| wrong(error.to_string()))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        let greeting = monitor.line().await.map_err(wrong)?;
        if greeting.get("QMP").is_none() {
            return Err(wrong(format!("unexpected greeting {greeting}")));
        }
        monitor.execute("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }

    /// Executes one command and returns its result.
    ///
    /// # Errors
    /// QEMU refuses it, has exited, or does not reply in time.
    pub async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, VmError> {
        let request = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let answer = async {
            self.stream.get_mut().write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
            loop {
                let mut line = self.line().await?;
                if let Some(error) = line.get("error") {
                    return Err(error.get("desc").and_then(Value::as_str).unwrap_or("no error description").to_owned());
                }
                if let Some(result) = line.get_mut("return") {
                    return Ok(result.take());
                }
            }
        };
        let answer = timeout(TIMEOUT, answer).await.unwrap_or_else(|_| Err(format!("no reply within {TIMEOUT:?}")));
        answer.map_err(|reason| VmError::Monitor { command: command.to_owned(), reason })
    }

    /// Hot-plugs a device into the machine's empty root port number `at`.
    ///
    /// # Errors
    /// QEMU refuses the backend or the device.
    pub async fn plug(&mut self, at: usize, device: &Device) -> Result<(), VmError> {
        if let Some((option, value)) = device.backend(at) {
            let command = if option == "-netdev" { "netdev_add" } else { "blockdev-add" };
            self.execute(command, value).await?;
        }
        for value in device.frontend(at) {
            self.execute("device_add", value).await?;
        }
        Ok(())
    }

    /// Hot-plugs `count` of the machine's spare CPUs, lowest number first.
    ///
    /// # Errors
    /// There are fewer spare CPUs, or QEMU refuses one.
    pub async fn plug_cpus(&mut self, count: usize) -> Result<(), VmError> {
        let command = "query-hotpluggable-cpus";
        let all = self.execute(command, json!({})).await?;
        // QEMU lists the highest first; CPUs with a QOM path are plugged.
        let all = all.as_array().map(Vec::as_slice).unwrap_or_default();
        let spare: Vec<&Value> = all.iter().rev().filter(|cpu| cpu.get("qom-path").is_none()).collect();
        if spare.len() < count {
            let reason = format!("{} spare CPUs, not {count}; raise spare_cpus of the machine", spare.len());
            return Err(VmError::Monitor { command: command.to_owned(), reason });
        }
        for cpu in &spare[..count] {
            let mut device = cpu.get("props").and_then(Value::as_object).cloned().unwrap_or_default();
            device.insert("driver".to_owned(), cpu.get("type").cloned().unwrap_or_default());
            self.execute("device_add", Value::Object(device)).await?;
        }
        Ok(())
    }

    /// Hot-plugs `mib` of the machine's spare memory as one DIMM.
    ///
    /// # Errors
    /// The spare memory or the DIMM slots are exhausted, or QEMU refuses.
    pub async fn plug_memory(&mut self, mib: u32) -> Result<(), VmError> {
        let all = self.execute("query-memory-devices", json!({})).await?;
        let at = all.as_array().map_or(0, Vec::len);
        let back = format!("spare{at}");
        let size = u64::from(mib) << 20;
        // Shared, because vhost-user daemons access the guest's buffers in it.
        let backend = json!({"qom-type": "memory-backend-memfd", "id": back, "size": size, "share": true});
        self.execute("object-add", backend).await?;
        let plugged =
            self.execute("device_add", json!({"driver": "pc-dimm", "id": format!("dimm{at}"), "memdev": back}));
        if let Err(error) = plugged.await {
            self.execute("object-del", json!({"id": back})).await?;
            return Err(error);
        }
        Ok(())
    }

    async fn line(&mut self) -> Result<Value, String> {
        let mut line = Vec::new();
        let mut bounded = (&mut self.stream).take(MAX_LINE);
        let read = bounded.read_until(b'\n', &mut line).await.map_err(|error| error.to_string())?;
        if read == 0 {
            return Err("the monitor closed the connection".to_owned());
        }
        serde_json::from_slice(&line).map_err(|error| format!("malformed reply: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    /// Serves these replies on one connection, the greeting first; returns the requests.
    async fn serve(listener: UnixListener, answers: &[&str]) -> Vec<String> {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut asked = Vec::new();
        for (at, answer) in answers.iter().enumerate() {
            if at > 0 {
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                asked.push(line);
            }
            stream.get_mut().write_all(answer.as_bytes()).await.unwrap();
        }
        asked
    }

    #[tokio::test]
    async fn spare_cpus_are_plugged_lowest_first_and_never_too_many() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let cpus = json!({"return": [
            {"type": "max-x86_64-cpu", "props": {"core-id": 2}},
            {"type": "max-x86_64-cpu", "props": {"core-id": 1}},
            {"type": "max-x86_64-cpu", "props": {"core-id": 0}, "qom-path": "/machine/unattached/device[0]"},
        ]});
        let cpus = format!("{cpus}\n");
        let answers = ["{\"QMP\": {}}\n", "{\"return\": {}}\n", &cpus, "{\"return\": {}}\n", &cpus];
        let client = async {
            let mut monitor = Qmp::connect(&path).await.unwrap();
            monitor.plug_cpus(1).await.unwrap();
            monitor.plug_cpus(3).await.unwrap_err().to_string()
        };
        let (asked, error) = tokio::join!(serve(listener, &answers), client);
        assert!(asked[2].contains("device_add") && asked[2].contains("\"core-id\":1"), "{asked:?}");
        assert!(asked[2].contains("max-x86_64-cpu"), "{asked:?}");
        assert!(error.contains("2 spare CPUs, not 3"), "{error}");
    }

    #[tokio::test]
    async fn memory_has_a_unique_id_and_a_refused_dimm_removes_its_backend() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let done = "{\"return\": {}}\n";
        let there = "{\"return\": [{\"type\": \"dimm\", \"data\": {\"id\": \"dimm0\"}}]}\n";
        let refusal = "{\"error\": {\"desc\": \"not enough space\"}}\n";
        let answers = ["{\"QMP\": {}}\n", done, "{\"return\": []}\n", done, done, there, done, refusal, done];
        let client = async {
            let mut monitor = Qmp::connect(&path).await.unwrap();
            monitor.plug_memory(128).await.unwrap();
            monitor.plug_memory(256).await.unwrap_err().to_string()
        };
        let (asked, error) = tokio::join!(serve(listener, &answers), client);
        assert!(asked[2].contains("\"id\":\"spare0\"") && asked[2].contains("\"share\":true"), "{asked:?}");
        assert!(asked[2].contains(&(128 << 20).to_string()) && asked[3].contains("pc-dimm"), "{asked:?}");
        assert!(asked[6].contains("\"memdev\":\"spare1\""), "{asked:?}");
        assert!(asked[7].contains("object-del") && asked[7].contains("spare1"), "{asked:?}");
        assert!(error.contains("device_add") && error.contains("not enough space"), "{error}");
    }

    #[tokio::test]
    async fn events_are_skipped_and_errors_name_the_command() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let answers = [
            "{\"QMP\": {}}\n",
            "{\"return\": {}}\n",
            "{\"event\": \"X\"}\n{\"return\": {}}\n",
            "{\"error\": {\"class\": \"GenericError\", \"desc\": \"Bus 'port9' not found\"}}\n",
        ];
        let client = async {
            let mut monitor = Qmp::connect(&path).await.unwrap();
            monitor.plug(9, &Device::Disk { file: "/d".into() }).await
        };
        let (asked, result) = tokio::join!(serve(listener, &answers), client);
        assert!(asked[0].contains("qmp_capabilities"), "{asked:?}");
        assert!(asked[1].contains("blockdev-add") && asked[2].contains("virtio-blk-pci"), "{asked:?}");
        let error = result.unwrap_err().to_string();
        assert!(error.contains("device_add") && error.contains("port9"), "{error}");
    }
}
