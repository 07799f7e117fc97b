//! Labels that are numbers: the model learns them standardised, and what people see is in their own unit.

use flambeau_worker::alone::local::{Evaluated, Trained, evaluate_trained, train};
use flambeau_worker::alone::predict::{Cell, predict, values, values_of_rows};
use model::input::{Fitted, TableRows, Target};
use shared_proto::job::LabelTransform;

use super::*;

/// The time of an arrival: an hour after a beginning that is far from 0, and a minute later for each step of x.
const BEGINNING: f64 = 1_700_000_000.0;

fn time(x: u32) -> f64 {
    BEGINNING + 60.0 * f64::from(x)
}

#[test]
fn predictions_and_metrics_are_in_the_unit_of_the_labels() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..200).map(|x| format!("{x},{}\n", time(x))).collect();
    std::fs::write(folder.path().join("train.csv"), format!("x,y\n{rows}")).unwrap();
    // Held-out labels are far off; they are no part of mean and deviation.
    let far: String = (0..50)
        .map(|x| format!("{x},{}\n", time(x) + 1e6))
        .collect();
    std::fs::write(folder.path().join("test.csv"), format!("x,y\n{far}")).unwrap();
    let mut found = Vec::new();
    for stream in [false, true] {
        let job = format!(
            "epochs = 100\nbatch_size = 20\n[data]\nkind = \"csv\"\ndir = {:?}\nlabel = \"y\"\ntarget = \"number\"\nlabel_transform = \"standardise\"\nstream = {stream}\n[model]\nname = \"logistic\"\n[optimizer]\nname = \"adam\"\nlearning_rate = 0.05\n",
            folder.path()
        );
        let job = Job::from_toml(&job).unwrap();
        let registry = Registry::builtin();
        let weights = folder
            .path()
            .join(format!("run-{stream}/model.safetensors"));
        let outcome = train(&job, &registry, &Device::Cpu, Some(&weights)).unwrap();
        // Each held-out label is a million more than what is predicted.
        let rmse = outcome.metrics["rmse"];
        assert!((rmse - 1e6).abs() < 100.0, "{rmse}");
        assert_eq!(outcome.metrics["mae"].round(), rmse.round());
        let fitted = Fitted::load(&weights.with_file_name("transforms.json")).unwrap();
        let Target::Number { scale: Some(scale) } = fitted.target else {
            panic!("{:?}", fitted.target);
        };
        assert!((scale.mean - time(99) - 30.0).abs() < 1e-3, "{scale:?}");
        let trained = |job| Trained {
            job,
            weights: &weights,
            rows: Box::new(|_| unreachable!("there is no table")),
            fitted: Some(&fitted),
        };
        let (metrics, count) =
            evaluate_trained(&trained(&job), &registry, &Device::Cpu, Evaluated::HeldOut).unwrap();
        assert_eq!((metrics["rmse"], count), (rmse, 50));

        // All digits are there, which single precision would round to steps of 128.
        let mut of_file = job.clone();
        of_file.data.dir = Some(folder.path().join("test.csv"));
        of_file.data.stream = false;
        let predictions = predict(&trained(&of_file), &registry, &Device::Cpu).unwrap();
        assert_eq!(predictions.header, ["prediction"]);
        for (x, row) in (0..).zip(&predictions.rows) {
            let [Cell::Double(number)] = row[..] else {
                panic!("{row:?}");
            };
            assert!((number - time(x)).abs() < 60.0, "{x}: {number}");
        }
        let held_out = values(&trained(&job), &registry, &Device::Cpu, None).unwrap();
        let rows = TableRows::new().column("x", 0..50u32);
        let of_rows = values_of_rows(&trained(&job), &registry, &Device::Cpu, rows).unwrap();
        assert_eq!(held_out, of_rows);
        assert!((f64::from(of_rows[10][0]) - time(10)).abs() < 200.0);
        found.push(scale);
    }
    assert_eq!(found[0], found[1]);
}

#[test]
fn a_label_transform_that_would_have_no_effect_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.csv"), "x,label\n1,a\n2,b\n3,c\n").unwrap();
    for (settings, part) in [
        (data("csv", folder.path()), "labels are classes"),
        (
            data("digits", folder.path()),
            "no effect on data.kind = \"digits\"",
        ),
    ] {
        let settings = Data {
            label_transform: LabelTransform::Standardise,
            ..settings
        };
        let error = load(&settings, 1).unwrap_err().to_string();
        assert!(
            error.contains("data.label_transform") && error.contains(part),
            "{error}"
        );
    }
}
