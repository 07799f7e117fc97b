//! Training steps with gradients that leave in buckets during the backward pass.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use model::tables;
use nn::{Watch, backward_watched};
use shared_proto::blocks::{VariableKind, VariableSpec};
use shared_proto::payload::Elements;
use shared_proto::step::Gradients;
use variables::{Variables, VariablesError, sum_of_squares, with_elements};

use super::pass::loss_value;
use super::{Thread, nothing};
use crate::error::ReplicaError;
use crate::filling::Filling;
use crate::mirror::InBuckets;
use crate::step::{Computed, Positions, Step};

/// The newest step that was computed in buckets.
#[derive(Default)]
pub(super) struct Bucketed {
    /// The step's gradients, kept until the next command on the values, because the members of the ring may have to add
    /// them up again.
    gradients: Option<Kept>,
    /// The indices of the variables whose gradients were complete before the pass ended, in the order of completion.
    order: Vec<usize>,
}

struct Kept {
    store: GradStore,
    /// The changes of averaged variables, by the variables' indices.
    changes: BTreeMap<usize, Vec<f32>>,
}

impl Bucketed {
    /// Forgets the gradients.
    pub(super) fn forget(&mut self) {
        self.gradients = None;
    }
}

impl Thread {
    /// Computes the loss and the gradients of a step, and fills buckets meanwhile.
    pub(super) fn compute_in_buckets(
        &mut self,
        positions: Positions,
        step: Step,
        filling: Filling,
    ) -> Result<InBuckets, ReplicaError> {
        self.bucketed.forget();
        let begun = self.begin(positions)?;
        let before = self.variables.measured()?;
        let filler = Rc::new(Filler::new(filling, &self.variables));
        let pass = || {
            let [batch] = &begun.batches[..] else {
                return Err(nothing());
            };
            let backward = |loss: &Tensor| backward_watched(loss, filler.clone());
            let (loss, store) = self.both_passes(batch, &self.training_pass(step), backward)?;
            Ok((loss_value(&loss)?, store))
        };
        let (loss, store) = match pass() {
            Ok(passed) => passed,
            Err(error) => {
                // The step may be made again with others, and then counts from these values.
                self.variables.restore(before)?;
                return Err(error.into());
            }
        };
        let changes = self.variables.changes(before)?;
        let of_rows = begun.step_rows.gradients(&store)?;
        let filled = filler.finish(&self.variables, &store, &changes)?;
        let squares_of_rows = of_rows.iter().map(|values| sum_of_squares(values));
        let squares = squares_of_rows.fold(filled.squares, |sum, squares| sum + squares);
        self.bucketed = Bucketed {
            gradients: Some(Kept { store, changes }),
            order: filled.order,
        };
        let gradients = Gradients {
            values: Vec::new(),
            rows: tables::gradients(&begun.rows, of_rows),
            norm: squares.sqrt(),
        };
        Ok(InBuckets {
            computed: Computed::new(loss, gradients),
            complete: filled.complete,
        })
    }

    /// Returns the gradients of the newest step that was computed in buckets.
    pub(super) fn bucketed_gradients(&self) -> Result<Vec<Elements>, ReplicaError> {
        let Some(Kept { store, changes }) = &self.bucketed.gradients else {
            return Err(nothing().into());
        };
        let gradient = |(number, (spec, var, _)): (usize, (&VariableSpec, &Var, bool))| {
            let values = match spec.kind {
                VariableKind::Frozen => Vec::new(),
                VariableKind::Averaged => changes.get(&number).cloned().unwrap_or_default(),
                VariableKind::Trained => {
                    with_elements(gradient_of(store, spec, var)?, <[f32]>::to_vec)?
                }
            };
            Ok(values.into())
        };
        let variables = self.variables.each().enumerate();
        variables.map(gradient).collect()
    }

