//! A data source of your own, with the whole command line of Flambeau around it:
//!
//!     cargo run --release --example own_data -- train --data spirals --hidden 64
//!     cargo run --release --example own_data -- worker --coordinator HOST:7070

use std::f32::consts::TAU;
use std::process::ExitCode;

use flambeau::{App, Column, DataSetup, Dataset, InMemory, InputError, Source};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Points on interlaced spirals. The number of the spiral is the class.
struct Spirals;

impl Source for Spirals {
    fn open(setup: &DataSetup) -> Result<Dataset, InputError> {
        // Settings of the source's own stand under `options` in the job's [data].
        setup.only(&["arms"])?;
        let arms = setup.whole_number("arms")?.unwrap_or(3);
        if !(2..=10).contains(&arms) {
            return Err(InputError::Invalid(format!(
                "`data.options.arms` is {arms}, but must be from 2 to 10"
            )));
        }
        let arms = arms as u32;
        Dataset::in_memory(points(arms, 600, 0.0)?, points(arms, 100, 0.5)?)
    }
}

/// Returns points on each of the spirals, at equal distances.
fn points(arms: u32, each: u16, offset: f32) -> Result<InMemory, InputError> {
    let (mut values, mut labels) = (Vec::new(), Vec::new());
    for arm in 0..arms {
        for step in 0..each {
            let distance = (f32::from(step) + offset) / f32::from(each);
            let angle = TAU * (distance + arm as f32 / arms as f32);
            values.extend([3.0 * distance * angle.cos(), 3.0 * distance * angle.sin()]);
            labels.push(arm);
        }
    }
    InMemory::new(
        vec![Column::numbers("point", vec![2], values)],
        vec![Column::category("spiral", labels, arms.into())],
    )
}

fn main() -> ExitCode {
    App::new().data::<Spirals>("spirals").main()
}
