//! The channels between a stage and its neighbours, on devices of this worker or of others.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, SyncSender};

use bytes::Bytes;
use candle_core::{Device, Error, Result, Tensor, Var, bail};
use tokio::sync::mpsc::{Receiver as MessageReceiver, Sender as MessageSender};

use crate::neighbours::Wait;

/// The outputs of a stage for a micro-batch.
pub(super) struct Activations {
    pub(super) values: Tensor,
    /// True if the values depend on a trained variable, so that their gradient is needed.
    pub(super) is_trained: bool,
}

impl Activations {
    /// Returns the values as the inputs of a stage. If their gradient is needed, the inputs are a new variable, which
    /// is returned too: candle's backward pass ends at variables.
    pub(super) fn taken(self) -> Result<(Option<Tensor>, Option<Var>)> {
        if !self.is_trained {
            return Ok((Some(self.values), None));
        }
        let var = Var::from_tensor(&self.values)?;
        Ok((Some(var.as_tensor().clone()), Some(var)))
    }
}

/// The gradient of a stage's inputs; `None` if the inputs do not depend on trained variables, or the loss does not
/// depend on the inputs.
pub(super) type Gradient = Option<Tensor>;

/// A value that one stage sends to another.
pub(super) trait Travels: Sized {
    fn to_device(self, device: &Device) -> Result<Self>;

    /// Returns the tensor of the value, with a name for its kind; `None` if the value has no tensor.
    fn named(&self) -> Option<(&'static str, &Tensor)>;

    /// Returns the value that has this named tensor; `None` if values of this type do not use the name.
    fn of_named(named: Option<(&str, Tensor)>) -> Option<Self>;
}

impl Travels for Activations {
    fn to_device(self, device: &Device) -> Result<Self> {
        Ok(Self {
            values: self.values.to_device(device)?,
            ..self
        })
    }

    fn named(&self) -> Option<(&'static str, &Tensor)> {
        let name = match self.is_trained {
            true => "trained",
            false => "fixed",
        };
        Some((name, &self.values))
    }

    fn of_named(named: Option<(&str, Tensor)>) -> Option<Self> {
        let (name, values) = named?;
        let is_trained = match name {
            "trained" => true,
            "fixed" => false,
            _ => return None,
        };
        Some(Self { values, is_trained })
    }
}

impl Travels for Gradient {
    fn to_device(self, device: &Device) -> Result<Self> {
        self.map(|gradient| gradient.to_device(device)).transpose()
    }

    fn named(&self) -> Option<(&'static str, &Tensor)> {
        self.as_ref().map(|gradient| ("gradient", gradient))
    }

    fn of_named(named: Option<(&str, Tensor)>) -> Option<Self> {
        match named {
            None => Some(None),
            Some(("gradient", gradient)) => Some(Some(gradient)),
            Some(_) => None,
        }
    }
}

/// A value on its way from a stage to another.
pub(super) enum Parcel<T> {
    /// For a stage of the same worker, on the stage's device.
    Value(T),
    /// For another worker: a safetensors file with at most one tensor.
    Message(Bytes),
}

impl<T: Travels> Parcel<T> {
    /// Returns the value on this device.
    pub(super) fn open(self, device: &Device) -> Result<T> {
        let message = match self {
            Self::Value(value) => return Ok(value),
            Self::Message(message) => message,
        };
        let tensors = candle_core::safetensors::load_buffer(&message, device)?;
        let count = tensors.len();
        let mut tensors = tensors.into_iter();
        let first = tensors.next().filter(|_| count == 1);
        let named = first
            .as_ref()
            .map(|(name, tensor)| (&name[..], tensor.clone()));
        let value = T::of_named(named).filter(|_| count <= 1);
        let Some(value) = value else {
            bail!(
                "another worker of the stage group sent {count} tensors that this stage does not expect; do all workers run the same version of Flambeau?"
            );
        };
        Ok(value)
    }
}

/// The end of a channel that sends to a neighbour.
pub(super) enum Outlet<T> {
    /// To a stage of this worker, on this device.
    Stage(SyncSender<Parcel<T>>, Device),
    /// To another worker.
    Worker(MessageSender<Bytes>),
}

impl<T: Travels> Outlet<T> {
    /// Prepares a value for sending: copies it to the stage's device, or serializes it for another worker.
    pub(super) fn pack(&self, value: T) -> Result<Parcel<T>> {
        match self {
            Self::Stage(_, device) => value.to_device(device).map(Parcel::Value),
            Self::Worker(_) => {
                let tensors: BTreeMap<&str, &Tensor> = value.named().into_iter().collect();
                let message = safetensors::serialize(tensors, None);
                Ok(Parcel::Message(message.map_err(Error::wrap)?.into()))
            }
        }
    }

