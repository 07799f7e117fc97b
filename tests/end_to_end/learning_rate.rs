//! The learning rate: falls on a plateau, and the search for one.

use candle_core::{Result, Tensor};
use flambeau::candle_nn::{self, VarBuilder};
use flambeau::settings::{Goal, Plateau};
use flambeau::{Batch, Column, InMemory, Model, Pass, RateRange, Setup, Trainer};

use crate::fit::job;
use crate::program;
use crate::weights::{difference, weights};

/// A job that halves its learning rate after the second pass: the loss falls, but the goal of the plateau is a high one.
const PLATEAU: &str = "seed = 5\nepochs = 4\nbatch_size = 16\n[optimizer]\nname = \"momentum\"\nlearning_rate = 0.02\n[model]\nhidden = [16]\n[plateau]\nmetric = \"loss\"\ngoal = \"max\"\npatience = 1\nfactor = 0.5\nmin_learning_rate = 0.01\n[cluster]\nps = 2\nworkers = 2\n[strategy]\nmode = \"sync\"\n";

#[test]
fn on_a_plateau_the_learning_rate_falls_in_every_strategy_and_stays_low_in_a_run_that_goes_on() {
    let clicks = "[data]\nkind = \"clicks\"\n[data.options]\nsamples = 2000\nrows = 100\n[[tables]]\ntables = \"*\"\noptimizer = { name = \"row-adagrad\", learning_rate = 0.02 }\n";
    for (strategy, workers, data) in [
        ("name = \"parameter-server\"", 2, ""),
        ("name = \"multi-worker-mirrored\"", 2, ""),
        (
            "name = \"multi-worker-mirrored\"\noptimizer_copies = 1",
            2,
            "",
        ),
        ("name = \"one-device\"", 1, ""),
        ("name = \"parameter-server\"", 2, clicks),
        ("name = \"hybrid\"", 2, clicks),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut text = PLATEAU.replace("workers = 2", &format!("workers = {workers}"));
        text += &format!("{strategy}\n{data}");
        if !data.is_empty() {
            text = text.replace(
                "hidden = [16]",
                "name = \"deepfm\"\nembedding = 4\nhidden = [8]",
            );
        }
        let of_text = |text: &str, epochs, run: &str| {
            let mut job = job(text);
            (job.epochs, job.run_dir) = (epochs, Some(dir.path().join(run)));
            job
        };
        let job = |epochs, run: &str| of_text(&text, epochs, run);
        let of = |run: &str| weights(&dir.path().join(run).join("model.safetensors"));
        let from = |run: &str| dir.path().join(run).to_str().unwrap().to_owned();
        let history = Trainer::new(job(4, "whole")).fit().unwrap();
        let falls: Vec<_> = history
            .learning_rates
            .iter()
            .map(|fall| (fall.epoch, fall.factor))
            .collect();
        assert_eq!(falls, [(2, 0.5)], "{strategy}");

        // The same by hand: two passes with one rate, and two with the half of it.
        let by_hand = |epochs, run: &str, rate: &str| {
            let text = text.replace("learning_rate = 0.02", &format!("learning_rate = {rate}"));
            let mut job = of_text(&text, epochs, run);
            job.plateau = None;
            job
        };
        Trainer::new(by_hand(2, "first", "0.02")).fit().unwrap();
        let mut second = Trainer::new(by_hand(4, "second", "0.01")).restore(from("first"));
        second.fit().unwrap();
        let apart = difference(&of("whole"), &of("second"));
        assert!(apart < 1e-6, "{strategy}: {apart}");
        let mut same = Trainer::new(by_hand(4, "same", "0.02")).restore(from("first"));
        same.fit().unwrap();
        let apart = difference(&of("whole"), &of("same"));
        assert!(apart > 1e-4, "{strategy}: the rate matters: {apart}");

        // A run that goes on from the third pass has the lower rate.
        Trainer::new(job(3, "begun")).fit().unwrap();
        if workers == 1 {
            let output = program().run(&["resume", &from("begun"), "--epochs", "4", "--quiet"]);
            assert!(output.status.success(), "{output:?}");
        } else {
            Trainer::new(job(4, "begun-2"))
                .restore(from("begun"))
                .fit()
                .unwrap();
        }
        let apart = difference(&of("whole"), &of("begun-2"));
        assert!(apart < 1e-6, "{strategy}: {apart}");
    }
}

#[test]
fn on_a_plateau_the_learning_rate_falls_in_every_mode_and_in_tables() {
    let hybrid = "\n[data]\nkind = \"clicks\"\n[data.options]\nsamples = 2000\nrows = 100\n";
    for (mode, more) in [
        (
            "name = \"parameter-server\"\nmode = \"bounded\"\ncorrection = { average = 0.0 }",
            "",
        ),
        (
            "name = \"parameter-server\"\nmode = \"async\"\ncorrection = { average = 0.0 }",
            "",
        ),
        ("name = \"hybrid\"\nmode = \"sync\"", hybrid),
        ("name = \"hybrid\"\nmode = \"async\"", hybrid),
    ] {
        let mut job = job(&format!(
            "epochs = 6\nbatch_size = 16\n[cluster]\nps = 2\nworkers = 2\n[strategy]\n{mode}\n{more}"
        ));
        if !more.is_empty() {
            (job.model.name, job.model.hidden, job.model.embedding) = ("deepfm".into(), vec![8], 4);
        }
        // After the fall the weights hardly change.
        let plateau = Plateau {
            goal: Some(Goal::Max),
            patience: 1,
            factor: 1e-9,
            ..Plateau::default()
        };
        let history = Trainer::new(job).callback(plateau).fit().unwrap();
        let fall = history.learning_rates.first().unwrap().epoch;
        assert_eq!(
            fall, 2,
            "{mode}: the loss falls, and the job says that large ones are better"
        );
        let losses = history.values("loss");
        assert!((losses[5] - losses[4]).abs() < 1e-6, "{mode}: {losses:?}");
        assert!((losses[1] - losses[0]).abs() > 1e-4, "{mode}: {losses:?}");
    }
}

