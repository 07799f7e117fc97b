//! Attention.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, D, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use candle_nn::VarBuilder;

use crate::autocast::{matmul, operand_type};
use crate::backward::keep_values;
use crate::linear::Linear;
use crate::simd::Element;
use crate::softmax::{self, softmax};
use crate::storage::{computed_here, with_type};

/// Multi-head self-attention, with two linear layers. `projection` makes queries, keys and values of the inputs, in
/// this order, as PyTorch's `in_proj` does. `output` is applied to the result of the attention.
#[derive(Clone, Debug)]
pub struct Attention {
    projection: Linear,
    output: Linear,
    heads: usize,
}

impl Attention {
    /// Asks `vars` for the variables of `projection` and `output`, with the initial values of [`Linear`].
    ///
    /// # Errors
    /// If the heads do not divide the size, or those of `vars`.
    pub fn new(size: usize, heads: usize, vars: VarBuilder) -> Result<Self> {
        if heads == 0 || !size.is_multiple_of(heads) {
            bail!("{heads} heads do not divide a size of {size}");
        }
        Ok(Self {
            projection: Linear::new(size, 3 * size, vars.pp("projection"))?,
            output: Linear::new(size, size, vars.pp("output"))?,
            heads,
        })
    }

    /// Returns the result of the attention for inputs of shape `[samples, length, size]`, in the same shape. The mask
    /// broadcasts to `[samples, heads, length, length]` and is added to the scores before the softmax: `-inf` hides a
    /// key from a query.
    ///
    /// # Errors
    /// If the shapes do not fit, or candle's.
    pub fn forward(&self, inputs: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let (samples, length, size) = inputs.dims3()?;
        let projected = self.projection.forward(inputs)?;
        let of_head = size / self.heads;
        let fused = mask.is_none() && operand_type(inputs).is_none() && projected.elem_count() > 0;
        let attended = if fused && computed_here(&[&projected]) {
            let heads = Heads {
                number: self.heads,
                sizes: [samples, length, of_head],
                probabilities: OnceLock::new(),
            };
            projected.contiguous()?.apply_op1(heads)?
        } else {
            let projected = projected.reshape((samples, length, 3, self.heads, of_head))?;
            // [3, samples, heads, length, size of a head]
            let projected = projected.permute((2, 0, 3, 1, 4))?.contiguous()?;
            let (queries, keys, values) = (projected.get(0)?, projected.get(1)?, projected.get(2)?);
            let queries = (queries * (of_head as f64).powf(-0.5))?;
            let mut scores = matmul(&queries, &keys.t()?)?;
            if let Some(mask) = mask {
                scores = (&scores + mask.broadcast_as(scores.shape())?)?;
            }
            let attended = matmul(&softmax(&scores)?, &values)?;
            attended.transpose(1, 2)?.flatten_from(D::Minus2)?
        };
        self.output.forward(&attended)
    }
}

/// The operation between the two linear layers: `[samples, length, 3 · size]` becomes `[samples, length, size]`. It
/// computes one head after the other, and reads queries, keys and values in place. candle's operations would copy them.
struct Heads {
    number: usize,
    /// Samples, length, and the size of a head.
    sizes: [usize; 3],
    /// The softmax of each head's scores, of shape `[samples, length, length]`, for the backward pass.
    probabilities: OnceLock<Vec<CpuStorage>>,
}

/// A part of the projected inputs.
#[derive(Clone, Copy)]
enum Role {
    Query,
    Key,
    Value,
}

const ROLES: [Role; 3] = [Role::Query, Role::Key, Role::Value];

/// The rows of a tensor of shape `[samples, length, width]`.
#[derive(Clone, Copy)]
struct Rows<'a> {
    storage: &'a CpuStorage,
    /// The index of the first element in the storage.
    start: usize,
    width: usize,
}

impl Heads {
    fn scale<T: Element>(&self) -> T {
        T::from_f64((self.sizes[2] as f64).powf(-0.5))
    }

    /// Returns the column where a head's part of the inputs begins.
    fn column(&self, role: Role, head: usize) -> usize {
        (role as usize * self.number + head) * self.sizes[2]
    }

