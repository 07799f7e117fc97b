//! Faults that are planted on purpose, to see whether a test finds them. Only a build with the feature
//! `planted-faults` has them, and no released program is one.
//!
//! [`planted!`](crate::planted!) stands in the code at the place of each fault. Without the feature it is
//! `false`, so nothing of the fault is compiled.

#[cfg(feature = "planted-faults")]
mod faults;

#[cfg(feature = "planted-faults")]
pub use faults::{Fault, VARIABLE, is_planted, plant};

/// Whether a fault is planted.
#[cfg(feature = "planted-faults")]
#[macro_export]
macro_rules! planted {
    ($fault:ident) => {
        $crate::planted::is_planted($crate::planted::Fault::$fault)
    };
}

/// Whether a fault is planted: never, without the feature `planted-faults`.
#[cfg(not(feature = "planted-faults"))]
#[macro_export]
macro_rules! planted {
    ($fault:ident) => {
        false
    };
}
