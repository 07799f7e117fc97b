//! Streamed data: the same samples as in memory, each once in a pass, in orders that repeat.

use model::Batch;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use candle_core::Tensor;

use super::*;

const SAMPLES: u32 = 20_000;

/// Opens data that is streamed in windows of a mebibyte.
fn stream(kind: &str, place: &Path) -> Result<Dataset, String> {
    let data = Data {
        stream: true,
        shuffle_mebibytes: 1,
        ..data(kind, place)
    };
    load(&data, 1).map_err(|error| error.to_string())
}

/// Returns a line for each sample: a label, and numbers of which the first is the sample's.
fn csv(samples: u32) -> String {
    let mut text = "label,number,noise\n".to_owned();
    for i in 0..samples {
        writeln!(text, "{},{i},\"{}\"", i % 7, f64::from(i).sin()).unwrap();
    }
    text
}

/// Reads a pass in batches of this size, and returns the numbers of the samples.
fn pass(samples: &mut Box<dyn Samples>, order: Order, size: u64) -> Vec<u32> {
    let (mut read, mut start) = (Vec::new(), 0);
    while start < samples.count() {
        let end = samples.count().min(start + size);
        let batch =
            Batch::of_samples(samples.read(order, start..end).unwrap(), &Device::Cpu).unwrap();
        let inputs = batch.input().unwrap().to_vec2::<f32>().unwrap();
        read.extend(inputs.iter().map(|row| row[0] as u32));
        start = end;
    }
    read
}

const fn shuffled(epoch: u32) -> Order {
    Order::Shuffled { seed: 7, epoch }
}

/// A job's columns that are left as they are, so that numbers tell samples.
fn untransformed(place: &Path, stream: bool) -> Data {
    let columns = "number = { type = \"number\", transform = \"none\" }";
    Data {
        stream,
        shuffle_mebibytes: 1,
        columns: toml::from_str(columns).unwrap(),
        ..data("csv", place)
    }
}

#[test]
fn each_pass_has_every_sample_once_in_an_order_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.csv"), csv(SAMPLES)).unwrap();
    fs::write(folder.path().join("test.csv"), csv(100)).unwrap();
    let open = || load(&untransformed(folder.path(), true), 1).unwrap();
    let (mut dataset, mut other) = (open(), open());
    assert_eq!(dataset.training.count(), u64::from(SAMPLES));
    let orders: Vec<Vec<u32>> = (0..3)
        .map(|epoch| pass(&mut dataset.training, shuffled(epoch), 999))
        .collect();
    for order in &orders {
        let seen: BTreeSet<u32> = order.iter().copied().collect();
        assert!(seen.into_iter().eq(0..SAMPLES) && order.len() == SAMPLES as usize);
        // Neighbours in the file are not neighbours in the pass.
        let together = order.windows(2).filter(|pair| pair[0] + 1 == pair[1]);
        assert!(together.count() < 100);
    }
    assert!(orders[0] != orders[1] && orders[1] != orders[2]);
    // The order depends neither on the size of batches nor on the process that reads it.
    assert_eq!(pass(&mut other.training, shuffled(1), 64), orders[1]);
    let stored = pass(&mut dataset.training, Order::Stored, 333);
    assert!(stored.into_iter().eq(0..SAMPLES));
    let mut at = |start: u64| {
        let read = dataset.training.read(shuffled(0), start..start + 5);
        let batch = Batch::of_samples(read.unwrap(), &Device::Cpu);
        let inputs = batch.unwrap().input().unwrap().to_vec2::<f32>().unwrap();
        inputs.iter().map(|row| row[0] as u32).collect::<Vec<_>>()
    };
    for start in [19_995, 3, 12_000, 0] {
        assert_eq!(at(start), orders[0][start as usize..][..5]);
    }
    assert_eq!(dataset.digest(), other.digest());
}

