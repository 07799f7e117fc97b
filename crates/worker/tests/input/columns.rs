//! Columns of tables: types, transforms, what is fitted, and what is refused.

use model::Batch;
use model::input::{Fitted, FittedColumn, Rule, Target};
use shared_proto::job::{Job, TargetKind};

use super::*;

/// The settings of a CSV folder with these `[data.columns]`.
fn settings(folder: &Path, columns: &str) -> Data {
    let job = Job::from_toml(&format!("[data.columns]\n{columns}")).unwrap();
    Data {
        columns: job.data.columns,
        ..data("csv", folder)
    }
}

fn load_columns(train: &str, test: &str, columns: &str) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.csv"), train).unwrap();
    if !test.is_empty() {
        std::fs::write(folder.path().join("test.csv"), test).unwrap();
    }
    load(&settings(folder.path(), columns), 1).map_err(|error| error.to_string())
}

fn whole(samples: &mut Box<dyn Samples>) -> Batch {
    let all = 0..samples.count();
    Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap()
}

fn rows(batch: &Batch) -> Vec<Vec<f32>> {
    batch.input_of("inputs").unwrap().to_vec2().unwrap()
}

fn ids(batch: &Batch, name: &str) -> Vec<u32> {
    batch.input_of(name).unwrap().to_vec1().unwrap()
}

const TRAIN: &str = "price,city,kind,when,age,note,size,raw,label
1,Rome,b,1970-01-02,10,x,0,7,no
3,Paris,a,1970-01-04,20,y,0,8,yes
1,Rome,b,1970-01-02 00:00:00,30,,2,7,no
3,,b,1970-01-04T00:00:00Z,40,\"z, z\",2,8,yes
";

const COLUMNS: &str = r#"
city = { type = "category", buckets = 50 }
kind = { type = "category" }
when = { type = "date" }
age = { type = "number", transform = "bucket", buckets = 2 }
note = { type = "ignore" }
size = { type = "number", transform = "log" }
raw = { type = "number", transform = "none" }
"#;

#[test]
fn each_type_becomes_an_input() {
    let test = "price,city,kind,when,age,note,size,raw,label
5,Rome,c,1970-01-03,9,?,-2,-1,yes
1,Oslo,a,1970-01-05T12:00:00,35,?,0,0,no
";
    let mut dataset = load_columns(TRAIN, test, COLUMNS).unwrap();
    let fields = dataset.signature.inputs.iter();
    let fields: Vec<_> = fields
        .map(|f| (f.name.as_str(), &f.shape[..], f.categories))
        .collect();
    assert_eq!(
        fields,
        [
            ("inputs", &[4][..], None),
            ("city", &[], Some(50)),
            ("kind", &[], Some(3)),
            ("age", &[], Some(2)),
        ]
    );
    let training = whole(&mut dataset.training);
    // Price, when, size and raw: the columns in the order of the file.
    let expected = [
        [-1.0, -1.0, -1.0, 7.0],
        [1.0, 1.0, -1.0, 8.0],
        [-1.0, -1.0, 1.0, 7.0],
        [1.0, 1.0, 1.0, 8.0],
    ];
    assert_eq!(rows(&training), expected);
    assert_eq!(ids(&training, "kind"), [2, 1, 2, 2]);
    assert_eq!(ids(&training, "age"), [0, 0, 1, 1]);
    let cities = ids(&training, "city");
    assert_eq!(cities[0], cities[2]);
    assert!(cities[0] != cities[1] && cities[0] != cities[3]);
    assert!(cities.iter().all(|id| *id < 50));

    let held_out = whole(&mut dataset.evaluation);
    let [first, second] = &rows(&held_out)[..] else {
        panic!("two samples");
    };
    // ln(1 + 2) is one deviation above the mean, so its negative is three below.
    assert!((first[2] + 3.0).abs() < 1e-6, "{first:?}");
    assert_eq!((first[0], first[1], first[3]), (3.0, 0.0, -1.0));
    assert_eq!(
        (second[0], second[1], second[2], second[3]),
        (-1.0, 2.5, -1.0, 0.0)
    );
    assert_eq!(ids(&held_out, "kind"), [0, 1], "c is unknown");
    assert_eq!(ids(&held_out, "age"), [0, 1]);
    assert_eq!(ids(&held_out, "city")[0], cities[0]);
}

