//! The command line and the library face of Flambeau.
