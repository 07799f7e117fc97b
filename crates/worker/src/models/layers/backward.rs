//! The backward pass that keeps the gradients of variables.

use std::cell::RefCell;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

/// The same gradients as `loss.backward()`, faster if the layers here made the loss: a variable's
/// gradient is kept as they make it, where candle would add it to zeros. A backward pass within
/// another, as for recomputing activations, must be this one too.
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
    // Also after an error or a panic: nobody would fetch what is kept then.
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

/// Keeps the gradient of a variable, or gives it to candle. It is not computed for what has no
/// variable in it, such as the first layer's inputs: candle asks for all of them.
pub(super) fn keep(
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
