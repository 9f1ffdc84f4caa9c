//! Loading of models, and of bytes that are not models.

#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_error, load, model, raw};
use ortrain_onnx::{
    AttributeProto, AttributeType, DataType, ExternalData, GraphProto, LoadedModel, ModelProto, NodeProto,
    OnnxError, Storage, encode,
};

fn small() -> ModelProto {
    let mut model =
        model(vec![raw("w", DataType::Float, &[2], [1_f32.to_le_bytes(), 2_f32.to_le_bytes()].concat())]);
    let attribute = AttributeProto {
        name: "axis".into(),
        r#type: AttributeType::Int.into(),
        i: -1,
        ..AttributeProto::default()
    };
    let node = NodeProto {
        input: vec!["x".into(), "w".into()],
        output: vec!["y".into()],
        op_type: "Softmax".into(),
        attribute: vec![attribute],
        ..NodeProto::default()
    };
    model.graph.as_mut().unwrap().node.push(node);
    model
}

#[test]
fn round_trip_keeps_the_message() {
    let model = small();
    let bytes = encode(&model).unwrap();
    let loaded = load(bytes.clone()).unwrap();
    assert_eq!(loaded.proto, model);
    assert_eq!(loaded.unknown_fields(), 0);
    assert_eq!(encode(&loaded.proto).unwrap(), bytes);
}

#[test]
fn payloads_are_ranges_of_the_buffer() {
    let bytes = bytes::Bytes::from(encode(&small()).unwrap());
    let range = bytes.as_ptr_range();
    let loaded = load(bytes).unwrap();
    let payload = loaded.tensor_payload(&loaded.proto.graph.as_ref().unwrap().initializer[0]).unwrap();
    assert!(range.contains(&payload.as_ptr()));
}

#[test]
fn loads_files_read_and_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, encode(&small()).unwrap()).unwrap();
    for storage in [Storage::Read, Storage::Mapped] {
        let loaded = LoadedModel::load_with(&path, storage).unwrap();
        assert_eq!(loaded.proto, small());
        assert_eq!(loaded.folder(), Some(folder.path()));
    }
}

#[test]
fn names_the_file_that_cannot_be_read() {
    let error = LoadedModel::load("nowhere/m.onnx").unwrap_err().to_string();
    assert!(error.starts_with("cannot read nowhere/m.onnx: "), "{error}");
    assert!(matches!(LoadedModel::load_with("nowhere/m.onnx", Storage::Mapped), Err(OnnxError::Read { .. })));
}

#[test]
fn other_formats_are_recognized() {
    assert_error(load(b"".as_slice()), "the model is empty; expected an ONNX model");
    let cases: [(&[u8], &str); 11] = [
        (b"hello, I am a text\n", "it looks like text"),
        (b"{\"json\": true}", "it looks like text"),
        ("# Größe\n".as_bytes(), "it looks like text"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            "it is a Git LFS pointer; fetch the file itself with `git lfs pull`",
        ),
        (
            b"PK\x03\x04\0\0\0\0",
            "it is a zip archive (a saved PyTorch model is one); export it to ONNX first",
        ),
        (
            b"PK\x03\x04-\0\0\0\0\0\0\0!\0\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0x.npy",
            "it is an NPZ archive of NumPy, which has arrays but no graph; pass it as data",
        ),
        (b"\x18\0\0\0ORTM\0\0", "it is in the ORT format; use the ONNX model it was made from"),
        (b"\x18\0\0\0ODTC\0\0", "it is a training checkpoint, not a model"),
        (b"\x1f\x8b\x08\0", "it is compressed with gzip; unpack it first"),
        (b"\xff\xfe\xfd\xfc\xfb", "its first bytes are not those of an ONNX model"),
        // Only a version.
        (b"\x08\x07", "it has no graph"),
    ];
    for (bytes, reason) in cases {
        assert_error(load(bytes), &format!("the model is not an ONNX model: {reason}"));
    }
}

#[test]
fn errors_name_the_path_of_the_caller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    std::fs::write(&path, b"").unwrap();
    assert_error(LoadedModel::load(&path), &format!("{} is empty; expected an ONNX model", path.display()));
    assert_error(
        LoadedModel::load_with(&path, Storage::Mapped),
        &format!("{} is empty; expected an ONNX model", path.display()),
    );
}

