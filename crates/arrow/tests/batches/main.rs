//! Record batches give the samples that a CSV file of the same rows gives.

#![allow(clippy::unwrap_used, reason = "tests")]

mod random;

use std::sync::Arc;

use arrow_array::builder::{Int64Builder, ListBuilder, StringDictionaryBuilder};
use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Decimal256Array,
    DictionaryArray, FixedSizeListArray, Float16Array, Float32Array, Float64Array, Int8Array,
    Int64Array, LargeStringArray, NullArray, RecordBatch, StringArray, StringViewArray,
    Time32SecondArray, TimestampMicrosecondArray, UInt64Array,
};
use arrow_schema::{DataType, Field, Schema};
use data::{
    Csv, DataSetup, Dataset, InMemory, InputError, Order, Purpose, Source, TableRows, open_batches,
};
use half::f16;
use shared_proto::job::Job;

/// Rows of all types, with gaps. The last column is the label.
fn batch() -> RecordBatch {
    let mut towns = StringDictionaryBuilder::<Int32Type>::new();
    for town in [Some("Bern"), None, Some("Zürich"), Some("Bern")] {
        towns.append_option(town);
    }
    let mut clicks = ListBuilder::new(Int64Builder::new());
    clicks.append_value([Some(7), Some(9_007_199_254_740_993)]);
    clicks.append_value([]);
    clicks.append_null();
    clicks.append_value([Some(7), None]);
    let pairs = FixedSizeListArray::from_iter_primitive::<arrow_array::types::Int32Type, _, _>(
        (0..4).map(|row| Some([Some(row), Some(row + 1)])),
        2,
    );
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("small", Arc::new(Int8Array::from(vec![1, -2, 3, 4]))),
        (
            "half",
            Arc::new(Float16Array::from_iter_values(
                [0.5, 1.5, 2.0, -4.0].map(f16::from_f32),
            )),
        ),
        (
            "single",
            Arc::new(Float32Array::from(vec![
                Some(0.25),
                None,
                Some(2.5),
                Some(1.0),
            ])),
        ),
        (
            "double",
            Arc::new(Float64Array::from(vec![1e-3, 2.0, 3.0, f64::NAN])),
        ),
        (
            "amount",
            Arc::new(
                Decimal128Array::from(vec![150, 250, 350, -50])
                    .with_precision_and_scale(9, 2)
                    .unwrap(),
            ),
        ),
        (
            "wide",
            Arc::new(
                Decimal256Array::from_iter_values([1, 2, 3, 4].map(arrow_i256))
                    .with_precision_and_scale(50, 1)
                    .unwrap(),
            ),
        ),
        (
            "key",
            Arc::new(UInt64Array::from(vec![u64::MAX, u64::MAX - 1, 0, u64::MAX])),
        ),
        (
            "name",
            Arc::new(StringArray::from(vec![
                Some("a"),
                Some("b"),
                None,
                Some("a"),
            ])),
        ),
        (
            "long",
            Arc::new(LargeStringArray::from(vec!["x", "y", "x", "1"])),
        ),
        (
            "view",
            Arc::new(StringViewArray::from(vec!["p", "q", "p", "q"])),
        ),
        ("town", Arc::new(towns.finish())),
        (
            "truth",
            Arc::new(BooleanArray::from(vec![true, false, true, true])),
        ),
        ("day", Arc::new(Date32Array::from(vec![0, 19_000, 1, 2]))),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from(vec![
                0,
                1,
                86_400_000_000,
                5,
            ])),
        ),
        ("clicks", Arc::new(clicks.finish())),
        ("pairs", Arc::new(pairs)),
        ("nothing", Arc::new(NullArray::new(4))),
        ("clock", Arc::new(Time32SecondArray::from(vec![1, 2, 3, 4]))),
        ("y", Arc::new(Int64Array::from(vec![0, 1, 1, 0]))),
    ];
    let fields: Vec<Field> = columns
        .iter()
        .map(|(name, array)| Field::new(*name, array.data_type().clone(), true))
        .collect();
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
}