    /// Sends a packed value. Returns false if the neighbour is gone.
    pub(super) fn send(&self, parcel: Parcel<T>) -> bool {
        match (self, parcel) {
            (Self::Stage(stage, _), parcel) => stage.send(parcel).is_ok(),
            (Self::Worker(worker), Parcel::Message(message)) => {
                worker.blocking_send(message).is_ok()
            }
            (Self::Worker(_), Parcel::Value(_)) => false,
        }
    }
}

/// The end of a channel that receives from a neighbour.
pub(super) enum Inlet<T> {
    /// From a stage of this worker.
    Stage(Receiver<Parcel<T>>),
    /// From another worker.
    Worker(MessageReceiver<Bytes>, Wait),
}

impl<T> Inlet<T> {
    /// Receives the neighbour's next value; `None` if the neighbour is gone. A neighbour in the same lane has sent the
    /// value before, or never will, so this does not wait for it.
    pub(super) fn receive(&mut self, is_in_lane: bool) -> Option<Parcel<T>> {
        match self {
            Self::Stage(stage) if is_in_lane => stage.try_recv().ok(),
            Self::Stage(stage) => stage.recv().ok(),
            Self::Worker(worker, wait) => {
                let message = wait.during(|| worker.blocking_recv());
                message.map(Parcel::Message)
            }
        }
    }
}

/// The channels of a stage.
#[derive(Default)]
pub(super) struct Ways {
    pub(super) from_before: Option<Inlet<Activations>>,
    pub(super) to_next: Option<Outlet<Activations>>,
    pub(super) from_next: Option<Inlet<Gradient>>,
    pub(super) to_before: Option<Outlet<Gradient>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_any_type_travel_in_messages_and_others_are_refused() {
        let message = |value: &dyn Fn() -> Activations| {
            let (worker, _kept) = tokio::sync::mpsc::channel(1);
            match Outlet::Worker(worker).pack(value()).unwrap() {
                Parcel::Message(message) => message,
                Parcel::Value(_) => unreachable!("it goes to another worker"),
            }
        };
        let numbers = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap();
        for dtype in [
            candle_core::DType::F32,
            candle_core::DType::BF16,
            candle_core::DType::I64,
            candle_core::DType::U8,
        ] {
            let sent = numbers.reshape((3, 4)).unwrap().to_dtype(dtype).unwrap();
            for is_trained in [true, false] {
                let values = sent.clone();
                // A part of a tensor's memory, in another order.
                let part = move || Activations {
                    values: values.t().unwrap().narrow(0, 1, 2).unwrap(),
                    is_trained,
                };
                let parcel = Parcel::Message(message(&part));
                let found: Activations = parcel.open(&Device::Cpu).unwrap();
                assert_eq!(found.is_trained, is_trained);
                assert_eq!(found.values.dtype(), dtype);
                let as_numbers = |tensor: &Tensor| {
                    let tensor = tensor.to_dtype(candle_core::DType::F32).unwrap();
                    tensor.to_vec2::<f32>().unwrap()
                };
                assert_eq!(as_numbers(&found.values), as_numbers(&part().values));
            }
        }
        let activations = message(&|| Activations {
            values: numbers.clone(),
            is_trained: true,
        });
        let as_gradient: Result<Gradient> = Parcel::Message(activations).open(&Device::Cpu);
        assert!(as_gradient.is_err());
        for bytes in [&b""[..], b"no file", &[255; 64]] {
            let bytes = Bytes::copy_from_slice(bytes);
            let opened: Result<Activations> = Parcel::Message(bytes).open(&Device::Cpu);
            assert!(opened.is_err());
        }
    }
}
