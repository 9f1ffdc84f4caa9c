//! Adapters: their names, their removal, and damaged files. The Python tests compare their training with PEFT.
#![allow(clippy::unwrap_used)]

use std::fs;

use ortrain::ModelSource;
use ortrain::lora::{LoraOptions, Targets, adapters, add, load_adapter, merge, remove, save_adapter};
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{FactorKind, FactorName, factor_name};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");

fn source(model: &ModelProto) -> ModelSource {
    ModelSource::from_proto(model).unwrap()
}

fn adapted(model: ModelSource, name: &str) -> ModelProto {
    let options = LoraOptions {
        rank: 2,
        targets: Targets::patterns(["*"]),
        name: name.into(),
        ..LoraOptions::default()
    };
    add(model, &options).unwrap().0
}

#[test]
fn names_of_factors_are_split_at_the_last_infix() {
    for weight in ["fc1.weight", "onnx::MatMul_1", "w.lora_A.style", "/a/b"] {
        for kind in [FactorKind::A, FactorKind::B] {
            let name = factor_name(weight, kind, "second");
            let expected = FactorName { weight, kind, adapter: "second" };
            assert_eq!(FactorName::split(&name), Some(expected), "{name}");
        }
    }
    for name in
        ["", "w", "w.lora_A.", ".lora_A.default", "w.lora_A.a.b", "w.lora_C.default", "w.lora_A.default/down"]
    {
        assert_eq!(FactorName::split(name), None, "{name}");
    }
}

/// Adapters are removed in any order, and the model of an adapter alone is the model that never had another one.
#[test]
fn removed_adapters_leave_no_trace() {
    let base = remove(source(&adapted(MODEL.into(), "first")), "first").unwrap();
    let first = adapted(MODEL.into(), "first");
    let both = adapted(source(&first), "second");
    assert_eq!(remove(source(&both), "second").unwrap(), first);
    let second = remove(source(&both), "first").unwrap();
    assert_eq!(adapters(source(&second)).unwrap().layers.len(), 2);
    assert_eq!(remove(source(&second), "second").unwrap(), base);
    let merged = merge(source(&both), &[("first".into(), 1.0), ("second".into(), -1.0)]).unwrap();
    // The second factors of new adapters are zero.
    assert_eq!(merged, base);
}

#[test]
fn a_model_without_a_factor_is_an_error() {
    let model = adapted(MODEL.into(), "default");
    for missing in ["fc1.weight.lora_A.default", "fc1.weight.lora_B.default", "fc1.weight.lora_scale.default"]
    {
        let mut damaged = model.clone();
        damaged.graph.as_mut().unwrap().initializer.retain(|tensor| tensor.name != missing);
        let error = merge(source(&damaged), &[("default".into(), 1.0)]).unwrap_err();
        assert!(error.to_string().contains(missing), "{error}");
    }
}

/// A file of each length is an error, and neither a panic nor a model.
#[test]
fn adapters_cut_short_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    save_adapter(source(&adapted(MODEL.into(), "default")), folder.path(), "default", &[]).unwrap();
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        let path = folder.path().join(name);
        let whole = fs::read(&path).unwrap();
        let lengths = (0..whole.len()).step_by(whole.len().div_ceil(40)).chain([whole.len() - 1]);
        for length in lengths {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(
                load_adapter(MODEL.into(), folder.path(), "default", &[], true).is_err(),
                "{name}: {length}"
            );
        }
        fs::write(&path, whole).unwrap();
    }
    load_adapter(MODEL.into(), folder.path(), "default", &[], true).unwrap();
}