fn arrow_i256(
    value: i128,
) -> <arrow_array::types::Decimal256Type as arrow_array::ArrowPrimitiveType>::Native {
    <arrow_array::types::Decimal256Type as arrow_array::ArrowPrimitiveType>::Native::from_i128(
        value,
    )
}

const CSV: &str = "small;half;single;double;amount;wide;key;name;long;view;town;truth;day;time;clicks;pairs;nothing;clock;y
1;0.5;0.25;0.001;1.50;0.1;18446744073709551615;a;x;p;Bern;True;1970-01-01;1970-01-01T00:00:00;7 9007199254740993;0 1;;1;0
-2;1.5;;2;2.50;0.2;18446744073709551614;b;y;q;;False;2022-01-08;1970-01-01T00:00:00.000001;;1 2;;2;1
3;2;2.5;3;3.50;0.3;0;;x;p;Zürich;True;1970-01-02;1970-01-02T00:00:00;;2 3;;3;1
4;-4;1;;-0.50;0.4;18446744073709551615;a;1;q;Bern;True;1970-01-03;1970-01-01T00:00:00.000005;7;3 4;;4;0
";

/// A job for the rows. Lists of a file of texts have a separator.
fn job(separator: &str, more: &str) -> Job {
    let columns = [
        "key = { type = \"category\" }",
        "name = { type = \"category\" }",
        "long = { type = \"category\" }",
        "view = { type = \"category\", buckets = 5 }",
        "town = { type = \"category\" }",
        "truth = { type = \"category\" }",
        "day = { type = \"date\" }",
        "time = { type = \"date\", transform = \"none\" }",
        "clock = { type = \"ignore\" }",
    ]
    .join("\n");
    let lists = format!(
        "clicks = {{ type = \"id\"{separator} }}\npairs = {{ type = \"id\", hash = false{separator} }}"
    );
    let text = format!(
        "[data]\nlabel = \"y\"\nmissing = \"indicator\"\nheld_out = 0.25\n{more}\n[data.columns]\n{columns}\n{lists}\n"
    );
    Job::from_toml(&text).unwrap()
}

fn setup<'a>(job: &'a Job, purpose: Purpose<'a>) -> DataSetup<'a> {
    DataSetup {
        settings: &job.data,
        seed: 1,
        purpose,
    }
}

/// Returns all samples, the training's first, as text.
fn all(mut dataset: Dataset) -> String {
    let mut all = String::new();
    for part in [&mut dataset.training, &mut dataset.evaluation] {
        let samples: InMemory = part.read(Order::Stored, 0..part.count()).unwrap();
        all += &format!("{samples:?}\n");
    }
    all
}

fn of_csv(dir: &std::path::Path, stream: bool) -> Dataset {
    let file = dir.join("rows.csv");
    std::fs::write(&file, CSV).unwrap();
    let mut job = job(", separator = \" \"", &format!("stream = {stream}"));
    job.data.dir = Some(file);
    Csv::open(&setup(&job, Purpose::Training)).unwrap()
}

#[test]
fn record_batches_give_the_samples_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let job = job("", "");
    let whole = batch();
    let parts = [whole.slice(0, 1), whole.slice(1, 0), whole.slice(1, 3)];
    for batches in [vec![whole], parts.to_vec()] {
        let opened = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "rows", batches);
        assert_eq!(all(opened.unwrap()), all(of_csv(dir.path(), false)));
    }
}

#[test]
fn streamed_batches_give_the_samples_of_those_in_memory() {
    let rows = batch();
    let batches = || vec![rows.slice(0, 2), rows.slice(2, 2)];
    let opened = |stream: bool| {
        let job = job("", &format!("stream = {stream}"));
        let dataset = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "rows", batches());
        let dataset = dataset.unwrap();
        (dataset.training.count(), dataset.evaluation.count())
    };
    // Whole batches are held out of streamed data.
    assert_eq!((opened(false), opened(true)), ((3, 1), (2, 2)));
}

