//! Saved files are complete, or do not exist.

#![allow(clippy::unwrap_used)]

mod common;

use bytes::Bytes;
use common::{assert_error, external, model, raw, tensor};
use ortrain_files::faults;
use ortrain_onnx::{
    AttributeProto, AttributeType, DataFile, DataType, ExternalData, LoadedModel, ModelProto, NodeProto,
    OnnxError, SparseTensorProto, TensorProto, ToWrite, encode, message_size, save, stage, visit_tensors_mut,
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
fn save_replaces_the_old_file() {
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
fn failed_writes_name_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no/m.onnx");
    let error = save(&weights(), &path).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    assert_error(save(&weights(), "/"), "cannot save to /: the path does not end in a file name");
    // The target is a folder. No temporary file remains.
    let path = folder.path().join("sub");
    std::fs::create_dir_all(path.join("x")).unwrap();
    assert_error(
        save(&weights(), &path),
        &format!("cannot write {}: it is a folder; name a file in it", path.display()),
    );
    assert_eq!(files(folder.path()), ["sub"]);
}

#[test]
fn two_gigabytes_need_external_data() {
    // All tensors share one buffer.
    let buffer = Bytes::from(vec![0; 1 << 20]);
    let weights =
        (0..2048).map(|i| raw(&i.to_string(), DataType::Uint8, &[1 << 20], buffer.clone())).collect();
    let error = encode(&model(weights)).unwrap_err();
    let OnnxError::TooLarge { size } = error else { panic!() };
    assert_error::<()>(
        Err(error),
        &format!(
            "the model takes {size} bytes, but an ONNX message holds at most 2 GiB; save it to a path, with its \
             weights in a file beside it"
        ),
    );
}

#[test]
fn external_data_round_trips() {
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
    // Attributes stay in the message, because few readers look for external data there.
    assert_eq!(graph.node, original.proto.graph.as_ref().unwrap().node);

    // The model is saved as one file in another folder. The typed field has become raw data.
    let single = folder.path().join("single");
    std::fs::create_dir(&single).unwrap();
    loaded.save(single.join("s.onnx")).unwrap();
    let mut expected = weights();
    visit_tensors_mut(&mut expected, |tensor, _| {
        if tensor.name == "typed" {
            tensor.raw_data =
                std::mem::take(&mut tensor.float_data).iter().flat_map(|v| v.to_le_bytes()).collect();
        }
        Ok::<(), ()>(())
    })
    .unwrap();
    assert_eq!(LoadedModel::load(single.join("s.onnx")).unwrap().proto, expected);
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

/// Returns a model with the weights `value`, and with `value` as its producer version.
fn marked(value: u8) -> LoadedModel {
    let proto = ModelProto {
        producer_version: value.to_string(),
        ..model(vec![raw("w", DataType::Uint8, &[5000], vec![value; 5000])])
    };
    LoadedModel::from_proto(proto, ExternalData::none())
}

/// Returns the producer version of the model at a path, after checking that the weights match it.
fn mark(path: &std::path::Path) -> String {
    let loaded = LoadedModel::load(path).unwrap();
    let weights = loaded.tensor_payload(&loaded.proto.graph.as_ref().unwrap().initializer[0]).unwrap();
    let version: u8 = loaded.proto.producer_version.parse().unwrap();
    assert!(
        weights.len() == 5000 && weights.iter().all(|&byte| byte == version),
        "other weights than {version}"
    );
    loaded.proto.producer_version
}

/// The disk fails from each possible step on, as if the process were killed there. The model on disk then has its own
/// data.
#[test]
fn at_every_moment_a_model_has_its_own_data() {
    let mut marks = Vec::new();
    for failing in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        marked(1).save_with_external_data(&path, 1000).unwrap();
        let (saved, _) = faults::with(Some(failing), || marked(2).save_with_external_data(&path, 1000));
        marks.push(mark(&path));
        if saved.is_ok() {
            assert_eq!(mark(&path), "2");
            break;
        }
        // The next save succeeds, and leaves no temporary file.
        marked(3).save_with_external_data(&path, 1000).unwrap();
        assert_eq!(mark(&path), "3");
        assert_eq!(files(folder.path()), ["m.onnx", "m.onnx.data"], "failed at {failing}");
    }
    assert!(marks.is_sorted() && marks[0] == "1", "{marks:?}");
    assert!(marks.iter().filter(|mark| *mark == "2").count() > 3, "{marks:?}");
}

#[test]
fn only_large_tensors_become_external() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let model = marked(7);
    let size = message_size(&model.proto) as u64;
    model.save_above(&path, size).unwrap();
    assert_eq!(files(folder.path()), ["m.onnx"]);
    model.save_above(&path, size - 1).unwrap();
    assert_eq!(files(folder.path()), ["m.onnx", "m.onnx.data"]);
    assert_eq!(mark(&path), "7");
    // External data counts like data in the message.
    let loaded = LoadedModel::load(&path).unwrap();
    let second = folder.path().join("again.onnx");
    loaded.save_above(&second, 5000).unwrap();
    assert_eq!(files(folder.path()), ["again.onnx", "again.onnx.data", "m.onnx", "m.onnx.data"]);
    std::fs::remove_file(folder.path().join("again.onnx.data")).unwrap();
    loaded.save_above(&second, u64::MAX).unwrap();
    assert_eq!(mark(&second), "7");
    assert_eq!(files(folder.path()), ["again.onnx", "m.onnx", "m.onnx.data"]);
}