    /// Returns the matrices of shape `[samples, length, size of a head]` that begin at a column.
    fn matrices<'a>(&self, of: Rows<'a>, column: usize) -> (&'a CpuStorage, Layout) {
        let [samples, length, of_head] = self.sizes;
        let strides = vec![length * of.width, of.width, 1];
        let shape = Shape::from((samples, length, of_head));
        (of.storage, Layout::new(shape, strides, of.start + column))
    }

    /// Returns the matrices of a head's scores, of shape `[samples, length, length]`.
    fn squares<'a>(&self, scores: &'a CpuStorage) -> (&'a CpuStorage, Layout) {
        let [samples, length, _] = self.sizes;
        (scores, Layout::contiguous((samples, length, length)))
    }

    fn product<T: Element>(
        &self,
        a: (&CpuStorage, Layout),
        b: (&CpuStorage, Layout),
    ) -> Result<Vec<T>> {
        let (rows, inner, columns) = (a.1.dims()[1], a.1.dims()[2], b.1.dims()[2]);
        let sizes = (self.sizes[0], rows, columns, inner);
        T::cpu_storage_data(a.0.matmul(b.0, sizes, &a.1, &b.1)?)
    }

    /// Copies the matrices of a head to a column of a tensor of this width.
    fn place<T: Element>(&self, matrices: &[T], into: &mut [T], width: usize, column: usize) {
        let rows = matrices.chunks_exact(self.sizes[2]);
        for (row, whole) in rows.zip(into.chunks_exact_mut(width)) {
            whole[column..column + row.len()].copy_from_slice(row);
        }
    }

    /// Returns the result, and the softmax of each head's scores.
    fn forward<T: Element>(&self, inputs: Rows) -> Result<(Vec<T>, Vec<CpuStorage>)> {
        let [samples, length, of_head] = self.sizes;
        let (scale, width) = (self.scale::<T>(), self.number * of_head);
        let mut result = vec![T::zero(); samples * length * width];
        let mut probabilities = Vec::with_capacity(self.number);
        for head in 0..self.number {
            let [query, key, value] =
                ROLES.map(|role| self.matrices(inputs, self.column(role, head)));
            let mut scores = self.product::<T>(query, transposed(key)?)?;
            softmax::forward(&mut scores, length, scale);
            let probability = T::to_cpu_storage_owned(scores);
            let attended = self.product::<T>(self.squares(&probability), value)?;
            self.place(&attended, &mut result, width, head * of_head);
            probabilities.push(probability);
        }
        Ok((result, probabilities))
    }

    /// Returns the gradient of the inputs.
    fn backward<T: Element>(&self, inputs: Rows, gradient: Rows) -> Result<Vec<T>> {
        let [samples, length, of_head] = self.sizes;
        let scale = self.scale::<T>();
        let mut result = vec![T::zero(); samples * length * inputs.width];
        let Some(probabilities) = self.probabilities.get() else {
            bail!("the gradient of attention was asked for before its result");
        };
        for (head, probability) in probabilities.iter().enumerate() {
            let [query, key, value] =
                ROLES.map(|role| self.matrices(inputs, self.column(role, head)));
            let of_attended = || self.matrices(gradient, head * of_head);
            let of_value =
                self.product::<T>(transposed(self.squares(probability))?, of_attended())?;
            let mut of_scores = self.product::<T>(of_attended(), transposed(value)?)?;
            let probabilities = T::cpu_storage_as_slice(probability)?;
            softmax::backward(&mut of_scores, probabilities, length, scale);
            let of_scores = T::to_cpu_storage_owned(of_scores);
            let of_query = self.product::<T>(self.squares(&of_scores), key)?;
            let of_key = self.product::<T>(transposed(self.squares(&of_scores))?, query)?;
            for (role, part) in ROLES.into_iter().zip([of_query, of_key, of_value]) {
                let column = self.column(role, head);
                self.place(&part, &mut result, inputs.width, column);
            }
        }
        Ok(result)
    }
}

/// Returns the layout of the transposed matrices.
fn transposed((storage, layout): (&CpuStorage, Layout)) -> Result<(&CpuStorage, Layout)> {
    Ok((storage, layout.transpose(1, 2)?))
}

impl CustomOp1 for Heads {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(&self, inputs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (samples, length, width) = layout.shape().dims3()?;
        let rows = Rows {
            storage: inputs,
            start: layout.start_offset(),
            width,
        };
        let (result, probabilities) = with_type!(inputs.dtype(), T => {
            let (result, probabilities) = self.forward::<T>(rows)?;
            (T::to_cpu_storage_owned(result), probabilities)
        });
        // An operation belongs to one result, so this is the first call.
        let _ = self.probabilities.set(probabilities);
        Ok((result, (samples, length, width / 3).into()))
    }

    fn bwd(&self, inputs: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let (storage, layout) = inputs.storage_and_layout();
        let (of_result, of_layout) = gradient.storage_and_layout();
        let (Storage::Cpu(storage), Storage::Cpu(of_result)) = (&*storage, &*of_result) else {
            bail!("a tensor of shape {:?} is not on the CPU", layout.shape());
        };
        let rows = |storage, layout: &Layout| Rows {
            storage,
            start: layout.start_offset(),
            width: layout.dims()[2],
        };
        let (projected, gradient) = (rows(storage, layout), rows(of_result, of_layout));
        with_type!(inputs.dtype(), T => {
            keep_values(result, inputs, || self.backward::<T>(projected, gradient))
        })
    }
}