#[test]
fn samples_are_those_of_memory() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.csv"), csv(3000)).unwrap();
    fs::write(folder.path().join("test.csv"), csv(100)).unwrap();
    let mut streamed = stream("csv", folder.path()).unwrap();
    let mut held = load(&data("csv", folder.path()), 1).unwrap();
    assert_eq!(streamed.signature, held.signature);
    assert_eq!(streamed.transforms, held.transforms);
    assert_eq!(all(&mut streamed.training), all(&mut held.training));
    assert_eq!(all(&mut streamed.evaluation), all(&mut held.evaluation));

    let libsvm: String = (0..500)
        .map(|i| format!("{} {}:1 {}:0.5 # {i}\n\n", i % 2, i % 9 + 1, i % 9 + 10))
        .collect();
    let file = folder.path().join("file.libsvm");
    fs::write(&file, &libsvm).unwrap();
    fs::write(folder.path().join("file.libsvm.t"), &libsvm[..200]).unwrap();
    let mut streamed = stream("libsvm", &file).unwrap();
    let mut held = load(&data("libsvm", &file), 1).unwrap();
    assert_eq!(streamed.signature, held.signature);
    let rows = |samples: &mut Box<dyn Samples>| {
        let read = samples.read(Order::Stored, 0..samples.count());
        let batch = Batch::of_samples(read.unwrap(), &Device::Cpu).unwrap();
        (
            batch.input().unwrap().to_vec2::<f32>().unwrap(),
            batch.target().unwrap().to_vec1::<f32>().unwrap(),
        )
    };
    assert_eq!(rows(&mut streamed.training), rows(&mut held.training));
    assert_eq!(rows(&mut streamed.evaluation), rows(&mut held.evaluation));
}

#[test]
fn several_files_are_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let whole = csv(1000);
    let (header, rows) = whole.split_once('\n').unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    for (day, rows) in rows.chunks(300).enumerate() {
        let text = format!("{header}\n{}\n", rows.join("\n"));
        fs::write(folder.path().join(format!("day-{day}.csv")), text).unwrap();
    }
    fs::write(folder.path().join("whole.txt"), &whole).unwrap();
    let pattern = folder.path().join("day-*.csv");
    let mut parts = load(&untransformed(&pattern, false), 1).unwrap();
    let mut single = load(&untransformed(&folder.path().join("whole.txt"), false), 1).unwrap();
    assert_eq!(all(&mut parts.training), all(&mut single.training));
    assert_eq!(all(&mut parts.evaluation), all(&mut single.evaluation));
    let mut streamed = load(&untransformed(&pattern, true), 1).unwrap();
    let mut seen = pass(&mut streamed.training, shuffled(0), 64);
    assert!((750..=850).contains(&seen.len()), "{}", seen.len());
    seen.extend(pass(&mut streamed.evaluation, Order::Stored, 64));
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..1000));

    fs::write(
        folder.path().join("day-9.csv"),
        "label,noise,number\n1,2,3\n",
    )
    .unwrap();
    let error = load(&untransformed(&pattern, true), 1).unwrap_err();
    let columns = "label, noise, number were found";
    assert_says(
        &error.to_string(),
        &["day-9.csv, line 1", columns, "first file"],
    );
    let none = folder.path().join("night-*.csv");
    let error = load(&untransformed(&none, false), 1).unwrap_err();
    assert_says(&error.to_string(), &["night-*.csv"]);
}

