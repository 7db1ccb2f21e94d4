//! Log records on standard error. PID 1 adds the time and the daemon's name, and forwards each line.

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, dispatcher};
use tracing_subscriber::fmt::MakeWriter;

/// The form of log records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Level, message and fields, without a time.
    Text,
    /// JSON objects with `timestamp`, `level`, `message` and fields.
    Json,
}

/// Options for log records.
#[derive(Debug, Clone, Copy, Args)]
pub struct LogOptions {
    /// The form of log records.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
    /// The least severe level that is logged: error, warn, info, debug, trace or off.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: LevelFilter,
}

impl LogOptions {
    /// Logs to standard error from now on.
    pub fn install(self) {
        // Fails only if the process has installed another.
        let _ = dispatcher::set_global_default(self.dispatch(std::io::stderr));
    }

    fn dispatch(self, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) -> Dispatch {
        let builder = tracing_subscriber::fmt()
            .with_max_level(self.log_level)
            .with_target(false)
            .with_ansi(false)
            .with_writer(writer);
        match self.log_format {
            LogFormat::Text => Dispatch::new(builder.without_time().finish()),
            LogFormat::Json => Dispatch::new(builder.json().flatten_event(true).finish()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _};
    use std::sync::Arc;

    use super::*;

    /// Returns what is logged by a warning and a debug record.
    fn logged(log_format: LogFormat, log_level: LevelFilter) -> String {
        let mut file = tempfile::tempfile().unwrap();
        let options = LogOptions { log_format, log_level };
        dispatcher::with_default(&options.dispatch(Arc::new(file.try_clone().unwrap())), || {
            tracing::warn!(cid = 7, device = "a\nb\u{1b}[31m", "rejected a connection");
            tracing::debug!("a request");
        });
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn text_records_are_one_line_with_level_message_and_fields() {
        let text = logged(LogFormat::Text, LevelFilter::INFO);
        assert_eq!(text, " WARN rejected a connection cid=7 device=\"a\\nb\\u{1b}[31m\"\n");
        assert_eq!(logged(LogFormat::Text, LevelFilter::DEBUG).lines().count(), 2);
        assert_eq!(logged(LogFormat::Text, LevelFilter::OFF), "");
    }

    #[test]
    fn json_records_have_level_message_and_fields() {
        let text = logged(LogFormat::Json, LevelFilter::INFO);
        assert_eq!(text.lines().count(), 1, "{text}");
        let record: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&record["level"], &record["message"]), (&"WARN".into(), &"rejected a connection".into()), "{text}");
        assert_eq!((&record["cid"], &record["device"]), (&7.into(), &"a\nb\u{1b}[31m".into()), "{text}");
    }
}
