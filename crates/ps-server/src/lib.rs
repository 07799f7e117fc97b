//! A parameter server: store, optimizers, staleness gate, service.
