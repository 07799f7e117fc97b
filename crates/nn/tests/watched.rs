//! Gradients that are told while the backward pass runs.

#![allow(clippy::unwrap_used)]

mod gradients;

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId, Var, bail};
use flambeau_nn::{Watch, backward, backward_watched, cross_entropy, linear, linear_relu};
use gradients::{Source, values};

/// Notes the gradients that it is told, until there are so many.
struct Noted {
    told: RefCell<Vec<(TensorId, Tensor)>>,
    most: usize,
}

impl Watch for Noted {
    fn complete(&self, variable: TensorId, gradient: &Tensor) -> Result<()> {
        let mut told = self.told.borrow_mut();
        if told.len() == self.most {
            bail!("there is no room for another gradient");
        }
        told.push((variable, gradient.clone()));
        Ok(())
    }
}

fn watched(loss: &Tensor, most: usize) -> Result<(GradStore, Vec<(TensorId, Tensor)>)> {
    let noted = Rc::new(Noted {
        told: RefCell::default(),
        most,
    });
    let store = backward_watched(loss, noted.clone())?;
    Ok((store, noted.told.take()))
}

/// The variables of three layers, and their loss.
fn three_layers(source: &mut Source) -> (Vec<[Var; 2]>, Tensor) {
    let x = source.tensor(&[5, 4], DType::F32);
    let sizes = [(4, 6), (6, 7), (7, 3)];
    let layer = |(inputs, outputs): (usize, usize)| {
        [vec![outputs, inputs], vec![outputs]].map(|shape| source.var(&shape, DType::F32))
    };
    let layers: Vec<[Var; 2]> = sizes.map(layer).into();
    let outputs = layers.iter().fold(x, |x, [weight, bias]| {
        linear_relu(&x, weight, bias).unwrap()
    });
    let loss = cross_entropy(&outputs, &source.targets(5, 3)).unwrap();
    (layers, loss)
}

#[test]
fn gradients_are_told_once_and_before_those_of_earlier_layers() {
    let (layers, loss) = three_layers(&mut Source::new());
    let (store, told) = watched(&loss, 99).unwrap();
    let expected = backward(&loss).unwrap();
    for var in layers.iter().flatten() {
        let gradient = store.get(var).unwrap();
        assert_eq!(values(gradient), values(expected.get(var).unwrap()));
    }
    // Those of the first layer are complete when the pass ends.
    let named: Vec<TensorId> = told.iter().map(|(id, _)| *id).collect();
    let ids = |layer: usize| [layers[layer][1].id(), layers[layer][0].id()];
    assert_eq!(named, [ids(2), ids(1)].concat());
    for (id, gradient) in &told {
        assert_eq!(store.get_id(*id).unwrap().id(), gradient.id());
    }
}

#[test]
fn a_variable_of_several_layers_is_told_after_the_last_of_them() {
    let mut source = Source::new();
    let [tied, first] = [(); 2].map(|()| source.var(&[4, 4], DType::F32));
    let bias = source.var(&[4], DType::F32);
    let x = source.tensor(&[3, 4], DType::F32);
    // From the inputs: `first`, `tied`, `tied`.
    let x = linear(&x, &first, &bias).unwrap();
    let x = linear_relu(&x, &tied, &bias).unwrap();
    let x = linear_relu(&x, &tied, &bias).unwrap();
    let loss = x.sqr().unwrap().sum_all().unwrap();
    let (store, told) = watched(&loss, 99).unwrap();
    let [(id, gradient)] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(*id, tied.id());
    let whole = backward(&loss).unwrap();
    assert_eq!(values(gradient), values(whole.get(&tied).unwrap()));
    assert_eq!(store.get(&tied).unwrap().id(), gradient.id());
}

#[test]
fn a_part_that_candle_adds_at_the_end_shows_in_the_tensor() {
    let mut source = Source::new();
    let [shared, first] = [(); 2].map(|()| source.var(&[4, 4], DType::F32));
    let bias = source.var(&[4], DType::F32);
    let x = source.tensor(&[3, 4], DType::F32);
    let x = linear_relu(&x, &first, &bias).unwrap();
    let x = linear_relu(&x, &shared, &bias).unwrap();
    let decay = shared.sqr().unwrap().sum_all().unwrap();
    let loss = (x.sum_all().unwrap() + decay).unwrap();
    let (store, told) = watched(&loss, 99).unwrap();
    let (_, gradient) = told.iter().find(|(id, _)| *id == shared.id()).unwrap();
    assert_ne!(store.get(&shared).unwrap().id(), gradient.id());
    assert_ne!(values(store.get(&shared).unwrap()), values(gradient));
}

#[test]
fn a_watch_that_fails_ends_the_pass_and_the_next_one_is_like_any_other() {
    let (layers, loss) = three_layers(&mut Source::new());
    let error = watched(&loss, 1).unwrap_err().to_string();
    assert!(error.contains("no room"), "{error}");
    let (store, told) = watched(&loss, 99).unwrap();
    assert_eq!(told.len(), 4);
    assert!(layers.iter().flatten().all(|var| store.get(var).is_some()));
}
