//! The driver of the fuzz target `tables`, which reads whole data files.

use std::io;
use std::path::Path;

use shared_proto::job::{Data, Job};

use crate::dataset::Dataset;
use crate::error::InputError;
use crate::samples::Order;
use crate::source::{DataSetup, Purpose, Source};
use crate::sources::criteo::Criteo;
use crate::sources::csv::Csv;
use crate::sources::idx::Idx;
use crate::sources::images::Images;
use crate::sources::libsvm::LibSvm;
use crate::sources::npy::Npy;
use crate::sources::parquet::Parquet;
use crate::sources::survey;

/// The settings for the columns of tables in [`FORMS`].
const COLUMNS: &str = r#"label = "y"
missing = "indicator"
[data.columns]
a = { type = "number" }
b = { type = "category" }
c = { type = "id", separator = "|" }
d = { type = "date" }
"#;

type Open = fn(&DataSetup) -> Result<Dataset, InputError>;

/// A way to read an input: the data source, its settings, and its files.
struct Form {
    kind: &'static str,
    open: Open,
    settings: &'static str,
    /// The files to which the input is written. Some sources need more than one.
    files: &'static [&'static str],
    /// The names and contents of other files that the source needs.
    others: &'static [(&'static str, &'static [u8])],
}

/// Returns the form of a table that has no other files.
const fn table(
    kind: &'static str,
    open: Open,
    settings: &'static str,
    files: &'static [&'static str],
) -> Form {
    Form {
        kind,
        open,
        settings,
        files,
        others: &[],
    }
}

/// An IDX file with four labels.
const LABELS: &[u8] = b"\0\0\x08\x01\0\0\0\x04\x00\x01\x00\x01";

/// The ways to read an input. The first byte of the input chooses one.
const FORMS: &[Form] = &[
    table("csv", Csv::open, COLUMNS, &["t.csv"]),
    table("csv", Csv::open, COLUMNS, &["t.csv.gz"]),
    table("csv", Csv::open, COLUMNS, &["t.csv.zst"]),
    table(
        "csv",
        Csv::open,
        "header = false\nlabel = \"2\"\ndelimiter = \";\"\nmissing_label = \"skip\"\nmissing = \"median\"\n",
        &["t.csv"],
    ),
    table("parquet", Parquet::open, COLUMNS, &["t.parquet"]),
    table("libsvm", LibSvm::open, "", &["t.svm"]),
    table(
        "libsvm",
        LibSvm::open,
        "options = { sparse = true }\n",
        &["t.svm.gz"],
    ),
    table("criteo", Criteo::open, "", &["t.txt"]),
    Form {
        kind: "npy",
        open: Npy::open,
        settings: "",
        files: &["one.npy", "other.npy"],
        others: &[],
    },
    Form {
        kind: "image-folder",
        open: Images::open,
        settings: "",
        files: &["one/1.png", "one/2.png", "other/1.jpg", "other/2.jpg"],
        others: &[],
    },
    Form {
        kind: "mnist",
        open: Idx::open,
        settings: "",
        files: &["train-images-idx3-ubyte", "t10k-images-idx3-ubyte"],
        others: &[
            ("train-labels-idx1-ubyte", LABELS),
            ("t10k-labels-idx1-ubyte", LABELS),
        ],
    },
];

/// Reads an input as data files for training, evaluation and prediction, once in memory and once streamed. Returns true
/// if one of the two succeeds.
///
/// # Panics
/// If an error does not name the file, or if a folder for the file cannot be made.
pub fn tables(input: &[u8]) -> bool {
    let Some((&first, content)) = input.split_first() else {
        return false;
    };
    let form = &FORMS[usize::from(first) % FORMS.len()];
    let dir = tempfile::tempdir().expect("a folder for the file");
    write(dir.path(), form, content).expect("the file is written");
    let mut data = Job::from_toml(&format!(
        "[data]\nkind = {:?}\n{}",
        form.kind, form.settings
    ))
    .expect("settings of a form")
    .data;
    data.dir = Some(match form.files {
        [file] => dir.path().join(file),
        _ => dir.path().to_owned(),
    });
    let mut taken = false;
    for stream in [false, true] {
        data.stream = stream;
        match read(form.open, &data) {
            Ok(()) => taken = true,
            Err(error) => check(&error, dir.path()),
        }
    }
    if let Err(error) = survey(&data)
        && ["csv", "parquet"].contains(&form.kind)
    {
        check(&error, dir.path());
    }
    taken
}

fn write(dir: &Path, form: &Form, content: &[u8]) -> io::Result<()> {
    let inputs = form.files.iter().map(|file| (*file, content));
    for (file, content) in inputs.chain(form.others.iter().copied()) {
        let path = dir.join(file);
        std::fs::create_dir_all(path.parent().unwrap_or(dir))?;
        std::fs::write(path, content)?;
    }
    Ok(())
}

/// Reads all training samples and all held-out samples. Then reads all samples for evaluation and for prediction, with
/// the parameters that were fitted in training.
fn read(open: Open, data: &Data) -> Result<(), InputError> {
    let open = |purpose| {
        let seed = 1;
        open(&DataSetup {
            settings: data,
            seed,
            purpose,
        })
    };
    let mut training = open(Purpose::Training)?;
    let order = Order::Shuffled { seed: 1, epoch: 0 };
    let count = training.training.count();
    training.training.read(order, 0..count)?;
    read_evaluation(&mut training)?;
    if let Some(fitted) = &training.transforms {
        for purpose in [
            Purpose::EvaluationOfAll(fitted),
            Purpose::Prediction(fitted),
        ] {
            read_evaluation(&mut open(purpose)?)?;
        }
    }
    Ok(())
}

fn read_evaluation(dataset: &mut Dataset) -> Result<(), InputError> {
    let count = dataset.evaluation.count();
    dataset.evaluation.read(Order::Stored, 0..count)?;
    Ok(())
}

/// Checks that an error names the file or a setting of the data.
fn check(error: &InputError, dir: &Path) {
    let text = error.to_string();
    let is_setting =
        |word: &str| word.trim_start_matches(['`', '"']).starts_with("data.") && word.len() > 6;
    let named = text.contains(&*dir.to_string_lossy()) || text.split(' ').any(is_setting);
    assert!(named, "the error does not say where: {text}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_form_of_the_corpus_is_read_or_refused_by_name() {
        let taken = std::cell::RefCell::new([false; super::FORMS.len()]);
        fuzz_input::replay("tables", |bytes| {
            if super::tables(bytes) {
                taken.borrow_mut()[usize::from(bytes[0]) % super::FORMS.len()] = true;
            }
        });
        assert_eq!(taken.into_inner(), [true; super::FORMS.len()]);
    }
}