#[test]
fn pictures_may_stay_in_their_files() {
    let folder = tempfile::tempdir().unwrap();
    for class in ["ant", "bee"] {
        fs::create_dir(folder.path().join(class)).unwrap();
        for i in 0..20u8 {
            let color = image::Rgb([i, if class == "ant" { 0 } else { 200 }, 7]);
            let picture = image::RgbImage::from_pixel(3, 2, color);
            picture
                .save(folder.path().join(format!("{class}/{i}.png")))
                .unwrap();
        }
    }
    let mut streamed = stream("image-folder", folder.path()).unwrap();
    let mut held = load(&data("image-folder", folder.path()), 1).unwrap();
    assert_eq!(streamed.signature, held.signature);
    assert_eq!(streamed.transforms, held.transforms);
    let pictures = |samples: &mut Box<dyn Samples>, order| {
        let read = samples.read(order, 0..samples.count()).unwrap();
        let batch = Batch::of_samples(read, &Device::Cpu).unwrap();
        let pixels = batch.input().unwrap().flatten_from(1).unwrap();
        let pixels = pixels.to_vec2::<f32>().unwrap();
        let labels = batch.target().unwrap().to_vec1::<u32>().unwrap();
        let bits = |row: &Vec<f32>| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        pixels.iter().map(bits).zip(labels).collect::<Vec<_>>()
    };
    for (streamed, held) in [
        (&mut streamed.training, &mut held.training),
        (&mut streamed.evaluation, &mut held.evaluation),
    ] {
        assert_eq!(
            pictures(streamed, Order::Stored),
            pictures(held, Order::Stored)
        );
        let mut all = pictures(streamed, shuffled(0));
        assert_ne!(all, pictures(streamed, Order::Stored));
        all.sort();
        let mut stored = pictures(held, Order::Stored);
        stored.sort();
        assert_eq!(all, stored);
    }
}

/// Writes an array of rows of three numbers. The first of them is the number of the row.
fn write_numbers(place: &Path, rows: std::ops::Range<u32>) {
    let values: Vec<f32> = rows.clone().flat_map(|i| [i as f32, 0.5, -1.0]).collect();
    let array = Tensor::from_vec(values, (rows.len(), 3), &Device::Cpu).unwrap();
    array.write_npy(place).unwrap();
}

#[test]
fn arrays_of_numpy_may_stay_in_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let half = SAMPLES / 2;
    write_numbers(&folder.path().join("ant.npy"), 0..half);
    write_numbers(&folder.path().join("bee.npy"), half..SAMPLES);
    let mut streamed = stream("npy", folder.path()).unwrap();
    let held = load(&data("npy", folder.path()), 1).unwrap();
    assert_eq!(streamed.signature, held.signature);
    assert_eq!(streamed.transforms, held.transforms);

    let first = pass(&mut streamed.training, shuffled(0), 999);
    let training: BTreeSet<u32> = first.iter().copied().collect();
    assert_eq!(training.len(), first.len());
    assert_ne!(pass(&mut streamed.training, shuffled(1), 999), first);
    assert_eq!(pass(&mut streamed.training, shuffled(0), 700), first);
    let evaluation: BTreeSet<u32> = pass(&mut streamed.evaluation, Order::Stored, 999)
        .into_iter()
        .collect();
    let all: BTreeSet<u32> = training.union(&evaluation).copied().collect();
    assert!(all.iter().copied().eq(0..SAMPLES));
    assert!(training.is_disjoint(&evaluation));
    // Not much more than a fifth of each class is held out.
    let of_ant = evaluation.range(..half).count() as u32;
    for held_out in [of_ant, evaluation.len() as u32 - of_ant] {
        assert!((half / 5..half / 4).contains(&held_out), "{held_out}");
    }
    let count = streamed.training.count();
    let read = streamed.training.read(shuffled(0), 0..count).unwrap();
    let batch = Batch::of_samples(read, &Device::Cpu).unwrap();
    let labels = batch.target().unwrap().to_vec1::<u32>().unwrap();
    for (number, label) in first.iter().zip(labels) {
        assert_eq!(label, u32::from(*number >= half), "{number}");
    }
}

