//! The origin that a call claims to have.

use shared_proto::ids::Role;
use shared_proto::wire;
use tonic::Extensions;

/// The claimed origin of a call, and the call's name.
pub(super) struct CallOrigin<'a> {
    pub(super) origin: Option<&'a wire::Origin>,
    pub(super) extensions: &'a Extensions,
    pub(super) what: &'static str,
    /// The only role that may make this call. `None`: servers and workers may.
    pub(super) role: Option<Role>,
}

impl<'a> CallOrigin<'a> {
    pub(super) fn new(
        origin: &'a Option<wire::Origin>,
        extensions: &'a Extensions,
        what: &'static str,
    ) -> Self {
        Self {
            origin: origin.as_ref(),
            extensions,
            what,
            role: None,
        }
    }

    /// Restricts the call to servers.
    pub(super) fn server(self) -> Self {
        Self {
            role: Some(Role::Ps),
            ..self
        }
    }

    /// Restricts the call to workers.
    pub(super) fn worker(self) -> Self {
        Self {
            role: Some(Role::Worker),
            ..self
        }
    }
}
