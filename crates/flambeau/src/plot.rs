//! `flambeau plot`, and the picture at the end of a run: loss and accuracy over epochs. `flambeau plot` writes the
//! report, too. `learning_rates` draws the curve of `flambeau find-learning-rate`.

use daemon::outln;
use std::path::{Path, PathBuf};

use clap::Args;
use plotters::prelude::*;
use shared_proto::job::run_dir;
use worker::finder::LearningRateCurve;

use crate::error::CommandError;
use crate::metrics::{self, Line};
use crate::report;

const SIZE: (u32, u32) = (900, 420);

/// The height of a chart's title and legend.
const HEAD: i32 = 40;

/// The distance of the title from the left edge.
const LEGEND_LEFT: i32 = 64;

/// The most points of a line that are drawn as dots.
const MOST_DOTS: usize = 60;

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with metrics.jsonl.
    run_dir: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    draw(&arguments.run_dir)?;
    outln!("{}", arguments.run_dir.join(run_dir::CURVES).display());
    if report::write(&arguments.run_dir)? {
        outln!("{}", arguments.run_dir.join(run_dir::REPORT).display());
    }
    Ok(())
}

#[derive(Default)]
struct Curves {
    training_loss: Vec<(f64, f64)>,
    test_loss: Vec<(f64, f64)>,
    accuracy: Vec<(f64, f64)>,
}

/// Draws `curves.svg`.
pub(crate) fn draw(dir: &Path) -> Result<(), CommandError> {
    let curves = Curves::of(metrics::read(dir)?);
    let path = dir.join(run_dir::CURVES);
    paint(&curves, &path).map_err(|error| CommandError::Plot {
        path,
        reason: error.to_string(),
    })
}

impl Curves {
    fn of(lines: Vec<Line>) -> Self {
        let mut curves = Self::default();
        for line in lines {
            match line {
                Line::Steps { epoch, loss, .. } => curves.training_loss.push((epoch, loss)),
                Line::Evaluation { epoch, metrics, .. } => {
                    let epoch = f64::from(epoch);
                    let point = |name: &str| metrics.get(name).map(|value| (epoch, value.0));
                    curves.test_loss.extend(point("loss"));
                    curves.accuracy.extend(point("accuracy"));
                }
                Line::LearningRate { .. } | Line::Other => {}
            }
        }
        curves
    }
}

type Painting<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
/// A name, points of (epochs, value), and a colour.
type Curve<'a> = (&'a str, &'a [(f64, f64)], RGBAColor);
type PaintError = Box<dyn std::error::Error>;

fn paint(curves: &Curves, path: &Path) -> Result<(), PaintError> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    if curves.accuracy.is_empty() {
        loss(&root, curves)?;
    } else {
        let (left, right) = root.split_horizontally(SIZE.0 / 2);
        loss(&left, curves)?;
        let chart = [("test accuracy", &curves.accuracy[..], GREEN.mix(0.8))];
        axes(&right, "accuracy", &chart)?;
    }
    root.present()?;
    Ok(())
}

fn loss(area: &Painting, curves: &Curves) -> Result<(), PaintError> {
    let chart = [
        ("training loss", &curves.training_loss[..], BLUE.mix(0.5)),
        ("test loss", &curves.test_loss[..], RED.mix(0.9)),
    ];
    axes(area, "loss", &chart)
}

