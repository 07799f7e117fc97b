//! The backward pass, in which layers store the gradients of variables themselves.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, TensorId, WithDType, bail,
};

use crate::storage::{computed_here, with_type};

/// Returns the same gradients as `loss.backward()`. It is faster if layers of this crate computed the loss: they store
/// the gradient of a variable as soon as they have it, while candle first makes zeros and adds the gradient to them. A
/// backward pass that runs within another one, for example to recompute activations, must call this function too.
///
/// # Errors
/// candle's.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    run(loss, None)
}

/// Takes the gradients of variables while a backward pass runs.
pub trait Watch {
    /// Takes the complete gradient of a variable: no later layer of this crate adds to it. A pass calls this at most
    /// once for each variable.
    ///
    /// # Errors
    /// If it cannot take the gradient. The pass then fails.
    fn complete(&self, variable: TensorId, gradient: &Tensor) -> Result<()>;
}

/// Returns the same gradients as [`backward`], and passes the gradient of each variable to `watch` once it is complete.
/// candle does not report completion, so `watch` gets only the gradients of variables that layers of this crate use on
/// the CPU. If candle's own operations use such a variable too, the returned gradient is another tensor than the one
/// that `watch` got: compare their ids.
///
/// # Errors
/// candle's, or those of `watch`.
pub fn backward_watched(loss: &Tensor, watch: Rc<dyn Watch>) -> Result<GradStore> {
    run(loss, Some(Watched::new(loss, watch)))
}

fn run(loss: &Tensor, watched: Option<Watched>) -> Result<GradStore> {
    let scope = Scope::enter(watched);
    let mut gradients = loss.backward()?;
    if let Some(kept) = scope.leave() {
        gradients.extend(kept.gradients)?;
    }
    Ok(gradients)
}

/// Returns the same gradients as [`backward`], for a scalar of which only the gradient with respect to `outputs` is
/// known. So the backward pass of a model can be split into parts, each on another thread or device.
///
/// # Errors
/// If the gradient does not have the shape of the outputs, or candle's.
pub fn backward_from(outputs: &Tensor, gradient: &Tensor) -> Result<GradStore> {
    if outputs.shape() != gradient.shape() {
        bail!(
            "a gradient of shape {:?} does not fit outputs of shape {:?}",
            gradient.shape(),
            outputs.shape()
        );
    }
    if computed_here(&[outputs, gradient]) {
        return backward(&outputs.apply_op1(Given(gradient.clone()))?);
    }
    // The gradient of this sum with respect to the outputs is the given one.
    backward(&(outputs * gradient)?.sum_all()?)
}

/// An operation with a scalar result, for which the gradient of the operand is given. The value of the result does not
/// matter, so nothing is computed.
struct Given(Tensor);

impl CustomOp1 for Given {
    fn name(&self) -> &'static str {
        "given"
    }

    fn cpu_fwd(&self, outputs: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        with_type!(outputs.dtype(), T => {
            Ok((T::to_cpu_storage_owned(vec![0.0 as T]), Shape::from(())))
        })
    }

    fn bwd(&self, outputs: &Tensor, node: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        keep(node, outputs, || Ok(self.0.clone()))
    }
}

thread_local! {
    /// The gradients of variables that layers have stored, while [`backward`] runs.
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// The state of a backward pass.
#[derive(Default)]
struct Kept {
    gradients: GradStore,
    watched: Option<Watched>,
}

/// The variables of a pass, and the receiver of their gradients.
struct Watched {
    watch: Rc<dyn Watch>,
    /// The index of each tensor in the order of the pass. A tensor comes after all tensors that were computed from it.
    places: HashMap<TensorId, usize>,
    /// The variables that lack a complete gradient, the next one last.
    variables: Vec<TensorId>,
}

impl Watched {
    fn new(loss: &Tensor, watch: Rc<dyn Watch>) -> Self {
        let nodes = loss.sorted_nodes();
        let places = nodes.iter().enumerate();
        let variables = nodes.iter().rev().filter(|node| node.is_variable());
        Self {
            watch,
            places: places.map(|(place, node)| (node.id(), place)).collect(),
            variables: variables.map(|node| node.id()).collect(),
        }
    }

    /// Takes the next variable whose gradient is complete: neither `node` nor an operation after it in the pass uses
    /// the variable.
    fn next_complete(&mut self, node: &Tensor) -> Option<TensorId> {
        let reached = self.places.get(&node.id())?;
        let before = |variable: &mut TensorId| self.places.get(variable) < Some(reached);
        self.variables.pop_if(before)
    }
}

/// While this value exists, layers store gradients in [`KEPT`]. The value holds the state of the enclosing pass, if
/// there is one.
struct Scope(Option<Kept>);

impl Scope {
    fn enter(watched: Option<Watched>) -> Self {
        let gradients = GradStore::default();
        Self(KEPT.replace(Some(Kept { gradients, watched })))
    }

    fn leave(self) -> Option<Kept> {
        KEPT.take()
    }
}

impl Drop for Scope {
    // Also after an error or a panic, so that no gradient of a failed pass remains.
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Computes the gradient of `arg`, from which a layer has computed `node`. During [`backward`], stores the gradient of
/// a variable in [`KEPT`]; otherwise returns the gradient, for candle to store. If `arg` does not depend on a variable,
/// like the inputs of the first layer, computes no gradient.
pub(crate) fn keep(
    node: &Tensor,
    arg: &Tensor,
    gradient: impl FnOnce() -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    report_complete(node)?;
    if !arg.track_op() {
        return Ok(None);
    }
    let gradient = gradient()?;
    KEPT.with_borrow_mut(|kept| match kept {
        // candle's backward pass needs the gradients of all other tensors in its own store.
        Some(kept) if arg.is_variable() => {
            let sum = match kept.gradients.remove(arg) {
                Some(other) => (other + gradient)?,
                None => gradient,
            };
            kept.gradients.insert(arg, sum);
            Ok(None)
        }
        _ => Ok(Some(gradient)),
    })
}

/// Passes the gradients that are complete at `node` to the watch, if there is one.
fn report_complete(node: &Tensor) -> Result<()> {
    let next = || {
        KEPT.with_borrow_mut(|kept| {
            let kept = kept.as_mut()?;
            let watched = kept.watched.as_mut()?;
            let variable = watched.next_complete(node)?;
            let gradient = kept.gradients.get_id(variable).cloned();
            Some((variable, gradient, Rc::clone(&watched.watch)))
        })
    };
    while let Some((variable, gradient, watch)) = next() {
        // A variable without a gradient here is used by candle's own operations alone.
        if let Some(gradient) = gradient {
            watch.complete(variable, &gradient)?;
        }
    }
    Ok(())
}

/// Calls [`keep`] with the elements of a gradient, which has the shape of `arg`.
pub(crate) fn keep_values<T: WithDType>(
    node: &Tensor,
    arg: &Tensor,
    values: impl FnOnce() -> Result<Vec<T>>,
) -> Result<Option<Tensor>> {
    keep(node, arg, || {
        Tensor::from_vec(values()?, arg.shape(), arg.device())
    })
}