#[test]
fn truncated_file_is_reported() {
    let bytes = encode(&small()).unwrap();
    assert_error(
        load(bytes[..bytes.len() - 8].to_vec()),
        &format!(
            "the model is cut short: graph, at byte 9 of {}, is longer than the rest of the file; was it copied or \
             downloaded completely?",
            bytes.len() - 8
        ),
    );
    for length in 0..bytes.len() {
        // A model that is truncated between two fields may still be valid.
        if let Ok(loaded) = load(bytes[..length].to_vec()) {
            assert!(loaded.proto.graph.is_some());
        }
    }
}

#[test]
fn changed_bytes_never_panic() {
    let bytes = encode(&small()).unwrap();
    for at in 0..bytes.len() {
        for value in 0..=255 {
            let mut changed = bytes.clone();
            changed[at] = value;
            if let Ok(loaded) = load(changed) {
                for tensor in &loaded.proto.graph.as_ref().unwrap().initializer {
                    let _ = loaded.tensor_payload(tensor);
                }
                let _ = encode(&loaded.proto).unwrap();
            }
        }
    }
}

#[test]
fn damage_is_located() {
    // ir_version 10, then the graph as a number.
    assert_error(
        load(b"\x08\x0a\x38\x01\xff".as_slice()),
        "the model is damaged: the field graph of ModelProto has the wrong wire type (at byte 2)",
    );
    // A name that is not UTF-8.
    let error = load(b"\x08\x0a\x3a\x03\x12\x01\xff".as_slice()).unwrap_err();
    assert!(matches!(error, OnnxError::Decode { .. }));
    let text = error.to_string();
    assert!(
        text.starts_with("the model is damaged: ") && text.contains("name") && text.contains("UTF-8"),
        "{text}"
    );
}

#[test]
fn unknown_fields_are_counted() {
    let mut bytes = encode(&small()).unwrap();
    // Field 99, three bytes of text.
    bytes.extend(b"\x9a\x06\x03abc");
    let loaded = load(bytes).unwrap();
    assert_eq!(loaded.unknown_fields(), 1);
    assert_eq!(loaded.proto, small());
}

/// Returns a model with `levels` nested graphs, each in an attribute of a node of the enclosing graph.
fn nested(levels: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let wrap = |bytes: &mut Vec<u8>, field: u8| {
        let mut head = vec![field << 3 | 2];
        let mut length = bytes.len();
        while length >= 0x80 {
            head.push(length as u8 | 0x80);
            length >>= 7;
        }
        head.push(length as u8);
        bytes.splice(0..0, head);
    };
    for _ in 0..levels {
        wrap(&mut bytes, 6);
        wrap(&mut bytes, 5);
        wrap(&mut bytes, 1);
    }
    wrap(&mut bytes, 7);
    bytes
}

#[test]
fn nesting_is_bounded() {
    // The depth is 1 + 3 * `levels`. The last accepted depth is 100, as in prost.
    let loaded = load(nested(33)).unwrap();
    assert!(loaded.proto.graph.is_some());
    for levels in [34, 5000] {
        assert_error(
            load(nested(levels)),
            "the model nests messages more than 100 levels deep; nest fewer subgraphs",
        );
    }
}

#[test]
fn memory_is_bounded_by_the_file_size() {
    // A graph with a node with two million empty attributes.
    let count = 2_000_000_u32;
    let wrap = |field: u8, inner: &[u8]| {
        let mut out = vec![field << 3 | 2];
        let mut length = inner.len();
        while length >= 0x80 {
            out.push(length as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
        out.extend_from_slice(inner);
        out
    };
    let attributes = [0x2a_u8, 0].repeat(count as usize);
    let bytes = wrap(7, &wrap(1, &attributes));
    let size = bytes.len();
    let error = load(bytes).unwrap_err();
    let OnnxError::Bomb { needed, .. } = error else { panic!("{error}") };
    assert!(needed > u64::from(count) * size_of::<AttributeProto>() as u64);
    assert_eq!(
        error.to_string(),
        format!(
            "the model is refused: its {size} bytes describe {needed} bytes of nodes and names, which no exporter \
             writes"
        )
    );
}

#[test]
fn model_of_many_small_nodes_is_accepted() {
    let mut model = small();
    let graph = model.graph.as_mut().unwrap();
    graph.node = vec![graph.node[0].clone(); 100_000];
    let bytes = encode(&model).unwrap();
    assert!(load(bytes).is_ok());
}

#[test]
fn models_can_be_built_in_memory() {
    let loaded = LoadedModel::from_proto(small(), ExternalData::none());
    assert_eq!(loaded.folder(), None);
    let other = loaded.with_proto(ModelProto { graph: Some(GraphProto::default()), ..ModelProto::default() });
    assert!(other.proto.graph.unwrap().node.is_empty());
}
