//! Dates and times as numbers: days since the beginning of 1970 in UTC.

use time::format_description::parse_strftime_borrowed;
use time::format_description::well_known::Iso8601;
use time::parsing::Parsed;
use time::{Date, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset};

const SECONDS: f64 = 86_400.0;

/// A date as it is written.
const DATE: &str = "2024-03-01";

/// Returns the days of a date, as in `2024-03-01`, or of a date and time, as in `2024-03-01T12:30:00` or
/// `2024-03-01 12:30:00+02:00` (ISO 8601; the `T` may be a space, and a time without an offset is in UTC). None if the
/// text is neither.
pub(crate) fn days(text: &str) -> Option<f64> {
    // The library takes shorter forms too, and does not look at a time after a date.
    if text.len() <= DATE.len() {
        let date = Date::parse(text, &Iso8601::DATE).ok();
        let date = date.filter(|_| text.len() == DATE.len())?;
        return Some(in_days(date.midnight().assume_utc()));
    }
    // As databases write it: `2024-03-01 12:30:00.5 UTC` or `... +02`.
    let text = match text
        .strip_suffix("UTC")
        .or_else(|| text.strip_suffix("GMT"))
    {
        Some(text) => format!("{}Z", text.trim_end()),
        None => text.to_owned(),
    };
    let text = text.replacen(' ', "T", 1).replace(' ', "");
    let time = OffsetDateTime::parse(&text, &Iso8601::DEFAULT).or_else(|_| {
        PrimitiveDateTime::parse(&text, &Iso8601::DEFAULT).map(PrimitiveDateTime::assume_utc)
    });
    time.ok().map(in_days)
}

/// Returns the days of a date that is written in a format of `strftime`, as in `%d/%m/%Y`. A time without an offset is in UTC. None if the text is
/// not in this format, or if it is none.
pub(crate) fn days_by(text: &str, format: &str) -> Option<f64> {
    let format = parse_strftime_borrowed(format).ok()?;
    let mut parsed = Parsed::new();
    let rest = parsed.parse_items(text.as_bytes(), &format).ok()?;
    if !rest.is_empty() {
        return None;
    }
    if let (None, Some(of_century)) = (parsed.year(), parsed.year_last_two()) {
        // As POSIX reads `%y`.
        let century = if of_century < 69 { 2000 } else { 1900 };
        parsed.set_year(century + i32::from(of_century))?;
    }
    let date = Date::try_from(parsed).ok()?;
    let clock = match (parsed.hour_24(), parsed.hour_12()) {
        (None, None) => Time::MIDNIGHT,
        _ => Time::try_from(parsed).ok()?,
    };
    let offset = UtcOffset::try_from(parsed).unwrap_or(UtcOffset::UTC);
    Some(in_days(
        PrimitiveDateTime::new(date, clock).assume_offset(offset),
    ))
}

fn in_days(time: OffsetDateTime) -> f64 {
    let fraction = f64::from(time.nanosecond()) / 1e9;
    (time.unix_timestamp() as f64 + fraction) / SECONDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times_are_days_since_1970() {
        for (text, expected) in [
            ("1970-01-01", 0.0),
            ("1969-12-31", -1.0),
            ("2024-02-29", 19_782.0),
            ("1970-01-02T12:00:00", 1.5),
            ("1970-01-02 12:00:00", 1.5),
            ("1970-01-02T12:00:00Z", 1.5),
            ("1970-01-02 14:00:00+02:00", 1.5),
            ("1970-01-01T00:00:43.2", 0.0005),
        ] {
            let found = days(text).unwrap();
            assert!((found - expected).abs() < 1e-12, "{text}: {found}");
        }
        for text in [
            "",
            "x",
            "2023-02-29",
            "2024-13-01",
            "01/02/2024",
            "12:00:00",
            "5",
            "2024",
            "20240301",
            "2024-03-01x",
            "2024-03-01T",
            "2024-03-01T25:00:00",
        ] {
            assert_eq!(days(text), None, "{text}");
        }
    }
}
