//! The curve of `flambeau find-learning-rate` as a picture.

use std::path::Path;

use plotters::prelude::*;
use worker::alone::finder::LearningRateCurve;

use crate::error::CommandError;

const SIZE: (u32, u32) = (900, 420);

/// The height of a chart's title and legend.
const HEAD: i32 = 40;

/// The distance of the title from the left edge.
const LEGEND_LEFT: i32 = 64;

type Painting<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
/// A name, points of (rate, loss), and a colour.
type Curve<'a> = (&'a str, &'a [(f64, f64)], RGBAColor);
type PaintError = Box<dyn std::error::Error>;

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
