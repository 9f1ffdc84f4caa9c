//! Reads any text as the description of an optimizer. No text may cause a panic. A valid description can be written as
//! a model and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ortrain::DType;
use ortrain::optim::{OptimizerSpec, optimizer_model};
use ortrain_graph::Graph;
use ortrain_onnx::{ExternalData, LoadedModel};

fuzz_target!(|text: &str| {
    let Ok(spec) = OptimizerSpec::from_text(text) else { return };
    assert_eq!(OptimizerSpec::from_text(&spec.to_text()).ok().as_ref(), Some(&spec));
    if spec.check().is_err() {
        return;
    }
    let Ok(model) = optimizer_model(&spec, &[DType::F32]) else { return };
    let model = LoadedModel::from_proto(model, ExternalData::none());
    let mut graph = Graph::from_model(&model).expect("it was written here");
    ortrain_ops::optimizers::bind(&mut graph).expect("it was written here");
});