#[test]
fn models_share_common_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let base = raw("base", DataType::Uint8, &[1 << 20], vec![5; 1 << 20]);
    let typed = TensorProto { float_data: vec![2.0; 500], ..tensor("typed", DataType::Float, &[500]) };
    let separate = |value: u8| raw("own", DataType::Uint8, &[2000], vec![value; 2000]);
    let external_tensor = external("there", &[300], &[("location", "there.bin")]);
    std::fs::write(at("there.bin"), [9; 1200]).unwrap();
    let train = model(vec![base.clone(), separate(1), typed.clone(), external_tensor.clone()]);
    let eval = model(vec![separate(2), typed, base, external_tensor.clone()]);
    let none = ExternalData::none();
    let (train_path, eval_path, data) = (at("train.onnx"), at("eval.onnx"), at("frozen.data"));
    let models = [
        ToWrite { model: &train, external: &none, path: &train_path },
        ToWrite { model: &eval, external: &none, path: &eval_path },
    ];
    let options = DataFile { path: &data, above: 0, from: 1024, is_appended: true };
    for _ in 0..2 {
        stage(&models, &options).unwrap().persist().unwrap();
    }
    assert_eq!(files(folder.path()), ["eval.onnx", "frozen.data", "there.bin", "train.onnx"]);
    let length = std::fs::metadata(&data).unwrap().len();
    assert!(
        (1 << 20..(1 << 20) + 10_000).contains(&length),
        "the base is there once, but {length} bytes are"
    );
    for (path, expected) in [(&train_path, &train), (&eval_path, &eval)] {
        let loaded = LoadedModel::load(path).unwrap();
        let expected = LoadedModel::from_proto(
            expected.clone(),
            ExternalData::in_folder(folder.path(), Default::default()),
        );
        let initializers = |model: &LoadedModel| model.proto.graph.as_ref().unwrap().initializer.clone();
        for (tensor, old) in initializers(&loaded).iter().zip(&initializers(&expected)) {
            assert_eq!(loaded.tensor_payload(tensor).unwrap(), expected.tensor_payload(old).unwrap());
        }
    }
    // Existing external data keeps its file. Staged files that are not placed are removed.
    let shared = LoadedModel::load(&train_path).unwrap().proto.graph.unwrap().initializer.remove(3);
    assert_eq!(shared, external_tensor);
    std::fs::remove_file(&data).unwrap();
    drop(stage(&models, &options).unwrap());
    assert_eq!(files(folder.path()), ["eval.onnx", "there.bin", "train.onnx"]);
}

