//! The value of a cell, in the type that the file gives it. Values that are equal as numbers have the same text, so
//! categories, ids and labels do not depend on the format of the file, and no integer or decimal passes through a
//! floating-point number on its way to a text. Booleans have the texts that pandas writes: `True` and `False`.

use std::borrow::Cow;
use std::fmt;

use super::date;

/// The length limit of numbers that have a canonical text, in digits before the point and in digits after it. The
/// shortest text of any `f64` needs fewer.
const LONGEST: usize = 400;

/// A cell's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell<'a> {
    /// No value.
    Missing,
    /// A text. A text that spells a number counts as that number.
    Text(&'a str),
    /// A whole number of any type.
    Integer(i128),
    /// A number divided by a power of ten, exactly.
    Decimal {
        /// The number without its point.
        unscaled: i128,
        /// The number of digits behind the point.
        scale: i32,
    },
    /// A number of double precision.
    Double(f64),
    /// A number of single precision.
    Single(f32),
    /// A truth value.
    Boolean(bool),
    /// A date or time, as days since the beginning of 1970 in UTC.
    Days(f64),
}

impl Cell<'_> {
    /// Returns the cell of a time that is given in nanoseconds since the beginning of 1970 in UTC.
    pub fn time(nanoseconds: i128) -> Self {
        Self::Days(date::days_of(nanoseconds))
    }

    /// Returns the value as a number; `None` if the value is not a number, or not finite as `f32`. Booleans and the texts
    /// `true` and `false`, in any case, are 1 and 0.
    pub(crate) fn number(self) -> Option<f64> {
        let number = match self {
            Self::Text(text) => match text.parse().or_else(|_| text.trim().parse()) {
                Ok(number) => number,
                Err(_) if text.eq_ignore_ascii_case("true") => 1.0,
                Err(_) if text.eq_ignore_ascii_case("false") => 0.0,
                Err(_) => return None,
            },
            Self::Integer(number) => number as f64,
            // As the text of it is read, which is the closest number.
            Self::Decimal { unscaled, scale } => {
                format!("{unscaled}e{}", -i64::from(scale)).parse().ok()?
            }
            Self::Double(number) => number,
            Self::Single(number) => number.into(),
            Self::Boolean(truth) => u8::from(truth).into(),
            Self::Missing | Self::Days(_) => return None,
        };
        Some(number).filter(|number: &f64| (*number as f32).is_finite())
    }

    /// Returns a date as days since the beginning of 1970. A text is parsed with `format`, or as ISO 8601 if there is
    /// no format. `None` if the value is no date.
    pub(crate) fn days(self, format: Option<&str>) -> Option<f64> {
        match self {
            Self::Text(text) => match format {
                Some(format) => date::days_by(text, format),
                None => date::days(text),
            },
            Self::Days(days) => Some(days).filter(|days| days.is_finite()),
            _ => None,
        }
    }

    /// Returns the text of the value as a label, a category or an id. A number has the text that [`number_text`]
    /// returns, a date is in ISO 8601, and a missing value has the empty text. `None` for a date beyond the calendar.
    pub(crate) fn text(&self) -> Option<Cow<'_, str>> {
        let text = match self {
            Self::Missing => return Some(Cow::Borrowed("")),
            Self::Text(text) => return Some(Cow::Borrowed(text)),
            Self::Days(days) => return date::text_of(*days).map(Cow::Owned),
            Self::Boolean(true) => return Some(Cow::Borrowed("True")),
            Self::Boolean(false) => return Some(Cow::Borrowed("False")),
            Self::Integer(number) => return Some(Cow::Owned(number.to_string())),
            Self::Decimal { unscaled, scale } => format!("{unscaled}e{}", -i64::from(*scale)),
            Self::Double(number) => number.to_string(),
            Self::Single(number) => number.to_string(),
        };
        Some(match number_text(&text) {
            Some(number) => Cow::Owned(number.into_owned()),
            None => Cow::Owned(text),
        })
    }

    /// Returns the advice of an error message: the line of a job with which a column that has this value can be read.
    pub(crate) fn advice(self, column: &str) -> String {
        let kind = match self.days(None) {
            Some(_) => "type = \"date\"",
            None => match self {
                Self::Text(text) if has_decimal_comma(text) => {
                    return "; for numbers with a comma before their fraction, set data.decimal to \",\"".to_owned();
                }
                Self::Text(_) => "type = \"category\"",
                Self::Missing => "type = \"number\", missing = \"mean\"",
                _ => "type = \"ignore\"",
            },
        };
        let other = match self {
            Self::Missing => ", or give `data.missing` for all columns",
            Self::Text(_) => ", or \"ignore\"",
            _ => "",
        };
        let key = key(column);
        format!("; add this line to [data.columns]: {key} = {{ {kind} }}{other}")
    }
}

