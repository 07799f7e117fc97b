//! `flambeau find-learning-rate`: the loss by the learning rate, in a short training with rising rates.

use daemon::{out, outln};
use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use coordinator::read_job;
use model::registry::Registry;
use replica::device::Choices;
use serde_json::json;
use shared_proto::job::Job;
use shared_proto::number::Number;
use worker::alone::finder::{LearningRateCurve, RateRange, find_learning_rate};

use crate::command::{JobArguments, block_on};
use crate::error::CommandError;
use crate::plot;

/// The most points of a curve that the terminal shows.
const LINES: usize = 20;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    job: JobArguments,
    /// The lowest learning rate, that of the first step.
    #[arg(long, default_value_t = RateRange::default().from, value_name = "RATE")]
    from: f32,
    /// The highest learning rate, that of the last step.
    #[arg(long, default_value_t = RateRange::default().to, value_name = "RATE")]
    to: f32,
    /// The number of learning rates, each of which is tried for one step.
    #[arg(long, default_value_t = RateRange::default().rates, value_name = "NUMBER")]
    rates: u32,
    /// The devices to compute on, separated by commas: auto, cpu or cuda:N.
    #[arg(long, env = "FLAMBEAU_DEVICE", default_value = "auto")]
    device: String,
    /// Draw the curve.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// One JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: Arguments, registry: &Registry) -> Result<(), CommandError> {
    let job = read_job(arguments.job.file.as_deref(), arguments.job.flags)?;
    let range = RateRange {
        from: arguments.from,
        to: arguments.to,
        rates: arguments.rates,
    };
    let curve = search(&job, registry, &arguments.device, range)?;
    if let Some(path) = &arguments.plot {
        plot::learning_rates(&curve, path)?;
    }
    match arguments.json {
        true => outln!("{}", as_json(&curve)),
        false => out!("{}", shown(&curve)),
    }
    Ok(())
}

/// Tries rising learning rates on a job, in this process.
///
/// # Errors
/// If the range or the job makes no sense, or the data or the model cannot be used.
pub(crate) fn search(
    job: &Job,
    registry: &Registry,
    devices: &str,
    range: RateRange,
) -> Result<LearningRateCurve, CommandError> {
    range.validate()?;
    job.validate()?;
    let devices = devices.parse::<Choices>()?.open_to_train()?;
    block_on(async { Ok(find_learning_rate(job, registry, &devices, range).await?) })
}

fn as_json(curve: &LearningRateCurve) -> serde_json::Value {
    let points = curve.points.iter().map(|point| {
        json!({
            "learning_rate": point.rate,
            "loss": Number(point.loss),
            "smoothed": Number(point.smoothed),
        })
    });
    json!({
        "suggestion": curve.suggestion,
        "diverged": curve.diverged,
        "points": points.collect::<Vec<_>>(),
    })
}

fn shown(curve: &LearningRateCurve) -> String {
    let mut text = format!(
        "{:>13}  {:>10}  {:>10}\n",
        "learning rate", "loss", "smoothed"
    );
    let every = curve.points.len().div_ceil(LINES).max(1);
    for point in curve.points.iter().step_by(every) {
        let _ = writeln!(
            text,
            "{:>13.3e}  {:>10.4}  {:>10.4}",
            point.rate, point.loss, point.smoothed
        );
    }
    let last = curve.points.last().map_or(0.0, |point| point.rate);
    text += &match curve.diverged {
        true => format!("the loss diverges beyond {last:.3e}\n"),
        false => format!("the loss has not diverged up to {last:.3e}\n"),
    };
    text += &match curve.suggestion {
        Some(rate) => format!("suggestion: {rate:.3e}, where the smoothed loss falls fastest\n"),
        None => "no suggestion: the smoothed loss does not fall; try other rates or more of them\n"
            .to_owned(),
    };
    text
}

#[cfg(test)]
mod tests {
    use worker::alone::finder::RatePoint;

    use super::*;

    #[test]
    fn a_curve_is_shown_in_a_few_lines_with_its_suggestion() {
        let mut curve = LearningRateCurve::default();
        assert!(shown(&curve).contains("no suggestion"));
        curve.points = (1..=100)
            .map(|i| RatePoint {
                rate: i as f32 / 100.0,
                loss: f64::INFINITY,
                smoothed: 1.0,
            })
            .collect();
        (curve.suggestion, curve.diverged) = (Some(0.5), true);
        let text = shown(&curve);
        assert!(text.lines().count() <= LINES + 3, "{text}");
        assert!(text.contains("suggestion: 5.000e-1") && text.contains("beyond 1.000e0"));
        let object = as_json(&curve);
        assert_eq!(object["suggestion"], 0.5);
        assert_eq!(object["points"].as_array().unwrap().len(), 100);
    }
}