/// Draws a chart below its title and legend, so that these cover no line.
fn axes(area: &Painting, title: &str, lines: &[Curve]) -> Result<(), PaintError> {
    let (head, area) = area.split_vertically(HEAD);
    legend(&head, title, lines)?;
    let points = || lines.iter().flat_map(|(_, points, _)| points.iter());
    let finite = |values: &mut dyn Iterator<Item = f64>| {
        let finite = values.filter(|v| v.is_finite());
        finite.fold(None, |range: Option<(f64, f64)>, v| {
            Some(range.map_or((v, v), |(low, high)| (low.min(v), high.max(v))))
        })
    };
    let (_, end) = finite(&mut points().map(|p| p.0)).unwrap_or((0.0, 1.0));
    let (low, high) = finite(&mut points().map(|p| p.1)).unwrap_or((0.0, 1.0));
    let margin = ((high - low) * 0.05).max(1e-3);
    let end = end.max(1.0);
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .margin_top(4)
        .x_label_area_size(34)
        .y_label_area_size(52)
        // A margin on the right, so that the last dot is drawn whole.
        .build_cartesian_2d(0.0..end * 1.02, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("epochs")
        .light_line_style(WHITE)
        .draw()?;
    for (_, points, color) in lines {
        let finite = || points.iter().copied().filter(|p| p.1.is_finite());
        chart.draw_series(LineSeries::new(finite(), color.stroke_width(2)))?;
        // A single point is not visible as a line, so it is drawn as a dot.
        if points.len() <= MOST_DOTS {
            chart.draw_series(finite().map(|point| Circle::new(point, 3, color.filled())))?;
        }
    }
    Ok(())
}

/// Draws the loss by the learning rate.
pub(crate) fn learning_rates(curve: &LearningRateCurve, path: &Path) -> Result<(), CommandError> {
    paint_rates(curve, path).map_err(|error| CommandError::Plot {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

fn paint_rates(curve: &LearningRateCurve, path: &Path) -> Result<(), PaintError> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let points = curve.points.iter();
    let smoothed: Vec<(f64, f64)> = points
        .map(|point| (f64::from(point.rate), point.smoothed))
        .collect();
    let values = smoothed.iter().map(|point| point.1);
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    // The losses of single steps are drawn as far as there is room.
    let steps = curve.points.iter().map(|p| (f64::from(p.rate), p.loss));
    let steps: Vec<_> = steps.filter(|p| (low..=high).contains(&p.1)).collect();
    let lines = [
        ("loss of a step", &steps[..], BLUE.mix(0.4)),
        ("smoothed loss", &smoothed[..], RED.mix(0.9)),
    ];
    let (head, area) = root.split_vertically(HEAD);
    let title = match curve.suggestion {
        Some(rate) => format!("suggestion {rate:.1e}"),
        None => "no suggestion".to_owned(),
    };
    legend(&head, &title, &lines)?;
    if let (Some((from, _)), Some((to, _))) = (smoothed.first(), smoothed.last()) {
        let margin = ((high - low) * 0.05).max(1e-3);
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .margin_top(4)
            .x_label_area_size(34)
            .y_label_area_size(52)
            .build_cartesian_2d((*from..to * 1.2).log_scale(), low - margin..high + margin)?;
        let rates = |rate: &f64| format!("{rate:.0e}");
        chart
            .configure_mesh()
            .x_desc("learning rate")
            .x_label_formatter(&rates)
            .light_line_style(WHITE)
            .draw()?;
        for (_, points, color) in lines {
            chart.draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?;
        }
        if let Some(rate) = curve.suggestion.map(f64::from) {
            let ends = [(rate, low - margin), (rate, high + margin)];
            chart.draw_series(LineSeries::new(ends, GREEN.mix(0.8).stroke_width(1)))?;
        }
    }
    root.present()?;
    Ok(())
}

/// Draws the title, and beside it the name of each line in its colour.
fn legend(area: &Painting, title: &str, lines: &[Curve]) -> Result<(), PaintError> {
    let font = ("sans-serif", 18).into_font();
    area.draw(&Text::new(title.to_owned(), (LEGEND_LEFT, 14), font))?;
    for ((name, _, color), i) in lines.iter().zip(0i32..) {
        let left = LEGEND_LEFT + 100 + i * 140;
        area.draw(&PathElement::new(
            [(left, 23), (left + 18, 23)],
            color.stroke_width(2),
        ))?;
        area.draw(&Circle::new((left + 9, 23), 3, color.filled()))?;
        let font = ("sans-serif", 13).into_font();
        area.draw(&Text::new((*name).to_owned(), (left + 24, 17), font))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(lines: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(run_dir::METRICS), lines).unwrap();
        draw(dir.path()).unwrap();
        std::fs::read_to_string(dir.path().join(run_dir::CURVES)).unwrap()
    }

    const EVALUATION: &str =
        r#"{"event":"evaluation","epoch":1,"metrics":{"loss":0.5,"accuracy":0.9}}"#;

    /// Counts the circles of a picture, without those of the legend.
    fn dots(picture: &str) -> usize {
        let below = |circle: &&str| {
            let y = circle
                .split("cy=\"")
                .nth(1)
                .and_then(|y| y.split('"').next());
            y.is_some_and(|y| y.parse::<i32>().unwrap() > HEAD)
        };
        picture.split("<circle").skip(1).filter(below).count()
    }

    #[test]
    fn an_epoch_is_a_point() {
        assert_eq!(dots(&picture(EVALUATION)), 2, "its loss and its accuracy");
    }

    #[test]
    fn names_stand_above_the_curves() {
        let picture = picture(EVALUATION);
        for name in ["test loss", "training loss", "test accuracy"] {
            let text = picture.split("<text").find(|text| text.contains(name));
            let y = text.unwrap().split("y=\"").nth(1).unwrap();
            let y: f64 = y.split('"').next().unwrap().parse().unwrap();
            assert!(y < f64::from(HEAD), "{name} at {y}");
        }
    }
}
