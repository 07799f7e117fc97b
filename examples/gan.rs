//! A generative adversarial network: a loop of one's own, with two optimizers, on the named devices of each host of TF_CONFIG.
//!
//!     cargo run --release --example gan -- cpu,cpu 2000
//!
//! The generator learns to make points of a circle out of noise, the discriminator to tell these from points of the circle.

use std::f64::consts::PI;

use flambeau::candle_core::{Device, Result, Tensor};
use flambeau::candle_nn::{Linear, Module, VarBuilder, linear};
use flambeau::settings::{Adam, Optimizer};
use flambeau::{LoopError, Reduce, Strategy};
use rand::{Rng, SeedableRng, rngs::StdRng};

const SAMPLES: usize = 64;

struct Network([Linear; 3]);

impl Network {
    fn new(inputs: usize, outputs: usize, vars: VarBuilder) -> Result<Self> {
        Ok(Self([
            linear(inputs, 32, vars.pp("first"))?,
            linear(32, 32, vars.pp("second"))?,
            linear(32, outputs, vars.pp("third"))?,
        ]))
    }

    fn forward(&self, inputs: &Tensor) -> Result<Tensor> {
        let [first, second, third] = &self.0;
        third.forward(&second.forward(&first.forward(inputs)?.tanh()?)?.tanh()?)
    }
}

/// The mean of -log(sigmoid(x)): small where the discriminator takes all samples for real ones.
fn looks_real(logits: &Tensor) -> Result<Tensor> {
    (logits.neg()?.exp()? + 1.0)?.log()?.mean_all()
}

/// Uniform numbers from -1 to 1, one for each sample.
fn noise(random: &mut StdRng, device: &Device) -> Result<Tensor> {
    let noise = (0..SAMPLES).map(|_| 2.0 * random.random::<f32>() - 1.0);
    Tensor::from_iter(noise, device)?.reshape((SAMPLES, 1))
}

fn main() -> std::result::Result<(), LoopError> {
    let mut args = std::env::args().skip(1);
    let strategy = Strategy::multi_worker(&args.next().unwrap_or("cpu".to_owned()))?;
    let steps = args.next().unwrap_or_default().parse().unwrap_or(2000);
    let build = |vars: VarBuilder| {
        let generator = Network::new(1, 2, vars.pp("generator"))?;
        let discriminator = Network::new(2, 1, vars.pp("discriminator"))?;
        Ok((generator, discriminator))
    };
    let mut gan = strategy.scope(1, build)?;
    let adam = Optimizer::Adam(Adam::default());
    let for_generator = gan.optimizer("generator.*", adam.clone())?;
    let for_discriminator = gan.optimizer("discriminator.*", adam)?;
    for step in 0..=steps {
        let radii = gan.run(|replica| {
            let (generator, discriminator) = replica.model();
            let mut random = StdRng::seed_from_u64(step * 1000 + replica.index() as u64);
            let fake = generator.forward(&noise(&mut random, replica.device())?)?;
            let angles = (noise(&mut random, replica.device())? * PI)?;
            let real = Tensor::cat(&[angles.cos()?, angles.sin()?], 1)?;
            let on_real = discriminator.forward(&real)?;
            let on_fake = discriminator.forward(&fake.detach())?;
            let loss = (looks_real(&on_real)? + looks_real(&on_fake.neg()?)?)?;
            replica.minimize(for_discriminator, &loss, SAMPLES)?;
            let loss = looks_real(&discriminator.forward(&fake)?)?;
            replica.minimize(for_generator, &loss, SAMPLES)?;
            let radius = fake.sqr()?.sum(1)?.sqrt()?.mean_all()?;
            radius.to_scalar::<f32>().map(f64::from)
        })?;
        if step % 500 == 0 {
            let mean = strategy.reduce(Reduce::Mean, &radii)?;
            println!("step {step:>5}: mean radius {mean:.3}");
        }
    }
    Ok(())
}
