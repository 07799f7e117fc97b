//! Variables in files: their own, and those of other models and programs.

use std::path::Path;

use super::*;

#[test]
fn initial_values_may_come_from_a_file_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pretrained.safetensors");
    let (saved, _) = build(1, a_and_b);
    saved.save(&path).unwrap();
    // `a` and another variable; `b` is left over.
    let (other, _) = build(2, |vars| {
        let a = vars.get_with_hints((2, 3), "a", Init::Const(0.0));
        Ok(vec![a?, vars.get_with_hints(2, "c", Init::Const(7.0))?])
    });
    let load = |variables: &Variables, path: &Path| {
        let foreign = |name: &str| (name == "c2").then(|| "c".to_owned());
        let loaded = variables.load_known(path, |name| name != "unwanted", foreign, None);
        loaded.map_err(|error| error.to_string())
    };
    load(&other, &path).unwrap();
    assert_eq!(numbers(&other, 0), numbers(&saved, 0));
    assert_eq!(numbers(&other, 1), [7.0, 7.0]);

    let (none, _) = build(1, |vars| Ok(vec![vars.get(2, "z")?]));
    let error = load(&none, &path).unwrap_err();
    assert!(error.contains("none of the variables"), "{error}");
    let (larger, _) = build(3, |vars| {
        Ok(vec![vars.get((2, 3), "a")?, vars.get(9, "inner.b")?])
    });
    let before = numbers(&larger, 0);
    let error = load(&larger, &path).unwrap_err();
    assert!(
        error.contains("\"inner.b\"") && error.contains("with shape [4]"),
        "{error}"
    );
    assert_eq!(numbers(&larger, 0), before);

    let half = folder.path().join("half.safetensors");
    let values = Tensor::new(&[1.5f32, -2.0], &Device::Cpu).unwrap();
    let save = |name, values: Tensor| {
        let tensors = [(name, values)];
        candle_core::safetensors::save(&tensors.into(), &half).unwrap();
    };
    save("c", values.to_dtype(DType::BF16).unwrap());
    load(&other, &half).unwrap();
    assert_eq!(numbers(&other, 1), [1.5, -2.0]);
    // Under the name that another program gives it.
    save("c2", (&values + 1.0).unwrap());
    load(&other, &half).unwrap();
    assert_eq!(numbers(&other, 1), [2.5, -1.0]);
    save("c", values.to_dtype(DType::U32).unwrap());
    let error = load(&other, &half).unwrap_err();
    assert!(error.contains("\"c\" is of u32"), "{error}");
    save("c2", (&values * f64::INFINITY).unwrap());
    let error = load(&other, &half).unwrap_err();
    assert!(error.contains("\"c2\" has NaN or infinity"), "{error}");
    assert_eq!(numbers(&other, 1), [2.5, -1.0]);
    let (unwanted, _) = build(1, |vars| Ok(vec![vars.get(2, "unwanted")?]));
    save("unwanted", values);
    assert!(load(&unwanted, &half).is_err());
    std::fs::write(&half, "no tensors").unwrap();
    assert!(
        load(&other, &half)
            .unwrap_err()
            .contains("half.safetensors cannot be read")
    );
}

#[test]
fn the_prefix_of_a_wrapper_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wrapped.safetensors");
    let values = Tensor::new(&[1.5f32, -2.0], &Device::Cpu).unwrap();
    let load = |prefix: &str, strip: Option<&str>, make: Make| {
        let tensors = ["a", "b"].map(|name| (format!("{prefix}{name}"), values.clone()));
        candle_core::safetensors::save(&tensors.into(), &path).unwrap();
        let (variables, _) = build(1, make);
        let loaded = variables.load_known(&path, |_| true, |_| None, strip);
        loaded.is_ok() && numbers(&variables, 0) == [1.5, -2.0]
    };
    let plain: Make = |vars| Ok(vec![vars.get(2, "a")?]);
    for prefix in ["", "module.", "_orig_mod.", "model.", "module._orig_mod."] {
        assert!(load(prefix, None, plain), "{prefix}");
    }
    assert!(!load("backbone.", None, plain));
    assert!(load("backbone.", Some("backbone."), plain));
    // A model that has such a name itself takes it as it is.
    let own: Make = |vars| Ok(vec![vars.get(2, "model.a")?]);
    assert!(load("model.", None, own));
}

