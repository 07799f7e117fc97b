//! Training from a program: `Trainer::fit`, `evaluate`, `predict`, and loops of the program's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor};
use flambeau::candle_nn::{self, Linear, Module, VarBuilder};
use flambeau::settings::{Best, EarlyStopping, Mode};
use flambeau::{
    Batch, Callback, Column, Control, Dataset, Epoch, Error, History, InMemory, InputError, Job,
    Metric, Model, Order, Pass, Progress, Samples, Setup, Strategy, Trainer, on_evaluation,
};

use crate::program;
use crate::weights::{difference, weights};

pub(crate) const JOB: &str = "seed = 5\nepochs = 3\nbatch_size = 16\nlog_every = 5\n[optimizer]\nname = \"momentum\"\n[model]\nhidden = [16]\n[cluster]\nps = 2\nworkers = 2\n[strategy]\nmode = \"sync\"\n";

pub(crate) fn job(text: &str) -> Job {
    Job::from_toml(text).unwrap()
}

#[test]
fn fit_has_the_weights_and_the_values_of_the_command_line() {
    let mut trainer = Trainer::new(job(JOB)).devices("cpu");
    let history = trainer.fit().unwrap();

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("job.toml");
    std::fs::write(&file, JOB).unwrap();
    let run = dir.path().join("run");
    let [file, place] = [&file, &run].map(|path| path.to_str().unwrap().to_owned());
    let arguments = [
        "train",
        &file,
        "--quiet",
        "--json",
        "--device",
        "cpu",
        "--run-dir",
        &place,
    ];
    let output = program().run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();

    let found = weights(&trainer.weights().unwrap());
    let expected = weights(&run.join("model.safetensors"));
    assert!(difference(&found, &expected) < 1e-5);
    assert_eq!((history.epochs.len(), history.stopped.as_ref()), (3, None));
    assert_eq!(summary["steps"], history.steps);
    assert_eq!(summary["samples"], history.samples);
    let accuracy = history.last("accuracy").unwrap();
    let told = summary["test_accuracy"].as_f64().unwrap();
    assert!(
        (accuracy - told).abs() < 1e-6 && accuracy > 0.8,
        "{accuracy}"
    );
    // The whole run is in the history.
    let steps: Vec<u64> = history.progress.iter().map(|more| more.steps).collect();
    assert_eq!(steps.first(), Some(&5));
    assert!(steps.is_sorted() && steps.len() as u64 == history.steps / 5);
    assert_eq!(trainer.evaluate().unwrap()["accuracy"], accuracy);
}

#[test]
fn fit_trains_by_every_strategy() {
    let mut ends = BTreeMap::new();
    for (strategy, devices, workers, batch) in [
        ("parameter-server", "cpu", 2, 16),
        ("multi-worker-mirrored", "cpu", 2, 16),
        ("mirrored", "cpu,cpu", 1, 32),
        ("central-storage", "cpu,cpu", 1, 32),
        ("one-device", "cpu", 1, 32),
        ("model-parallel", "cpu,cpu", 1, 32),
    ] {
        let text = JOB.replace("workers = 2", &format!("workers = {workers}"));
        let mut job = job(&format!("{text}name = {strategy:?}\n"));
        job.batch_size = batch;
        let mut trainer = Trainer::new(job).devices(devices);
        let history = trainer.fit().unwrap();
        assert!(history.last("accuracy").unwrap() > 0.8, "{strategy}");
        ends.insert(strategy, weights(&trainer.weights().unwrap()));
    }
    let alone = &ends["one-device"];
    for (strategy, weights) in &ends {
        let difference = difference(weights, alone);
        assert!(difference < 1e-4, "{strategy}: {difference}");
    }
}

#[test]
fn fit_trains_tables_on_servers_and_the_rest_on_workers() {
    let mut trainer = Trainer::new(job(
        "epochs = 1\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 4000\nrows = 200\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [8]\n[cluster]\nps = 2\nworkers = 2\n[strategy]\nname = \"hybrid\"\nmode = \"sync\"\n",
    ));
    let history = trainer.fit().unwrap();
    // The rows are read from the last checkpoint.
    let evaluated = trainer.evaluate().unwrap();
    assert!((evaluated["auc"] - history.last("auc").unwrap()).abs() < 1e-6);
}

/// Sees what callbacks are called with.
#[derive(Clone, Default)]
struct Seen {
    epochs: Arc<Mutex<Vec<Epoch>>>,
    progress: Arc<Mutex<Vec<Progress>>>,
    ended: Arc<Mutex<Vec<History>>>,
}

impl Callback for Seen {
    fn progressed(&mut self, progress: &Progress, _: &mut Control) {
        self.progress.lock().unwrap().push(*progress);
    }

