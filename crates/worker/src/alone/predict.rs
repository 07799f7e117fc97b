//! Predictions of a trained model, made without a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::ops::Range;

use candle_core::{D, DType, Device, Tensor, WithDType, bail};
use nn::autocast;

use data::texts;

use model::input::{Fitted, InMemory, InputError, Purpose, RowBatch, Target};
use model::registry::Registry;
use model::{Loss, Objective};
use replica::{EVALUATION_BATCH, ReplicaError, precision};
use shared_proto::job::{Job, run_dir};

use super::local::{Loaded, Trained};

/// The predictions for some samples, as a table of labels and numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Predictions {
    /// The names of the columns.
    pub header: Vec<String>,
    /// A row for each sample, in the order of the samples. The cells of a column are of one kind.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a row of predictions.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// The label of a class.
    Label(String),
    /// A probability, or a number that was predicted.
    Number(f32),
    /// A predicted number in the unit of the labels, which were standardised for the training.
    Double(f64),
}

impl Cell {
    /// Returns the number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Label(_) => None,
            Self::Number(number) => Some((*number).into()),
            Self::Double(number) => Some(*number),
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Label(label) => f.write_str(label),
            Self::Number(number) => number.fmt(f),
            Self::Double(number) => number.fmt(f),
        }
    }
}

impl Predictions {
    /// Inserts columns of the predicted data in front of the predictions.
    ///
    /// # Errors
    /// If the data has no such column, or cannot be read.
    pub fn keep(&mut self, trained: &Trained, columns: &[String]) -> Result<(), ReplicaError> {
        if columns.is_empty() {
            return Ok(());
        }
        let kept = texts(trained.job, columns)?;
        for (name, cells) in columns.iter().zip(kept).rev() {
            if cells.len() != self.rows.len() {
                return Err(InputError::Invalid(format!(
                    "column {name:?} has {} rows, and there are {} predictions",
                    cells.len(),
                    self.rows.len()
                ))
                .into());
            }
            self.header.insert(0, name.clone());
            for (row, cell) in self.rows.iter_mut().zip(cells) {
                row.insert(0, Cell::Label(cell));
            }
        }
        Ok(())
    }

    /// Writes a CSV file.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write_csv(&self, to: impl Write) -> std::io::Result<()> {
        let mut file = csv::Writer::from_writer(to);
        file.write_record(&self.header)?;
        for row in &self.rows {
            file.write_record(row.iter().map(Cell::to_string))?;
        }
        file.flush()
    }
}

/// Returns the predictions of a trained model. With `trained.fitted`, predicts all samples in `data.dir`, with the
/// transforms and the classes of the training; labels are not read and may be missing. Otherwise predicts the held-out
/// samples of the job.
///
/// For classes, a prediction is the likeliest class and its probability; for a binary target, the likelier label and
/// the probability of the label that counts as 1; for numbers, the numbers.
///
/// # Errors
/// The data's or the model's, or if the file holds other variables than the model has.
pub fn predict(
    trained: &Trained,
    registry: &Registry,
    device: &Device,
) -> Result<Predictions, ReplicaError> {
    let purpose = trained
        .fitted
        .map_or(Purpose::Training, Purpose::Prediction);
    let mut loaded = Loaded::open(trained, registry, device, purpose)?;
    let transforms = loaded.data.transforms.as_ref();
    let labels = transforms.map_or_else(BTreeMap::new, |fitted| labels(&fitted.target));
    let form = Form::new(&loaded.objective);
    let count = loaded.data.evaluation.count();
    let mut rows = Vec::new();
    for start in (0..count).step_by(EVALUATION_BATCH as usize) {
        let end = count.min(start + EVALUATION_BATCH);
        let outputs = autocast(precision(trained.job), || {
            loaded.outputs(start..end, device)
        })?;
        check_finite(&outputs, start)?;
        rows.extend(match form {
            Form::Classes => classes(&outputs, &labels)?,
            Form::Binary => binary(&outputs, &labels)?,
            Form::Numbers => numbers(&outputs)?,
        });
    }
    let width = rows.first().map_or(0, Vec::len);
    let header = match form {
        Form::Classes | Form::Binary => vec!["prediction".to_owned(), "probability".to_owned()],
        Form::Numbers if width == 1 => vec!["prediction".to_owned()],
        Form::Numbers => (0..width).map(|i| format!("prediction_{i}")).collect(),
    };
    Ok(Predictions { header, rows })
}

