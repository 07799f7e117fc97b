//! Predicts the price of a house from its area and its city, with a model, data and a metric of its own.

use flambeau::candle_core::{D, DType, Result, Tensor};
use flambeau::candle_nn::VarBuilder;
use flambeau::nn::{Embedding, Linear};
use flambeau::settings::{EarlyStopping, Goal};
use flambeau::{
    Batch, Column, History, InMemory, InputError, Job, Metric, Model, Pass, Setup, Trainer,
};

const CITIES: u64 = 3;

struct Price {
    city: Embedding,
    area: Linear,
}

impl Model for Price {
    fn new(_: &Setup, vars: VarBuilder) -> Result<Self> {
        Ok(Self {
            city: Embedding::new(CITIES as usize, 1, vars.pp("city"))?,
            area: Linear::new(1, 1, vars.pp("area"))?,
        })
    }

    fn forward(&self, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let city = self.city.forward(batch.input_of("city")?)?;
        (city + self.area.forward(batch.input_of("area")?)?)?.squeeze(D::Minus1)
    }

    fn metrics(&self) -> Vec<(String, Box<dyn Metric>)> {
        vec![("within_a_tenth".to_owned(), Box::new(Within::default()))]
    }
}

/// The share of predicted prices that are off by at most 0.1.
#[derive(Default)]
struct Within {
    houses: f64,
    good: f64,
}

impl Metric for Within {
    fn add(&mut self, outputs: &Tensor, batch: &Batch) -> Result<()> {
        let error = (outputs.flatten_all()? - batch.target()?.flatten_all()?)?.abs()?;
        let good = error.le(0.1f32)?.to_dtype(DType::F64)?;
        self.good += good.sum_all()?.to_scalar::<f64>()?;
        self.houses += batch.samples() as f64;
        Ok(())
    }

    fn value(&mut self) -> f64 {
        self.good / self.houses
    }
}

/// A house costs 1 for each city before its own, and 2 for each unit of area.
fn houses(count: u32) -> std::result::Result<InMemory, InputError> {
    let city: Vec<u32> = (0..count).map(|i| i % CITIES as u32).collect();
    let area: Vec<f32> = (0..count).map(|i| (i % 10) as f32 / 10.0).collect();
    let price = city.iter().zip(&area).map(|(city, area)| *city as f32 + 2.0 * area);
    let price = price.collect();
    InMemory::new(
        vec![Column::category("city", city, CITIES), Column::numbers("area", vec![1], area)],
        vec![Column::numbers("price", vec![], price)],
    )
}

fn trainer() -> std::result::Result<Trainer, flambeau::Error> {
    let job = Job::from_toml(
        "epochs = 500\nstrategy = { mode = \"sync\" }\noptimizer = { name = \"adam\", learning_rate = 0.05 }",
    )?;
    Ok(Trainer::new(job)
        .model::<Price>()
        .in_memory(houses(300)?, houses(60)?)
        .callback(EarlyStopping {
            metric: "within_a_tenth".to_owned(),
            goal: Some(Goal::Max),
            patience: 20,
            min_delta: 0.0,
        }))
}

fn price(trainer: &Trainer, city: u32, area: f32) -> std::result::Result<f32, flambeau::Error> {
    let house = vec![
        Column::category("city", vec![city], CITIES),
        Column::numbers("area", vec![1], vec![area]),
    ];
    Ok(trainer.predict(house)?[0][0])
}

fn main() -> std::result::Result<(), flambeau::Error> {
    let mut trainer = trainer()?;
    let history: History = trainer.fit()?;
    println!("{} passes over the data", history.epochs.len());
    println!("a house of area 0.5 in city 2 costs {:.2}", price(&trainer, 2, 0.5)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{price, trainer};

    #[test]
    fn learns_the_prices_and_stops_early() -> Result<(), flambeau::Error> {
        let mut trainer = trainer()?;
        let history = trainer.fit()?;
        assert!(history.epochs.len() < 500, "it did not stop early");
        let why = history.stopped.as_deref().expect("it stopped early");
        assert!(why.contains("within_a_tenth"), "{why}");

        let within = history.values("within_a_tenth");
        assert_eq!(within.len(), history.epochs.len());
        assert!(within[0] < 1.0, "it knew the prices before it trained");
        assert_eq!(history.last("within_a_tenth"), Some(1.0));
        for (city, area) in [(0, 0.0), (1, 0.3), (2, 0.9)] {
            let right = city as f32 + 2.0 * area;
            let predicted = price(&trainer, city, area)?;
            assert!((predicted - right).abs() <= 0.1, "{predicted} is not {right}");
        }
        Ok(())
    }
}
