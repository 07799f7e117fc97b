//! Embeddings.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, WithDType, bail};
use candle_nn::{Init, VarBuilder};

use crate::backward::keep_values;
use crate::storage::{computed_here, elements, slice, with_type};

/// A table of vectors: a weight of shape `[rows, size]`.
#[derive(Clone, Debug)]
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// Asks `vars` for `weight`, with the initial values of [`candle_nn::embedding()`].
    ///
    /// # Errors
    /// Those of `vars`.
    pub fn new(rows: usize, size: usize, vars: VarBuilder) -> Result<Self> {
        let layer = candle_nn::embedding(rows, size, vars)?;
        Ok(Self {
            weight: layer.embeddings().clone(),
        })
    }

    /// Asks `vars` for `weight`, with these initial values.
    ///
    /// # Errors
    /// Those of `vars`.
    pub fn with_init(rows: usize, size: usize, init: Init, vars: VarBuilder) -> Result<Self> {
        let weight = vars.get_with_hints((rows, size), "weight", init)?;
        Ok(Self { weight })
    }

    /// Returns the vectors of `ids`, which have the type `u32`: ids of shape `[...]` give a result of shape `[...,
    /// size]`. On the CPU, the gradients of an id's vector are added up in the order of the ids, so the sum is the same
    /// in each run.
    ///
    /// # Errors
    /// If an id is not below `rows` (on the CPU), if the ids are not `u32`, or candle's.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        lookup(&self.weight, ids)
    }
}

/// Returns rows of a weight of shape `[rows, size]`, as [`Embedding::forward`] does.
///
/// # Errors
/// Those of [`Embedding::forward`].
pub fn lookup(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    if ids.dtype() != DType::U32 {
        bail!("ids are u32, not {:?}", ids.dtype());
    }
    let size = weight.dim(1)?;
    let (weight, ids) = (weight.contiguous()?, ids.contiguous()?);
    let empty = weight.elem_count() == 0 || ids.elem_count() == 0;
    match empty || !computed_here(&[&weight]) || !ids.device().is_cpu() {
        true => {
            let shape = [ids.dims(), &[size]].concat();
            weight.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
        }
        // No reshape follows: backward would pass over all rows once more for it.
        false => weight.apply_op2(&ids, Lookup { size }),
    }
}

struct Lookup {
    size: usize,
}

impl CustomOp2 for Lookup {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(
        &self,
        weight: &CpuStorage,
        weight_layout: &Layout,
        ids: &CpuStorage,
        ids_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ids = slice::<u32>(ids, ids_layout)?;
        let shape = Shape::from([ids_layout.dims(), &[self.size]].concat());
        with_type!(weight.dtype(), T => {
            let rows = slice::<T>(weight, weight_layout)?;
            let mut result = Vec::with_capacity(ids.len() * self.size);
            for id in ids {
                let start = *id as usize * self.size;
                let Some(row) = rows.get(start..start + self.size) else {
                    bail!("there is no row {id}; there are {}, from 0", rows.len() / self.size);
                };
                result.extend_from_slice(row);
            }
            Ok((T::to_cpu_storage_owned(result), shape))
        })
    }

    fn bwd(
        &self,
        weight: &Tensor,
        ids: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let of_weight = with_type!(weight.dtype(), T => {
            keep_values(result, weight, || {
                let (ids, gradient) = (elements(ids), elements(&gradient));
                let mut of_weight = vec![0.0 as T; weight.elem_count()];
                let rows = gradient.slice::<T>()?.chunks_exact(self.size);
                for (id, row) in ids.slice::<u32>()?.iter().zip(rows) {
                    let sums = &mut of_weight[*id as usize * self.size..][..self.size];
                    sums.iter_mut().zip(row).for_each(|(sum, g)| *sum += g);
                }
                Ok(of_weight)
            })
        })?;
        Ok((of_weight, None))
    }
}
