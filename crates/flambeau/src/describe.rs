//! `flambeau data`: what is in a file, and a job for it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use comfy_table::{Table, presets};
use daemon::{noteln, outln};
use model::input::{ColumnSurvey, Looks, survey};
use shared_proto::job::{ColumnType, Data, Job};

use crate::error::CommandError;
use crate::status::harmless;

/// With at most this many different whole numbers, a label is taken for a class.
const MOST_CLASSES: usize = 20;

/// With at least this many columns of categories, clicks or buys are likely, and a model for them is proposed.
const MANY_CATEGORIES: usize = 3;

/// The fewest and the most epochs of a proposed job. A file of few rows has more epochs, for a total of about `STEPS`
/// steps.
const EPOCHS: (u64, u64) = (10, 100);
const STEPS: u64 = 500;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Show the columns of a CSV or Parquet file, and what they would become.
    Describe {
        /// The file, or a pattern of names.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The column with the label.
        #[arg(long, value_name = "COLUMN")]
        label: Option<String>,
        /// CSV: the first line has no names. Columns are named by their numbers, from 0.
        #[arg(long)]
        no_header: bool,
        /// CSV: the character between fields, if it is not the comma, tab, semicolon or `|` that the first line has most often.
        #[arg(long, value_name = "CHARACTER")]
        delimiter: Option<char>,
        /// CSV: the character before the fraction of numbers.
        #[arg(long, value_name = "CHARACTER", default_value = ".")]
        decimal: char,
        /// Write a job for the file. An existing file is not replaced.
        #[arg(long, value_name = "JOB.toml")]
        write: Option<PathBuf>,
    },
}

pub(crate) fn run(command: &Command) -> Result<(), CommandError> {
    let Command::Describe {
        file,
        label,
        no_header,
        delimiter,
        decimal,
        write,
    } = command;
    let kind = match file.extension().is_some_and(|end| end == "parquet") {
        true => "parquet",
        false => "csv",
    };
    if kind == "parquet"
        && (*no_header || delimiter.is_some() || *decimal != Data::default().decimal)
    {
        return Err(CommandError::Content {
            path: file.clone(),
            reason: "--no-header, --delimiter and --decimal are for CSV; a Parquet file has names, and numbers as they are".to_owned(),
        });
    }
    let data = Data {
        kind: kind.to_owned(),
        dir: Some(file.clone()),
        label: label.clone().unwrap_or_else(|| Data::default().label),
        header: !no_header,
        delimiter: *delimiter,
        decimal: *decimal,
        ..Data::default()
    };
    let checked = Job {
        data: data.clone(),
        ..Job::default()
    };
    checked.validate()?;
    let columns = survey(&data)?;
    outln!("{}", table(&columns, &data.label).trim_fmt());
    let rows = columns.first().map_or(0, |column| column.rows);
    outln!("by the first {rows} rows");
    let Some(path) = write else {
        return Ok(());
    };
    let Some(label) = columns.iter().find(|column| column.name == data.label) else {
        let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
        return Err(CommandError::NoLabel {
            label: data.label,
            columns: names.join(", "),
        });
    };
    let is_input = |column: &ColumnSurvey| {
        column.name != label.name && column.suggestion() != ColumnType::Ignore {}
    };
    if !columns.iter().any(is_input) {
        return Err(CommandError::Content {
            path: file.clone(),
            reason: "no column but the label is of use as it is: texts that hardly occur twice are left out; name a type for one of them in a job of your own".to_owned(),
        });
    }
    let job = job(&data, file, &columns, label);
    // What is written is a job that can be read.
    Job::from_toml(&job).map_err(|error| CommandError::Content {
        path: path.clone(),
        reason: error.to_string(),
    })?;
    let write = || std::fs::File::create_new(path)?.write_all(job.as_bytes());
    write().map_err(CommandError::file(path))?;
    noteln!("wrote {}; flambeau train {0} runs it", path.display());
    Ok(())
}

fn table(columns: &[ColumnSurvey], label: &str) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "column", "cells", "missing", "distinct", "range", "examples", "becomes",
    ]);
    for column in columns {
        let cells = match column.looks {
            Looks::Nothing => "nothing",
            Looks::Numbers if column.has_fractions => "numbers",
            Looks::Numbers => "whole numbers",
            Looks::Dates => "dates",
            Looks::Texts => "texts",
            Looks::Lists => "lists",
        };
        let range = column
            .range
            .map_or(String::new(), |(a, b)| format!("{a} to {b}"));
        let examples: Vec<String> = column.examples.iter().map(|text| brief(text)).collect();
        let becomes = match column.name == label {
            true => format!("the label: {}", target(column)),
            false => column.line().map_or("a number".to_owned(), |line| {
                line.split_once(" = ")
                    .map_or(String::new(), |(_, kind)| kind.to_owned())
            }),
        };
        table.add_row([
            harmless(&column.name).into_owned(),
            cells.to_owned(),
            column.missing.to_string(),
            column.distinct.to_string(),
            range,
            examples.join(", "),
            harmless(&becomes).into_owned(),
        ]);
    }
    table
}

fn brief(text: &str) -> String {
    const LONGEST: usize = 16;
    match text.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", harmless(text.get(..at).unwrap_or_default())),
        None => harmless(text).into_owned(),
    }
}

/// Returns the value of `data.target` that fits a label.
fn target(label: &ColumnSurvey) -> &'static str {
    match label.looks {
        _ if label.distinct == 2 => "binary",
        Looks::Numbers if label.has_fractions || label.distinct > MOST_CLASSES => "number",
        _ => "class",
    }
}

