//! Floating-point numbers in JSON. JSON has no NaN and no infinities, and `serde_json` writes them as
//! `null`, which it then refuses to read as a number.
//!
//! A finite number is a JSON number. The others are the strings `"NaN"`, `"Infinity"` and
//! `"-Infinity"`, as in protobuf's JSON mapping: Python's `float(x)` and JavaScript's `Number(x)` read
//! both forms. The payload of a NaN is not kept. Reading also takes `null`, as NaN: files of earlier
//! releases have it.
//!
//! Use it as `#[serde(with = "flambeau_shared_proto::number")]` on a field of type `f64`, and its submodules on fields
//! with an optional number or with numbers by name. [`Number`] is a type with the same encoding.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::planted;

const NAN: &str = "NaN";
const INFINITY: &str = "Infinity";
const NEGATIVE: &str = "-Infinity";

/// A number that survives JSON, finite or not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Number(pub f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Self(number)
    }
}

/// Writes a number.
///
/// # Errors
/// If the serializer fails.
pub fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    match *number {
        n if n.is_finite() || planted!(NullNumbers) => serializer.serialize_f64(n),
        n if n.is_nan() => serializer.serialize_str(NAN),
        n if n > 0.0 => serializer.serialize_str(INFINITY),
        _ => serializer.serialize_str(NEGATIVE),
    }
}

/// Reads a number.
///
/// # Errors
/// If the input is no number.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Number::deserialize(deserializer).map(|number| number.0)
}

struct Reader;

impl Visitor<'_> for Reader {
    type Value = f64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, \"NaN\", \"Infinity\" or \"-Infinity\"")
    }

    fn visit_f64<E>(self, number: f64) -> Result<f64, E> {
        Ok(number)
    }

    fn visit_u64<E>(self, number: u64) -> Result<f64, E> {
        Ok(number as f64)
    }

    fn visit_i64<E>(self, number: i64) -> Result<f64, E> {
        Ok(number as f64)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<f64, E> {
        match text {
            NAN => Ok(f64::NAN),
            INFINITY => Ok(f64::INFINITY),
            NEGATIVE => Ok(f64::NEG_INFINITY),
            other => Err(E::invalid_value(Unexpected::Str(other), &self)),
        }
    }

    fn visit_unit<E>(self) -> Result<f64, E> {
        Ok(f64::NAN)
    }
}

/// A number that may be absent, as `null`.
pub mod option {
    use super::{Deserialize, Deserializer, Number, Serialize, Serializer};

    /// Writes a number, or `null`.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<S: Serializer>(n: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        n.map(Number).serialize(serializer)
    }

    /// Reads a number; `null` is `None`.
    ///
    /// # Errors
    /// If the input is neither a number nor `null`.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Number>::deserialize(d)?.map(|number| number.0))
    }
}

/// Numbers by name.
pub mod map {
    use std::collections::BTreeMap;

    use super::{Deserialize, Deserializer, Number, Serializer};

    /// Writes numbers by name.
    ///
    /// # Errors
    /// If the serializer fails.
    pub fn serialize<S: Serializer>(
        numbers: &BTreeMap<String, f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(numbers.iter().map(|(name, n)| (name, Number(*n))))
    }

    /// Reads numbers by name.
    ///
    /// # Errors
    /// If a value is no number.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<String, f64>, D::Error> {
        let numbers = BTreeMap::<String, Number>::deserialize(d)?;
        Ok(numbers.into_iter().map(|(name, n)| (name, n.0)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::num::f64::{INFINITE, NEGATIVE, NORMAL, POSITIVE, QUIET_NAN, SIGNALING_NAN};
    use proptest::num::f64::{SUBNORMAL, ZERO};
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct All {
        #[serde(with = "crate::number")]
        plain: f64,
        #[serde(default, with = "crate::number::option")]
        perhaps: Option<f64>,
        #[serde(with = "crate::number::map")]
        named: BTreeMap<String, f64>,
        #[serde(flatten, with = "crate::number::map")]
        beside: BTreeMap<String, f64>,
    }

    fn same(a: f64, b: f64) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    fn all(number: f64) -> All {
        let named = BTreeMap::from([("x".to_owned(), number)]);
        All {
            plain: number,
            perhaps: Some(number),
            named: named.clone(),
            beside: named,
        }
    }

    fn holds(all: &All, number: f64) -> bool {
        let numbers = [all.plain, all.named["x"], all.beside["x"]];
        numbers.iter().all(|n| same(*n, number)) && same(all.perhaps.unwrap(), number)
    }

    proptest! {
        /// Every class of bit pattern survives, as text and by way of a JSON value, in which a manifest keeps the
        /// progress.
        #[test]
        fn every_number_comes_back(
            number in POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO | INFINITE | QUIET_NAN | SIGNALING_NAN,
            bits: u64,
        ) {
            for number in [number, f64::from_bits(bits)] {
                let text = serde_json::to_string(&all(number)).unwrap();
                let read: All = serde_json::from_str(&text).unwrap();
                prop_assert!(holds(&read, number), "{number:e} as {text}");
                let value = serde_json::to_value(all(number)).unwrap();
                let text = serde_json::to_string_pretty(&value).unwrap();
                let value: serde_json::Value = serde_json::from_str(&text).unwrap();
                let read: All = serde_json::from_value(value).unwrap();
                prop_assert!(holds(&read, number), "{number:e} as {text}");
            }
        }
    }

    #[test]
    fn the_limits_come_back() {
        let limits = [
            0.0,
            -0.0,
            5e-324,
            f64::MIN_POSITIVE,
            f64::MAX,
            f64::MIN,
            f64::EPSILON,
            1e308,
            0.1 + 0.2,
            9_007_199_254_740_993.0,
        ];
        for number in limits.into_iter().chain([f64::NAN, f64::INFINITY]) {
            for number in [number, -number] {
                let text = serde_json::to_string(&all(number)).unwrap();
                assert!(
                    holds(&serde_json::from_str(&text).unwrap(), number),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn what_earlier_releases_wrote_is_read() {
        let read: All = serde_json::from_str(
            r#"{"plain": null, "perhaps": null, "named": {"a": 1, "b": -2, "c": 0.5, "d": null}, "e": 3}"#,
        )
        .unwrap();
        assert!(read.plain.is_nan() && read.perhaps.is_none());
        assert_eq!(read.named["a"], 1.0);
        assert_eq!(read.named["b"], -2.0);
        assert_eq!(read.named["c"], 0.5);
        assert!(read.named["d"].is_nan());
        assert_eq!(read.beside["e"], 3.0);
        let refused = serde_json::from_str::<Number>("\"much\"").unwrap_err();
        assert!(
            refused.to_string().contains("expected a number"),
            "{refused}"
        );
    }
}
