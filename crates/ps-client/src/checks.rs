//! Checks of a push before its first block is sent. Either all of it is sent, or nothing.

use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::ids::Clock;
use shared_proto::payload::Elements;
use shared_proto::protocol::MAX_MESSAGE_BYTES;
use shared_proto::step::{Gradients, RowGradients};
use shared_proto::table::hash::bucket;

use crate::error::ClientError;
use crate::shards::Shards;

/// The most bytes of a bucket's rows in a push: the size of a message, minus room for its other fields.
const MOST_BUCKET_BYTES: usize = MAX_MESSAGE_BYTES - (64 << 10);

impl Shards {
    /// Checks all values of a push.
    pub(crate) fn check(&self, clock: Clock, gradients: &Gradients) -> Result<(), ClientError> {
        let values = &gradients.values;
        self.check_sizes(values, VariableKind::takes_updates)?;
        // No element of a gradient is larger than the norm. If the norm is NaN, the elements are checked.
        let gradients_fit = gradients.norm < f64::from(self.wire.largest());
        let unchecked = |kind: VariableKind| !(gradients_fit && kind.is_optimized());
        self.check_finite(clock, values, unchecked)?;
        self.check_range(values, unchecked)?;
        self.check_rows(clock, gradients, gradients_fit)
    }

    /// Checks that each table has gradients, that the rows of each bucket fit into a message, and that each number is
    /// finite and fits the wire's type. `gradients_fit` is true if the norm already shows that all numbers do.
    fn check_rows(
        &self,
        clock: Clock,
        gradients: &Gradients,
        gradients_fit: bool,
    ) -> Result<(), ClientError> {
        let wrong = |name: &str, found, expected| ClientError::WrongSize {
            variable: name.to_owned(),
            found,
            expected,
        };
        for (number, table) in self.map.tables.iter().enumerate() {
            let spec = &table.spec;
            let name = &spec.name;
            let of = gradients.rows.get(number);
            let Some(RowGradients { rows, values }) = of.filter(|of| of.rows.table == number)
            else {
                return Err(wrong(name, 0, spec.dimension as usize));
            };
            let width = spec.dimension as usize;
            if values.len() != rows.ids.len() * width {
                return Err(wrong(name, values.len(), rows.ids.len() * width));
            }
            if !gradients_fit && !values.all_finite() {
                let (variable, clock) = (name.clone(), clock.0);
                return Err(ClientError::NonFinite { variable, clock });
            }
            if !gradients_fit && !values.all_fit(self.wire) {
                let (variable, wire) = (name.clone(), self.wire.as_str_name());
                return Err(ClientError::TooLarge { variable, wire });
            }
            let most = MOST_BUCKET_BYTES / (size_of::<u64>() + width * self.wire.size());
            let buckets = rows
                .ids
                .chunk_by(|one, other| bucket(*one, spec.buckets) == bucket(*other, spec.buckets));
            let largest = buckets.map(<[u64]>::len).max().unwrap_or(0);
            if largest > most {
                return Err(ClientError::TooManyRows {
                    table: name.clone(),
                    rows: largest,
                    most,
                    buckets: spec.buckets,
                });
            }
        }
        Ok(())
    }

    /// Checks that `values` has all values of the variables that are sent, and none of the others. Variables that
    /// workers hold are never sent.
    pub(crate) fn check_sizes(
        &self,
        values: &[Elements],
        is_sent: impl Fn(VariableKind) -> bool,
    ) -> Result<(), ClientError> {
        for (index, variable) in self.map.variables.iter().enumerate() {
            let spec = &variable.spec;
            let is_sent = is_sent(spec.kind) && !variable.shards.is_empty();
            check_size(spec, is_sent, values.get(index))?;
        }
        Ok(())
    }

    pub(crate) fn check_finite(
        &self,
        clock: Clock,
        values: &[Elements],
        of: impl Fn(VariableKind) -> bool,
    ) -> Result<(), ClientError> {
        match self.first_without(values, of, Elements::all_finite) {
            Some(variable) => Err(ClientError::NonFinite {
                variable,
                clock: clock.0,
            }),
            None => Ok(()),
        }
    }

