//! `flambeau predict`: the predictions of a run's weights.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use model::registry::Registry;
use parquet::basic::{LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, FloatType};
use parquet::errors::ParquetError;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use replica::device;
use worker::alone::predict::{Cell, Predictions, predict};

use crate::command::{FinishedRun, Weights, show_warnings};
use crate::error::CommandError;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with job.toml and model.safetensors, and transforms.json if the training wrote it.
    run_dir: PathBuf,
    /// Predict with the best weights, best.safetensors, which a job with [best] keeps.
    #[arg(long)]
    best: bool,
    /// The data to predict: a table of the job's kind, with or without the label; pictures in a folder; or a folder of
    /// NumPy files. For other kinds, the folder or file of the data, of which the held-out samples are predicted.
    #[arg(long, value_name = "FILE")]
    data_dir: Option<PathBuf>,
    /// Columns of a table to be copied before the predictions, separated by commas, such as ids.
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',')]
    keep: Vec<String>,
    /// The file to write: Parquet if its name ends in .parquet, and else CSV. Without it, CSV goes to standard output.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The device to compute on: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: device::Choice,
}

pub(crate) fn run(arguments: &Arguments, registry: &Registry) -> Result<(), CommandError> {
    show_warnings();
    let weights = Weights::best_if(arguments.best);
    let finished = FinishedRun::read(&arguments.run_dir, weights, arguments.data_dir.as_deref())?;
    let device = device::open(arguments.device)?;
    let mut predictions = predict(&finished.trained(), registry, &device)?;
    predictions.keep(&finished.trained(), &arguments.keep)?;
    match &arguments.out {
        Some(path) => {
            let file = std::fs::File::create(path).map_err(CommandError::file(path))?;
            let file = io::BufWriter::new(file);
            let written = match path.extension().is_some_and(|end| end == "parquet") {
                true => write_parquet(&predictions, file).map_err(io::Error::other),
                false => predictions.write_csv(file),
            };
            written.map_err(CommandError::file(path))
        }
        None => {
            let written = predictions.write_csv(io::stdout().lock());
            written.map_err(CommandError::file("standard output"))
        }
    }
}

/// Writes a Parquet file with the columns of the predictions: text for labels, `float` or `double` for numbers.
fn write_parquet(predictions: &Predictions, to: impl Write + Send) -> Result<(), ParquetError> {
    let column = |place: usize| predictions.rows.iter().map(move |row| &row[place]);
    let kind = |place| match column(place).next() {
        Some(Cell::Label(_)) => PhysicalType::BYTE_ARRAY,
        Some(Cell::Double(_)) => PhysicalType::DOUBLE,
        Some(Cell::Number(_)) | None => PhysicalType::FLOAT,
    };
    let fields = predictions.header.iter().enumerate();
    let fields = fields.map(|(place, name)| {
        let text = (kind(place) == PhysicalType::BYTE_ARRAY).then_some(LogicalType::String);
        Type::primitive_type_builder(name, kind(place))
            .with_logical_type(text)
            .with_repetition(Repetition::REQUIRED)
            .build()
            .map(Arc::new)
    });
    let schema = Type::group_type_builder("predictions")
        .with_fields(fields.collect::<Result<_, _>>()?)
        .build()?;
    let schema = Arc::new(schema);
    let mut writer = SerializedFileWriter::new(to, schema, Arc::default())?;
    let mut group = writer.next_row_group()?;
    for place in 0..predictions.header.len() {
        let Some(mut writer) = group.next_column()? else {
            break;
        };
        match kind(place) {
            PhysicalType::BYTE_ARRAY => {
                let labels =
                    column(place).map(|cell| ByteArray::from(cell.to_string().into_bytes()));
                let labels: Vec<_> = labels.collect();
                let writer = writer.typed::<ByteArrayType>();
                writer.write_batch(&labels, None, None)?;
            }
            PhysicalType::DOUBLE => {
                let numbers: Vec<f64> = column(place).filter_map(Cell::number).collect();
                let writer = writer.typed::<DoubleType>();
                writer.write_batch(&numbers, None, None)?;
            }
            _ => {
                let numbers = column(place).filter_map(Cell::number);
                let numbers: Vec<f32> = numbers.map(|number| number as f32).collect();
                let writer = writer.typed::<FloatType>();
                writer.write_batch(&numbers, None, None)?;
            }
        }
        writer.close()?;
    }
    group.close()?;
    Ok(writer.into_inner()?.flush()?)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    use super::*;

    #[test]
    fn parquet_has_the_labels_and_the_numbers() {
        let row = |label: &str, p| vec![Cell::Label(label.to_owned()), Cell::Number(p)];
        let predictions = Predictions {
            header: vec!["prediction".to_owned(), "probability".to_owned()],
            rows: vec![row("cat, black", 0.25), row("dog", 1.0)],
        };
        let mut file = Vec::new();
        write_parquet(&predictions, &mut file).unwrap();
        let reader = SerializedFileReader::new(Bytes::from(file)).unwrap();
        let rows: Vec<_> = reader.get_row_iter(None).unwrap().collect();
        let found: Vec<(String, f32)> = rows
            .into_iter()
            .map(|row| row.unwrap())
            .map(|row| {
                (
                    row.get_string(0).unwrap().clone(),
                    row.get_float(1).unwrap(),
                )
            })
            .collect();
        let expected = [("cat, black".to_owned(), 0.25), ("dog".to_owned(), 1.0)];
        assert_eq!(found, expected);
    }
}