/// Returns whether a text is a number once its first comma is replaced by a point.
fn has_decimal_comma(text: &str) -> bool {
    text.contains(',') && text.replacen(',', ".", 1).parse::<f64>().is_ok()
}

/// Returns a column's name as a key of a job file.
pub(crate) fn key(column: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !column.is_empty() && column.chars().all(bare) {
        true => column.to_owned(),
        false => format!("{column:?}"),
    }
}

impl fmt::Display for Cell<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("no value (\"\")"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Double(number) => write!(f, "{number}"),
            Self::Single(number) => write!(f, "{number}"),
            Self::Decimal { .. } => f.write_str(self.text().as_deref().unwrap_or_default()),
            Self::Boolean(_) => f.write_str(self.text().as_deref().unwrap_or_default()),
            Self::Days(_) => f.write_str("a date"),
        }
    }
}

/// Returns the canonical text of a number: `5` for `5.0`, `+5` and `5e0`, and `0.25` for `2.50E-1`. `None` if the text is
/// no number, if it begins with zeros as a code does (`007`), or if it has more digits than any `f64`. No digit is
/// lost.
pub(crate) fn number_text(text: &str) -> Option<Cow<'_, str>> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (unsigned, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let is_code = whole.len() > 1 && whole.starts_with('0');
    if !are_digits(whole) || !are_digits(fraction) || whole.len() + fraction.len() == 0 || is_code {
        return None;
    }
    let is_plain = whole.len() == unsigned.len() && !text.starts_with('+');
    if unsigned.len() > LONGEST {
        return None;
    }
    if is_plain && !(negative && whole == "0") {
        return Some(Cow::Borrowed(text));
    }
    // The digits without zeros at both ends, and the place of the point among them.
    let digits = format!("{whole}{fraction}");
    let point = i64::try_from(whole.len()).ok()? + i64::from(exponent);
    let zeros = digits.bytes().take_while(|byte| *byte == b'0').count();
    let digits = digits.trim_matches('0');
    if digits.is_empty() {
        return Some(Cow::Borrowed("0"));
    }
    let point = point - i64::try_from(zeros).ok()?;
    let length = i64::try_from(digits.len()).ok()?;
    let longest = LONGEST as i64;
    if point > longest || point < -longest || length > 2 * longest {
        return None;
    }
    let sign = if negative { "-" } else { "" };
    Some(Cow::Owned(if point <= 0 {
        format!("{sign}0.{}{digits}", "0".repeat(-point as usize))
    } else if point >= length {
        format!("{sign}{digits}{}", "0".repeat((point - length) as usize))
    } else {
        let (whole, fraction) = digits.split_at(point as usize);
        format!("{sign}{whole}.{fraction}")
    }))
}

/// Returns a text as a fitted rule stores it. If `numbers` is true, that is the canonical text of a number, and `1` or
/// `0` for a boolean, because earlier releases read the booleans of Parquet as numbers. All other texts stay as they
/// are.
pub(crate) fn known(text: &str, numbers: bool) -> Cow<'_, str> {
    match number_text(text).or(truth_text(text)).filter(|_| numbers) {
        Some(number) => number,
        None => Cow::Borrowed(text),
    }
}