#[test]
fn ids_are_hashes_or_whole_numbers_and_a_cell_may_have_several() {
    let train = "user,item,genres,label
ann,7,Crime|Drama,0
bob,9223372036854775807,,1
ann,0,Drama,0
";
    let columns = r#"
user = { type = "id" }
item = { type = "id", hash = false }
genres = { type = "id", seed = 1, separator = "|" }
"#;
    let mut dataset = load_columns(train, train, columns).unwrap();
    let batch = whole(&mut dataset.training);
    let ids = |name: &str| batch.input_of(name).unwrap().to_vec1::<i64>().unwrap();
    assert_eq!(ids("item"), [7, i64::MAX, 0]);
    let users = ids("user");
    assert_eq!(users[0], users[2]);
    assert!(users[0] != users[1] && users.iter().all(|id| *id >= 0));
    let genres = batch.ragged("genres").unwrap();
    assert_eq!(genres.offsets, [0, 2, 2, 3]);
    let genres = genres.values.to_vec1::<i64>().unwrap();
    assert_eq!(genres[1], genres[2]);
    // Another seed, another hash.
    let seeded = columns.replace("\"id\" }", "\"id\", seed = 1 }");
    let mut seeded = load_columns(train, train, &seeded).unwrap();
    let seeded = whole(&mut seeded.training);
    let seeded = seeded.input_of("user").unwrap().to_vec1::<i64>().unwrap();
    assert_ne!(seeded[0], users[0]);
    for cell in ["-1", "x", "", "1.5", "9223372036854775808"] {
        let error = load_columns(&train.replace(",7,", &format!(",{cell},")), train, columns);
        let error = error.unwrap_err().to_string();
        let named = error.contains("line 2") && error.contains("\"item\"");
        assert!(named && error.contains("whole number"), "{error}");
    }
}

#[test]
fn columns_are_fitted_to_the_training_samples_alone() {
    let rows: String = (0..20)
        .map(|i| format!("{i},c{i},{i},{}\n", i * i))
        .collect();
    let train = format!("x,kind,age,label\n{rows}");
    let columns = "kind = { type = 'category' }\nage = { type = 'number', transform = 'bucket', buckets = 4 }";
    let mut dataset = load_columns(&train, "", columns).unwrap();
    let training = whole(&mut dataset.training);
    let labels = training.target().unwrap().to_vec1::<u32>().unwrap();
    let numbers: Vec<f64> = labels
        .iter()
        .map(|label| f64::from(*label).sqrt())
        .collect();
    assert_eq!(numbers.len(), 16);

    let fitted = dataset.transforms.as_ref().unwrap();
    let [x, kind, age] = &fitted.columns[..] else {
        panic!("{fitted:?}");
    };
    let Rule::Standardise { mean, .. } = x.rule else {
        panic!("{x:?}");
    };
    assert!((mean - numbers.iter().sum::<f64>() / 16.0).abs() < 1e-9);
    let Rule::Vocabulary { texts, .. } = &kind.rule else {
        panic!("{kind:?}");
    };
    let mut expected: Vec<String> = numbers.iter().map(|n| format!("c{n}")).collect();
    expected.sort();
    assert_eq!(texts, &expected);
    let mut sorted = numbers.clone();
    sorted.sort_by(f64::total_cmp);
    let edges = [4, 8, 12].map(|place| sorted[place]).to_vec();
    assert_eq!(age.rule, Rule::Bucket { edges });
    let mut each = ids(&training, "age");
    each.sort_unstable();
    assert_eq!(each, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);

    let held_out = whole(&mut dataset.evaluation);
    assert_eq!(ids(&held_out, "kind"), [0; 4]);
    assert!(ids(&training, "kind").iter().all(|id| *id > 0));
}

#[test]
fn what_is_fitted_comes_back_from_its_file() {
    let train = "x,kind,when,label\n0.1,b,2024-02-29,u\n1e-7,a,1969-07-20T20:17:40,v\n3e38,c,2024-01-01,u\n7,a,2000-01-01,v\n";
    let columns = "kind = { type = 'category' }\nwhen = { type = 'date', transform = 'log' }";
    let fitted = load_columns(train, train, columns).unwrap().transforms;
    let mut fitted = fitted.unwrap();
    let classes = [("u".to_owned(), 0), ("v".to_owned(), 1)];
    let target = Target::Class {
        numbers: classes.into_iter().collect(),
        count: 2,
    };
    assert_eq!(fitted.target, target);
    assert_eq!(
        fitted.columns.iter().map(|c| c.date).collect::<Vec<_>>(),
        [false, false, true]
    );
    // Numbers of any length come back, each bit of them.
    fitted.columns.extend((1..1000u32).map(|i| {
        let deviation = f64::from(i).sqrt().exp() * 1e-9;
        FittedColumn {
            name: format!("c{i}"),
            date: false,
            rule: Rule::Standardise {
                mean: -deviation.sin(),
                deviation,
            },
            gap: None,
        }
    }));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("transforms.json");
    fitted.save(&file).unwrap();
    let again = Fitted::load(&file).unwrap();
    let pairs = again.columns.iter().zip(&fitted.columns);
    for (again, fitted) in pairs {
        assert_eq!(again, fitted);
    }
    assert!(again == fitted);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    // A worker may be the first to write to its run directory.
    let new = folder.path().join("missing").join("transforms.json");
    assert_says(
        &Fitted::load(&new).unwrap_err().to_string(),
        &["transforms.json", "cannot be read"],
    );
    fitted.save(&new).unwrap();
    assert!(Fitted::load(&new).unwrap() == fitted);
    let below_a_file = file.join("transforms.json");
    assert_says(
        &fitted.save(&below_a_file).unwrap_err().to_string(),
        &["transforms.json", "cannot be written"],
    );
}

