//! Files that are there completely or not at all.

#![allow(clippy::unwrap_used)]

mod common;

use bytes::Bytes;
use common::{external, model, raw, says, tensor};
use ortrain_onnx::{
    AttributeProto, AttributeType, DataType, ExternalData, LoadedModel, ModelProto, NodeProto, OnnxError,
    SparseTensorProto, TensorProto, encode, save, visit_tensors_mut,
};

fn files(folder: &std::path::Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn weights() -> ModelProto {
    let mut model = model(vec![
        raw("small", DataType::Float, &[1], vec![9; 4]),
        raw("odd", DataType::Uint8, &[1001], vec![1; 1001]),
        TensorProto { float_data: vec![2.0; 500], ..tensor("typed", DataType::Float, &[500]) },
        raw("large", DataType::Float, &[1 << 18], vec![3; 1 << 20]),
        raw("packed", DataType::Int4, &[4001], vec![4; 2001]),
        TensorProto { string_data: vec!["text".into()], ..tensor("text", DataType::String, &[1]) },
    ]);
    let constant = AttributeProto {
        name: "value".into(),
        r#type: AttributeType::Tensor.into(),
        t: Some(Box::new(raw("constant", DataType::Uint8, &[2000], vec![5; 2000]))),
        ..AttributeProto::default()
    };
    let node = NodeProto { op_type: "Constant".into(), attribute: vec![constant], ..NodeProto::default() };
    model.graph.as_mut().unwrap().node.push(node);
    model
}

#[test]
fn saves_in_place_of_an_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    for ir_version in [7, 8] {
        let model = ModelProto { ir_version, ..weights() };
        save(&model, &path).unwrap();
        assert_eq!(LoadedModel::load(&path).unwrap().proto, model);
    }
    assert_eq!(files(folder.path()), ["m.onnx"]);
}

#[test]
fn says_where_it_could_not_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/m.onnx");
    let error = save(&weights(), &path).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    says(save(&weights(), "/"), "cannot save to /: the path does not end in a file name");
    // The target is a folder: nothing is left behind.
    let path = folder.path().join("sub");
    std::fs::create_dir_all(path.join("x")).unwrap();
    says(
        save(&weights(), &path),
        &format!("cannot write {}: it is a folder; name a file in it", path.display()),
    );
    assert_eq!(files(folder.path()), ["sub"]);
}

#[test]
fn two_gigabytes_need_external_data() {
    // One buffer, shared by all.
    let buffer = Bytes::from(vec![0; 1 << 20]);
    let many = (0..2048).map(|i| raw(&i.to_string(), DataType::Uint8, &[1 << 20], buffer.clone())).collect();
    let error = encode(&model(many)).unwrap_err();
    let OnnxError::TooLarge { size } = error else { panic!() };
    says::<()>(
        Err(error),
        &format!(
            "the model takes {size} bytes, but one message of ONNX holds at most 2 GiB; only written to a path, with its \
             weights in a file beside it, can a model be larger"
        ),
    );
}

#[test]
fn external_data_goes_out_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let original = LoadedModel::from_proto(weights(), ExternalData::none());
    original.save_with_external_data(&path, 1000).unwrap();
    assert_eq!(files(folder.path()), ["m.onnx", "m.onnx.data"]);

    let loaded = LoadedModel::load(&path).unwrap();
    let graph = loaded.proto.graph.as_ref().unwrap();
    let offsets: Vec<_> = graph
        .initializer
        .iter()
        .map(|tensor| tensor.external_data.iter().find(|e| e.key == "offset").map(|e| e.value.as_str()))
        .collect();
    assert_eq!(offsets, [None, Some("0"), Some("1024"), Some("4096"), Some("1052672"), None]);
    for (tensor, old) in graph.initializer.iter().zip(&original.proto.graph.as_ref().unwrap().initializer) {
        if !["packed", "text"].contains(&tensor.name.as_str()) {
            assert_eq!(loaded.tensor_payload(tensor).unwrap(), original.tensor_payload(old).unwrap());
        }
    }
    // Attributes stay: few readers look for external data there.
    assert_eq!(graph.node, original.proto.graph.as_ref().unwrap().node);

    // Back into one file, elsewhere; the typed field has become raw data.
    let single = folder.path().join("single");
    std::fs::create_dir(&single).unwrap();
    loaded.save(single.join("s.onnx")).unwrap();
    let mut want = weights();
    visit_tensors_mut(&mut want, |tensor, _| {
        if tensor.name == "typed" {
            tensor.raw_data =
                std::mem::take(&mut tensor.float_data).iter().flat_map(|v| v.to_le_bytes()).collect();
        }
        Ok::<(), ()>(())
    })
    .unwrap();
    assert_eq!(LoadedModel::load(single.join("s.onnx")).unwrap().proto, want);
}

#[test]
fn a_model_can_be_saved_over_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    LoadedModel::from_proto(weights(), ExternalData::none()).save_with_external_data(&path, 1000).unwrap();
    let loaded = LoadedModel::load(&path).unwrap();
    loaded.save_with_external_data(&path, 1000).unwrap();
    assert_eq!(LoadedModel::load(&path).unwrap().proto, loaded.proto);
    assert_eq!(files(folder.path()), ["m.onnx", "m.onnx.data"]);
}

#[test]
fn without_large_tensors_there_is_no_side_file() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = LoadedModel::from_proto(model(vec![]), ExternalData::none());
    loaded.save_with_external_data(folder.path().join("m.onnx"), 0).unwrap();
    assert_eq!(files(folder.path()), ["m.onnx"]);
}

#[test]
fn a_missing_tensor_stops_the_save_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let lost = model(vec![external("w", &[1], &[("location", "gone")])]);
    let lost = LoadedModel::from_proto(lost, ExternalData::none());
    let path = folder.path().join("m.onnx");
    assert!(matches!(lost.save_with_external_data(&path, 0), Err(OnnxError::NoFolder { .. })));
    assert!(matches!(lost.save(&path), Err(OnnxError::NoFolder { .. })));
    assert!(files(folder.path()).is_empty());
}

#[test]
fn every_tensor_is_visited() {
    let named = |name: &str| tensor(name, DataType::Float, &[]);
    let sparse = SparseTensorProto {
        values: Some(named("values")),
        indices: Some(named("indices")),
        ..SparseTensorProto::default()
    };
    let mut inner = model(vec![named("inner")]).graph.unwrap();
    inner.sparse_initializer.push(sparse);
    let attribute = AttributeProto {
        t: Some(Box::new(named("t"))),
        tensors: vec![named("ts")],
        g: Some(Box::new(inner.clone())),
        graphs: vec![inner],
        ..AttributeProto::default()
    };
    let mut model = model(vec![named("outer")]);
    let node = NodeProto { attribute: vec![attribute], ..NodeProto::default() };
    model.graph.as_mut().unwrap().node.push(node.clone());
    model.functions.push(ortrain_onnx::FunctionProto { node: vec![node], ..Default::default() });
    let mut names = Vec::new();
    visit_tensors_mut(&mut model, |tensor, _| {
        names.push(tensor.name.clone());
        Ok::<(), ()>(())
    })
    .unwrap();
    let part = ["t", "ts", "inner", "values", "indices", "inner", "values", "indices"];
    assert_eq!(names, [["outer"].as_slice(), &part, &part].concat());
}