#[test]
fn rows_of_a_program_are_read_as_in_training() {
    let job = job("", "");
    let trained = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "rows", [batch()]);
    let fitted = trained.unwrap().transforms.unwrap();
    let of_batch = fitted
        .samples(&job.data, flambeau_arrow::Rows::from(batch()))
        .unwrap();
    let gap = None::<f32>;
    let rows = TableRows::new()
        .column("small", [1, -2, 3, 4])
        .column("half", [0.5, 1.5, 2.0, -4.0])
        .column("single", [Some(0.25f32), gap, Some(2.5), Some(1.0)])
        .column("double", [Some(1e-3), Some(2.0), Some(3.0), None])
        .column("amount", ["1.50", "2.5", "3.5", "-0.5"])
        .column("wide", [0.1, 0.2, 0.3, 0.4])
        .column("key", [u64::MAX, u64::MAX - 1, 0, u64::MAX])
        .column("name", [Some("a"), Some("b"), None, Some("a")])
        .column("long", ["x", "y", "x", "1"])
        .column("view", ["p", "q", "p", "q"])
        .column("town", [Some("Bern"), None, Some("Zürich"), Some("Bern")])
        .column("truth", [true, false, true, true])
        .column(
            "day",
            ["1970-01-01", "2022-01-08", "1970-01-02", "1970-01-03"],
        )
        .column(
            "time",
            [
                "1970-01-01",
                "1970-01-01T00:00:00.000001",
                "1970-01-02",
                "1970-01-01T00:00:00.000005",
            ],
        )
        .lists(
            "clicks",
            [vec![7u64, 9_007_199_254_740_993], vec![], vec![], vec![7]],
        )
        .lists("pairs", (0..4).map(|row| vec![row, row + 1]))
        .column("nothing", [gap; 4]);
    let of_rows = fitted.samples(&job.data, rows).unwrap();
    assert_eq!(format!("{of_rows:?}"), format!("{of_batch:?}"));
}

#[test]
fn rows_without_a_label_are_an_error_or_left_out() {
    let labels = [Some(1.0), None, Some(2.5), Some(4.5)];
    let rows = || {
        TableRows::new()
            .column("x", [1, 2, 3, 4])
            .column("y", labels)
    };
    let opened = |more: &str| {
        let job = Job::from_toml(&format!("[data]\nlabel = \"y\"\n{more}")).unwrap();
        open_batches(
            &setup(&job, Purpose::Training),
            "a query",
            vec![rows(), rows()],
        )
        .map(|dataset| dataset.training.count() + dataset.evaluation.count())
        .map_err(|error| error.to_string())
    };
    assert_eq!(opened("missing_label = \"skip\""), Ok(6));
    let error = opened("").unwrap_err();
    assert!(
        error.contains("a query, row 2") && error.contains("missing_label"),
        "{error}"
    );
}