#[test]
fn files_of_fitted_columns_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("transforms.json");
    let load = |form: u32, columns: &str| {
        let text =
            format!(r#"{{"form": {form}, "columns": [{columns}], "target": {{"number": {{}}}}}}"#);
        std::fs::write(&file, text).unwrap();
        Fitted::load(&file).map_err(|error| error.to_string())
    };
    let column = |rule: &str| format!(r#"{{"name": "x", "date": false, "rule": {rule}}}"#);
    let good = column(r#"{"standardise": {"mean": 1.5, "deviation": 2}}"#);
    assert!(load(1, &good).is_ok());
    assert_says(&load(2, &good).unwrap_err(), &["transforms.json", "form 2"]);
    let twice = format!("{good}, {good}");
    assert_says(
        &load(1, &twice).unwrap_err(),
        &["transforms.json", "\"x\"", "twice"],
    );
    for rule in [
        r#"{"standardise": {"mean": 1.5, "deviation": 0}}"#,
        r#"{"log": {"mean": 1.5, "deviation": -1}}"#,
        r#"{"bucket": {"edges": [1, 1]}}"#,
        r#"{"hash": {"buckets": 0}}"#,
        r#"{"hash": {"buckets": 4294967296}}"#,
        r#"{"vocabulary": {"texts": ["b", "a"]}}"#,
    ] {
        let error = load(1, &column(rule)).unwrap_err();
        assert_says(
            &error,
            &["transforms.json", "\"x\"", "not those of its rule"],
        );
    }
    for rule in [r#"{"plain": {}}"#, r#"{"number": {"by": 3}}"#, "3"] {
        let error = load(1, &column(rule)).unwrap_err();
        assert_says(&error, &["transforms.json", "no file of fitted columns"]);
    }
    for target in [
        r#"{"class": {"numbers": {"a": 3}, "count": 3}}"#,
        r#"{"class": {"numbers": {}, "count": 1000000000000000}}"#,
        r#"{"binary": {"values": {"a": 0.5}}}"#,
    ] {
        let text = format!(r#"{{"form": 1, "columns": [{good}], "target": {target}}}"#);
        std::fs::write(&file, text).unwrap();
        let error = Fitted::load(&file).unwrap_err().to_string();
        assert_says(&error, &["transforms.json", "its target"]);
    }
}

#[test]
fn columns_that_cannot_be_read_are_refused_with_the_line_to_add() {
    for (train, columns, parts) in [
        (
            "city,label\nParis,0\nRome,1\n",
            "",
            &[
                "line 2",
                "\"city\"",
                "\"Paris\"",
                "city = { type = \"category\" }",
            ][..],
        ),
        (
            "when,label\n2024-01-01,0\nx,1\n",
            "",
            &["line 2", "\"when\"", "when = { type = \"date\" }"],
        ),
        (
            "the city,label\n1,0\nRome,1\n",
            "",
            &["line 3", "\"the city\" = { type = \"category\" }"],
        ),
        (
            "x,y,label\n1,2,0\n,2,1\n",
            "",
            &[
                "line 3",
                "\"x\"",
                "no value",
                "x = { type = \"number\", missing = \"mean\" }",
            ],
        ),
        (
            "when,label\n2024-01-01,0\n2024-02-30,1\n",
            "when = { type = 'date' }",
            &[
                "line 3",
                "\"when\"",
                "\"2024-02-30\"",
                "a date as in 2024-03-01",
            ],
        ),
        (
            "x,label\n1,0\ny,1\n",
            "x = { type = 'number' }",
            &["line 3", "\"x\"", "\"y\"", "a finite number was expected"],
        ),
        (
            "x,label\n1,0\n2,1\n",
            "town = { type = 'category' }",
            &["line 1", "\"town\"", "no column", "[\"x\", \"label\"]"],
        ),
        (
            "x,label\n1,0\n2,1\n",
            "label = { type = 'category' }",
            &["line 1", "\"label\"", "data.target"],
        ),
        (
            "x,label\n1,0\n2,1\n",
            "x = { type = 'ignore' }",
            &["line 1", "\"label\" is the only column"],
        ),
        (
            "x,inputs,label\n1,0,0\n2,1,0\n",
            "inputs = { type = 'category' }",
            &["line 1", "\"inputs\"", "rename"],
        ),
    ] {
        assert_says(&load_columns(train, "", columns).unwrap_err(), parts);
    }
    let far = load_columns("x,label\n1,0\n1.0000001,1\n", "x,label\n1e38,0\n", "");
    assert_says(&far.unwrap_err(), &["\"x\"", "test.csv, line 2", "too far"]);
    let fewer = load_columns(TRAIN, "price,label\n1,yes\n", "");
    assert!(fewer.is_err());
    let fewer = load_columns("x,y,label\n1,2,0\n", "x,label\n1,0\n", "");
    assert_says(
        &fewer.unwrap_err(),
        &["test.csv, line 1", "no column \"y\"", "the file has x"],
    );

    let other = Data {
        kind: "digits".to_owned(),
        ..settings(Path::new("."), "x = { type = 'number' }")
    };
    let error = load(&other, 1).unwrap_err().to_string();
    assert_says(
        &error,
        &["`data.columns`", "\"x\"", "\"digits\"", "\"parquet\""],
    );
}

#[test]
fn a_label_is_what_the_job_says() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..1200).map(|i| format!("{i},{}\n", i * 3)).collect();
    std::fs::write(folder.path().join("train.csv"), format!("x,price\n{rows}")).unwrap();
    let load = |target| {
        let data = Data {
            label: "price".to_owned(),
            target,
            ..data("csv", folder.path())
        };
        load(&data, 1).map_err(|error| error.to_string())
    };
    let mut numbers = load(TargetKind::Number).unwrap();
    assert_eq!(numbers.signature.target().unwrap().categories, None);
    let training = whole(&mut numbers.training);
    let prices = training.target().unwrap().to_vec1::<f32>().unwrap();
    assert!(
        prices.contains(&3000.0) || prices.contains(&3003.0),
        "{prices:?}"
    );
    assert_says(
        &load(TargetKind::Auto).unwrap_err(),
        &["1200 different", "\"number\""],
    );
    assert_says(
        &load(TargetKind::Binary).unwrap_err(),
        &["third label", "\"class\""],
    );
}

#[test]
fn later_data_is_read_as_the_training_data_was() {
    let fitted = load_columns(TRAIN, "", COLUMNS)
        .unwrap()
        .transforms
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let open = |text: &str, columns: &str, purpose| {
        let file = folder.path().join("later.csv");
        std::fs::write(&file, text).unwrap();
        let opened = Registry::builtin().open(&settings(&file, columns), 1, purpose);
        opened.map_err(|error| error.to_string())
    };
    // The same samples, without their labels and the ignored column.
    let bare: String = TRAIN
        .replace(",\"z, z\",", ",z,")
        .lines()
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            let kept = [&cells[..5], &cells[6..8]].concat();
            kept.join(",") + "\n"
        })
        .collect();
    let without_note = COLUMNS.replace("note = { type = \"ignore\" }\n", "");
    let mut labelled = open(TRAIN, COLUMNS, Purpose::Evaluation(&fitted)).unwrap();
    let mut later = open(&bare, &without_note, Purpose::Prediction(&fitted)).unwrap();
    assert_eq!(later.evaluation.count(), 4);
    let all = whole(&mut later.evaluation);
    // Neither has been fitted again, though these hold other samples than the training part.
    assert_eq!(labelled.transforms.as_ref(), Some(&fitted));
    let held_out = whole(&mut labelled.evaluation);
    let of = rows(&all);
    assert!(rows(&held_out).iter().all(|row| of.contains(row)));
    assert_eq!(later.signature, labelled.signature);

    let refused = |text: &str, columns: &str, parts: &[&str]| {
        let error = open(text, columns, Purpose::Prediction(&fitted)).unwrap_err();
        assert_says(&error, parts);
    };
    // Columns are found by their names, in any order, and others do not count.
    let swapped: String = bare
        .lines()
        .map(|line| {
            let mut cells: Vec<&str> = line.split(',').collect();
            cells.reverse();
            format!("{},more\n", cells.join(","))
        })
        .collect();
    let mut swapped = open(&swapped, &without_note, Purpose::Prediction(&fitted)).unwrap();
    assert_eq!(rows(&whole(&mut swapped.evaluation)), of);
    let few = "price\n1\n";
    refused(
        few,
        "",
        &[
            "no column \"city\"",
            "the training had",
            "the file has price",
        ],
    );
    let other = without_note.replace("kind = { type = \"category\" }\n", "");
    refused(
        &bare.replace(",b,", ",1,").replace(",a,", ",2,"),
        &other,
        &["\"kind\"", "another type"],
    );
    let error = Registry::builtin().open(
        &settings(folder.path(), COLUMNS),
        1,
        Purpose::Prediction(&fitted),
    );
    assert_says(&error.unwrap_err().to_string(), &["is no file", "CSV"]);
}
