//! Values of samples.

use std::fmt;
use std::time::Duration;

/// The value of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// A count or a size.
    Integer(u64),
    /// A number, which may be infinite or not a number.
    Float(f64),
    /// A duration, written as seconds with three decimals.
    Seconds(Duration),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) if value.is_nan() => f.write_str("NaN"),
            // Rust writes `inf`.
            Self::Float(value) if value.is_infinite() => f.write_str(if *value > 0.0 { "+Inf" } else { "-Inf" }),
            Self::Float(value) => write!(f, "{value}"),
            Self::Seconds(duration) => write!(f, "{:.3}", duration.as_secs_f64()),
        }
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Integer(value)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Integer(value.into())
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::Integer(u64::try_from(value).unwrap_or(u64::MAX))
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Integer(value.into())
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<Duration> for Value {
    fn from(value: Duration) -> Self {
        Self::Seconds(value)
    }
}
