//! Mixed precision: matrix products and convolutions of `bf16` operands in models of `f32`.

use std::cell::Cell;

use candle_core::{DType, Result, Tensor};

thread_local! {
    /// The type to which the `f32` operands of products are converted.
    static OPERANDS: Cell<DType> = const { Cell::new(DType::F32) };
}

/// Calls `compute`. While it runs, the layers of this crate on this thread convert the `f32` operands of matrix
/// products and convolutions to `dtype` (`BF16` or `F16`; `F32` changes nothing), and the products back to `f32`.
/// Everything else stays `f32`: variables, biases, activations, normalisation, softmax, losses, sums. The backward pass
/// of such a product has operands of `dtype` too, even if it runs later or on another thread. The gradients of
/// variables are `f32`.
///
/// Use this on GPUs that compute in `bf16`, which has the range of `f32`, so that losses need no scaling. On the CPU,
/// it only rounds the operands and saves no time.
pub fn autocast<R>(dtype: DType, compute: impl FnOnce() -> R) -> R {
    /// Sets the type back, after a panic too.
    struct Back(DType);
    impl Drop for Back {
        fn drop(&mut self) {
            OPERANDS.set(self.0);
        }
    }
    let _back = Back(OPERANDS.replace(dtype));
    compute()
}

/// Returns the type to which an operand of a product must be converted; `None` if the operand stays as it is.
pub(crate) fn operand_type(operand: &Tensor) -> Option<DType> {
    let dtype = OPERANDS.get();
    (operand.dtype() == DType::F32 && dtype != DType::F32).then_some(dtype)
}

/// Returns the product of two matrices, or of two batches of matrices. Within [`autocast()`], converts the operands.
///
/// # Errors
/// candle's.
pub fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match operand_type(a) {
        None => a.matmul(b),
        Some(dtype) => a
            .to_dtype(dtype)?
            .matmul(&b.to_dtype(dtype)?)?
            .to_dtype(a.dtype()),
    }
}
