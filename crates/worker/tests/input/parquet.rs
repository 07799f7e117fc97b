//! Parquet files: the types of columns, missing cells, and damaged files.

use ::parquet::data_type::{ByteArray, ByteArrayType, DoubleType};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use model::Batch;
use model::input::Rule;
use shared_proto::job::Job;

use super::*;

/// A file of pyarrow's, which `tests/vectors/make_parquet.py` writes: six rows in two groups.
const FILE: &[u8] = include_bytes!("../vectors/table.parquet");

fn load_bytes(content: &[u8], settings: &str) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("table.parquet");
    std::fs::write(&file, content).unwrap();
    let job = Job::from_toml(&format!("[data]\n{settings}")).unwrap();
    let data = Data {
        kind: "parquet".to_owned(),
        dir: Some(file),
        ..job.data
    };
    load(&data, 1).map_err(|error| error.to_string())
}

/// Numbers are left as they are, so that they can be compared; the first column tells the row.
const COLUMNS: &str = r#"
columns.int8 = { type = "number", transform = "none" }
columns.uint32 = { type = "number", transform = "none" }
columns.int64 = { type = "number", transform = "none" }
columns.uint64 = { type = "number", transform = "none" }
columns.half = { type = "number", transform = "none" }
columns.float = { type = "number", transform = "none" }
columns.double = { type = "number", transform = "none" }
columns.bool = { type = "number", transform = "none" }
columns.decimal = { type = "number", transform = "none" }
columns.date = { type = "date", transform = "none" }
columns.millis = { type = "date", transform = "none" }
columns.micros = { type = "date", transform = "none" }
columns.nanos = { type = "date", transform = "none" }
columns.iso = { type = "date", transform = "none" }
columns.city = { type = "category" }
columns.code = { type = "category", buckets = 1000 }
columns.list = { type = "ignore" }
"#;

#[test]
fn each_type_of_column_is_read() {
    let mut dataset = load_bytes(FILE, COLUMNS).unwrap();
    assert_eq!(dataset.signature.target().unwrap().categories, Some(2));
    let mut rows = Vec::new();
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let all = 0..samples.count();
        let batch =
            Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap();
        let numbers = batch.input_of("inputs").unwrap().to_vec2::<f32>().unwrap();
        let cities: Vec<u32> = batch.input_of("city").unwrap().to_vec1().unwrap();
        let codes: Vec<u32> = batch.input_of("code").unwrap().to_vec1().unwrap();
        let labels: Vec<u32> = batch.target().unwrap().to_vec1().unwrap();
        for (i, numbers) in numbers.into_iter().enumerate() {
            rows.push((numbers[0] as usize, numbers, cities[i], codes[i], labels[i]));
        }
    }
    rows.sort_by_key(|row| row.0);
    assert_eq!(rows.len(), 6);
    for (row, numbers, _, _, label) in &rows {
        let n = *row as f32;
        let noon = n + 0.5;
        let expected = [
            n,
            2f32.powi(32),
            -n,
            2f32.powi(63),
            n / 2.0,
            n / 4.0,
            n / 8.0,
            n % 2.0,
            -n / 100.0,
            n,
            noon,
            noon,
            noon,
            n,
        ];
        assert_eq!(numbers[..], expected[..], "row {row}");
        assert_eq!(*label as usize, row % 2);
    }
    for (a, b, equal) in [(0, 3, true), (0, 5, true), (0, 1, false), (0, 2, false)] {
        assert_eq!(rows[a].3 == rows[b].3, equal, "codes of rows {a} and {b}");
    }
    // Of the training samples' cities, each has an id of its own.
    assert_eq!(rows[0].2, rows[3].2);
}

