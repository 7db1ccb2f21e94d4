//! `firstlight pull`.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use firstlight_oci::pull::{self, Credentials, Platform, PullRequest, PulledImage, RetryPolicy, Source};
use firstlight_progress::{Progress, megabytes};

/// Options of `pull`.
#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// oci:PATH[:REF], docker-archive:PATH[:REF] or docker://HOST[:PORT]/NAME[:TAG|@sha256:..].
    #[arg(value_name = "SOURCE")]
    source: String,
    /// Directory of the OCI image layout. An existing layout is replaced.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Platform of the image: OS/ARCHITECTURE[/VARIANT].
    #[arg(long, value_name = "PLATFORM", default_value = "linux/amd64")]
    platform: Platform,
    /// Permit HTTP without TLS. To loopback addresses it is always used.
    #[arg(long)]
    plain_http: bool,
    /// Print the pulled image as JSON.
    #[arg(long)]
    json: bool,
}

/// Pulls an image and prints a summary.
pub(crate) fn pull(args: &PullArgs) -> Result<()> {
    let source: Source = args.source.parse()?;
    let image = pull::pull(&PullRequest {
        source: &source,
        out: &args.out,
        platform: &args.platform,
        plain_http: args.plain_http,
        credentials: &Credentials::of_user(),
        retry: RetryPolicy::default(),
        progress: Progress::stderr("firstlight"),
    })
    .with_context(|| format!("failed to pull {}", args.source))?;
    print_summary(&image, args.json, &mut io::stdout().lock())
}

fn print_summary(image: &PulledImage, json: bool, out: &mut dyn Write) -> Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, image)?;
        writeln!(out)?;
    } else {
        let (layers, bytes, platform) = (image.layers.len(), megabytes(image.bytes), &image.platform);
        writeln!(out, "{}: {} for {platform}, {layers} layers, {bytes}", image.out.display(), image.digest)?;
    }
    Ok(())
}