    /// Returns the indices of the variables whose gradients were complete before the pass ended, in the order of
    /// completion, in the newest step that was computed in buckets.
    pub(super) fn gradient_order(&self) -> Vec<usize> {
        self.bucketed.order.clone()
    }
}

/// Fills buckets while the backward pass runs.
struct Filler {
    /// The index of each variable.
    numbers: HashMap<TensorId, usize>,
    state: RefCell<State>,
}

struct State {
    filling: Filling,
    /// The sum of the squares of each variable's gradient.
    squares: Vec<f64>,
    /// The variables and gradients that the pass has reported, in order.
    reported: Vec<(usize, TensorId)>,
}

/// The outcome of a step in buckets.
struct Outcome {
    /// The sum of the squares of all gradients.
    squares: f64,
    /// The indices of the variables whose gradients did not change after the pass reported them, in the order of the
    /// reports.
    order: Vec<usize>,
    /// True if all gradients in the buckets are complete.
    complete: bool,
}

impl Watch for Filler {
    fn complete(&self, variable: TensorId, gradient: &Tensor) -> candle_core::Result<()> {
        // The rows of tables have no place in buckets.
        let Some(&number) = self.numbers.get(&variable) else {
            return Ok(());
        };
        let state = &mut *self.state.borrow_mut();
        state.reported.push((number, gradient.id()));
        if state.filling.plan().is_early(number) {
            state.fill(number, gradient)?;
        }
        Ok(())
    }
}

impl Filler {
    fn new(filling: Filling, variables: &Variables) -> Self {
        let each = variables.each().enumerate();
        let numbers: HashMap<_, _> = each
            .map(|(number, (_, var, _))| (var.id(), number))
            .collect();
        Self {
            state: RefCell::new(State {
                filling,
                squares: vec![0.0; numbers.len()],
                reported: Vec::new(),
            }),
            numbers,
        }
    }

    /// Fills the rest of the buckets after the pass, from its gradients and the changes of averaged variables.
    fn finish(
        &self,
        variables: &Variables,
        store: &GradStore,
        changes: &BTreeMap<usize, Vec<f32>>,
    ) -> Result<Outcome, VariablesError> {
        let state = &mut *self.state.borrow_mut();
        let reported: BTreeMap<usize, TensorId> = state.reported.iter().copied().collect();
        let mut whole = vec![false; variables.each().count()];
        let mut complete = true;
        for (number, (spec, var, _)) in variables.each().enumerate() {
            match spec.kind {
                VariableKind::Frozen => {}
                VariableKind::Averaged => {
                    let change = changes.get(&number).map_or(&[][..], |change| change);
                    state.filling.fill(number, change);
                }
                VariableKind::Trained => {
                    let gradient = gradient_of(store, spec, var)?;
                    let reported = reported.get(&number);
                    // Operations of candle's own may have added to it at the end.
                    whole[number] = reported == Some(&gradient.id());
                    match reported.filter(|_| state.filling.plan().is_early(number)) {
                        Some(_) if whole[number] => {}
                        Some(_) => {
                            complete = false;
                            state.squares[number] = with_elements(gradient, sum_of_squares)?;
                        }
                        None => state.fill(number, gradient)?,
                    }
                }
            }
        }
        let order = state.reported.iter().map(|(number, _)| *number);
        Ok(Outcome {
            squares: state.squares.iter().sum(),
            order: order.filter(|number| whole[*number]).collect(),
            complete,
        })
    }
}

impl State {
    fn fill(&mut self, number: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let filling = &mut self.filling;
        self.squares[number] = with_elements(gradient, |values| filling.fill(number, values))?;
        Ok(())
    }
}

/// Returns the gradient of a trained variable.
fn gradient_of<'a>(
    store: &'a GradStore,
    spec: &VariableSpec,
    var: &Var,
) -> Result<&'a Tensor, VariablesError> {
    store.get(var).ok_or_else(|| VariablesError::NoGradient {
        variable: spec.clone(),
    })
}
