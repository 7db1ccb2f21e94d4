//! `firstlight pull`.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use firstlight_oci::pull::{self, Credentials, Patience, Platform, Source, Wanted};
use firstlight_progress::{Progress, megabytes};

/// Options of `pull`.
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// oci:PATH[:REF], docker-archive:PATH[:REF] or docker://HOST[:PORT]/NAME[:TAG|@sha256:..].
    #[arg(value_name = "SOURCE")]
    source: String,
    /// The directory that becomes an OCI image layout. An older layout there is replaced.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// For which machine, if there are several: OS/ARCHITECTURE[/VARIANT].
    #[arg(long, value_name = "PLATFORM", default_value = "linux/amd64")]
    platform: Platform,
    /// Ask the registry without TLS. One on this machine's loopback is always asked so.
    #[arg(long)]
    plain_http: bool,
    /// Print what was pulled as JSON.
    #[arg(long)]
    json: bool,
}

impl Pull {
    pub(crate) fn run(&self) -> Result<()> {
        self.run_to(&mut io::stdout().lock(), Progress::stderr("firstlight"))
    }

    fn run_to(&self, out: &mut dyn Write, progress: Progress) -> Result<()> {
        let source: Source = self.source.parse()?;
        let pulled = pull::pull(&Wanted {
            source: &source,
            out: &self.out,
            platform: &self.platform,
            plain_http: self.plain_http,
            credentials: &Credentials::of_user(),
            patience: Patience::default(),
            progress,
        })
        .with_context(|| format!("cannot pull {}", self.source))?;
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &pulled)?;
            writeln!(out)?;
        } else {
            let (layers, bytes, platform) = (pulled.layers.len(), megabytes(pulled.bytes), &pulled.platform);
            writeln!(out, "{}: {} for {platform}, {layers} layers, {bytes}", self.out.display(), pulled.digest)?;
        }
        Ok(())
    }
}
