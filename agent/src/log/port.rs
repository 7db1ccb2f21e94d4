//! The log port: streams records to one client on the host.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::queue::Queue;
use crate::vsock;

/// Serves one client at a time, forever. Unread records are dropped by the queue; logging never
/// waits for a client.
pub(crate) async fn serve(port: u32, queue: &Queue) {
    let listener = match vsock::listen(port) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("agent.log_vport={port}: failed to listen: {error}; the log cannot be read from the host");
            return;
        }
    };
    loop {
        let mut stream = vsock::accept_next(&listener, "log port").await;
        let mut fed = std::pin::pin!(feed(queue, &mut stream));
        loop {
            tokio::select! {
                // The client has disconnected; the next one continues at the same record.
                _ = &mut fed => break,
                // Rejected: concurrent clients would each get only part of the records.
                second = vsock::accept_next(&listener, "log port") => drop(second),
            }
        }
    }
}

/// Writes lines until the client disconnects. Its input is discarded.
async fn feed<S: AsyncRead + AsyncWrite + Unpin>(queue: &Queue, stream: &mut S) -> io::Result<()> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let write = async {
        loop {
            writer.write_all(queue.next().await.as_bytes()).await?;
        }
    };
    let read = async {
        let mut ignored = [0; 64];
        while reader.read(&mut ignored).await? > 0 {}
        Ok(())
    };
    tokio::select! {
        written = write => written,
        gone = read => gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncBufReadExt;
    use tokio::net::UnixStream;

    #[test]
    fn client_reads_queued_records_and_the_next_one_continues() {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let queue = Queue::default();
            queue.push("before\n".into());
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            let client = async {
                let mut lines = tokio::io::BufReader::new(theirs).lines();
                assert_eq!(lines.next_line().await.unwrap().unwrap(), "before");
                queue.push("during\n".into());
                assert_eq!(lines.next_line().await.unwrap().unwrap(), "during");
            };
            let (end, ()) = tokio::join!(feed(&queue, &mut ours), client);
            end.unwrap();
            queue.push("after\n".into());
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            let client = async {
                let mut lines = tokio::io::BufReader::new(theirs).lines();
                assert_eq!(lines.next_line().await.unwrap().unwrap(), "after");
            };
            let (end, ()) = tokio::join!(feed(&queue, &mut ours), client);
            end.unwrap();
        });
    }
}
