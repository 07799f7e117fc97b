//! The examples of docs/data.md.

use std::sync::Arc;

use ::parquet::data_type::{ByteArrayType, DoubleType};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use shared_proto::job::Job;

use super::*;

const TEXT: &str = include_str!("../../../../docs/data.md");

/// Returns the blocks of code in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let begin = format!("```{language}\n");
    let parts = TEXT.split(&begin as &str).skip(1);
    parts
        .filter_map(|rest| Some(rest.split_once("```")?.0))
        .collect()
}

/// Returns the settings of the example of a kind of data, with its files in this folder.
fn example(kind: &str, folder: &Path) -> Data {
    let jobs = blocks("toml")
        .into_iter()
        .map(|job| Job::from_toml(job).unwrap());
    let data = jobs
        .map(|job| job.data)
        .find(|data| data.kind == kind)
        .unwrap();
    Data {
        dir: Some(folder.to_owned()),
        ..data
    }
}

fn table() -> &'static str {
    let [table] = blocks("csv")[..] else {
        panic!("one table");
    };
    table
}

/// Returns name, shape and number of ids of each input.
fn inputs(dataset: &Dataset) -> Vec<(&str, &[usize], Option<u64>)> {
    let inputs = dataset.signature.inputs.iter();
    inputs
        .map(|f| (f.name.as_str(), &f.shape[..], f.categories))
        .collect()
}

#[test]
fn each_job_is_valid() {
    let jobs = blocks("toml");
    assert!(jobs.len() > 5, "{jobs:?}");
    for job in jobs {
        if let Err(error) = Job::from_toml(job) {
            panic!("{error}: {job}");
        }
    }
}

#[test]
fn the_table_is_read_as_its_job_says() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.csv"), table()).unwrap();
    let dataset = load(&example("csv", folder.path()), 1).unwrap();
    // Three samples are trained on, with two kinds of houses.
    let expected = [
        ("inputs", &[3][..], None),
        ("city", &[], Some(1000)),
        ("kind", &[], Some(3)),
    ];
    assert_eq!(inputs(&dataset), expected);
    assert_eq!(dataset.signature.target().unwrap().categories, None);
}

#[test]
fn the_same_table_is_read_from_parquet() {
    let mut reader = ::csv::Reader::from_reader(table().as_bytes());
    let names: Vec<String> = reader
        .headers()
        .unwrap()
        .iter()
        .map(str::to_owned)
        .collect();
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    let is_number = |name: &&str| ["price", "area", "rooms"].contains(name);
    let column = |name: &String| match is_number(&name.as_str()) {
        true => format!("required double {name};"),
        false => format!("required binary {name} (UTF8);"),
    };
    let columns: String = names.iter().map(column).collect();
    let schema = Arc::new(parse_message_type(&format!("message m {{ {columns} }}")).unwrap());

    let folder = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(folder.path().join("train.parquet")).unwrap();
    let mut file = SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    for (i, name) in names.iter().enumerate() {
        let mut column = group.next_column().unwrap().unwrap();
        let cells = rows.iter().map(|row| &row[i]);
        if is_number(&name.as_str()) {
            let numbers: Vec<f64> = cells.map(|cell| cell.parse().unwrap()).collect();
            column
                .typed::<DoubleType>()
                .write_batch(&numbers, None, None)
                .unwrap();
        } else {
            let texts: Vec<_> = cells.map(Into::into).collect();
            column
                .typed::<ByteArrayType>()
                .write_batch(&texts, None, None)
                .unwrap();
        }
        column.close().unwrap();
    }
    group.close().unwrap();
    file.close().unwrap();

    let dataset = load(&example("parquet", folder.path()), 1).unwrap();
    let names: Vec<_> = inputs(&dataset).iter().map(|input| input.0).collect();
    assert_eq!(names, ["inputs", "city", "kind", "built"]);
    // Three different dates are trained on.
    assert_eq!(inputs(&dataset)[3].2, Some(3));
}

#[test]
fn the_pictures_get_the_size_of_their_job() {
    let folder = tempfile::tempdir().unwrap();
    for class in ["cat", "dog"] {
        std::fs::create_dir(folder.path().join(class)).unwrap();
        for (name, side) in [("1.jpg", 80), ("2.png", 50)] {
            let picture = image::RgbImage::new(side, side);
            picture.save(folder.path().join(class).join(name)).unwrap();
        }
    }
    let dataset = load(&example("image-folder", folder.path()), 1).unwrap();
    assert_eq!(fields(&dataset), (vec![3, 64, 64], Some(2)));
}
