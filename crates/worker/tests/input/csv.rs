//! CSV files: columns, classes, the held-out part, and what is refused.

use super::*;

fn load_csv(files: &[(&str, &str)], seed: u64) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    // A single file is named itself.
    let place = match files {
        [(name, _)] if *name != "train.csv" => folder.path().join(name),
        _ => folder.path().to_owned(),
    };
    load(&data("csv", &place), seed).map_err(|error| error.to_string())
}

#[test]
fn csv_columns_are_standardised_by_the_training_part() {
    let train = "x, label ,constant,y\n1,0,5,-1\n3, 2 ,5,1\n";
    let test = "x,label,constant,y\n\n5,2,6,0\n";
    let mut dataset = load_csv(&[("train.csv", train), ("test.csv", test)], 1).unwrap();
    assert_eq!(fields(&dataset), (vec![3], Some(3)));
    let expected = (vec![-1.0, 0.0, -1.0, 1.0, 0.0, 1.0], vec![0, 2]);
    assert_eq!(all(&mut dataset.training), expected);
    assert_eq!(all(&mut dataset.evaluation), (vec![3.0, 1.0, 0.0], vec![2]));
}

#[test]
fn names_are_classes_in_sorted_order() {
    let train = "label,x\ncat,1\nant,2\n\"bee, big\",3\nant,4\n";
    let mut dataset =
        load_csv(&[("train.csv", train), ("test.csv", "label,x\ncat,1\n")], 1).unwrap();
    assert_eq!(
        (labels(&mut dataset.training), fields(&dataset).1),
        (vec![2, 0, 1, 0], Some(3))
    );
    assert_eq!(labels(&mut dataset.evaluation), [2]);
}

#[test]
fn a_share_is_held_out_where_there_is_no_test_file() {
    let rows: String = (0..10).map(|i| format!("{i},{i}\n")).collect();
    let content = format!("x,label\n{rows}");
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..10 {
        let mut single = load_csv(&[("any.csv", &content)], seed).unwrap();
        let mut folder = load_csv(&[("train.csv", &content)], seed).unwrap();
        assert_eq!(all(&mut single.training), all(&mut folder.training));
        assert_eq!((single.training.count(), single.evaluation.count()), (8, 2));
        let mut both = [labels(&mut single.training), labels(&mut single.evaluation)].concat();
        both.sort_unstable();
        assert!(both.into_iter().eq(0..10));
        seen.insert(labels(&mut single.evaluation));
    }
    assert!(seen.len() > 3, "the seed does not decide: {seen:?}");
}

#[test]
fn bad_csv_files_are_refused() {
    let good = "x,y,label\n1,2,0\n3,4,1\n";
    for (train, test, parts) in [
        ("", "", ["train.csv", "line 1", "empty"]),
        ("x,y,label\n", "", ["train.csv", "line 1", "no sample"]),
        (
            "x,y,label\n1,2,0\n",
            "",
            ["train.csv", "a single sample", "hold out"],
        ),
        (
            "x,y,class\n1,2,0\n",
            "",
            ["line 1", "\"label\"", "[\"x\", \"y\", \"class\"]"],
        ),
        ("x,x,label\n1,2,0\n", "", ["line 1", "\"x\"", "two columns"]),
        ("label\n1\n", "", ["line 1", "\"label\"", "only column"]),
        (
            "x,y,label\n1,2,0\n3,four,1\n",
            "",
            ["line 3", "\"y\"", "\"four\""],
        ),
        ("x,y,label\n1,,0\n3,4,1\n", "", ["line 2", "\"y\"", "\"\""]),
        (
            "x,y,label\n1,NaN,0\n3,4,1\n",
            "",
            ["line 2", "\"y\"", "\"NaN\""],
        ),
        (
            "x,y,label\n-inf,2,0\n3,4,1\n",
            "",
            ["line 2", "\"x\"", "\"-inf\""],
        ),
        (
            "x,y,label\n1e39,2,0\n3,4,1\n",
            "",
            ["line 2", "\"x\"", "\"1e39\""],
        ),
        (
            "x,y,label\n1,2,0\n\n3,4\n",
            "",
            ["line 4", "2 fields", "3 expected"],
        ),
        (
            "x,y,label\n1,2,0,0\n",
            "",
            ["line 2", "4 fields", "3 expected"],
        ),
        (
            "x,y,label\n1,2,\n3,4,1\n",
            "",
            ["line 2", "\"label\"", "missing"],
        ),
        (
            "x,y,label\n1,2,4000000000\n3,4,1\n",
            "",
            ["line 2", "4000000000", "65536"],
        ),
        (
            good,
            "x,y,label\n1,2,1\n1,2,2\n",
            ["test.csv, line 3", "\"2\"", "training"],
        ),
        (
            good,
            "z,x,label\n1,2,1\n",
            ["test.csv, line 1", "no column \"y\"", "the file has z, x"],
        ),
    ] {
        let mut files = vec![("train.csv", train)];
        if !test.is_empty() {
            files.push(("test.csv", test));
        }
        assert_says(&load_csv(&files, 1).unwrap_err(), &parts);
    }
}