/// Returns a trained model's outputs for each of `samples`, or, without them, for each held-out sample of the job: the
/// probabilities of the classes, the probability that a binary label is 1, or numbers.
///
/// # Errors
/// The data's or the model's, or if the samples have other inputs than those of the training.
pub fn values(
    trained: &Trained,
    registry: &Registry,
    device: &Device,
    samples: Option<InMemory>,
) -> Result<Vec<Vec<f32>>, ReplicaError> {
    let purpose = trained
        .fitted
        .map_or(Purpose::Training, Purpose::Evaluation);
    let mut loaded = Loaded::open(trained, registry, device, purpose)?;
    if let Some(samples) = samples {
        loaded.replace_held_out(samples)?;
    }
    outputs_of(&mut loaded, trained.job, device)
}

/// Returns a trained model's outputs for each of these rows, as [`values`] does. The data of the training is not needed.
///
/// # Errors
/// If a row does not fit the columns of the training, or the model's.
pub fn values_of_rows(
    trained: &Trained,
    registry: &Registry,
    device: &Device,
    rows: impl RowBatch,
) -> Result<Vec<Vec<f32>>, ReplicaError> {
    let samples = samples_of(trained.fitted, trained.job, rows)?;
    let mut loaded = Loaded::for_samples(trained, registry, device, samples)?;
    outputs_of(&mut loaded, trained.job, device)
}

/// Returns rows as samples of a job, with the columns of its training.
fn samples_of(
    fitted: Option<&Fitted>,
    job: &Job,
    rows: impl RowBatch,
) -> Result<InMemory, InputError> {
    let fitted = fitted.ok_or_else(|| {
        InputError::Invalid(format!(
            "there is no {} in the run directory, which tells what rows become; the data of the training had no columns, or the file is lost",
            run_dir::TRANSFORMS
        ))
    })?;
    fitted.samples(&job.data, rows)
}

/// Returns the outputs for all samples that are held out.
fn outputs_of(
    loaded: &mut Loaded,
    job: &Job,
    device: &Device,
) -> Result<Vec<Vec<f32>>, ReplicaError> {
    let form = Form::new(&loaded.objective);
    let count = loaded.data.evaluation.count();
    let mut rows = Vec::new();
    for start in (0..count).step_by(EVALUATION_BATCH as usize) {
        let end = count.min(start + EVALUATION_BATCH);
        let outputs = autocast(precision(job), || loaded.outputs(start..end, device))?;
        check_finite(&outputs, start)?;
        let outputs = outputs.to_dtype(DType::F32)?;
        let outputs = match form {
            Form::Classes => nn::softmax(&outputs)?,
            Form::Binary => candle_nn::ops::sigmoid(&outputs)?,
            Form::Numbers => outputs,
        };
        rows.extend(rows_of(&outputs)?);
    }
    Ok(rows)
}

/// A trained model that scores samples one request at a time, as an online service does.
pub struct Scorer {
    loaded: Loaded,
    job: Job,
    fitted: Option<Fitted>,
    device: Device,
}

