//! The log port: one client of the host reads the records as they come.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::queue::Queue;
use crate::vsock;

/// Serves one client after the other, for ever. What nobody reads is dropped
/// by the queue; nothing that logs ever waits for a client.
pub(crate) async fn serve(port: u32, queue: &Queue) {
    let listener = match vsock::listen(port) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("agent.log_vport={port}: cannot listen: {error}; the log cannot be read from the host");
            return;
        }
    };
    loop {
        let mut stream = vsock::next(&listener, "log port").await;
        let mut fed = std::pin::pin!(feed(queue, &mut stream));
        loop {
            tokio::select! {
                // A client that is gone; the next one continues where it was.
                _ = &mut fed => break,
                // A second one at the same time would get half of the records.
                second = vsock::next(&listener, "log port") => drop(second),
            }
        }
    }
}

/// Writes lines until the client is gone. What it says is not listened to.
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
    fn a_client_reads_what_came_before_and_the_next_one_goes_on() {
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
