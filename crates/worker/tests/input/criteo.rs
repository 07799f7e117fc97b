//! Criteo's lines of clicks.

use model::Batch;

use super::*;

fn line(label: &str, number: &str, category: &str) -> String {
    let numbers = vec![number; 13].join("\t");
    let categories = vec![category; 26].join("\t");
    format!("{label}\t{numbers}\t{categories}\n")
}

fn load_text(text: &str) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("train.txt");
    std::fs::write(&file, text).unwrap();
    let mut data = data("criteo", &file);
    data.options.insert("buckets".to_owned(), 1000.into());
    load(&data, 1).map_err(|error| error.to_string())
}

#[test]
fn numbers_are_compressed_and_categories_hashed_by_field() {
    let text = [
        line("0", "", "68fd1e64"),
        line("1", "-3", ""),
        line("1", "9", "68fd1e64"),
    ];
    let mut dataset = load_text(&text.concat()).unwrap();
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (2, 1)
    );
    let read = |samples: &mut Box<dyn Samples>| {
        let all = 0..samples.count();
        Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap()
    };
    let (first, last) = (read(&mut dataset.training), read(&mut dataset.evaluation));
    let numbers =
        |batch: &model::Batch| batch.input_of("numbers").unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(numbers(&first), [[0.0; 13]; 2]);
    // The last lines are held out: they are the newest.
    assert!((numbers(&last)[0][0] - 10f32.ln()).abs() < 1e-6);
    let ids = |batch: &model::Batch| {
        batch
            .input_of("categories")
            .unwrap()
            .to_vec2::<u32>()
            .unwrap()
    };
    let (first, last) = (ids(&first), ids(&last));
    assert_eq!(first[0], last[0]);
    assert_ne!(first[0], first[1]);
    // One text in 26 fields has as many ids, but for chance.
    let different: std::collections::BTreeSet<u32> = first[0].iter().copied().collect();
    assert!(different.len() > 20 && different.iter().all(|id| *id < 1000));
}

#[test]
fn what_cannot_be_read_is_named_with_its_line() {
    let good = line("0", "1", "ab");
    for (bad, parts) in [
        (line("2", "1", "ab"), ["line 2", "label \"2\""]),
        (line("0", "1.5", "ab"), ["line 2", "number 1 is \"1.5\""]),
        (line("0", "1", "xyz"), ["line 2", "category 1"]),
        ("0\t1\n".to_owned(), ["line 2", "2 fields"]),
    ] {
        let error = load_text(&format!("{good}{bad}")).unwrap_err();
        assert_says(&error, &parts);
    }
    assert_says(&load_text("").unwrap_err(), &["no sample"]);
}

#[test]
fn the_real_sample_has_its_counts() {
    let Some(folder) = real("criteo-10k") else {
        return;
    };
    let file = folder.join("train.first10k.txt");
    let mut dataset = load(&data("criteo", &file), 1).unwrap();
    assert_eq!(
        (dataset.training.count(), dataset.evaluation.count()),
        (8_000, 2_000)
    );
    let mut clicks = 0.0;
    for samples in [&mut dataset.training, &mut dataset.evaluation] {
        let all = 0..samples.count();
        let batch =
            Batch::of_samples(samples.read(Order::Stored, all).unwrap(), &Device::Cpu).unwrap();
        clicks += batch
            .target()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
    }
    assert_eq!(clicks, 2_182.0);
}