    fn check_range(
        &self,
        values: &[Elements],
        of: impl Fn(VariableKind) -> bool,
    ) -> Result<(), ClientError> {
        match self.first_without(values, of, |values| values.all_fit(self.wire)) {
            Some(variable) => Err(ClientError::TooLarge {
                variable,
                wire: self.wire.as_str_name(),
            }),
            None => Ok(()),
        }
    }

    /// Returns the name of the first variable of these kinds with values for which `holds` is false.
    fn first_without(
        &self,
        values: &[Elements],
        of: impl Fn(VariableKind) -> bool,
        holds: impl Fn(&Elements) -> bool,
    ) -> Option<String> {
        let named = self.map.variables.iter().zip(values);
        let mut named = named.filter(|(variable, _)| of(variable.spec.kind));
        let found = named.find(|(_, values)| !holds(values));
        found.map(|(variable, _)| variable.spec.name.clone())
    }
}

/// Checks that all values of a variable are there, or none if the variable is not sent.
///
/// # Errors
/// [`ClientError::WrongSize`].
fn check_size(
    variable: &VariableSpec,
    is_sent: bool,
    values: Option<&Elements>,
) -> Result<(), ClientError> {
    let found = values.map_or(0, Elements::len);
    let expected = if is_sent { variable.elements() } else { 0 };
    match found == expected {
        true => Ok(()),
        false => Err(ClientError::WrongSize {
            variable: variable.name.clone(),
            found,
            expected,
        }),
    }
}

#[cfg(test)]
mod tests {
    use shared_proto::blocks::{PlacedVariable, ShardMap, VariableSpec};
    use shared_proto::ids::Epoch;
    use shared_proto::payload::Dtype;
    use tokio::sync::mpsc;

    use super::*;
    use crate::identity::Identity;

    fn shards(wire: Dtype) -> Shards {
        let spec = VariableSpec {
            name: "w".to_owned(),
            shape: vec![2],
            ..VariableSpec::default()
        };
        let map = ShardMap {
            epoch: Epoch(1),
            // Nothing listens there: an error must be found before anything is sent.
            shards: vec![crate::maps::placed("127.0.0.1:1")],
            variables: vec![PlacedVariable {
                spec,
                shards: vec![0],
            }],
            tables: Vec::new(),
            block_elements: 1 << 14,
            total_updates: 1,
        };
        let identity = Identity::of_a_test(wire, mpsc::channel(1).0);
        let (_, maps) = crate::MapSource::new(map);
        Shards::connect(&maps, &identity)
    }

    #[tokio::test]
    async fn what_cannot_travel_is_named_before_anything_is_sent() {
        let push = async |wire, values: [f32; 2]| {
            let gradients = Gradients {
                values: vec![values.to_vec().into()],
                rows: Vec::new(),
                norm: values
                    .iter()
                    .map(|v| f64::from(*v).powi(2))
                    .sum::<f64>()
                    .sqrt(),
            };
            let pushed = shards(wire).push(Clock(3), &gradients).await;
            pushed.map(drop).map_err(|error| error.to_string())
        };
        for (wire, fits, too_large) in [
            (Dtype::F16, 65504.0, 65520.0),
            (Dtype::Bf16, 3.38e38, f32::MAX),
        ] {
            // The norm of two such numbers is larger than the largest number on the wire; each number fits.
            assert_eq!(push(wire, [fits, fits]).await, Ok(()));
            let error = push(wire, [1.0, too_large]).await.unwrap_err();
            assert!(
                error.contains("\"w\"") && error.contains(wire.as_str_name()),
                "{error}"
            );
        }
        assert_eq!(push(Dtype::F32, [f32::MAX, f32::MAX]).await, Ok(()));
        for wire in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for wrong in [f32::NAN, f32::INFINITY] {
                let error = push(wire, [1.0, wrong]).await.unwrap_err();
                assert!(
                    error.contains("NaN or infinity") && error.contains("clock 3"),
                    "{error}"
                );
            }
        }
    }
}
