//! Dates and times as numbers: days since the beginning of 1970 in UTC.

use time::format_description::parse_strftime_borrowed;
use time::format_description::well_known::Iso8601;
use time::parsing::Parsed;
use time::{Date, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset};

const NANOSECONDS_OF_A_DAY: f64 = 86_400e9;

/// Expands to each date format alone, with hours and minutes, and with hours, minutes and seconds.
macro_rules! with_times {
    ($($date:literal),*) => {
        [$($date, concat!($date, " %H:%M"), concat!($date, " %H:%M:%S")),*]
    };
}

/// The formats besides ISO 8601 that a survey of a file tries on the columns.
const FORMATS: [&str; 27] = with_times![
    "%Y/%m/%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y%m%d", "%b %e %Y",
    "%d %b %Y"
];

/// A date in ISO 8601. A longer text must have a time as well.
const DATE: &str = "2024-03-01";

/// Returns the days from the beginning of 1970 to a date, as in `2024-03-01`, or to a date and time, as in
/// `2024-03-01T12:30:00` or `2024-03-01 12:30:00+02:00` (ISO 8601; the `T` may be a space, and a time without an offset
/// is in UTC). `None` if the text is neither.
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

/// Returns the days from the beginning of 1970 to a date that is written in a format of `strftime`, as in `%d/%m/%Y`. A
/// time without an offset is in UTC. `None` if the text does not match the format, or if the format is invalid.
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

/// Returns the format, besides ISO 8601, in which all these texts are dates. `None` if no format or more than one fits.
pub(crate) fn format_of<'a>(
    texts: impl Iterator<Item = &'a String> + Clone,
) -> Option<&'static str> {
    let fits = |format: &&&str| texts.clone().all(|text| days_by(text, format).is_some());
    let mut fitting = FORMATS.iter().filter(fits);
    // If two formats fit, the choice is ambiguous.
    match (fitting.next(), fitting.next()) {
        (Some(format), None) => Some(format),
        _ => None,
    }
}

/// Converts a time from nanoseconds since the beginning of 1970 to days.
pub(crate) fn days_of(nanoseconds: i128) -> f64 {
    nanoseconds as f64 / NANOSECONDS_OF_A_DAY
}

/// Returns the text of a time that is given in days since 1970: a date, or a date and time if the days are not a whole
/// number. None beyond the calendar.
pub(crate) fn text_of(days: f64) -> Option<String> {
    let microseconds = (days * NANOSECONDS_OF_A_DAY / 1e3).round() as i128;
    let time = OffsetDateTime::from_unix_timestamp_nanos(microseconds.checked_mul(1000)?).ok()?;
    let date = time.date();
    if time.time() == Time::MIDNIGHT {
        return Some(date.to_string());
    }
    let (hour, minute, second, fraction) = time.to_hms_micro();
    let clock = format!("{hour:02}:{minute:02}:{second:02}");
    Some(match fraction {
        0 => format!("{date} {clock}"),
        fraction => format!("{date} {clock}.{fraction:06}"),
    })
}

fn in_days(time: OffsetDateTime) -> f64 {
    days_of(time.unix_timestamp_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_written_as_they_are_read() {
        for text in [
            "1970-01-01",
            "1969-12-31",
            "2024-02-29 12:30:01",
            "2024-02-29 00:00:00.250000",
        ] {
            assert_eq!(text_of(days(text).unwrap()).as_deref(), Some(text));
        }
        assert_eq!(text_of(f64::INFINITY), None);
    }

    #[test]
    fn a_format_is_found_if_it_is_the_only_one() {
        for (texts, expected) in [
            (&["2010/01/01", "2012/12/31"][..], Some("%Y/%m/%d")),
            (&["31/01/2010", "01/02/2010"], Some("%d/%m/%Y")),
            (&["01/02/2010", "03/04/2010"], None),
            (&["19580329", "19580405"], Some("%Y%m%d")),
            (
                &["2010/01/01 00:00", "2010/01/01 23:00"],
                Some("%Y/%m/%d %H:%M"),
            ),
            (&["31.12.2010 08:30:59"], Some("%d.%m.%Y %H:%M:%S")),
            (&["yes"], None),
        ] {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(format_of(texts.iter()), expected, "{texts:?}");
        }
    }

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