#[test]
fn columns_that_cannot_be_read_are_named_with_their_row() {
    let without = |line: &str| COLUMNS.replace(line, "");
    for (settings, parts) in [
        (
            without("columns.city = { type = \"category\" }"),
            ["\"city\"", "row 1", "\"Rome\"", "city = {"],
        ),
        (
            without("columns.list = { type = \"ignore\" }"),
            ["\"list\"", "row 1", "has lists", "ignore"],
        ),
        (
            without("columns.iso = { type = \"date\", transform = \"none\" }"),
            [
                "\"iso\"",
                "row 1",
                "1970-01-01",
                "iso = { type = \"date\" }",
            ],
        ),
        (
            without("columns.date = { type = \"date\", transform = \"none\" }"),
            ["\"date\"", "row 1", "a date", "date = { type = \"date\" }"],
        ),
        (
            without("columns.code = { type = \"category\", buckets = 1000 }"),
            [
                "\"code\"",
                "row 3",
                "no value",
                "code = { type = \"number\", missing = \"mean\" }",
            ],
        ),
        (
            format!(
                "label = \"city\"\n{}",
                without("columns.city = { type = \"category\" }")
            ),
            ["row 3", "\"city\"", "label", "missing"],
        ),
        (
            format!("label = \"kind\"\n{COLUMNS}"),
            ["no column", "\"kind\"", "data.label", "row 1"],
        ),
    ] {
        assert_says(&load_bytes(FILE, &settings).unwrap_err(), &parts);
    }
    assert_says(
        &load_bytes(b"x,label\n1,2\n", "").unwrap_err(),
        &["table.parquet", "cannot be read as Parquet"],
    );
}

/// A time can be a category too: its text is that of CSV.
#[test]
fn dates_are_texts_where_a_column_has_texts() {
    let settings = COLUMNS.replace(
        "columns.millis = { type = \"date\", transform = \"none\" }",
        "columns.millis = { type = \"category\" }",
    );
    let dataset = load_bytes(FILE, &settings).unwrap();
    let columns = &dataset.transforms.as_ref().unwrap().columns;
    let millis = columns.iter().find(|column| column.name == "millis");
    let Rule::Vocabulary { texts, .. } = &millis.unwrap().rule else {
        panic!("a category has a vocabulary");
    };
    let is_time =
        |text: &String| text.starts_with("19") || text.starts_with("20") || text.is_empty();
    assert!(texts.iter().all(is_time), "{texts:?}");
}

/// A file of one column `x` and a label.
fn written(numbers: &[f64], labels: &[&str]) -> Vec<u8> {
    let schema = "message m { required double x; required binary label (UTF8); }";
    let schema = std::sync::Arc::new(parse_message_type(schema).unwrap());
    let mut content = Vec::new();
    let mut file = SerializedFileWriter::new(&mut content, schema, Default::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column
        .typed::<DoubleType>()
        .write_batch(numbers, None, None)
        .unwrap();
    column.close().unwrap();
    let labels: Vec<ByteArray> = labels.iter().map(|label| ByteArray::from(*label)).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column
        .typed::<ByteArrayType>()
        .write_batch(&labels, None, None)
        .unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
    content
}

#[test]
fn a_folder_may_have_a_file_of_held_out_samples() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name| folder.path().join(name);
    std::fs::write(place("train.parquet"), written(&[1.0, 3.0], &["a", "b"])).unwrap();
    std::fs::write(place("test.parquet"), written(&[5.0], &["b"])).unwrap();
    let mut dataset = load(&data("parquet", folder.path()), 1).unwrap();
    assert_eq!(all(&mut dataset.training), (vec![-1.0, 1.0], vec![0, 1]));
    assert_eq!(all(&mut dataset.evaluation), (vec![3.0], vec![1]));

    std::fs::write(place("test.parquet"), written(&[f64::NAN], &["b"])).unwrap();
    let error = load(&data("parquet", folder.path()), 1)
        .unwrap_err()
        .to_string();
    assert_says(&error, &["test.parquet, row 1", "\"x\"", "NaN"]);
    std::fs::write(place("test.parquet"), written(&[], &[])).unwrap();
    let error = load(&data("parquet", folder.path()), 1)
        .unwrap_err()
        .to_string();
    assert_says(&error, &["test.parquet", "no row"]);
    std::fs::remove_file(place("train.parquet")).unwrap();
    let error = load(&data("parquet", folder.path()), 1)
        .unwrap_err()
        .to_string();
    assert_says(&error, &["no train.parquet", "data.dir"]);
}

#[test]
fn damaged_files_are_refused() {
    for end in (0..FILE.len()).step_by(37) {
        let error = load_bytes(&FILE[..end], COLUMNS).unwrap_err();
        assert_says(&error, &["table.parquet"]);
    }
    // A change of a value may leave a file that can be read.
    let (mut tried, mut refused) = (0, 0);
    for place in (0..FILE.len()).step_by(5) {
        let mut content = FILE.to_vec();
        content[place] ^= 1 << (place % 8);
        tried += 1;
        refused += usize::from(load_bytes(&content, COLUMNS).is_err());
    }
    assert!(refused > tried / 4, "{refused} of {tried}");
}
