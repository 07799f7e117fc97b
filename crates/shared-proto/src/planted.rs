//! Faults that are planted on purpose, to check that a test finds them. Only a build with the feature
//! `planted-faults` has them, and no release is built with it.
//!
//! [`planted!`](crate::planted!) stands in the code at the place of each fault. Without the feature it is
//! `false`, so nothing of the fault is compiled.

#[cfg(feature = "planted-faults")]
mod faults;

#[cfg(feature = "planted-faults")]
pub use faults::{Fault, VARIABLE, is_planted, plant};

/// True if a fault is planted.
#[cfg(feature = "planted-faults")]
#[macro_export]
macro_rules! planted {
    ($fault:ident) => {
        $crate::planted::is_planted($crate::planted::Fault::$fault)
    };
}

/// False: without the feature `planted-faults`, no fault is planted.
#[cfg(not(feature = "planted-faults"))]
#[macro_export]
macro_rules! planted {
    ($fault:ident) => {
        false
    };
}