    fn evaluated(&mut self, epoch: &Epoch, _: &mut Control) {
        self.epochs.lock().unwrap().push(epoch.clone());
    }

    fn ended(&mut self, history: &History) {
        self.ended.lock().unwrap().push(history.clone());
    }
}

#[test]
fn callbacks_see_each_record_once() {
    let seen = Seen::default();
    let mut trainer = Trainer::new(job(JOB)).callback(seen.clone());
    let history = trainer.fit().unwrap();
    assert_eq!(*seen.epochs.lock().unwrap(), history.epochs);
    assert_eq!(*seen.progress.lock().unwrap(), history.progress);
    assert_eq!(*seen.ended.lock().unwrap(), [history]);
}

#[test]
fn a_callback_ends_a_training_in_good_order() {
    let mut long = job(JOB);
    long.epochs = 100_000;
    let stop = on_evaluation(|epoch, control| {
        if epoch.number == 2 {
            control.stop("that is enough");
        }
    });
    let mut trainer = Trainer::new(long).callback(stop);
    let history = trainer.fit().unwrap();
    assert_eq!(history.stopped.as_deref(), Some("that is enough"));
    assert!((2..100_000).contains(&history.epochs.len()));
    let last = history.last("accuracy").unwrap();
    assert_eq!(trainer.evaluate().unwrap()["accuracy"], last);
}

/// A line with a metric of its own, which gets worse with each evaluation.
pub(crate) struct Worse(Linear);

/// The largest absolute value of the outputs.
#[derive(Default)]
struct Largest(f64);

impl Metric for Largest {
    fn add(&mut self, outputs: &Tensor, _: &Batch) -> Result<()> {
        let largest = outputs.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        self.0 = self.0.max(f64::from(largest));
        Ok(())
    }

    fn value(&mut self) -> f64 {
        self.0
    }
}

impl Model for Worse {
    fn new(setup: &Setup, vars: VarBuilder) -> Result<Self> {
        let (features, outputs) = (setup.features()?, setup.outputs());
        Ok(Self(candle_nn::linear(features, outputs, vars.pp("line"))?))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.0.forward(&batch.input()?.flatten_from(1)?)
    }

    fn metrics(&self) -> Vec<(String, Box<dyn Metric>)> {
        vec![("largest".to_owned(), Box::new(Largest::default()))]
    }
}

#[test]
fn training_stops_early_on_a_metric_of_the_models_own_and_keeps_the_best_weights() {
    let dir = tempfile::tempdir().unwrap();
    let mut long = job(JOB);
    long.epochs = 1000;
    long.run_dir = Some(dir.path().join("run"));
    // The outputs grow as long as it trains, so the first evaluation is the best one.
    let metric = "largest".to_owned();
    let goal = Some(flambeau::settings::Goal::Min);
    let mut trainer = Trainer::new(long)
        .model::<Worse>()
        .callback(EarlyStopping {
            metric: metric.clone(),
            goal,
            patience: 3,
            ..EarlyStopping::default()
        })
        .callback(Best { metric, goal });
    let history = trainer.fit().unwrap();
    let stopped = history.stopped.clone().unwrap();
    assert!(
        stopped.contains("largest has not improved for 3 evaluations"),
        "{stopped}"
    );
    let values = history.values("largest");
    assert!((4..=8).contains(&values.len()), "{values:?}");
    let first = values[0];
    assert!(values[1..].iter().all(|value| *value > first), "{values:?}");

    // The best weights measure what the best evaluation has measured.
    let best = trainer.best().unwrap();
    let measured = best.evaluate().unwrap();
    assert_eq!(measured["largest"], first);
    assert_eq!(measured["accuracy"], history.values("accuracy")[0]);
    let outputs = best.predict_held_out().unwrap();
    let last = trainer.predict_held_out().unwrap();
    assert!(outputs.len() == last.len() && outputs != last);
    assert_ne!(best.weights(), trainer.weights().unwrap());
    assert_eq!(
        trainer.evaluate().unwrap()["largest"],
        *values.last().unwrap()
    );
}

#[test]
fn the_best_weights_are_refused_where_none_were_kept() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut short = job(JOB);
    (short.epochs, short.run_dir) = (1, Some(run.clone()));
    let mut trainer = Trainer::new(short);
    assert!(trainer.best().is_err(), "nothing was trained yet");
    trainer.fit().unwrap();
    let error = trainer.best().err().unwrap().to_string();
    assert!(
        error.contains("best.safetensors") && error.contains("best.metric"),
        "{error}"
    );
    for command in ["eval", "predict"] {
        let output = program().run(&[command, run.to_str().unwrap(), "--best"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(&error), "{said}");
    }

    // The rows of tables are in checkpoints alone, which are not of the best evaluation.
    let mut trainer = Trainer::new(job(
        "epochs = 1\n[best]\nmetric = \"auc\"\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 2000\nrows = 100\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [8]\n",
    ));
    let error = trainer.fit().unwrap_err().to_string();
    assert!(
        error.contains("`best` is not possible with this model: it has tables"),
        "{error}"
    );
}

