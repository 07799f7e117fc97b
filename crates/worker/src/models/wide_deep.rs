use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use super::deepfm::{SPREAD, Wide, joined};
use super::dense::Dense;
use super::inputs::Vectors;
use super::options::Options;
use crate::model::{Batch, Model, Pass, Setup};

/// A weight for each feature, and a multi-layer perceptron over vectors of ids (Cheng et al., "Wide & Deep Learning for
/// Recommender Systems", DLRS 2016), without crossed features. It predicts a number or a binary target.
///
/// Tables and variables are those of DeepFM.
pub struct WideDeep {
    wide: Wide,
    vectors: Vectors,
    deep: Dense,
}

impl Model for WideDeep {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        Options::of(setup, &[])?;
        let wide = Wide::new(setup, &vars)?;
        let size = setup.settings.embedding;
        let features = wide.inputs.width + wide.inputs.vector_count() * size;
        Ok(Self {
            vectors: wide.inputs.table(setup, "embedding", size, SPREAD)?,
            deep: Dense::new(features, &setup.settings.hidden, 1, &vars)?,
            wide,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let (numbers, outputs) = self.wide.forward(batch)?;
        let vectors = self.wide.inputs.vectors(&self.vectors, batch)?;
        outputs + self.deep.forward(&joined(&vectors, numbers)?)?
    }
}
