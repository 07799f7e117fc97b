//! The loop that all rules share: it updates the elements of a part.

use shared_proto::kernel::{Kernel, Simd, WithSimd};

use crate::{LookAhead, Part};

impl Part<'_> {
    /// Updates all elements. `step` takes a weight, its gradient and its `N` slots, and returns the new weight and
    /// slots. It must be short: a closure that the compiler does not inline is compiled for the baseline (see
    /// [`Kernel::run`]).
    ///
    /// Look-ahead weights repeat the change that this step makes to the weights. They are not computed from the slots:
    /// slots of weights that no longer have gradients become denormal numbers, which slow the processor down.
    pub(crate) fn update<const N: usize>(
        self,
        kernel: Kernel,
        step: impl Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
    ) {
        kernel.run(Elements { part: self, step });
    }
}

/// The work of [`Part::update`].
struct Elements<'a, const N: usize, F: Fn(f32, f32, [f32; N]) -> (f32, [f32; N])> {
    part: Part<'a>,
    step: F,
}

impl<const N: usize, F: Fn(f32, f32, [f32; N]) -> (f32, [f32; N])> WithSimd for Elements<'_, N, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { part, step } = self;
        let weights = part.weights;
        // Slices of the same length, so that the loops check no bounds.
        let gradient = &part.gradient[..weights.len()];
        let mut slots = part.slots.into_iter();
        let mut slots: [&mut [f32]; N] =
            std::array::from_fn(|_| &mut slots.next().unwrap_or_default()[..weights.len()]);
        // Two loops: the compiler does not vectorise the second one if a closure is the body of both.
        let Some(LookAhead { made, steps }) = part.ahead else {
            for i in 0..weights.len() {
                let before = slots.each_ref().map(|slot| slot[i]);
                let (weight, after) = step(weights[i], gradient[i].get(), before);
                weights[i] = weight;
                for (slot, after) in slots.iter_mut().zip(after) {
                    slot[i] = after;
                }
            }
            return;
        };
        let made = &mut made[..weights.len()];
        for i in 0..weights.len() {
            let before = slots.each_ref().map(|slot| slot[i]);
            let (weight, after) = step(weights[i], gradient[i].get(), before);
            made[i] = weight + steps * (weight - weights[i]);
            weights[i] = weight;
            for (slot, after) in slots.iter_mut().zip(after) {
                slot[i] = after;
            }
        }
    }
}