#[test]
fn a_training_may_follow_one_that_has_failed_in_the_same_folder() {
    let dir = tempfile::tempdir().unwrap();
    let mut same = job(JOB);
    same.run_dir = Some(dir.path().join("run"));
    same.checkpoint.enabled = false;
    let panics = on_evaluation(|_, _| panic!("a fault of the callback"));
    let mut first = Trainer::new(same.clone()).callback(panics);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| first.fit())).unwrap_err();
    let mut wrong = same.clone();
    wrong.best = Some(Best {
        metric: "auc".to_owned(),
        goal: None,
    });
    let error = Trainer::new(wrong).fit().unwrap_err().to_string();
    assert!(error.contains("best.metric"), "{error}");
    assert_eq!(Trainer::new(same).fit().unwrap().epochs.len(), 3);
}

pub(crate) fn points(count: usize) -> std::result::Result<InMemory, InputError> {
    let x: Vec<f32> = (0..count * 2).map(|i| (i % 17) as f32 / 17.0).collect();
    let y = x.chunks(2).map(|pair| pair[0] - 2.0 * pair[1]).collect();
    InMemory::new(
        vec![Column::numbers("x", vec![2], x)],
        vec![Column::numbers("y", vec![1], y)],
    )
}

#[test]
fn a_program_trains_on_its_own_data_and_predicts() {
    let job = job(
        "epochs = 40\nbatch_size = 8\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.3\n[strategy]\nmode = \"sync\"\n",
    );
    let mut trainer = Trainer::new(job)
        .model::<Worse>()
        .in_memory(points(256).unwrap(), points(64).unwrap());
    let untrained = trainer.predict_held_out().unwrap_err().to_string();
    assert!(untrained.contains("call fit first"), "{untrained}");
    trainer.fit().unwrap();
    let one = |x: [f32; 2]| vec![Column::numbers("x", vec![2], x.to_vec())];
    let predicted = trainer.predict(one([0.5, 0.25])).unwrap();
    assert!(predicted[0][0].abs() < 1e-2, "{predicted:?}");
    assert_eq!(trainer.predict_held_out().unwrap().len(), 64);

    let other = vec![Column::numbers("z", vec![2], vec![0.0, 0.0])];
    let refused = trainer.predict(other).unwrap_err().to_string();
    assert!(refused.contains("the same columns"), "{refused}");
}

#[test]
fn a_training_goes_on_from_the_checkpoint_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = job(JOB);
    first.run_dir = Some(dir.path().join("first"));
    Trainer::new(first.clone()).fit().unwrap();
    first.epochs = 5;
    // The folder of the first one is not overwritten.
    for from in ["first", "first/checkpoints/1"] {
        let from = dir.path().join(from);
        let mut same = Trainer::new(first.clone()).restore(from.to_str().unwrap());
        let error = same.fit().unwrap_err();
        assert!(matches!(error, Error::SameRun { .. }), "{error}");
    }
    assert!(dir.path().join("first/summary.json").is_file());
    first.run_dir = None;
    let mut second = Trainer::new(first).restore(dir.path().join("first").to_str().unwrap());
    let history = second.fit().unwrap();
    let numbers: Vec<u32> = history.epochs.iter().map(|epoch| epoch.number).collect();
    assert_eq!(numbers, [4, 5]);
}