#[test]
fn rows_that_do_not_fit_are_named() {
    let job = Job::from_toml("[data]\nlabel = \"y\"").unwrap();
    let open = |rows: Vec<TableRows>| -> String {
        let opened = open_batches(&setup(&job, Purpose::Training), "a query", rows);
        opened.map(|_| ()).unwrap_err().to_string()
    };
    let labels = |rows: TableRows| rows.column("y", [0, 1, 0]);
    let cases: [(Vec<TableRows>, &[&str]); 7] = [
        (vec![], &["a query", "no row"]),
        (
            vec![labels(TableRows::new().column("x", ["1", "two", "3"]))],
            &["row 2", "\"two\""],
        ),
        // Of several columns without a type, all are named.
        (
            vec![labels(
                TableRows::new()
                    .column("x", ["a", "b", "c"])
                    .column("z", ["u", "v", "w"]),
            )],
            &["x = {", "z = {", "category"],
        ),
        (
            vec![labels(TableRows::new().column("x", [1, 2]))],
            &["\"y\" has 3 cells for 2 rows"],
        ),
        (
            vec![labels(TableRows::new().lists("x", vec![vec![1]; 3]))],
            &["\"x\" has lists", "type = \"id\""],
        ),
        (
            vec![TableRows::new().column("x", [1, 2, 3])],
            &["no column is called \"y\""],
        ),
        (
            vec![
                labels(TableRows::new().column("x", [1, 2, 3])),
                labels(TableRows::new().column("z", [1, 2, 3])),
            ],
            &["the columns z, y", "x, y were expected"],
        ),
    ];
    for (rows, parts) in cases {
        let error = open(rows);
        assert!(
            parts.iter().all(|part| error.contains(part)),
            "{parts:?}: {error}"
        );
    }
    let structures = RecordBatch::try_new(
        Arc::new(Schema::new(vec![
            Field::new("x", DataType::Time32(arrow_schema::TimeUnit::Second), true),
            Field::new("y", DataType::Int64, true),
        ])),
        vec![
            Arc::new(Time32SecondArray::from(vec![1])),
            Arc::new(Int64Array::from(vec![1])),
        ],
    );
    let opened = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "a query", structures);
    let error: InputError = opened.unwrap_err();
    assert!(
        error.to_string().contains("Time32") && error.to_string().contains("\"ignore\""),
        "{error}"
    );
}

#[test]
fn dictionaries_may_be_empty_and_bytes_may_be_texts() {
    let mut gaps = StringDictionaryBuilder::<Int32Type>::new();
    gaps.append_nulls(3);
    let open = |town: ArrayRef, kind: &str| {
        let labels: ArrayRef = Arc::new(Int64Array::from(vec![0, 1, 0]));
        let batch = RecordBatch::try_from_iter([("town", town), ("y", labels)]).unwrap();
        let empty = batch.slice(0, 0);
        let job = Job::from_toml(&format!(
            "[data]\nlabel = \"y\"\nmissing_label = \"skip\"\ncolumns.town = {{ type = \"{kind}\" }}"
        ));
        let job = job.unwrap();
        flambeau_arrow::dataset(&setup(&job, Purpose::Training), "towns", [empty, batch])
            .map(|dataset| dataset.signature.inputs[0].categories)
            .map_err(|error| error.to_string())
    };
    assert_eq!(open(Arc::new(gaps.finish()), "category"), Ok(Some(2)));
    let texts = BinaryArray::from(vec!["Bern".as_bytes(), b"Basel", b"Bern"]);
    assert!(open(Arc::new(texts), "category").is_ok());
    let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![&b"Bern"[..], b"\xff", b"Bern"]));
    let keys = arrow_array::Int32Array::from(vec![0, 1, 2]);
    let words = DictionaryArray::new(keys, bytes.clone());
    for array in [bytes, Arc::new(words)] {
        let error = open(array, "category").unwrap_err();
        assert!(
            error.contains("\"town\"") && error.contains("UTF-8"),
            "{error}"
        );
    }
}

#[test]
fn the_index_of_a_pandas_frame_is_left_out() {
    let pandas = r#"{"index_columns": ["__index_level_0__"]}"#;
    let schema = Schema::new(vec![
        Field::new("x", DataType::Int64, true),
        Field::new("__index_level_0__", DataType::Utf8, true),
        Field::new("y", DataType::Float64, true),
    ])
    .with_metadata(std::collections::HashMap::from([(
        "pandas".to_owned(),
        pandas.to_owned(),
    )]));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(vec![1, 2])),
        Arc::new(StringArray::from(vec!["a", "b"])),
        Arc::new(Float64Array::from(vec![0.5, 1.5])),
    ];
    let batch = RecordBatch::try_new(Arc::new(schema), columns).unwrap();
    let job = Job::from_toml("[data]\nlabel = \"y\"\nheld_out = 0.5").unwrap();
    let opened = flambeau_arrow::dataset(&setup(&job, Purpose::Training), "frame", [batch]);
    assert_eq!(opened.unwrap().signature.inputs[0].shape, [1]);
}