#[test]
fn a_streamed_number_that_is_not_finite_is_named_when_it_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    write_numbers(&folder.path().join("ant.npy"), 0..100);
    let values = (0..200).map(|i| if i == 131 { f32::NAN } else { 1.0 });
    let array = Tensor::from_iter(values, &Device::Cpu).unwrap();
    let array = array.reshape((100, 2)).unwrap();
    array.write_npy(folder.path().join("bee.npy")).unwrap();
    let error = stream("npy", folder.path()).unwrap_err();
    assert_says(&error, &["bee.npy", "shape [2]", "shape [3]"]);
    fs::remove_file(folder.path().join("ant.npy")).unwrap();
    array.write_npy(folder.path().join("cat.npy")).unwrap();
    let mut data = stream("npy", folder.path()).unwrap();
    let read = |samples: &mut Box<dyn Samples>| {
        let count = samples.count();
        samples.read(Order::Stored, 0..count).map(drop)
    };
    let outcomes = [read(&mut data.training), read(&mut data.evaluation)];
    let error = outcomes.into_iter().find_map(Result::err).unwrap();
    assert_says(&error.to_string(), &[".npy", "sample 65 holds NaN"]);
}

#[test]
fn data_that_cannot_be_streamed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("one.csv");
    fs::write(&place, "label,number\n1,2\n").unwrap();
    let error = stream("csv", &place).unwrap_err();
    assert_says(
        &error,
        &["one.csv", "a single part", "data.stream to false"],
    );
    let error = stream("digits", folder.path()).unwrap_err();
    assert_says(
        &error,
        &["\"digits\"", "csv, image-folder, libsvm, npy, parquet"],
    );
    let place = folder.path().join("two.csv.gz");
    fs::write(&place, "").unwrap();
    let error = stream("csv", &place).unwrap_err();
    assert_says(&error, &["two.csv.gz", "compressed", "decompress it"]);
    // A row that is wrong is known before training.
    let mut text = csv(SAMPLES);
    text.push_str("1,two,3\n");
    fs::write(folder.path().join("train.csv"), text).unwrap();
    let error = stream("csv", folder.path()).unwrap_err();
    assert_says(&error, &["train.csv, line 20002", "\"two\""]);
}

#[test]
fn a_file_that_changes_in_training_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("rows.libsvm");
    let text: String = (0..100).map(|i| format!("{} 1:{i}\n", i % 2)).collect();
    fs::write(&place, &text).unwrap();
    for (later, named) in [
        (text.replace("1:7\n", "1:8\n"), "has changed"),
        (text[..100].to_owned(), "cannot be read"),
    ] {
        fs::write(&place, &text).unwrap();
        let dataset = stream("libsvm", &place).unwrap();
        fs::write(&place, later).unwrap();
        let count = dataset.training.count();
        let mut samples = [dataset.training, dataset.evaluation];
        let errors = samples.iter_mut().filter_map(|samples| {
            let end = count.min(samples.count());
            samples.read(Order::Stored, 0..end).err()
        });
        let errors: Vec<String> = errors.map(|error| error.to_string()).collect();
        assert!(!errors.is_empty());
        for error in errors {
            assert_says(&error, &["rows.libsvm", named]);
        }
    }
}

#[test]
fn a_pattern_leaves_held_out_and_hidden_files_to_themselves() {
    let folder = tempfile::tempdir().unwrap();
    for (name, rows) in [
        ("a", "0 1:1\n1 1:2\n1 1:3\n"),
        ("a.t", "0 1:5\n"),
        (".b", "x"),
    ] {
        fs::write(folder.path().join(name), rows).unwrap();
    }
    let dataset = load(&data("libsvm", &folder.path().join("*")), 1).unwrap();
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (3, 1)
    );
    fs::write(folder.path().join("c"), "0 1:1\n").unwrap();
    let job = Data {
        options: toml::from_str("test = \"c\"").unwrap(),
        ..data("libsvm", &folder.path().join("[a-c]"))
    };
    let dataset = load(&job, 1).unwrap();
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (3, 1)
    );
}

#[test]
fn a_quote_that_is_left_open_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("rows.csv");
    for text in ["label,note\n1,a\n0,\"b\n", "label,note\n1,a\n0,\"b"] {
        fs::write(&place, text).unwrap();
        let error = stream("csv", &place).unwrap_err();
        assert_says(&error, &["rows.csv, line 3", "left open"]);
    }
}