/// Returns a job for a file, as TOML.
fn job(data: &Data, file: &Path, columns: &[ColumnSurvey], label: &ColumnSurvey) -> String {
    let text = |text: &str| toml_text(text);
    let inputs = || columns.iter().filter(|column| column.name != label.name);
    let categories = inputs().filter(|column| {
        let kind = column.suggestion();
        matches!(kind, ColumnType::Category { .. } | ColumnType::Id { .. })
    });
    let model = match target(label) {
        "binary" if categories.count() >= MANY_CATEGORIES => "deepfm",
        _ => "mlp",
    };
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let name: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || "-_".contains(*c))
        .collect();
    let batch = u64::from(Job::default().batch_size);
    let epochs = (STEPS * batch / label.rows.max(1)).clamp(EPOCHS.0, EPOCHS.1);
    let mut job = String::new();
    if !name.is_empty() {
        let _ = writeln!(job, "name = {}", text(&name));
    }
    let _ = writeln!(
        job,
        "epochs = {epochs}\n\n[data]\nkind = {}\ndir = {}\nlabel = {}\ntarget = {}",
        text(&data.kind),
        text(&file.display().to_string()),
        text(&label.name),
        text(target(label)),
    );
    if !data.header {
        let _ = writeln!(job, "header = false");
    }
    if let Some(delimiter) = data.delimiter {
        let _ = writeln!(job, "delimiter = {}", text(&delimiter.to_string()));
    }
    if data.decimal != Data::default().decimal {
        let _ = writeln!(job, "decimal = {}", text(&data.decimal.to_string()));
    }
    if target(label) == "number" {
        let _ = writeln!(job, "label_transform = \"standardise\"");
    }
    if label.missing > 0 {
        let _ = writeln!(job, "missing_label = \"skip\"");
    }
    let lines: Vec<String> = inputs().filter_map(ColumnSurvey::line).collect();
    if !lines.is_empty() {
        let _ = writeln!(job, "\n[data.columns]\n{}", lines.join("\n"));
    }
    let _ = writeln!(job, "\n[model]\nname = {}", text(model));
    job
}

/// Returns a text as a string of TOML. Strings of JSON are strings of TOML too.
fn toml_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::input::Purpose;
    use shared_proto::job::LabelTransform;

    #[test]
    fn a_file_becomes_a_job() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("clicks of may.csv");
        let rows: String = (0..60)
            .map(|i| {
                let gap = if i == 7 {
                    "NA".to_owned()
                } else {
                    i.to_string()
                };
                format!(
                    "{},{gap},\"note {i}\",2024-03-01,a{},b{},c{}\n",
                    i % 2,
                    i % 3,
                    i % 4,
                    i % 5
                )
            })
            .collect();
        std::fs::write(
            &file,
            format!("click,price,note,\"the day\",shop,kind,city\n{rows}"),
        )
        .unwrap();
        let write = dir.path().join("job.toml");
        let command = |label: &str| Command::Describe {
            file: file.clone(),
            label: Some(label.to_owned()),
            no_header: false,
            delimiter: None,
            decimal: '.',
            write: Some(write.clone()),
        };
        let error = run(&command("label")).unwrap_err().to_string();
        assert!(error.contains("click, price"), "{error}");
        run(&command("click")).unwrap();
        let job = Job::from_toml(&std::fs::read_to_string(&write).unwrap()).unwrap();
        assert_eq!(job.model.name, "deepfm");
        let columns: Vec<&str> = job.data.columns.keys().map(String::as_str).collect();
        assert_eq!(
            columns,
            ["city", "kind", "note", "price", "shop", "the day"]
        );
        assert_eq!(job.data.columns["note"], ColumnType::Ignore {});
        assert!(job.data.columns["price"].missing().is_some());
        // What is there is not replaced.
        assert!(run(&command("click")).is_err());
    }

    #[test]
    fn a_file_without_names_becomes_a_job() {
        let dir = tempfile::tempdir().unwrap();
        let (file, write) = (dir.path().join("raw.csv"), dir.path().join("job.toml"));
        std::fs::write(&file, "1,5 2,5 700\n2,5 1,5 300\n3,5 1,5 250,5\n").unwrap();
        let command = |delimiter| Command::Describe {
            file: file.clone(),
            label: Some("2".to_owned()),
            no_header: true,
            delimiter: Some(delimiter),
            decimal: ',',
            write: Some(write.clone()),
        };
        let parquet = Command::Describe {
            file: dir.path().join("raw.parquet"),
            label: None,
            no_header: true,
            delimiter: None,
            decimal: '.',
            write: None,
        };
        let error = run(&parquet).unwrap_err().to_string();
        assert!(error.contains("--no-header"), "{error}");
        let error = run(&command('é')).unwrap_err().to_string();
        assert!(error.contains("data.delimiter"), "{error}");
        run(&command(' ')).unwrap();
        let job = Job::from_toml(&std::fs::read_to_string(&write).unwrap()).unwrap();
        assert_eq!((job.data.header, job.data.delimiter), (false, Some(' ')));
        assert_eq!(job.data.label_transform, LabelTransform::Standardise);
        let data = model::registry::Registry::builtin().open(&job.data, 1, Purpose::Training);
        let scale = data.unwrap().signature.targets[0].scale.unwrap();
        assert!((100.0..1000.0).contains(&scale.mean), "{scale:?}");
    }
}
