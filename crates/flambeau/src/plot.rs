//! `flambeau plot`, and the picture at the end of a run: loss and accuracy over epochs.

use std::path::{Path, PathBuf};

use clap::Args;
use plotters::prelude::*;
use shared_proto::job::run_dir;

use crate::error::CommandError;
use crate::metrics::{self, Line};

const SIZE: (u32, u32) = (900, 420);

#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// The run directory, with metrics.jsonl.
    run_dir: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    draw(&arguments.run_dir)?;
    println!("{}", arguments.run_dir.join(run_dir::CURVES).display());
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
                Line::Steps { epoch, loss } => curves.training_loss.push((epoch, loss)),
                Line::Evaluation { epoch, metrics } => {
                    let epoch = f64::from(epoch);
                    let point = |name: &str| metrics.get(name).map(|value| (epoch, value.0));
                    curves.test_loss.extend(point("loss"));
                    curves.accuracy.extend(point("accuracy"));
                }
                Line::Other => {}
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

fn axes(area: &Painting, title: &str, lines: &[Curve]) -> Result<(), PaintError> {
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
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..end.max(1.0), low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("epochs")
        .light_line_style(WHITE)
        .draw()?;
    for (name, points, color) in lines {
        let color = *color;
        let points = points.iter().copied().filter(|p| p.1.is_finite());
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}