/// A line without a bias through the origin, on which the largest stable learning rate is known.
struct Slope(Tensor);

impl Model for Slope {
    fn new(_: &Setup, vars: VarBuilder) -> Result<Self> {
        let begins_at_zero = candle_nn::Init::Const(0.0);
        Ok(Self(vars.get_with_hints(1, "slope", begins_at_zero)?))
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        batch.input()?.broadcast_mul(&self.0)
    }
}

#[test]
fn the_learning_rate_finder_suggests_a_stable_rate_of_a_known_quadratic() {
    // The loss is the mean of (slope * 2 - y)^2, so its second derivative is 8. Gradient descent is stable below 2 / 8.
    const STABLE: f32 = 0.25;
    let samples = |count: usize, noise: f32| {
        let y = |i: usize| 6.0 + noise * (((i * 37) % 17) as f32 / 17.0 - 0.5);
        InMemory::new(
            vec![Column::numbers("x", vec![1], vec![2.0; count])],
            vec![Column::numbers("y", vec![1], (0..count).map(y).collect())],
        )
    };
    let text = "epochs = 4\nbatch_size = 8\n[optimizer]\nname = \"sgd\"\nlearning_rate = 0.001\n[cluster]\nworkers = 1\n[strategy]\nname = \"one-device\"\n";
    let with_noise = |rate: f32, noise: f32| {
        let mut job = job(text);
        *job.optimizer.learning_rate_mut() = rate;
        let data = (samples(256, noise).unwrap(), samples(64, noise).unwrap());
        Trainer::new(job).model::<Slope>().in_memory(data.0, data.1)
    };
    let trainer = |rate| with_noise(rate, 1.0);
    let range = RateRange {
        from: 1e-4,
        to: 100.0,
        rates: 200,
    };
    let curve = trainer(0.001).find_learning_rate(range).unwrap();
    assert!(curve.diverged && curve.points.len() < 200, "{curve:?}");
    let end = curve.points.last().unwrap().rate;
    assert!(end > STABLE && end < 20.0 * STABLE, "it diverges at {end}");
    let rate = curve.suggestion.unwrap();
    assert!((0.001..STABLE).contains(&rate), "{rate}");
    // Each step has the rate that the curve says: without noise, the error shrinks by 1 - 8 * rate.
    let exact = with_noise(0.001, 0.0).find_learning_rate(range).unwrap();
    for pair in exact
        .points
        .windows(2)
        .take_while(|pair| pair[1].loss > 1e-3)
    {
        let shrinks = (1.0 - 8.0 * f64::from(pair[0].rate)).powi(2);
        let apart = pair[1].loss / pair[0].loss - shrinks;
        assert!(apart.abs() < 1e-3, "{pair:?}");
    }
    // Whatever the job's own rate is, the curve is that of the rates that are tried.
    let other = trainer(0.5).find_learning_rate(range).unwrap();
    assert!((other.suggestion.unwrap() / rate - 1.0).abs() < 1e-3);

    let converged = trainer(rate).fit().unwrap().last("rmse").unwrap();
    assert!(converged < 0.5, "{converged}");
    let mut beyond = trainer(2.0 * STABLE);
    let diverged = beyond.fit().map(|history| history.last("rmse").unwrap());
    assert!(diverged.map_or(true, |rmse| rmse.is_nan() || rmse > 6.0));
}

#[test]
fn the_learning_rate_finder_works_with_tables_and_from_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("clicks.toml");
    let text = "[data]\nkind = \"clicks\"\n[data.options]\nsamples = 4000\nrows = 200\n[model]\nname = \"deepfm\"\nembedding = 4\nhidden = [8]\n";
    std::fs::write(&file, text).unwrap();
    let picture = dir.path().join("rates.svg");
    let arguments = [
        "find-learning-rate",
        file.to_str().unwrap(),
        "--json",
        "--plot",
        picture.to_str().unwrap(),
    ];
    let output = program().run(&arguments);
    assert!(output.status.success(), "{output:?}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let points = found["points"].as_array().unwrap();
    assert!(points.len() > 50, "{}", points.len());
    let losses = points
        .iter()
        .map(|point| point["smoothed"].as_f64().unwrap());
    let (first, lowest) = (
        points[0]["loss"].as_f64().unwrap(),
        losses.fold(f64::MAX, f64::min),
    );
    assert!(
        lowest < first && found["suggestion"].as_f64().unwrap() > 1e-7,
        "{found}"
    );
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.contains("learning rate") && drawn.contains("suggestion"));

    for (wrong, named) in [
        (["--from", "0"], "`from`"),
        (["--rates", "3"], "`rates`"),
        (["--to", "1e-9"], "`to`"),
    ] {
        let output = program().run(&["find-learning-rate", wrong[0], wrong[1]]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(named), "{said}");
    }
}
