//! The backward pass that keeps the gradients of variables.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::storage::{computed_here, with_type};

/// Returns the same gradients as `loss.backward()`. It is faster if layers of this crate made the loss: they store the
/// gradient of a variable as soon as they have it, while candle first makes zeros and adds the gradient to them. A
/// backward pass that runs within another one, for example to recompute activations, must call this function too.
///
/// # Errors
/// candle's.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    let scope = Scope::enter();
    let mut gradients = loss.backward()?;
    if let Some(kept) = scope.leave() {
        gradients.extend(kept)?;
    }
    Ok(gradients)
}

/// Returns the gradients of a number of which only the gradient with respect to `outputs` is known, as [`backward`] does. So the
/// backward pass of a model can be made in parts, each on another thread or device.
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

/// A number with a given gradient. Its value does not matter, so nothing is computed.
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

    fn bwd(&self, outputs: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        keep(outputs, || Ok(self.0.clone()))
    }
}

thread_local! {
    /// The gradients of variables that layers have stored, while [`backward`] runs.
    static KEPT: RefCell<Option<GradStore>> = const { RefCell::new(None) };
}

/// Layers store gradients in [`KEPT`] while this value exists. It holds the store of the pass around this one, if any.
struct Scope(Option<GradStore>);

impl Scope {
    fn enter() -> Self {
        Self(KEPT.replace(Some(GradStore::default())))
    }

    fn leave(self) -> Option<GradStore> {
        KEPT.take()
    }
}

impl Drop for Scope {
    // Also after an error or a panic, so that no gradient of a failed pass remains.
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Stores the gradient of a variable in [`KEPT`], or returns it, for candle to store. If `arg` does not depend on a
/// variable, as with the inputs of the first layer, its gradient is not computed.
pub(crate) fn keep(
    arg: &Tensor,
    gradient: impl FnOnce() -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    if !arg.track_op() {
        return Ok(None);
    }
    let gradient = gradient()?;
    KEPT.with_borrow_mut(|kept| match kept {
        // candle's backward pass needs the gradients of all other tensors in its own store.
        Some(kept) if arg.is_variable() => {
            let sum = match kept.remove(arg) {
                Some(other) => (other + gradient)?,
                None => gradient,
            };
            kept.insert(arg, sum);
            Ok(None)
        }
        _ => Ok(Some(gradient)),
    })
}

/// Calls [`keep`] with the elements of a gradient, which has the shape of `arg`.
pub(crate) fn keep_values<T: WithDType>(
    arg: &Tensor,
    values: impl FnOnce() -> Result<Vec<T>>,
) -> Result<Option<Tensor>> {
    keep(arg, || {
        Tensor::from_vec(values()?, arg.shape(), arg.device())
    })
}