/// Returns `1` for `True` and `0` for `False`; `None` for any other text.
pub(crate) fn truth_text(text: &str) -> Option<Cow<'_, str>> {
    match text {
        "True" => Some(Cow::Borrowed("1")),
        "False" => Some(Cow::Borrowed("0")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_numbers_have_one_text() {
        for (texts, expected) in [
            (&["5", "5.0", "+5", "5e0", "0.5e1", "50E-1", "5."][..], "5"),
            (&["0", "-0", "0.000", "-0.0e5", ".0"], "0"),
            (&["-1.5", "-1.50", "-15e-1"], "-1.5"),
            (&["0.25", ".25", "2.50E-1"], "0.25"),
            (&["1e3", "1000", "1000.00"], "1000"),
            (
                &["340282366920938463463374607431768211455.0"],
                "340282366920938463463374607431768211455",
            ),
        ] {
            for text in texts {
                assert_eq!(number_text(text).as_deref(), Some(expected), "{text}");
            }
        }
        for text in [
            "",
            "-",
            ".",
            "e5",
            "abc",
            "1.2.3",
            "1,5",
            "007",
            "-01",
            "0x10",
            "nan",
            "inf",
            "1e",
            "1e9999999999",
            "1e401",
            "--1",
            " 1",
            "1_000",
        ] {
            assert_eq!(number_text(text), None, "{text:?}");
        }
    }

    #[test]
    fn values_of_all_types_have_the_text_of_their_number() {
        for (value, expected) in [
            (Cell::Integer(5), "5"),
            (Cell::Integer(i128::from(u64::MAX)), "18446744073709551615"),
            (Cell::Double(5.0), "5"),
            (Cell::Single(0.1), "0.1"),
            (Cell::Double(0.1), "0.1"),
            (Cell::Double(1e21), "1000000000000000000000"),
            (
                Cell::Decimal {
                    unscaled: 500,
                    scale: 2,
                },
                "5",
            ),
            (
                Cell::Decimal {
                    unscaled: 1_234_567_890_123_456_787,
                    scale: 0,
                },
                "1234567890123456787",
            ),
            (
                Cell::Decimal {
                    unscaled: -1205,
                    scale: 3,
                },
                "-1.205",
            ),
            (
                Cell::Decimal {
                    unscaled: 12,
                    scale: -3,
                },
                "12000",
            ),
            (Cell::Boolean(true), "True"),
            (Cell::Text("007"), "007"),
            (Cell::Missing, ""),
        ] {
            assert_eq!(value.text().as_deref(), Some(expected), "{value:?}");
        }
        assert_eq!(Cell::Days(1.0).text().as_deref(), Some("1970-01-02"));
        for (value, expected) in [
            (
                Cell::Decimal {
                    unscaled: 1,
                    scale: 1,
                },
                Some(0.1),
            ),
            (Cell::Text("True"), Some(1.0)),
            (Cell::Text("false"), Some(0.0)),
            (Cell::Boolean(true), Some(1.0)),
            (Cell::Text("yes"), None),
            (Cell::Double(f64::NAN), None),
            (Cell::Double(1e300), None),
        ] {
            assert_eq!(value.number(), expected, "{value:?}");
        }
    }

    proptest! {
        #[test]
        fn the_text_of_a_number_is_the_number(number in proptest::num::f64::NORMAL, digits in 0usize..20) {
            for text in [number.to_string(), format!("{number:e}"), format!("{number:.digits$}")] {
                let one = number_text(&text).unwrap();
                prop_assert_eq!(one.parse::<f64>().unwrap(), text.parse::<f64>().unwrap() + 0.0);
                let again = number_text(&one).unwrap().into_owned();
                prop_assert_eq!(again, one.as_ref());
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in "[-+0-9.eE]{0,12}|.{0,8}") {
            let _ = number_text(&text);
        }
    }
}