#[test]
fn text_that_is_not_unicode_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.csv"), b"x,label\n1,a\n2,\xff\n").unwrap();
    let error = load(&data("csv", folder.path()), 1).unwrap_err();
    assert_says(&error.to_string(), &["train.csv", "line 3"]);
}

#[test]
fn names_of_rows_without_a_name_of_their_column_are_left_out() {
    // As write.table of R has them.
    let rows =
        "\"x\" \"y\" \"label\"\n\"Mazda RX4\" 1 2 0\n\"Datsun 710\" 3 4 1\n\"Valiant\" 5 6 0\n";
    let mut dataset = load_csv(
        &[("train.csv", &rows.replace("\" ", "\";").replace(" ", ";"))],
        1,
    );
    let dataset = dataset.as_mut().unwrap();
    assert_eq!(fields(dataset), (vec![2], Some(2)));
    assert_eq!(all(&mut dataset.training).0.len(), 4);
    // Rows that are too long for another reason.
    for train in [
        "x,y,label\n1,2,0,\n3,4,1,\n",
        "x,y,label\n1,2,0,7\n3,4,1,8\n",
        "label,note\n1,good, but slow\n0,bad, and slow\n",
        "price,label\n12,50,1\n13,20,0\n",
    ] {
        let error = load_csv(&[("train.csv", train)], 1).unwrap_err();
        assert!(
            error.contains("line 2") && error.contains("fields were found"),
            "{error}"
        );
    }
}

#[test]
fn halves_of_a_character_in_two_rows_are_no_character() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.csv");
    std::fs::write(&file, b"label,t\n0,\xc3\n\xa9,x\n1,y\n").unwrap();
    let mut settings = data("csv", &file);
    settings.columns = Job::from_toml("data.columns.t = { type = \"category\" }")
        .unwrap()
        .data
        .columns;
    let error = load(&settings, 1).unwrap_err().to_string();
    assert!(
        error.contains("line 2, field 2") || error.contains("UTF-8"),
        "{error}"
    );
}

#[test]
fn the_first_name_may_have_a_line_break() {
    let train = "\"the, first\nname\";label\n1;0\n2;1\n3;0\n";
    let mut dataset = load_csv(&[("train.csv", train)], 1).unwrap();
    assert_eq!(fields(&dataset), (vec![1], Some(2)));
    assert_eq!(labels(&mut dataset.training).len(), 2);
}

#[test]
fn a_quote_that_is_left_open_is_an_error_with_the_line_of_its_row() {
    for (train, line) in [
        ("x,label\n1,0\n\"2,1\n3,0\n", "line 3"),
        ("\"x,label\n1,0\n", "line 1"),
    ] {
        let error = load_csv(&[("train.csv", train)], 1).unwrap_err();
        assert!(error.contains(line) && error.contains("quote"), "{error}");
    }
}
