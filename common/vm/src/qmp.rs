//! QEMU's monitor: what is plugged in while the guest runs.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::{Device, VmError};

/// One command may take this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// QEMU's longest answer to what is asked here is far below.
const MAX_LINE: u64 = 1 << 20;

/// A connection to the monitor. Events are passed over.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and takes the commands on.
    ///
    /// # Errors
    /// Nothing listens, or it is no monitor.
    pub async fn connect(socket: &Path) -> Result<Self, VmError> {
        let wrong = |what: String| VmError::Monitor { command: "connect".to_owned(), what };
        let stream = UnixStream::connect(socket).await.map_err(|error| wrong(error.to_string()))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        let greeting = monitor.line().await.map_err(wrong)?;
        if greeting.get("QMP").is_none() {
            return Err(wrong(format!("greeted with {greeting}")));
        }
        monitor.execute("qmp_capabilities", json!({})).await?;
        Ok(monitor)
    }

    /// Runs one command; what it returns.
    ///
    /// # Errors
    /// QEMU refuses it, is gone, or does not answer.
    pub async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, VmError> {
        let request = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let answer = async {
            self.stream.get_mut().write_all(request.as_bytes()).await.map_err(|error| error.to_string())?;
            loop {
                let mut line = self.line().await?;
                if let Some(error) = line.get("error") {
                    return Err(error.get("desc").and_then(Value::as_str).unwrap_or("no reason").to_owned());
                }
                if let Some(result) = line.get_mut("return") {
                    return Ok(result.take());
                }
            }
        };
        let answer = timeout(PATIENCE, answer).await.unwrap_or_else(|_| Err(format!("no answer in {PATIENCE:?}")));
        answer.map_err(|what| VmError::Monitor { command: command.to_owned(), what })
    }

    /// Plugs a device into the machine's empty port number `at`.
    ///
    /// # Errors
    /// QEMU refuses a part of it.
    pub async fn plug(&mut self, at: usize, device: &Device) -> Result<(), VmError> {
        if let Some((option, value)) = device.back(at) {
            let command = if option == "-netdev" { "netdev_add" } else { "blockdev-add" };
            self.execute(command, value).await?;
        }
        for value in device.front(at) {
            self.execute("device_add", value).await?;
        }
        Ok(())
    }

    /// Plugs `count` of the machine's spare processors in, lowest number first.
    ///
    /// # Errors
    /// There are not so many, or QEMU refuses one.
    pub async fn plug_cpus(&mut self, count: usize) -> Result<(), VmError> {
        let command = "query-hotpluggable-cpus";
        let all = self.execute(command, json!({})).await?;
        // QEMU tells the highest first; those with a path are in.
        let all = all.as_array().map(Vec::as_slice).unwrap_or_default();
        let spare: Vec<&Value> = all.iter().rev().filter(|cpu| cpu.get("qom-path").is_none()).collect();
        if spare.len() < count {
            let what = format!("{} spare processors, not {count}; see spare_cpus of the machine", spare.len());
            return Err(VmError::Monitor { command: command.to_owned(), what });
        }
        for cpu in &spare[..count] {
            let mut device = cpu.get("props").and_then(Value::as_object).cloned().unwrap_or_default();
            device.insert("driver".to_owned(), cpu.get("type").cloned().unwrap_or_default());
            self.execute("device_add", Value::Object(device)).await?;
        }
        Ok(())
    }

    /// Plugs `mib` of the machine's spare memory in, as one module (DIMM).
    ///
    /// # Errors
    /// There is not so much, or no place for another module, or QEMU refuses.
    pub async fn plug_memory(&mut self, mib: u32) -> Result<(), VmError> {
        let all = self.execute("query-memory-devices", json!({})).await?;
        let at = all.as_array().map_or(0, Vec::len);
        let back = format!("spare{at}");
        let size = u64::from(mib) << 20;
        // Shared, as the daemons that serve the guest read its buffers there.
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
            return Err("the monitor has closed".to_owned());
        }
        serde_json::from_slice(&line).map_err(|error| format!("not an answer: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    /// Serves one connection these answers, the greeting first; what was asked.
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
    async fn spare_processors_are_plugged_in_from_the_lowest_and_never_too_many() {
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
        assert!(error.contains("2 spare processors, not 3"), "{error}");
    }

    #[tokio::test]
    async fn memory_has_a_name_of_its_own_and_what_is_behind_a_refused_one_goes() {
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
    async fn commands_are_answered_past_events_and_refusals_are_named() {
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
