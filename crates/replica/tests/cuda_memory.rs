//! A process keeps the limit of a GPU's memory. It cannot change the limit, so this test has a process of its own. It needs a build with the
//! feature `cuda`, and a GPU.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Tensor};
use flambeau_replica::device::Choices;

#[test]
fn a_limit_is_kept() {
    let choices: Choices = "cuda:0@1GiB".parse().unwrap();
    for _ in 0..2 {
        let devices = choices.open_to_train().unwrap();
        let tensor = |mebibytes: usize| {
            let begun = std::time::Instant::now();
            let made = Tensor::zeros(mebibytes << 18, DType::F32, &devices[0]);
            let made = made.and_then(|tensor| tensor.device().synchronize().map(|()| tensor));
            println!("{mebibytes} MiB: {:?}, {:?}", made.is_ok(), begun.elapsed());
            made
        };
        tensor(512).unwrap();
        let error = tensor(2048).unwrap_err().to_string();
        assert!(error.contains("OUT_OF_MEMORY"), "{error}");
        let mut held = Vec::new();
        while let Ok(tensor) = tensor(64) {
            held.push(tensor);
        }
        assert!((12..=17).contains(&held.len()), "{}", held.len());
        drop(held);
        tensor(512).unwrap();
    }
    let other: Choices = "cuda:0@2GiB".parse().unwrap();
    assert!(
        other
            .open_to_train()
            .unwrap_err()
            .to_string()
            .contains("1GiB already")
    );
}