impl Scorer {
    /// Builds the model with its weights, and opens the data that samples come from, as [`predict`] does.
    ///
    /// # Errors
    /// The data's or the model's, or if the file holds other variables than the model has.
    pub fn open(
        trained: &Trained,
        registry: &Registry,
        device: Device,
    ) -> Result<Self, ReplicaError> {
        let purpose = trained
            .fitted
            .map_or(Purpose::Training, Purpose::Prediction);
        Ok(Self {
            loaded: Loaded::open(trained, registry, &device, purpose)?,
            job: trained.job.clone(),
            fitted: trained.fitted.cloned(),
            device,
        })
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> u64 {
        self.loaded.data.evaluation.count()
    }

    /// Returns the model's outputs for rows that come with a request, as [`Self::scores`] does.
    ///
    /// # Errors
    /// If a row does not fit the columns of the training, or for the reasons of [`Self::scores`].
    pub fn scores_of_rows(&mut self, rows: impl RowBatch) -> Result<Vec<f32>, ReplicaError> {
        let samples = samples_of(self.fitted.as_ref(), &self.job, rows)?;
        let before = self.loaded.replace_held_out(samples)?;
        let all = (0..self.samples()).step_by(EVALUATION_BATCH as usize);
        let scores = all.map(|start| {
            let end = self.samples().min(start + EVALUATION_BATCH);
            self.scores(start..end)
        });
        let scores = scores.collect::<Result<Vec<_>, _>>();
        self.loaded.data.evaluation = before;
        Ok(scores?.concat())
    }

    /// Returns the model's outputs for some samples: probabilities for a binary target, raw outputs for any other
    /// target.
    ///
    /// # Errors
    /// The data's or the model's, or if rows cannot be read.
    pub fn scores(&mut self, samples: Range<u64>) -> Result<Vec<f32>, ReplicaError> {
        let outputs = self.loaded.outputs(samples, &self.device)?;
        let outputs = match Form::new(&self.loaded.objective) {
            Form::Binary => candle_nn::ops::sigmoid(&outputs)?,
            Form::Classes | Form::Numbers => outputs,
        };
        Ok(outputs.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

/// The meaning of a model's outputs.
#[derive(Clone, Copy)]
enum Form {
    Classes,
    Binary,
    Numbers,
}

impl Form {
    fn new(objective: &Objective) -> Self {
        match objective.loss {
            Loss::CrossEntropy { .. } if objective.outputs > 0 => Self::Classes,
            Loss::BinaryCrossEntropy => Self::Binary,
            _ => Self::Numbers,
        }
    }
}

/// Checks that no output is NaN. The outputs belong to the samples from `start` on.
fn check_finite(outputs: &Tensor, start: u64) -> candle_core::Result<()> {
    let values = outputs
        .to_dtype(DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let Some(at) = values.iter().position(|value| value.is_nan()) else {
        return Ok(());
    };
    let row = start as usize + at * outputs.dim(0)? / values.len();
    bail!(
        "the model's output for sample {} is NaN; its weights or the sample are damaged",
        row + 1
    )
}

/// Returns the likeliest class of each sample, and its probability.
fn classes(
    outputs: &Tensor,
    labels: &BTreeMap<u32, String>,
) -> candle_core::Result<Vec<Vec<Cell>>> {
    let probabilities = nn::softmax(&outputs.to_dtype(DType::F32)?)?;
    let likeliest = probabilities.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let probability = probabilities.max(D::Minus1)?.to_vec1::<f32>()?;
    let row = |(class, p): (u32, f32)| vec![label(labels, class), Cell::Number(p)];
    Ok(likeliest.into_iter().zip(probability).map(row).collect())
}

/// Returns the likelier label of each sample, and the probability of the label that counts as 1.
fn binary(outputs: &Tensor, labels: &BTreeMap<u32, String>) -> candle_core::Result<Vec<Vec<Cell>>> {
    let outputs = outputs
        .flatten_all()?
        .to_dtype(DType::F64)?
        .to_vec1::<f64>()?;
    let row = |output: f64| {
        let p = 1.0 / (1.0 + (-output).exp());
        vec![label(labels, u32::from(p >= 0.5)), Cell::Number(p as f32)]
    };
    Ok(outputs.into_iter().map(row).collect())
}

/// Returns the outputs of each sample.
fn numbers(outputs: &Tensor) -> candle_core::Result<Vec<Vec<Cell>>> {
    let cells = |cell: &dyn Fn(f64) -> Cell| -> candle_core::Result<Vec<Vec<Cell>>> {
        let rows = rows_of::<f64>(&outputs.to_dtype(DType::F64)?)?;
        let row = |row: Vec<f64>| row.into_iter().map(cell).collect();
        Ok(rows.into_iter().map(row).collect())
    };
    match outputs.dtype() {
        DType::F64 => cells(&Cell::Double),
        _ => cells(&|number| Cell::Number(number as f32)),
    }
}

/// Returns the numbers of each sample.
fn rows_of<T: WithDType>(outputs: &Tensor) -> candle_core::Result<Vec<Vec<T>>> {
    match outputs.rank() {
        1 => outputs.unsqueeze(1)?.to_vec2(),
        _ => outputs.flatten_from(1)?.to_vec2(),
    }
}

/// Returns a class's label, or its number if the data has no labels in words.
fn label(labels: &BTreeMap<u32, String>, class: u32) -> Cell {
    let label = labels.get(&class).cloned();
    Cell::Label(label.unwrap_or_else(|| class.to_string()))
}

/// Returns the label of each class.
fn labels(target: &Target) -> BTreeMap<u32, String> {
    let mut labels = BTreeMap::new();
    let named: Vec<(u32, &String)> = match target {
        Target::Class { numbers, .. } => numbers.iter().map(|(text, n)| (*n, text)).collect(),
        Target::Binary { values } => values.iter().map(|(text, v)| (*v as u32, text)).collect(),
        Target::Number { .. } => Vec::new(),
    };
    for (class, text) in named {
        labels.entry(class).or_insert_with(|| text.clone());
    }
    labels
}
