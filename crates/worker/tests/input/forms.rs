//! One table in the forms in which people have it: exact values, gaps, lists, delimiters, compression, parts without rows.

use model::Batch;
use model::input::{Gap, Rule};
use shared_proto::job::Job;

use super::*;

/// Eight rows by pyarrow, which `tests/vectors/make_parquet.py` writes, compressed by Zstandard.
const FORMS: &[u8] = include_bytes!("../vectors/forms.parquet");

/// The same rows but for the lists.
const AS_CSV: &str = "big,exact,shop,label
9223372036854775808,1234567890123456780,1.0,0
9223372036854775908,1234567890123456781,2.0,1
9223372036854776008,1234567890123456782,,0
9223372036854776108,1234567890123456783,4.0,1
9223372036854776208,1234567890123456784,1.0,0
9223372036854776308,1234567890123456785,2.0,1
9223372036854776408,1234567890123456786,3.0,0
9223372036854776508,1234567890123456787,4.0,NA
";

fn load_forms(kind: &str, name: &str, content: &[u8], settings: &str) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(name);
    std::fs::write(&file, content).unwrap();
    load_place(kind, &file, settings)
}

fn load_place(kind: &str, place: &Path, settings: &str) -> Result<Dataset, String> {
    let job = Job::from_toml(&format!("[data]\n{settings}")).unwrap();
    let data = Data {
        kind: kind.to_owned(),
        dir: Some(place.to_owned()),
        ..job.data
    };
    load(&data, 1).map_err(|error| error.to_string())
}

/// Returns the texts of a category's vocabulary.
fn vocabulary(dataset: &Dataset, column: &str) -> Vec<String> {
    let columns = &dataset.transforms.as_ref().unwrap().columns;
    let column = columns.iter().find(|own| own.name == column).unwrap();
    match &column.rule {
        Rule::Vocabulary { texts, .. } => texts.clone(),
        other => panic!("{other:?}"),
    }
}

fn numbers(dataset: &mut Dataset) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let all = 0..samples.count();
        let batch =
            Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap();
        rows.extend(batch.input_of("inputs").unwrap().to_vec2::<f32>().unwrap());
    }
    rows
}

