use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn family_header_is_written_once_and_only_with_samples() {
    let mut text = Text::default();
    text.family("none", Kind::Gauge, "Nothing.");
    let mut family = text.family("a_total", Kind::Counter, "Some.");
    family.sample(&[("x", "1"), ("y", "\"\\\n")], 3_u64);
    family.sample(&[], 0.5);
    assert_eq!(
        text.finish(),
        "# HELP a_total Some.\n# TYPE a_total counter\na_total{x=\"1\",y=\"\\\"\\\\\\n\"} 3\na_total 0.5\n"
    );
}

#[test]
fn requested_header_is_written_without_samples() {
    let mut text = Text::default();
    let mut family = text.family("a", Kind::Gauge, "A \"b\" \\ c\nd");
    family.header();
    family.header();
    assert_eq!(text.finish(), "# HELP a A \"b\" \\\\ c\\nd\n# TYPE a gauge\n");
}

#[test]
fn values_are_written_as_prometheus_parses_them() {
    for (value, expected) in [
        (Value::from(u64::MAX), "18446744073709551615"),
        (7_u32.into(), "7"),
        (usize::MIN.into(), "0"),
        (true.into(), "1"),
        (1.5.into(), "1.5"),
        ((-0.25).into(), "-0.25"),
        (f64::NAN.into(), "NaN"),
        (f64::INFINITY.into(), "+Inf"),
        (f64::NEG_INFINITY.into(), "-Inf"),
        (Duration::from_millis(20).into(), "0.020"),
        (Duration::from_secs(60).into(), "60.000"),
    ] {
        assert_eq!(value.to_string(), expected);
    }
}

#[test]
fn histogram_buckets_are_cumulative() {
    let mut text = Text::default();
    let bounds = [Duration::from_millis(5).into(), 2_u64.into()];
    text.family("h", Kind::Histogram, "H").histogram(&[("k", "v")], &bounds, &[2, 0, 4], Duration::from_millis(1500));
    assert_eq!(
        text.finish(),
        "# HELP h H\n# TYPE h histogram\nh_bucket{k=\"v\",le=\"0.005\"} 2\nh_bucket{k=\"v\",le=\"2\"} 2\n\
         h_bucket{k=\"v\",le=\"+Inf\"} 6\nh_sum{k=\"v\"} 1.500\nh_count{k=\"v\"} 6\n"
    );
}

#[test]
fn invalid_names_are_replaced() {
    let mut text = Text::default();
    text.family("1a b:c\n", Kind::Gauge, "").sample(&[("ä-1", "x")], 0_u64);
    assert_eq!(text.finish(), "# HELP _a_b_c_ \n# TYPE _a_b_c_ gauge\n_a_b_c_{__1=\"x\"} 0\n");
}

/// A sample: name, labels, value.
type Sample = (String, Vec<(String, String)>, f64);

/// Parses a sample as Prometheus does.
fn parse(line: &str) -> Option<Sample> {
    let (name, mut rest) = line.split_at(line.find(['{', ' '])?);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, quoted) = rest.split_once("=\"")?;
            let (mut value, mut chars) = (String::new(), quoted.char_indices());
            let end = loop {
                match chars.next()? {
                    (at, '"') => break at,
                    (_, '\\') => value.push(match chars.next()?.1 {
                        'n' => '\n',
                        c @ ('"' | '\\') => c,
                        _ => return None,
                    }),
                    (_, c) => value.push(c),
                }
            };
            labels.push((label.to_owned(), value));
            rest = &quoted[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('}')?;
    }
    let value = rest.strip_prefix(' ')?.replace("+Inf", "inf").replace("-Inf", "-inf").parse().ok()?;
    Some((name.to_owned(), labels, value))
}

proptest! {
    #[test]
    fn arbitrary_labels_and_values_round_trip(
        labels in proptest::collection::vec(("[a-z_][a-z0-9_]{0,8}", any::<String>()), 0..4),
        value in any::<f64>(),
    ) {
        let borrowed: Vec<(&str, &str)> = labels.iter().map(|(label, value)| (label.as_str(), value.as_str())).collect();
        let mut text = Text::default();
        text.family("m", Kind::Gauge, "M").sample(&borrowed, value);
        let text = text.finish();
        let mut lines = text.strip_suffix('\n').unwrap().split('\n');
        prop_assert_eq!(lines.by_ref().take(2).collect::<Vec<_>>(), ["# HELP m M", "# TYPE m gauge"]);
        let (name, read, number) = parse(lines.next().unwrap()).unwrap();
        prop_assert_eq!((name.as_str(), read), ("m", labels));
        prop_assert!(number == value || number.is_nan() && value.is_nan());
        prop_assert_eq!(lines.next(), None);
    }

    #[test]
    fn arbitrary_names_and_help_keep_the_format(name in any::<String>(), label in any::<String>(), help in any::<String>()) {
        let mut text = Text::default();
        text.family(&name, Kind::Counter, &help).sample(&[(&label, "x")], 1_u64);
        let text = text.finish();
        let lines: Vec<&str> = text.split('\n').collect();
        prop_assert_eq!(lines.len(), 4, "{}", text);
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.starts_with(|c: char| c.is_ascii_digit());
        let (name, labels, _) = parse(lines[2]).unwrap();
        prop_assert!(is_name(&name) && labels.iter().all(|(label, _)| is_name(label)), "{}", text);
    }
}
