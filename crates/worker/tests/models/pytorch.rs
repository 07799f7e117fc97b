//! Small models against PyTorch over 20 steps of training, and the names of torchvision's variables.

use super::*;

/// Results of PyTorch, made by `vectors/make_model_vectors.py`.
struct Vectors(std::collections::HashMap<String, Tensor>);

impl Vectors {
    fn read(model: &str) -> Self {
        let path = format!(
            "{}/tests/vectors/{model}.safetensors",
            env!("CARGO_MANIFEST_DIR")
        );
        Self(candle_core::safetensors::load(path, &Device::Cpu).unwrap())
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        self.0[name].flatten_all().unwrap().to_vec1().unwrap()
    }

    fn batch(&self, step: usize) -> Batch {
        let labels = self.0["labels"].get(step).unwrap();
        batch(
            self.0["inputs"].get(step).unwrap(),
            labels.to_dtype(DType::U32).unwrap(),
        )
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn training_agrees_with_pytorch() {
    const LEARNING_RATE: f32 = 0.1;
    for (name, hidden, channels) in [
        ("softmax", vec![], vec![]),
        ("mlp", vec![32, 16], vec![]),
        ("cnn", vec![16], vec![4, 8]),
    ] {
        let vectors = Vectors::read(name);
        let sample_shape = &vectors.0["inputs"].dims()[2..];
        let settings = settings(&hidden, &channels);
        let pictures = Pictures::new(sample_shape, 10);
        let setup = pictures.setup(&settings);
        let (variables, model) = build(name, &setup);
        let specs = variables.specs();
        let in_file = vectors
            .0
            .keys()
            .filter(|k| k.starts_with("initial."))
            .count();
        assert_eq!(specs.len(), in_file);
        for (i, spec) in specs.iter().enumerate() {
            write(
                &variables,
                i,
                &vectors.numbers(&format!("initial.{}", spec.name)),
            );
        }

        let losses = vectors.numbers("losses");
        let mut worst = (0f32, 0f32, 0f32);
        for (step, expected) in losses.iter().enumerate() {
            let before = variables.measured().unwrap();
            let loss = pictures.loss(&*model, &vectors.batch(step));
            let gradients = variables
                .gradients(&loss.backward().unwrap(), before, Clip::default())
                .unwrap();
            worst.0 = worst
                .0
                .max((loss.to_scalar::<f32>().unwrap() / expected - 1.0).abs());
            for (i, spec) in specs.iter().enumerate() {
                let gradient = gradients.values[i].to_vec();
                if step == 0 {
                    let expected = vectors.numbers(&format!("gradient.{}", spec.name));
                    worst.1 = worst.1.max(largest_difference(&gradient, &expected));
                }
                let values = numbers(&variables.values(i).unwrap());
                let values = values
                    .iter()
                    .zip(&gradient)
                    .map(|(v, g)| v - LEARNING_RATE * g);
                write(&variables, i, &values.collect::<Vec<f32>>());
            }
        }
        for (i, spec) in specs.iter().enumerate() {
            let values = numbers(&variables.values(i).unwrap());
            let expected = vectors.numbers(&format!("final.{}", spec.name));
            worst.2 = worst.2.max(largest_difference(&values, &expected));
        }
        eprintln!(
            "{name}: largest differences from PyTorch: losses {:.1e} (relative), first gradient {:.1e}, final weights {:.1e}",
            worst.0, worst.1, worst.2
        );
        assert!(worst.0 < 1e-5 && worst.1 < 1e-5 && worst.2 < 1e-5);
    }
}

/// Each variable of torchvision's models (`vectors/make_torchvision_names.py`) belongs to one of the same shape, and each
/// of ours has one, but for torchvision's counts of batches.
#[test]
fn models_know_the_names_of_torchvision() {
    type Shapes = BTreeMap<String, Vec<usize>>;
    let models: BTreeMap<String, Shapes> =
        serde_json::from_str(include_str!("../vectors/torchvision.json")).unwrap();
    assert_eq!(models.len(), 3);
    for (name, foreign) in models {
        let settings = settings(&[], &[]);
        let pictures = Pictures::new(&[3, 64, 64], 1000);
        let (variables, model) = build(&name, &pictures.setup(&settings));
        let specs = variables.specs();
        let ours: Shapes = specs.into_iter().map(|s| (s.name, s.shape)).collect();
        let counts = |foreign: &String| foreign.ends_with("num_batches_tracked");
        let named = foreign.into_iter().filter(|(foreign, _)| !counts(foreign));
        let renamed = |(foreign, shape): (String, _)| {
            let name = model.name_of(&foreign);
            (
                name.unwrap_or_else(|| panic!("no variable for {foreign}")),
                shape,
            )
        };
        assert_eq!(named.map(renamed).collect::<Shapes>(), ours, "{name}");
    }
}