const CATEGORIES: &str = "held_out = 0.2
target = \"binary\"
missing_label = \"skip\"
columns.big = { type = \"category\" }
columns.exact = { type = \"category\" }
columns.shop = { type = \"category\" }
";

#[test]
fn numbers_of_any_size_and_form_are_the_same_categories() {
    let lists = format!("{CATEGORIES}columns.lists = {{ type = \"id\", hash = false }}\n");
    let parquet = load_forms("parquet", "a.parquet", FORMS, &lists).unwrap();
    let csv = load_forms("csv", "a.csv", AS_CSV.as_bytes(), CATEGORIES).unwrap();
    for dataset in [&parquet, &csv] {
        // The sample without a label is left out; a part of the others is held out.
        assert_eq!(dataset.training.count() + dataset.evaluation.count(), 7);
        for column in ["big", "exact"] {
            let texts = vocabulary(dataset, column);
            assert_eq!(texts.len() as u64, dataset.training.count());
            let is_there = |text: &String| AS_CSV.contains(text.as_str());
            assert!(texts.iter().all(is_there), "{column}: {texts:?}");
        }
        assert!(
            !vocabulary(dataset, "shop")
                .iter()
                .any(|text| text.contains('.'))
        );
    }
    assert_eq!(
        parquet.transforms.as_ref().unwrap().target,
        csv.transforms.as_ref().unwrap().target
    );
    // pandas' index is not an input, and the lists are ids.
    let inputs: Vec<&str> = parquet
        .signature
        .inputs
        .iter()
        .map(|field| field.name.as_str())
        .collect();
    assert_eq!(inputs, ["big", "exact", "shop", "lists"]);
    assert!(parquet.signature.inputs[3].ragged);
}

#[test]
fn a_file_with_another_form_of_numbers_has_the_same_categories() {
    let folder = tempfile::tempdir().unwrap();
    let rows = |numbers: [&str; 4]| -> String {
        let row = |(i, number): (usize, &str)| format!("{number},{}\n", i % 2);
        let rows: String = numbers.into_iter().enumerate().map(row).collect();
        format!("shop,label\n{}", rows.repeat(3))
    };
    std::fs::write(
        folder.path().join("train.csv"),
        rows(["5.0", "7.0", "", "8.0"]),
    )
    .unwrap();
    std::fs::write(folder.path().join("test.csv"), rows(["5", "+7", "", "8e0"])).unwrap();
    let settings = "columns.shop = { type = \"category\" }";
    let mut dataset = load_place("csv", folder.path(), settings).unwrap();
    let ids = |samples: &mut Box<dyn Samples>| {
        let batch =
            Batch::of_samples(samples.read(Order::Stored, 0..4).unwrap(), &Device::Cpu).unwrap();
        batch.input_of("shop").unwrap().to_vec1::<u32>().unwrap()
    };
    assert_eq!(ids(&mut dataset.training), [2, 3, 1, 4]);
    assert_eq!(ids(&mut dataset.evaluation), [2, 3, 1, 4]);
    // Codes that begin with zeros are texts.
    let codes = "zip,label\n".to_owned() + &"01234,0\n1234,1\n".repeat(10);
    let settings = "columns.zip = { type = \"category\" }";
    let dataset = load_forms("csv", "a.csv", codes.as_bytes(), settings).unwrap();
    assert_eq!(vocabulary(&dataset, "zip"), ["01234", "1234"]);
}

#[test]
fn labels_that_are_equal_as_numbers_are_one() {
    for (kind, name, text) in [
        (
            "csv",
            "a.csv",
            "x,label\n1,1\n2,1.0\n3,0\n4,0.0\n5,+1\n6,0\n",
        ),
        (
            "libsvm",
            "a.svm",
            "1 1:1\n1.0 1:2\n0 1:3\n-0.0 1:4\n+1 1:5\n0 1:6\n",
        ),
    ] {
        let dataset = load_forms(kind, name, text.as_bytes(), "target = \"class\"").unwrap();
        assert_eq!(
            dataset.signature.target().unwrap().categories,
            Some(2),
            "{kind}"
        );
    }
    // Among numbers, a label that is none is a mistake, however it is written.
    for missing in ["NA", "?", "NULL", "", "unknown"] {
        let rows: String = (0..40).map(|i| format!("{i},{}\n", 1000 * i)).collect();
        let text = format!("x,label\n{rows}7,{missing}\n");
        let error = load_forms("csv", "a.csv", text.as_bytes(), "").unwrap_err();
        assert_says(&error, &["line 42", missing]);
    }
    for (text, part) in [
        ("NA 1:1\n0 1:2\n", "missing_label"),
        ("0 1:2\n1:3\n", "where the label belongs"),
        ("1,2 1:2\n0 1:3\n", "set of labels"),
    ] {
        assert_says(
            &load_forms("libsvm", "a.svm", text.as_bytes(), "").unwrap_err(),
            &[part],
        );
    }
    let skipped = "NA 1:1\n0 1:2\n1 1:3\n? 1:4\n1 1:5\n";
    let dataset = load_forms(
        "libsvm",
        "a.svm",
        skipped.as_bytes(),
        "missing_label = \"skip\"",
    );
    let dataset = dataset.unwrap();
    assert_eq!(dataset.training.count() + dataset.evaluation.count(), 3);
}

#[test]
fn gaps_are_filled_as_the_job_says() {
    let folder = tempfile::tempdir().unwrap();
    let text = "a,b,label\n1,10,0\nNA,20,1\n3,,0\n8,30,1\n";
    std::fs::write(folder.path().join("train.csv"), text).unwrap();
    std::fs::write(folder.path().join("test.csv"), "a,b,label\n?,null,0\n").unwrap();
    let none = "columns.a = { type = \"number\", transform = \"none\"MISSING }
columns.b = { type = \"number\", transform = \"none\" }\n";
    let load = |missing: &str, all: &str| {
        let settings = format!("{all}{}", none.replace("MISSING", missing));
        load_place("csv", folder.path(), &settings)
    };
    for (missing, value) in [
        ("\"mean\"", 4.0),
        ("\"median\"", 3.0),
        ("\"zero\"", 0.0),
        ("-2.5", -2.5),
    ] {
        let mut dataset = load(&format!(", missing = {missing}"), "missing = \"mean\"\n").unwrap();
        let rows = numbers(&mut dataset);
        assert_eq!((rows[1][0], rows[2][1]), (value, 20.0), "{missing}");
        assert_eq!(rows[4], [value, 20.0], "the test file has no part in it");
    }
    let mut dataset = load(", missing = \"indicator\"", "missing = 7\n").unwrap();
    let rows = numbers(&mut dataset);
    assert_eq!(rows[0], [1.0, 0.0, 10.0]);
    assert_eq!(rows[1], [4.0, 1.0, 20.0]);
    assert_eq!(rows[2], [3.0, 0.0, 7.0]);
    let fitted = dataset.transforms.unwrap();
    let gap = Gap {
        value: 4.0,
        indicator: true,
    };
    assert_eq!(fitted.columns[0].gap, Some(gap));
    // Without a word of the job a gap is an error, with what to write.
    assert_says(
        &load("", "").unwrap_err(),
        &["line 3", "\"a\"", "\"NA\"", "missing = \"mean\""],
    );
    // Only what the job calls missing is missing.
    let error = load("", "missing = \"mean\"\nmissing_texts = [\"-\"]\n").unwrap_err();
    assert_says(&error, &["line 3", "\"NA\""]);
}

#[test]
fn delimiters_headers_and_compression_make_no_difference() {
    let plain = "x,y,label\n1,2.5,0\n2,3.5,1\n3,1.5,0\n4,0.5,1\n";
    let with = |delimiter: &str| plain.replace(',', delimiter);
    let bare = plain.strip_prefix("x,y,label\n").unwrap();
    let zipped = zstd::encode_all(plain.as_bytes(), 3).unwrap();
    let mut gzipped = GzEncoder::new(Vec::new(), Compression::fast());
    gzipped.write_all(plain.as_bytes()).unwrap();
    let forms: [(&str, Vec<u8>, &str); 8] = [
        ("a.csv", plain.into(), ""),
        ("a.csv", with(";").into(), ""),
        ("a.tsv", with("\t").into(), ""),
        ("a.csv", with("|").into(), ""),
        ("a.csv", with(":").into(), "delimiter = \":\""),
        ("a.csv.zst", zipped, ""),
        ("a.csv.gz", gzipped.finish().unwrap(), ""),
        (
            "a.csv",
            bare.into(),
            "header = false\ncolumn_names = [\"x\", \"y\", \"label\"]",
        ),
    ];
    let mut first = None;
    for (name, content, settings) in forms {
        let mut dataset = load_forms("csv", name, &content, settings).unwrap();
        let rows = numbers(&mut dataset);
        assert_eq!(
            first.get_or_insert_with(|| rows.clone()),
            &rows,
            "{name} {settings}"
        );
    }
    let numbered = "header = false\nlabel = \"2\"";
    let mut dataset = load_forms("csv", "a.csv", bare.as_bytes(), numbered).unwrap();
    assert_eq!(numbers(&mut dataset), first.unwrap());
    let error = load_forms("csv", "a.csv", bare.as_bytes(), "").unwrap_err();
    assert_says(&error, &["data.header"]);
    let utf16: Vec<u8> = "\u{feff}x,label"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    assert_says(
        &load_forms("csv", "a.csv", &utf16, "").unwrap_err(),
        &["UTF-16", "UTF-8"],
    );
}

#[test]
fn parts_without_rows_add_nothing() {
    let rows = "1,0\n2,1\n3,0\n";
    for (kind, parts, empty) in [
        ("csv", format!("x,label\n{rows}"), "x,label\n"),
        ("csv", format!("x,label\n{rows}"), ""),
        ("libsvm", "0 1:1\n1 1:2\n0 1:3\n".to_owned(), ""),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for (number, content) in [parts.as_str(), empty, &parts].into_iter().enumerate() {
            std::fs::write(folder.path().join(format!("part-{number}")), content).unwrap();
        }
        let dataset = load_place(kind, &folder.path().join("part-*"), "").unwrap();
        let count = dataset.training.count() + dataset.evaluation.count();
        assert_eq!(count, 6, "{kind} {empty:?}");
        // Alone it is an error.
        assert!(load_place(kind, &folder.path().join("part-1"), "").is_err());
    }
}

#[test]
fn dates_are_read_as_databases_and_people_write_them() {
    let text = "when,label\n2024-03-01 12:00:00 UTC,0\n2024-03-01 14:00:00.000 +02:00,1\n2024-03-01T12:00:00Z,0\n";
    let mut dataset = load_forms(
        "csv",
        "a.csv",
        text.as_bytes(),
        "columns.when = { type = \"date\", transform = \"none\" }",
    )
    .unwrap();
    assert_eq!(numbers(&mut dataset), vec![vec![19783.5]; 3]);
    let text = "when,label\n01/03/2024,0\n02/03/2024,1\n";
    let settings =
        "columns.when = { type = \"date\", transform = \"none\", format = \"%d/%m/%Y\" }";
    let mut dataset = load_forms("csv", "a.csv", text.as_bytes(), settings).unwrap();
    let short = text.replace("2024", "24");
    let settings_of_short = settings.replace("%Y", "%y");
    let mut of_short = load_forms("csv", "a.csv", short.as_bytes(), &settings_of_short).unwrap();
    assert_eq!(numbers(&mut of_short), numbers(&mut dataset));
    let mut days = numbers(&mut dataset);
    days.sort_by(|a, b| a[0].total_cmp(&b[0]));
    assert_eq!(days, [[19783.0], [19784.0]]);
}

#[test]
fn each_file_has_a_form_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.csv"), "x,label\n1,0\n2,1\n").unwrap();
    std::fs::write(folder.path().join("b.csv"), "x;label\n3;0\n4;1\n").unwrap();
    let none = "columns.x = { type = \"number\", transform = \"none\" }";
    let mut dataset = load_place("csv", &folder.path().join("*.csv"), none).unwrap();
    let mut rows = numbers(&mut dataset);
    rows.sort_by(|a, b| a[0].total_cmp(&b[0]));
    assert_eq!(rows, [[1.0], [2.0], [3.0], [4.0]]);
    // A byte order mark is no part of the first cell, wherever its row comes to lie.
    for seed in 0..4 {
        let file = folder.path().join("mark.csv");
        std::fs::write(&file, "\u{feff}1,0\n2,1\n3,0\n4,1\n").unwrap();
        let settings = format!(
            "header = false\nlabel = \"1\"\n{}",
            none.replace(".x", ".0")
        );
        let job = Job::from_toml(&format!("[data]\n{settings}")).unwrap();
        let data = Data {
            kind: "csv".to_owned(),
            dir: Some(file),
            ..job.data
        };
        let mut dataset = load(&data, seed).unwrap();
        assert_eq!(numbers(&mut dataset).len(), 4);
    }
}

#[test]
fn all_columns_that_need_a_word_are_named_at_once() {
    let rows: String = (0..80)
        .map(|i| {
            format!(
                "{i},note {i},c{},2024-03-01,{},0.5\n",
                i % 3,
                if i == 9 { "NA" } else { "1" }
            )
        })
        .collect();
    let text = format!("x,note,\"the city\",day,age,label\n{rows}");
    let error = load_forms("csv", "a.csv", text.as_bytes(), "").unwrap_err();
    assert_says(
        &error,
        &[
            "line 2",
            "\"note 0\"",
            "note = { type = \"ignore\" }\n\"the city\" = { type = \"category\" }\nday = { type = \"date\" }\nage = { type = \"number\", missing = \"mean\" }",
        ],
    );
    assert!(!error.contains("\nx = "), "{error}");
}

#[test]
fn files_of_a_data_set_are_in_its_folder() {
    for name in ["../secret", "/etc/passwd", "a/../../b"] {
        let settings = format!("options = {{ train = {name:?} }}");
        let error = load_forms("libsvm", "a.svm", b"0 1:1\n", &settings).unwrap_err();
        assert_says(&error, &["data.options.train", name]);
    }
}

#[test]
fn samples_have_the_weight_of_their_column_times_that_of_their_label() {
    let rows = "x,w,y\n1,0.5,no\n2,1,yes\n3,2,yes\n4,1,no\n";
    let settings = "held_out = 0.25\nlabel = \"y\"\nweight = \"w\"\nclass_weight = { yes = 3.0 }\n";
    let mut dataset = load_forms("csv", "a.csv", rows.as_bytes(), settings).unwrap();
    assert_eq!(dataset.signature.inputs[0].shape, [1]);
    let mut found = Vec::new();
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let read = samples.read(Order::Stored, 0..samples.count()).unwrap();
        let batch = Batch::of_samples(read, &Device::Cpu).unwrap();
        let inputs = batch.input_of("inputs").unwrap().flatten_all().unwrap();
        let weights = batch.weights().unwrap().to_vec1::<f32>().unwrap();
        found.extend(inputs.to_vec1::<f32>().unwrap().into_iter().zip(weights));
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let weights: Vec<f32> = found.into_iter().map(|(_, weight)| weight).collect();
    assert_eq!(weights, [0.5, 3.0, 6.0, 1.0]);

    for (rows, settings, named) in [
        (rows.replace("0.5", "-0.5"), settings, ["line 2", "\"w\""]),
        (rows.replace("0.5", ""), settings, ["line 2", "\"w\""]),
        (rows.replace("w,", "v,"), settings, ["data.weight", "\"w\""]),
        (
            rows.to_owned(),
            "label = \"y\"\nclass_weight = { maybe = 3.0 }\n",
            ["\"maybe\"", "no, yes"],
        ),
        (
            rows.to_owned(),
            "label = \"y\"\ntarget = \"number\"\nclass_weight = { no = 3.0 }\ncolumns.x = { type = \"number\" }\n",
            ["label", "no"],
        ),
    ] {
        let error = load_forms("csv", "a.csv", rows.as_bytes(), settings);
        assert_says(&error.unwrap_err(), &named);
    }
}

#[test]
fn numbers_with_a_decimal_comma_are_read_as_the_job_says() {
    let rows = "x;y\n1,5;0\n-2,25e1;1\n3;0\n";
    let settings = "held_out = 0.34\nlabel = \"y\"\n";
    let error = load_forms("csv", "a.csv", rows.as_bytes(), settings).unwrap_err();
    assert_says(&error, &["line 2", "data.decimal"]);
    let settings = format!(
        "{settings}decimal = \",\"\ncolumns.x = {{ type = \"number\", transform = \"none\" }}\n"
    );
    let mut dataset = load_forms("csv", "a.csv", rows.as_bytes(), &settings).unwrap();
    let mut numbers: Vec<f32> = numbers(&mut dataset).concat();
    numbers.sort_by(f32::total_cmp);
    assert_eq!(numbers, [-22.5, 1.5, 3.0]);
}