/// `vectors/make_pth.py` has written the files with PyTorch.
#[test]
fn initial_values_may_come_from_a_file_of_pytorch() {
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let load = |path: &Path, make: Make| {
        let (variables, _) = build(1, make);
        let loaded = variables.load_known(path, |_| true, |_| None, None);
        let loaded = loaded.map_err(|error| error.to_string());
        loaded.map(|()| variables)
    };
    let hidden: Make = |vars| {
        let weight = vars.get((2, 3), "hidden.weight")?;
        Ok(vec![weight, vars.get(2, "hidden.bias")?])
    };
    for file in ["state.pth", "checkpoint.pth"] {
        let variables = load(&vectors.join(file), hidden).unwrap();
        assert_eq!(numbers(&variables, 0), [0.5, -0.5], "{file}");
        let weight = numbers(&variables, 1);
        assert_eq!(weight, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "{file}");
    }
    let part: Make = |vars| Ok(vec![vars.get(2, "part")?]);
    let error = load(&vectors.join("state.pth"), part).err().unwrap();
    assert!(
        error.contains("\"part\"") && error.contains("save a clone"),
        "{error}"
    );
    let count: Make = |vars| Ok(vec![vars.get((), "batches")?]);
    let error = load(&vectors.join("state.pth"), count).err().unwrap();
    assert!(error.contains("\"batches\" is of i64"), "{error}");
    // A file that is cut off is refused, and one that is changed anywhere does no harm.
    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("damaged.pth");
    let whole = std::fs::read(vectors.join("state.pth")).unwrap();
    for place in (0..whole.len()).step_by(7) {
        std::fs::write(&damaged, &whole[..place]).unwrap();
        assert!(load(&damaged, hidden).is_err(), "{place} bytes");
        let mut changed = whole.clone();
        changed[place] ^= 0x55;
        std::fs::write(&damaged, changed).unwrap();
        drop(load(&damaged, hidden));
    }
}

#[test]
fn what_is_saved_can_be_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (saved, _) = build(1, a_and_b);
    saved.save(&path).unwrap();
    saved.save(&path).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    let (loaded, _) = build(2, a_and_b);
    assert_ne!(numbers(&saved, 0), numbers(&loaded, 0));
    loaded.load(&path).unwrap();
    for variable in 0..2 {
        assert_eq!(numbers(&saved, variable), numbers(&loaded, variable));
    }
    let in_file = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    assert_eq!(in_file["a"].dims(), [2, 3]);

    // Folders are made where they are missing; a file is no folder.
    saved
        .save(&folder.path().join("new").join("model.safetensors"))
        .unwrap();
    let error = saved.save(&path.join("below")).unwrap_err().to_string();
    assert!(
        error.contains("below") && error.contains("written"),
        "{error}"
    );
}

#[test]
fn other_variables_are_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.safetensors");
    let (variables, _) = build(1, a_and_b);
    let before = (numbers(&variables, 0), numbers(&variables, 1));
    let refused = |parts: &[&str]| {
        let error = variables.load(&path).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(error.contains("other.safetensors"), "{error}");
        assert_eq!(before, (numbers(&variables, 0), numbers(&variables, 1)));
    };
    refused(&["cannot be read"]);

    // The first variable fits, but must not be set either.
    let (other, _) = build(2, |vars| {
        Ok(vec![
            vars.get((2, 3), "a")?,
            vars.get((2, 2), "inner.b")?,
            vars.get(1, "c")?,
        ])
    });
    other.save(&path).unwrap();
    refused(&["\"inner.b\" of shape [4]", "[2, 2]", "\"c\""]);

    let (other, _) = build(2, |vars| Ok(vec![vars.get((2, 3), "a")?]));
    other.save(&path).unwrap();
    refused(&["\"inner.b\" of shape [4] is missing"]);

    let a = Var::zeros((2, 3), DType::F64, &Device::Cpu).unwrap();
    let b = Var::zeros(4, DType::F32, &Device::Cpu).unwrap();
    let tensors = [
        ("a", a.as_tensor().clone()),
        ("inner.b", b.as_tensor().clone()),
    ];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path).unwrap();
    refused(&["\"a\" of shape [2, 3] of F32", "F64"]);

    std::fs::write(&path, b"no safetensors").unwrap();
    refused(&["cannot be read"]);
}