#[test]
fn large_constants_in_nodes_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.onnx");
    let buffer = Bytes::from(vec![0; 1 << 20]);
    let constant = |i: usize| NodeProto {
        attribute: vec![AttributeProto {
            t: Some(Box::new(raw(&i.to_string(), DataType::Uint8, &[1 << 20], buffer.clone()))),
            ..AttributeProto::default()
        }],
        ..NodeProto::default()
    };
    let mut proto = marked(1).proto;
    proto.graph.as_mut().unwrap().node = (0..2048).map(constant).collect();
    let model = LoadedModel::from_proto(proto, ExternalData::none());
    let error = model.save_above(&path, u64::MAX).unwrap_err();
    let OnnxError::TooLargeInside { size, .. } = error else { panic!("{error}") };
    assert_error::<()>(
        Err(error),
        &format!(
            "{} takes {size} bytes without the weights in the file beside it, but an ONNX message holds at most 2 \
             GiB; turn the large constants of its nodes into initializers",
            path.display()
        ),
    );
    assert_eq!(files(folder.path()), [""; 0]);
}

#[cfg(unix)]
mod unix {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::Path;

    use super::*;

    type Writer = fn(&Path) -> Result<(), OnnxError>;

    /// Every function that writes a model file.
    const WRITERS: [(&str, Writer); 3] = [
        ("message", |path| save(&marked(1).proto, path)),
        ("one file", |path| marked(1).save(path)),
        ("two files", |path| marked(1).save_with_external_data(path, 1000)),
    ];

    #[test]
    fn every_writer_keeps_modes_and_links() {
        for (name, write) in WRITERS {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            fs::create_dir(at("store")).unwrap();
            fs::write(at("store/m.onnx"), "old").unwrap();
            fs::write(at("m.onnx.data"), "old").unwrap();
            fs::set_permissions(at("store/m.onnx"), Permissions::from_mode(0o640)).unwrap();
            fs::set_permissions(at("m.onnx.data"), Permissions::from_mode(0o600)).unwrap();
            symlink("store/m.onnx", at("m.onnx")).unwrap();
            write(&at("m.onnx")).unwrap();
            assert_eq!(mark(&at("m.onnx")), "1", "{name}");
            let mode = |file: &str| fs::metadata(at(file)).unwrap().permissions().mode() & 0o7777;
            assert_eq!((mode("store/m.onnx"), mode("m.onnx.data")), (0o640, 0o600), "{name}");
            assert_eq!(fs::read_link(at("m.onnx")).unwrap(), Path::new("store/m.onnx"), "{name}");
            assert_eq!(files(folder.path()), ["m.onnx", "m.onnx.data", "store"], "{name}");
        }
    }

    #[test]
    fn data_file_has_the_mode_of_its_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.onnx");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        marked(1).save_with_external_data(&path, 1000).unwrap();
        let data = fs::metadata(folder.path().join("m.onnx.data")).unwrap();
        assert_eq!(data.permissions().mode() & 0o7777, 0o600);
    }

    #[test]
    fn every_writer_rejects_special_files() {
        for (name, write) in WRITERS {
            assert_error(
                write(Path::new("/dev/null")),
                "cannot write /dev/null: it is a device, and only regular files are replaced; name another file",
            );
            // The path of the data file is checked, too.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("m.onnx");
            symlink("/dev/null", folder.path().join("m.onnx.data")).unwrap();
            let written = write(&path);
            if name == "two files" {
                assert_error(
                    written,
                    &format!(
                        "cannot write {}.data: it is a device, and only regular files are replaced; name another file",
                        path.display()
                    ),
                );
                assert_eq!(files(folder.path()), ["m.onnx.data"]);
            }
        }
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn every_writer_supports_long_names_and_sweeps() {
        for (name, write) in WRITERS {
            let folder = tempfile::tempdir().unwrap();
            let long = folder.path().join("m".repeat(250));
            let side = folder.path().join(format!("{}.data", "m".repeat(250)));
            for path in [&long, &side] {
                fs::write(ortrain_files::sibling_path(path, "77-0.tmp"), "half of").unwrap();
            }
            write(&long).unwrap();
            write(&long).unwrap();
            assert_eq!(mark(&long), "1", "{name}");
            assert!(files(folder.path()).iter().all(|name| !name.ends_with(".tmp")), "{name}");
            // Versions before 0.2 used this name for a file that was being written.
            fs::write(folder.path().join(".s.onnx.77-0.tmp"), "half of").unwrap();
            write(&folder.path().join("s.onnx")).unwrap();
            assert!(files(folder.path()).iter().all(|name| !name.ends_with(".tmp")), "{name}");
        }
    }
}
