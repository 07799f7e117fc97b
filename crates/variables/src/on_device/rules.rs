//! The update rules as candle's operations. The formulas are those of the crate `optimizer`.

use candle_core::{Result, Tensor, bail};
use optimizer::Update;
use shared_proto::job::{Ftrl, Momentum, Optimizer, RmsProp};

/// Returns new weights, and updates their slots.
pub(super) fn updated(
    optimizer: &Optimizer,
    update: Update,
    weights: &Tensor,
    gradient: Tensor,
    slots: &mut [Tensor],
) -> Result<Tensor> {
    let rate = f64::from(update.learning_rate);
    let with_decay = |decay: f32| match decay {
        0.0 => Ok(gradient.clone()),
        decay => &gradient + (weights * f64::from(decay))?,
    };
    match (optimizer, slots) {
        (Optimizer::Sgd(own), []) => weights - (with_decay(own.weight_decay)? * rate)?,
        (Optimizer::Momentum(own), [velocity]) => {
            let step = momentum_step(own, with_decay(own.weight_decay)?, velocity)?;
            weights - (step * rate)?
        }
        (Optimizer::Adagrad(own), [sum]) => {
            let gradient = with_decay(own.weight_decay)?;
            *sum = (&*sum + gradient.sqr()?)?;
            let root = (sum.sqrt()? + f64::from(own.epsilon))?;
            weights - ((gradient * rate)? / root)?
        }
        (Optimizer::RmsProp(own), [square, velocity @ ..]) => {
            let step = with_decay(own.weight_decay)?;
            let step = rmsprop_step(own, &step, square, velocity.first_mut())?;
            weights - (step * rate)?
        }
        (Optimizer::Adam(own), [mean, square]) => {
            let gradient = with_decay(own.weight_decay)?;
            let moments = (own.beta1, own.beta2, own.epsilon);
            weights - adam_step(update, moments, &gradient, (mean, square))?
        }
        (Optimizer::AdamW(own), [mean, square]) => {
            let moments = (own.beta1, own.beta2, own.epsilon);
            let step = adam_step(update, moments, &gradient, (mean, square))?;
            let keep = 1.0 - update.learning_rate * own.weight_decay;
            (weights * f64::from(keep))? - step
        }
        (Optimizer::Ftrl(own), [sum, linear]) => {
            ftrl_weights(own, update.learning_rate, weights, &gradient, (sum, linear))
        }
        (other, slots) => bail!(
            "{} slots do not fit the optimizer {other:?}; this is a fault of the program, please report it",
            slots.len()
        ),
    }
}

/// Returns `before` times `share`, plus `new` times `1 - share`.
fn mixed(before: &Tensor, share: f32, new: &Tensor) -> Result<Tensor> {
    (before * f64::from(share))? + (new * f64::from(1.0 - share))?
}

/// Returns by how much momentum lowers weights, divided by the rate, and updates the velocity.
fn momentum_step(own: &Momentum, gradient: Tensor, velocity: &mut Tensor) -> Result<Tensor> {
    *velocity = ((&*velocity * f64::from(own.momentum))? + &gradient)?;
    match own.nesterov {
        true => gradient + (&*velocity * f64::from(own.momentum))?,
        false => Ok(velocity.clone()),
    }
}

/// Returns by how much RMSProp lowers weights, divided by the rate, and updates the mean of squares and the velocity, if it has one.
fn rmsprop_step(
    own: &RmsProp,
    gradient: &Tensor,
    square: &mut Tensor,
    velocity: Option<&mut Tensor>,
) -> Result<Tensor> {
    *square = mixed(square, own.alpha, &gradient.sqr()?)?;
    let step = (gradient / (square.sqrt()? + f64::from(own.epsilon))?)?;
    let Some(velocity) = velocity else {
        return Ok(step);
    };
    *velocity = ((&*velocity * f64::from(own.momentum))? + step)?;
    Ok(velocity.clone())
}

/// Returns by how much Adam lowers weights, and updates the means of gradients and of their squares.
fn adam_step(
    update: Update,
    (beta1, beta2, epsilon): (f32, f32, f32),
    gradient: &Tensor,
    (mean, square): (&mut Tensor, &mut Tensor),
) -> Result<Tensor> {
    let power = update.number.min(i32::MAX as u64) as i32;
    let lack = |beta: f32| 1.0 - f64::from(beta).powi(power);
    *mean = mixed(mean, beta1, gradient)?;
    *square = mixed(square, beta2, &gradient.sqr()?)?;
    let divisor = square
        .sqrt()?
        .affine(1.0 / lack(beta2).sqrt(), f64::from(epsilon))?;
    (&*mean * (f64::from(update.learning_rate) / lack(beta1)))? / divisor
}

/// Returns the weights that FTRL makes, and updates the sum of squares and the linear term.
fn ftrl_weights(
    own: &Ftrl,
    rate: f32,
    weights: &Tensor,
    gradient: &Tensor,
    (sum, linear): (&mut Tensor, &mut Tensor),
) -> Result<Tensor> {
    if rate == 0.0 {
        // The weights may be a variable's own memory.
        return weights.copy();
    }
    let (inverse, begin) = (f64::from(1.0 / rate), f64::from(own.initial_accumulator));
    let raised = |sum: &Tensor| (sum + begin)?.powf(-f64::from(own.learning_rate_power));
    let before = raised(sum)?;
    *sum = (&*sum + gradient.sqr()?)?;
    let after = raised(sum)?;
    let shrunk = (gradient + (weights * f64::from(2.0 * own.l2_shrinkage))?)?;
    let moved = ((&after - before)? * inverse)?.mul(weights)?;
    *linear = ((&*linear + shrunk)? - moved)?;
    let l1 = f64::from(own.l1);
    let l2 = own.l2 + own.beta / (2.0 * rate);
    let divisor = after.affine(inverse, f64::from(2.0 * l2))?;
    (linear.clamp(-l1, l1)? - &*linear)? / divisor
}