#[test]
fn what_cannot_be_trained_is_refused_with_the_reason() {
    for (text, expected) in [
        ("[model]\nname = \"nothing\"\n", "nothing"),
        (
            "[data]\nkind = \"csv\"\ndir = \"/no/such/file.csv\"\n",
            "/no/such/file.csv",
        ),
        ("[best]\nmetric = \"auc\"\n", "best.metric"),
    ] {
        let error = Trainer::new(job(text)).fit().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = Trainer::new(job("")).devices("tpu").fit().unwrap_err();
    assert!(matches!(error, Error::Device(_)), "{error}");
    let mut wrong = job("");
    wrong.batch_size = 0;
    let error = Trainer::new(wrong).fit().unwrap_err().to_string();
    assert!(error.contains("batch_size"), "{error}");
}

#[tokio::test]
async fn fit_may_be_called_within_an_asynchronous_runtime() {
    let history = Trainer::new(job(JOB)).fit().unwrap();
    assert_eq!(history.epochs.len(), 3);
}

/// The digits that come with Flambeau, as a program reads them itself.
fn digits() -> Dataset {
    let registry = model::registry::Registry::builtin();
    let data = flambeau::settings::Data::default();
    registry
        .open(&data, 5, flambeau::Purpose::Training)
        .unwrap()
}

/// Trains a line of this name on the digits in a loop of its own, on two replicas, and writes its weights.
fn train_in_a_loop(job: &Job, name: &'static str, file: &std::path::Path) {
    let strategy = Strategy::mirrored("cpu,cpu").unwrap();
    let (features, classes) = (64, 10);
    let build = |vars: VarBuilder| candle_nn::linear(features, classes, vars.pp(name));
    let mut model = strategy.scope(job.seed, build).unwrap();
    let momentum = model.optimizer_of("*", job).unwrap();
    let mut data = digits();
    let (count, batch) = (data.training.count(), u64::from(job.batch_size));
    for epoch in 0..job.epochs {
        let order = Order::Shuffled {
            seed: job.seed,
            epoch,
        };
        for start in (0..count).step_by(2 * batch as usize) {
            let mut parts = Vec::new();
            for place in [start, start + batch] {
                let (from, to) = (place.min(count), (place + batch).min(count));
                let read = |data: &mut Box<dyn Samples>| {
                    Batch::of_samples(data.read(order, from..to).unwrap(), &Device::Cpu).unwrap()
                };
                parts.push((from < to).then(|| read(&mut data.training)));
            }
            let step = |replica: &mut flambeau::Replica<'_, Linear>| {
                // A replica without samples takes part with the first ones, and none of their weight.
                let own = parts[replica.index()].as_ref();
                let batch = own.or(parts[0].as_ref()).unwrap();
                let inputs = batch.input()?.flatten_from(1)?;
                let outputs = replica.model().forward(&inputs)?;
                let loss = candle_nn::loss::cross_entropy(&outputs, batch.target()?)?;
                let samples = own.map_or(0, |batch| batch.samples());
                replica.minimize(momentum, &loss, samples)
            };
            model.run(step).unwrap();
        }
    }
    model.save(file).unwrap();
}

#[test]
fn a_loop_of_ones_own_ends_with_the_weights_of_fit() {
    let mut job = job(JOB);
    job.strategy.mode = Mode::Sync;
    let mut trainer = Trainer::new(job.clone()).model::<Worse>();
    let history = trainer.fit().unwrap();
    let fitted = weights(&trainer.weights().unwrap());

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own.safetensors");
    train_in_a_loop(&job, "line", &file);
    let difference = difference(&weights(&file), &fitted);
    assert!(difference < 1e-5, "{difference}");
    assert!(history.last("accuracy").unwrap() > 0.8);
}

#[test]
fn fit_a_loop_of_ones_own_and_a_training_with_an_evaluator_end_with_the_same_weights() {
    let text = "seed = 5\nepochs = 3\nbatch_size = 16\nevaluations = \"last\"\n[optimizer]\nname = \"momentum\"\n[model]\nname = \"softmax\"\n[cluster]\nps = 2\nworkers = 2\n[strategy]\nmode = \"sync\"\n[checkpoint]\nevery_steps = 20\n";
    let mut trainer = Trainer::new(job(text)).devices("cpu");
    let history = trainer.fit().unwrap();
    let fitted = weights(&trainer.weights().unwrap());

    let dir = tempfile::tempdir().unwrap();
    let looped = dir.path().join("loop.safetensors");
    train_in_a_loop(&job(text), "output", &looped);
    let apart = difference(&weights(&looped), &fitted);
    assert!(apart < 1e-5, "the loop: {apart}");

    let (file, run) = (dir.path().join("job.toml"), dir.path().join("run"));
    std::fs::write(&file, text).unwrap();
    let place = run.to_str().unwrap();
    let mut evaluator = program().command(&["evaluator", place, "--every", "0.1"]);
    let evaluator = evaluator.stdout(std::process::Stdio::piped()).spawn();
    let arguments = [
        "train",
        file.to_str().unwrap(),
        "--quiet",
        "--run-dir",
        place,
    ];
    let output = program().run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let evaluated = evaluator.unwrap().wait_with_output().unwrap();
    assert!(evaluated.status.success(), "{evaluated:?}");
    let apart = difference(&weights(&run.join("model.safetensors")), &fitted);
    assert!(apart < 1e-5, "beside an evaluator: {apart}");
    let results = std::fs::read_to_string(run.join("evaluator.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(results.lines().last().unwrap()).unwrap();
    let accuracy = last["metrics"]["accuracy"].as_f64().unwrap();
    assert!((accuracy - history.last("accuracy").unwrap()).abs() < 1e-6);
}
