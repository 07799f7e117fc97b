//! The backward pass that keeps the gradients of variables.

use std::cell::RefCell;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

/// Returns the same gradients as `loss.backward()`, faster if the layers of this module made the loss: they keep a
/// variable's gradient as they make it, where candle adds it to zeros. A backward pass within another, for
/// example to recompute activations, must be this one too.
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

thread_local! {
    /// Gradients of variables, while [`backward`] runs.
    static KEPT: RefCell<Option<GradStore>> = const { RefCell::new(None) };
}

/// Lets gradients be kept, until it is dropped.
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
    // This runs after an error or a panic too, so that no gradient of a failed pass remains.
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Keeps the gradient of a variable, or gives it to candle. candle asks for the gradient of every tensor; it is not
/// computed for a tensor without variables, such as the first layer's inputs.
pub(crate) fn keep(
    arg: &Tensor,
    gradient: impl FnOnce() -> Result<Tensor>,
) -> Result<Option<Tensor>> {
    if !arg.track_op() {
        return Ok(None);
    }
    let gradient = gradient()?;
    KEPT.with_borrow_mut(|kept| match kept {
        // Only a variable may be without a gradient in candle's own store.
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
