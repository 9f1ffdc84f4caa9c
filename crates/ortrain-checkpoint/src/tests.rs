#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use bytes::Bytes;
use ortrain_files::faults::{self, Act};
use ortrain_graph::{DType, Tensor};
use planus::Builder;

use crate::generated::ortrain::checkpoint as format;
use crate::read::{IDENTIFIER, SideSum, load_by, waiting_side_path};
use crate::write::header;
use crate::{
    Checkpoint, Error, Extras, Layout, ModuleState, NamedTensor, NominalTensor, OptimizerGroup,
    ParameterState, Property, SaveOptions, Scheduler, disk, encode, load, load_safetensors, read,
    read_safetensors, save, save_safetensors, stage, trailer, write_safetensors,
};

/// Returns a checkpoint with unsorted names, every element type, every kind of property, and all extras.
fn sample() -> Checkpoint {
    let mut frozen: Vec<_> = DType::ALL
        .iter()
        .map(|&dtype| NamedTensor::new(format!("of {dtype}"), Tensor::filled(dtype, &[2, 1], 1.0)))
        .collect();
    frozen.push(NamedTensor::new("empty", Tensor::f32(&[0, 3], &[])));
    frozen.push(NamedTensor::new("", Tensor::f32(&[], &[-0.0])));
    let weight = Tensor::f32(&[2, 3], &[1.0, -2.0, 3.5, f32::INFINITY, 0.0, 6.0]);
    let trainable =
        vec![NamedTensor::new("w", weight.clone()), NamedTensor::new("b", Tensor::f32(&[1], &[0.25]))];
    let moments = |tensor: &Tensor| {
        ["momentum1", "momentum0"].map(|name| NamedTensor::new(name, tensor.clone())).to_vec()
    };
    Checkpoint {
        optimizer_groups: vec![OptimizerGroup {
            name: "group0".into(),
            step: 7,
            initial_learning_rate: 0.001,
            states: vec![
                ParameterState { parameter: "w".into(), moments: moments(&weight) },
                ParameterState { parameter: "b".into(), moments: moments(&Tensor::f32(&[1], &[0.0])) },
            ],
        }],
        module: ModuleState::Full { trainable, frozen },
        properties: [
            ("epoch", Property::Int(-(1 << 40))),
            ("zero", Property::Int(0)),
            ("minus zero", Property::Float(-0.0)),
            ("score", Property::Float(0.625)),
            ("tag", Property::String("grün".into())),
            ("", Property::String(String::new())),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into(),
        extras: Extras {
            learning_rate: Some(0.0),
            scheduler: Some(Scheduler {
                kind: "linear".into(),
                warmup_steps: 3,
                total_steps: 10,
                initial_learning_rate: 0.02,
                step: 4,
            }),
            seed: Some(-1),
            train_step: Some(0),
            optimizer: Some(r#"{"optimizer":"Lion"}"#.into()),
            schedule_factor: Some(0.5),
        },
    }
}

/// Returns a small checkpoint, for tests of every byte position.
fn small() -> Checkpoint {
    Checkpoint {
        module: ModuleState::Full {
            trainable: vec![NamedTensor::new("w", Tensor::f32(&[2], &[1.0, 2.0]))],
            frozen: vec![NamedTensor::new("s", Tensor::i64(&[], &[5]))],
        },
        extras: Extras { learning_rate: Some(0.5), ..Extras::default() },
        ..Checkpoint::default()
    }
}

fn sorted(mut checkpoint: Checkpoint) -> Checkpoint {
    if let ModuleState::Full { trainable, frozen } = &mut checkpoint.module {
        trainable.sort_by(|a, b| a.name.cmp(&b.name));
        frozen.sort_by(|a, b| a.name.cmp(&b.name));
    }
    for group in &mut checkpoint.optimizer_groups {
        group.states.sort_by(|a, b| a.parameter.cmp(&b.parameter));
        group.states.iter_mut().for_each(|state| state.moments.sort_by(|a, b| a.name.cmp(&b.name)));
    }
    checkpoint
}

fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn parameters(checkpoint: &Checkpoint) -> Vec<NamedTensor> {
    let ModuleState::Full { trainable, frozen } = &checkpoint.module else { panic!("values are there") };
    let mut expected = [&trainable[..], frozen].concat();
    expected.sort_by(|a, b| a.name.cmp(&b.name));
    expected
}

mod reference {
    //! Files of onnxruntime-training.

    use super::*;

    #[test]
    fn parameters_equal_the_reference() {
        for name in ["checkpoint", "checkpoint_step3_optim", "cnn_checkpoint"] {
            let actual = parameters(&load(data(name)).unwrap());
            let mut expected = load_safetensors(data(&format!("{name}.safetensors"))).unwrap();
            expected.sort_by(|a, b| a.name.cmp(&b.name));
            assert_eq!(actual, expected, "{name}");
        }
    }

    #[test]
    fn optimizer_state_and_properties_are_read() {
        let checkpoint = load(data("checkpoint_step3_optim")).unwrap();
        let [group] = &checkpoint.optimizer_groups[..] else { panic!("one group") };
        assert_eq!((&*group.name, group.step, group.initial_learning_rate), ("group0", 3, 0.001));
        let names: Vec<_> = group.states.iter().map(|state| &*state.parameter).collect();
        assert_eq!(names, ["fc1.weight", "fc2.bias", "fc2.weight"]);
        for state in &group.states {
            let names: Vec<_> = state.moments.iter().map(|moment| &*moment.name).collect();
            assert_eq!(names, ["momentum0", "momentum1"]);
        }
        let expected = [
            ("best_score", Property::Float(0.625)),
            ("epoch", Property::Int(3)),
            ("negative", Property::Int(-1_099_511_627_776)),
            ("tag", Property::String("fixture ünïcode".into())),
        ];
        assert_eq!(checkpoint.properties, expected.map(|(name, value)| (name.to_owned(), value)).into());
        assert_eq!(checkpoint.extras, Extras::default());
    }

    #[test]
    fn generated_files_keep_the_order_of_initializers() {
        let ModuleState::Full { trainable, frozen } = load(data("checkpoint")).unwrap().module else {
            panic!("values are there")
        };
        let names = |list: &[NamedTensor]| list.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&trainable), ["fc1.weight", "fc2.weight", "fc2.bias"]);
        assert_eq!(names(&frozen), ["fc1.bias"]);
    }

    #[test]
    fn nominal_files_hold_names_and_types() {
        let ModuleState::Nominal { trainable, frozen } = load(data("nominal_checkpoint")).unwrap().module
        else {
            panic!("it is nominal")
        };
        let entry = |name: &str| NominalTensor { name: name.to_owned(), dtype: DType::F32 };
        assert_eq!(trainable, ["fc1.weight", "fc2.weight", "fc2.bias"].map(entry));
        assert_eq!(frozen, [entry("fc1.bias")]);
    }

    #[test]
    fn checkpoints_round_trip() {
        for name in ["checkpoint", "checkpoint_step3_optim", "cnn_checkpoint", "nominal_checkpoint"] {
            let checkpoint = load(data(name)).unwrap();
            let bytes = encode(&checkpoint, Layout::Artifacts).unwrap();
            assert_eq!(read(bytes.into()).unwrap(), checkpoint, "{name}");
        }
    }
}

mod round_trip {
    use super::*;

    #[test]
    fn every_field_round_trips() {
        let checkpoint = sample();
        let bytes = encode(&checkpoint, Layout::Artifacts).unwrap();
        assert_eq!(read(bytes.into()).unwrap(), checkpoint, "order is kept");
        let bytes = encode(&checkpoint, Layout::State).unwrap();
        assert_eq!(read(bytes.into()).unwrap(), sorted(checkpoint), "everything is sorted");
    }

    #[test]
    fn zeros_keep_their_sign() {
        let bytes = encode(&sample(), Layout::State).unwrap();
        let Property::Float(zero) = read(bytes.into()).unwrap().properties["minus zero"] else {
            panic!("a float")
        };
        assert!(zero.is_sign_negative());
    }

    #[test]
    fn resaving_reproduces_the_file() {
        for checkpoint in
            [sample(), small(), Checkpoint::default(), load(data("nominal_checkpoint")).unwrap()]
        {
            for layout in [Layout::Artifacts, Layout::State] {
                let bytes = encode(&checkpoint, layout).unwrap();
                let second = encode(&read(bytes.clone().into()).unwrap(), layout).unwrap();
                assert!(bytes == second);
            }
        }
    }

    #[test]
    fn parts_are_present_as_in_the_reference() {
        use planus::ReadAsRoot;
        let empty = small();
        let artifacts = encode(&empty, Layout::Artifacts).unwrap();
        let root = format::CheckpointRef::read_as_root(&artifacts).unwrap();
        assert!(root.optimizer_groups().unwrap().is_none() && root.property_bag().unwrap().is_none());
        let state = encode(&empty, Layout::State).unwrap();
        let root = format::CheckpointRef::read_as_root(&state).unwrap();
        assert!(root.optimizer_groups().unwrap().is_some_and(planus::Vector::is_empty));
        assert!(root.property_bag().unwrap().is_none());
        let with = Checkpoint { properties: [("a".to_owned(), Property::Int(1))].into(), ..empty };
        let state = encode(&with, Layout::State).unwrap();
        let bag = format::CheckpointRef::read_as_root(&state).unwrap().property_bag().unwrap().unwrap();
        assert!(bag.floats().unwrap().is_some() && bag.strings().unwrap().is_some());
    }

    #[test]
    fn tensors_are_ranges_of_the_file() {
        let file = Bytes::from(encode(&small(), Layout::State).unwrap());
        let file_range = file.as_ptr_range();
        for parameter in parameters(&read(file).unwrap()) {
            assert!(file_range.contains(&parameter.tensor.data().as_ptr()), "{}", parameter.name);
        }
    }

    #[test]
    fn equal_tensors_do_not_share_bytes() {
        let zeros = (0..100)
            .map(|i| NamedTensor::new(format!("{i}"), Tensor::zeros(DType::F32, vec![1000]).unwrap()));
        let module = ModuleState::Full { trainable: zeros.collect(), frozen: Vec::new() };
        let bytes = encode(&Checkpoint { module, ..Checkpoint::default() }, Layout::State).unwrap();
        assert!(bytes.len() > 400_000);
        assert!(read(bytes.into()).is_ok());
    }

    #[test]
    fn duplicate_names_are_rejected() {
        let twice = vec![NamedTensor::new("w", Tensor::f32(&[], &[1.0])); 2];
        let group = OptimizerGroup {
            name: "group0".into(),
            step: 0,
            initial_learning_rate: 0.0,
            states: vec![ParameterState { parameter: "w".into(), moments: twice.clone() }],
        };
        let check = |module: ModuleState, optimizer_groups: Vec<OptimizerGroup>, sentence: &str| {
            let checkpoint = Checkpoint { module, optimizer_groups, ..Checkpoint::default() };
            assert_eq!(encode(&checkpoint, Layout::State).unwrap_err().to_string(), sentence);
        };
        let across = ModuleState::Full { trainable: twice[..1].to_vec(), frozen: twice[..1].to_vec() };
        check(across, vec![], "two parameters have the name 'w'");
        check(ModuleState::default(), vec![group.clone()], "two moments of a parameter have the name 'w'");
        let group = OptimizerGroup { states: Vec::new(), ..group };
        let groups = vec![group.clone(), group.clone()];
        check(ModuleState::default(), groups, "two optimizer groups have the name 'group0'");
        let state = ParameterState { parameter: "w".into(), moments: Vec::new() };
        let group = OptimizerGroup { states: vec![state.clone(), state], ..group };
        let sentence = "two optimizer states of a group have the name 'w'";
        check(ModuleState::default(), vec![group], sentence);
    }

    #[test]
    fn oversized_buffers_are_rejected() {
        let tensor = Tensor::zeros(DType::U8, vec![1 << 20]).unwrap();
        let trainable = (0..2048).map(|i| NamedTensor::new(i.to_string(), tensor.clone())).collect();
        let module = ModuleState::Full { trainable, frozen: Vec::new() };
        let checkpoint = Checkpoint { module, ..Checkpoint::default() };
        let error = encode(&checkpoint, Layout::State).unwrap_err();
        assert!(matches!(error, Error::TooLarge { bytes } if bytes > 2 << 30));
        assert!(error.to_string().ends_with("save it to a path, which puts its tensors into a .data file"));
    }
}

mod damage {
    use super::*;

    #[test]
    fn every_flipped_byte_is_found() {
        let good = encode(&small(), Layout::State).unwrap();
        for position in 0..good.len() {
            for flip in (0..8).map(|bit| 1 << bit).chain([0xff]) {
                let mut bytes = good.clone();
                bytes[position] ^= flip;
                assert!(read(bytes.into()).is_err(), "byte {position} of {}, flip {flip:#x}", good.len());
            }
        }
    }

    #[test]
    fn every_truncation_is_found() {
        let good = encode(&small(), Layout::State).unwrap();
        for length in 0..good.len() {
            assert!(read(good[..length].to_vec().into()).is_err(), "{length} bytes of {}", good.len());
        }
        assert!(read([&good[..], b"\0"].concat().into()).is_err(), "nor can it be extended");
    }

    #[test]
    fn files_of_the_reference_never_panic() {
        for name in ["checkpoint", "checkpoint_step3_optim", "nominal_checkpoint"] {
            let good = fs::read(data(name)).unwrap();
            for position in 0..good.len() {
                let _ = read(good[..position].to_vec().into());
                for flip in [1, 0x80, 0xff] {
                    let mut bytes = good.clone();
                    bytes[position] ^= flip;
                    if let Ok(checkpoint) = read(bytes.into()) {
                        let _ = encode(&checkpoint, Layout::State);
                    }
                }
            }
        }
    }

    #[test]
    fn sentences() {
        let good = encode(&small(), Layout::State).unwrap();
        let sentence = |bytes: &[u8]| read(bytes.to_vec().into()).unwrap_err().to_string();
        assert_eq!(sentence(b""), "the checkpoint is empty");
        assert_eq!(
            sentence(b"what is this?"),
            "this is not a checkpoint: bytes 4 to 7 are not the identifier ODTC; generate_artifacts and \
             save_checkpoint write checkpoints"
        );
        let tensors = write_safetensors(&parameters(&small())).unwrap();
        assert_eq!(
            sentence(&tensors),
            "this looks like a safetensors file, not a checkpoint; load it with load_safetensors"
        );
        assert_eq!(sentence(b"\0\0"), sentence(b"what is this?"));
        let body = good.len() - trailer::LENGTH;
        assert!(sentence(&good[..20]).starts_with(
            "the checkpoint is cut short or damaged: an offset points past its \
                                                   end"
        ));
        let missing = "the checkpoint is cut short, extended or damaged: the checksum at its end is missing";
        assert!(sentence(&good[..body]).starts_with(missing));
        assert!(sentence(&good[..good.len() - 1]).starts_with(missing));
        let mut flipped = good.clone();
        flipped[body - 1] ^= 1;
        let error = read(flipped.into()).unwrap_err();
        assert!(matches!(error, Error::Damaged { expected, found } if expected != found));
        assert!(error.to_string().starts_with("the checkpoint is damaged: its checksum is "));
    }
}

/// Files that this crate would not write.
mod crafted {
    use super::*;

    fn tensor(name: &str) -> format::Tensor {
        format::Tensor {
            name: Some(name.to_owned()),
            dims: Some(vec![1]),
            data_type: 1,
            raw_data: Some(vec![0, 0, 128, 63]),
            external_data_offset: -1,
            ..format::Tensor::default()
        }
    }

    fn checkpoint(trainable: Vec<format::Tensor>) -> format::Checkpoint {
        let module = format::ModuleState {
            requires_grad_params: Some(trainable),
            frozen_params: Some(Vec::new()),
            ..format::ModuleState::default()
        };
        format::Checkpoint {
            version: 2,
            module_state: Some(Box::new(module)),
            ..format::Checkpoint::default()
        }
    }

    fn file(checkpoint: &format::Checkpoint) -> Bytes {
        finish(&mut Builder::new(), checkpoint)
    }

    fn finish(builder: &mut Builder, root: impl planus::WriteAsOffset<format::Checkpoint>) -> Bytes {
        let finished = builder.finish(root, Some(IDENTIFIER));
        [&header(finished), &finished[8..]].concat().into()
    }

    fn sentence(checkpoint: &format::Checkpoint) -> String {
        read(file(checkpoint)).unwrap_err().to_string()
    }

    fn of(change: impl FnOnce(&mut format::Tensor)) -> String {
        let mut tensor = tensor("w");
        change(&mut tensor);
        sentence(&checkpoint(vec![tensor]))
    }

    #[test]
    fn other_versions_are_refused() {
        for version in [0, 1, 3, -1] {
            let checkpoint = format::Checkpoint { version, ..checkpoint(Vec::new()) };
            let expected =
                format!("checkpoint version {version} is not supported; the supported version is 2");
            assert_eq!(sentence(&checkpoint), expected);
        }
    }

    #[test]
    fn missing_parts_are_named() {
        let mut part = checkpoint(Vec::new());
        part.module_state.as_mut().unwrap().frozen_params = None;
        assert_eq!(sentence(&part), "the checkpoint has no list of frozen parameters");
        part.module_state.as_mut().unwrap().requires_grad_params = None;
        assert_eq!(sentence(&part), "the checkpoint has no list of trainable parameters");
        part.module_state = None;
        assert_eq!(sentence(&part), "the checkpoint has no module state");
        assert_eq!(of(|tensor| tensor.name = None), "the checkpoint holds a tensor without a name");
    }

    #[test]
    fn bad_tensors_are_named() {
        assert_eq!(
            of(|tensor| tensor.data_type = 8),
            "tensor 'w' holds strings; only tensors of numbers can be trained or saved"
        );
        assert_eq!(
            of(|tensor| tensor.data_type = 17),
            "tensor 'w' has the element type FLOAT8E4M3FN, which is not supported"
        );
        assert_eq!(
            of(|tensor| tensor.data_type = 99),
            "tensor 'w' has the element type number 99, which is not supported"
        );
        assert_eq!(
            of(|tensor| tensor.dims = Some(vec![2, -1])),
            "tensor 'w' has the shape [2, -1]; dimensions must be at least 0 and small enough to address"
        );
        assert_eq!(
            of(|tensor| tensor.dims = Some(vec![3])),
            "tensor 'w' is damaged: a tensor of shape [3] and type float32 needs 12 bytes but has 4"
        );
        assert_eq!(
            of(|tensor| tensor.raw_data = None),
            "tensor 'w' is damaged: a tensor of shape [1] and type float32 needs 4 bytes but has 0"
        );
        assert!(of(|tensor| tensor.dims = Some(vec![1 << 40, 1 << 40])).ends_with("is too large to address"));
        assert_eq!(
            of(|tensor| tensor.external_data_offset = 0),
            "tensor 'w' is in a .data file, but the checkpoint declares no .data file"
        );
    }

    #[test]
    fn invalid_utf8_is_an_error() {
        let good = file(&checkpoint(vec![tensor("wwww")]));
        let at = good.windows(4).position(|window| window == b"wwww").unwrap();
        let mut bytes = good.to_vec();
        bytes[at] = 0xff;
        let error = read(bytes.into()).unwrap_err();
        assert!(matches!(error, Error::Malformed(_)), "{error}");
    }

    #[test]
    fn the_first_of_equal_names_wins() {
        let second = format::Tensor { raw_data: Some(vec![9; 4]), ..tensor("w") };
        let mut twice = checkpoint(vec![tensor("w"), second.clone()]);
        twice.module_state.as_mut().unwrap().frozen_params = Some(vec![second]);
        twice.property_bag = Some(Box::new(format::PropertyBag {
            ints: Some([1, 2].map(|value| format::IntProperty { name: Some("p".into()), value }).to_vec()),
            ..format::PropertyBag::default()
        }));
        let checkpoint = read(file(&twice)).unwrap();
        assert_eq!(parameters(&checkpoint), [NamedTensor::new("w", Tensor::f32(&[1], &[1.0]))]);
        assert_eq!(checkpoint.properties["p"], Property::Int(1));
    }

    #[test]
    fn bytes_after_a_file_without_trailer_are_tolerated() {
        let bytes = [&file(&checkpoint(vec![tensor("w")]))[..], &[7; 100]].concat();
        assert!(read(bytes.into()).is_ok());
    }

    #[test]
    fn overlap_cannot_fill_the_memory() {
        let mut builder = Builder::new();
        let moments = format::Tensor {
            dims: Some(vec![1 << 18]),
            raw_data: Some(vec![0; 1 << 20]),
            ..tensor("momentum0")
        };
        let moments = builder.create_vector([moments]);
        let states: Vec<_> = (0..1000)
            .map(|i| format::ParameterOptimizerState::create(&mut builder, i.to_string(), moments))
            .collect();
        let group = format::OptimizerGroup::create(&mut builder, "group0", 0, 0.0, states);
        let module = format::ModuleState::create(
            &mut builder,
            Vec::<format::Tensor>::new(),
            Vec::<format::Tensor>::new(),
            false,
            false,
        );
        let root = format::Checkpoint::create(&mut builder, 2, module, vec![group], (), ());
        let bytes = finish(&mut builder, root);
        let length = bytes.len();
        assert_eq!(
            read(bytes).unwrap_err().to_string(),
            format!(
                "the checkpoint is damaged: its {length} bytes describe more data than they can hold, so parts overlap"
            )
        );
    }

    #[test]
    fn external_data_is_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let external = |offset| {
            let mut w = tensor("w");
            w.raw_data = None;
            w.external_data_offset = offset;
            let mut checkpoint = checkpoint(vec![w]);
            checkpoint.module_state.as_mut().unwrap().has_external_data = true;
            file(&checkpoint)
        };
        let sentence = |offset| {
            fs::write(&path, external(offset)).unwrap();
            load(&path).unwrap_err().content().to_string()
        };
        assert_eq!(
            read(external(0)).unwrap_err().to_string(),
            "the tensors of the checkpoint are in a .data file beside it; load the checkpoint from its path, not \
             from a buffer"
        );
        let side = folder.path().join("c.data");
        assert_eq!(
            sentence(0),
            format!("the tensors of the checkpoint are in {}, but this file does not exist", side.display())
        );
        fs::write(&side, [0, 0, 0, 0, 0, 0, 0, 64]).unwrap();
        let out = |offset| {
            format!("tensor 'w' takes 4 bytes at offset {offset} of the .data file, which has 8 bytes")
        };
        for offset in [5, 8, -2, i64::MIN, i64::MAX] {
            assert_eq!(sentence(offset), out(offset));
        }
        fs::write(&path, external(4)).unwrap();
        let actual = parameters(&load(&path).unwrap());
        assert_eq!(
            actual,
            [NamedTensor::new("w", Tensor::f32(&[1], &[2.0]))],
            "the reference's are not checksummed"
        );
    }
}

mod files {
    use super::*;

    #[test]
    fn files_of_every_size_are_read_completely() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let large = disk::LARGE as usize;
        let pieces = 2 * disk::PIECE;
        for size in [0, 1, large - 1, large, large + 1, 2 * large + 4097, pieces - 1, pieces, pieces + 4097] {
            let content: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            fs::write(&path, &content).unwrap();
            assert!(disk::read(&path).unwrap() == content, "{size} bytes");
        }
    }

    #[cfg(unix)]
    #[test]
    fn files_that_change_size_while_read_are_handled() {
        use std::os::unix::fs::FileExt;
        use std::sync::atomic::{AtomicBool, Ordering};

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (large, reads) in [(disk::LARGE, 20), (2 * disk::PIECE as u64, 3)] {
            fs::write(&path, vec![7; large as usize]).unwrap();
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut round = 0;
                    while !over.load(Ordering::Relaxed) {
                        round += 1;
                        file.set_len(large + round % 3 * 4096).unwrap();
                        file.write_all_at(&[7], large - 1).unwrap();
                    }
                });
                for _ in 0..reads {
                    // The result is the content at some moment, or an error.
                    if let Ok(content) = disk::read(&path) {
                        assert!(content.len() >= large as usize);
                        assert!(content[..large as usize].iter().all(|&byte| byte == 7));
                    }
                }
                over.store(true, Ordering::Relaxed);
            });
        }
    }

    fn external(layout: Layout) -> SaveOptions {
        SaveOptions::new(layout).external_above(100)
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn saves_leave_no_temporary_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        save(&small(), &path, Layout::State).unwrap();
        save(&sample(), &path, Layout::State).unwrap();
        assert_eq!(load(&path).unwrap(), sorted(sample()));
        assert!(fs::read(&path).unwrap() == encode(&sample(), Layout::State).unwrap());
        assert_eq!(names(folder.path()), ["c"]);
    }

    #[test]
    fn external_data_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        for layout in [Layout::Artifacts, Layout::State] {
            let path = folder.path().join(format!("{layout:?}"));
            save(&sample(), &path, external(layout)).unwrap();
            let loaded = load(&path).unwrap();
            assert_eq!(sorted(loaded.clone()), sorted(sample()));
            let second = folder.path().join("again");
            save(&loaded, &second, external(layout)).unwrap();
            let side = |path: &Path| fs::read(crate::read::side_path(path)).unwrap();
            assert!(fs::read(&path).unwrap() == fs::read(&second).unwrap() && side(&path) == side(&second));
        }
        // In the artifacts layout, small tensors stay inside. No tensor of the sample takes 64 bytes.
        assert_eq!(fs::metadata(folder.path().join("Artifacts.data")).unwrap().len(), 0);
        assert_eq!(names(folder.path()).len(), 6);
    }

    #[test]
    fn damage_in_external_data_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let side = folder.path().join("c.data");
        save(&sample(), &path, external(Layout::State)).unwrap();
        let good = fs::read(&side).unwrap();
        let sentence = || load(&path).unwrap_err().content().to_string();
        let damaged = format!(
            "{} is damaged or belongs to another checkpoint: its checksum does not match",
            side.display()
        );
        for position in 0..good.len() {
            let mut bytes = good.clone();
            bytes[position] ^= 1;
            fs::write(&side, bytes).unwrap();
            assert_eq!(sentence(), damaged, "byte {position}");
        }
        fs::write(&side, &good[..good.len() - 1]).unwrap();
        assert_eq!(sentence(), damaged);
        fs::remove_file(&side).unwrap();
        assert!(sentence().ends_with("c.data, but this file does not exist"));
    }

    #[test]
    fn interrupted_renames_leave_a_complete_state() {
        let folder = tempfile::tempdir().unwrap();
        let (path, side) = (folder.path().join("c"), folder.path().join("c.data"));
        save(&sample(), &path, external(Layout::State)).unwrap();
        let mut other = sample();
        other.properties.clear();
        if let ModuleState::Full { trainable, .. } = &mut other.module {
            trainable[0].tensor = Tensor::f32(&[2, 3], &[9.0; 6]);
        }
        let old = fs::read(&side).unwrap();
        save(&other, &path, external(Layout::State)).unwrap();
        // The state after a crash before the last rename.
        let new = fs::read(&side).unwrap();
        let sum = SideSum { length: new.len() as u64, checksum: crc32fast::hash(&new) };
        fs::rename(&side, waiting_side_path(&path, sum.checksum)).unwrap();
        fs::write(&side, &old).unwrap();
        assert_eq!(load(&path).unwrap(), sorted(other.clone()));
        // Another save of the same checkpoint neither needs nor breaks the waiting file.
        save(&other, &path, external(Layout::State)).unwrap();
        assert_eq!(names(folder.path()), ["c", "c.data"]);
        assert_eq!(load(&path).unwrap(), sorted(other));
    }

    #[test]
    fn a_failed_save_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        save(&small(), &path, Layout::State).unwrap();
        let before = fs::read(&path).unwrap();
        let mut bad = sample();
        if let ModuleState::Full { trainable, .. } = &mut bad.module {
            trainable[1].name = "w".into();
        }
        assert!(save(&bad, &path, external(Layout::State)).is_err());
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(names(folder.path()), ["c"]);

        // A folder at the path of the `.data` file is refused before anything is written.
        fs::create_dir(folder.path().join("c.data")).unwrap();
        assert!(matches!(save(&sample(), &path, external(Layout::State)), Err(Error::Directory { .. })));
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(names(folder.path()), ["c", "c.data"]);
    }

    /// The content is flushed before the rename, and the rename is flushed before `save` returns.
    #[test]
    fn files_are_flushed_before_they_are_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let (saved, steps) = faults::with(None, || save(&small(), &path, Layout::State));
        saved.unwrap();
        let (writes, rest) = steps.split_at(steps.iter().take_while(|&&act| act == Act::Write).count());
        assert!(!writes.is_empty());
        assert_eq!(rest, [Act::Flush, Act::Rename, Act::FlushFolder]);

        let (saved, steps) = faults::with(None, || save(&sample(), &path, external(Layout::State)));
        saved.unwrap();
        let rest: Vec<Act> = steps.into_iter().filter(|&act| act != Act::Write).collect();
        // Both files are flushed. The `.data` file gets its waiting name, then the checkpoint is renamed, then the
        // `.data` file gets its final name. A flush of the folder follows each rename.
        let renamed = [Act::Rename, Act::FlushFolder];
        assert_eq!(rest, [&[Act::Flush, Act::Flush][..], &renamed, &renamed, &renamed].concat());
    }

    #[test]
    fn unplaced_files_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        for options in [SaveOptions::from(Layout::State), external(Layout::State)] {
            save(&small(), &path, Layout::State).unwrap();
            let staged = stage(&sample(), &path, options).unwrap();
            assert_eq!(load(&path).unwrap(), sorted(small()));
            drop(staged);
            assert_eq!(names(folder.path()), ["c"]);
        }
        stage(&sample(), &path, external(Layout::State)).unwrap().persist().unwrap();
        assert_eq!(load(&path).unwrap(), sorted(sample()));
        assert_eq!(names(folder.path()), ["c", "c.data"]);
    }

    /// The disk fails from each possible step on. The state on disk is then the old one or the new one, complete.
    #[test]
    fn disk_failures_leave_a_complete_state() {
        let mut other = sample();
        other.properties.clear();
        for (options, old) in [
            (SaveOptions::from(Layout::State), sorted(sample())),
            (external(Layout::State), sorted(sample())),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("c");
            save(&old, &path, options).unwrap();
            let before = names(folder.path());
            let (saved, steps) = faults::with(None, || save(&old, &path, options));
            saved.unwrap();
            for failing in 0..steps.len() {
                save(&old, &path, options).unwrap();
                let (saved, done) = faults::with(Some(failing), || save(&other, &path, options));
                let error = saved.expect_err("the disk fails").to_string();
                assert!(error.starts_with("cannot "), "{error}");
                let actual = load(&path).unwrap();
                let renamed = done[..failing].contains(&Act::Rename);
                assert!(
                    actual == old || renamed && actual == sorted(other.clone()),
                    "step {failing} of {steps:?}"
                );
            }
            save(&other, &path, options).unwrap();
            assert_eq!(load(&path).unwrap(), sorted(other.clone()));
            assert_eq!(names(folder.path()), before, "nothing is left beside it");
        }
    }

    #[test]
    fn leftovers_of_killed_processes_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let at = |name: &str| folder.path().join(name);
        for name in ["c.77-0.tmp", "c.4000000000-12.tmp"] {
            fs::write(at(name), "half of").unwrap();
        }
        for name in ["d.77-0.tmp", "c.tmp", "c.77.bak", "c.best.tmp"] {
            fs::write(at(name), "somebody else's").unwrap();
        }
        let busy = fs::File::create(at("c.78-0.tmp")).unwrap();
        busy.lock().unwrap();
        save(&small(), &path, Layout::State).unwrap();
        assert_eq!(
            names(folder.path()),
            ["c", "c.77.bak", "c.78-0.tmp", "c.best.tmp", "c.tmp", "d.77-0.tmp"]
        );
        drop(busy);
        save(&small(), &path, Layout::State).unwrap();
        assert!(!at("c.78-0.tmp").exists());
    }

    /// Returns two checkpoints with different tensors.
    fn pair() -> [Checkpoint; 2] {
        [1.0, 2.0].map(|value| {
            let mut checkpoint = sorted(sample());
            if let ModuleState::Full { trainable, .. } = &mut checkpoint.module {
                trainable[1].tensor = Tensor::f32(&[2, 3], &[value; 6]);
            }
            checkpoint.properties.insert("value".into(), Property::Float(value));
            checkpoint
        })
    }

    /// Saves run after the load has read the first of two files. The load returns one complete state.
    #[test]
    fn load_during_a_save_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let [first, second] = pair();
        let options = external(Layout::State);
        let steps = faults::with(None, || save(&second, &path, options)).1;
        for failing in (0..steps.len()).map(Some).chain([None]) {
            save(&first, &path, options).unwrap();
            let mut saves = 0;
            let outcome = load_by(&path, || {
                if saves < 2 {
                    // First one checkpoint, then the other. The second save may fail before its end.
                    let next = [&second, &first][saves];
                    let failing = failing.filter(|_| saves == 1);
                    let _ = faults::with(failing, || save(next, &path, options));
                }
                saves += 1;
            });
            let checkpoint = outcome.unwrap();
            assert!(checkpoint == first || checkpoint == second, "failing at {failing:?} of {steps:?}");
        }
        // An inline checkpoint has no second file.
        save(&first, &path, options).unwrap();
        let outcome = load_by(&path, || {
            save(&second, &path, Layout::State).unwrap();
            let _ = fs::remove_file(folder.path().join("c.data"));
        });
        assert_eq!(outcome.unwrap(), second);
    }

    #[test]
    fn concurrent_loads_and_saves_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let both = pair();
        save(&both[0], &path, external(Layout::State)).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        let order = std::sync::atomic::Ordering::Relaxed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for next in both.iter().cycle().take(100) {
                    save(next, &path, external(Layout::State)).unwrap();
                }
                done.store(true, order);
            });
            while !done.load(order) {
                let actual = load(&path).unwrap();
                assert!(both.contains(&actual));
            }
        });
        assert_eq!(names(folder.path()), ["c", "c.data"]);
    }

    #[test]
    fn concurrent_saves_leave_a_complete_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let both = pair();
        for _ in 0..50 {
            std::thread::scope(|scope| {
                for name in &both {
                    scope.spawn(|| save(name, &path, external(Layout::State)).unwrap());
                }
            });
            assert!(both.contains(&load(&path).unwrap()));
        }
        save(&both[0], &path, external(Layout::State)).unwrap();
        assert_eq!(names(folder.path()), ["c", "c.data"], "the last one leaves nothing beside it");
    }

    #[test]
    fn data_files_of_killed_processes_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let at = |name: &str| folder.path().join(name);
        for name in
            ["c.data.00c0ffee", "c.data.12345678", "c.data.1234567", "c.data.123456789", "c.data.mine"]
        {
            fs::write(at(name), "tensors").unwrap();
        }
        let busy = fs::File::open(at("c.data.12345678")).unwrap();
        busy.lock().unwrap();
        // Saving a checkpoint without a `.data` file does not remove waiting `.data` files.
        save(&small(), &path, Layout::State).unwrap();
        assert!(at("c.data.00c0ffee").exists());
        save(&sample(), &path, external(Layout::State)).unwrap();
        let remaining =
            ["c", "c.data", "c.data.1234567", "c.data.12345678", "c.data.123456789", "c.data.mine"];
        assert_eq!(names(folder.path()), remaining);
        drop(busy);
        save(&sample(), &path, external(Layout::State)).unwrap();
        assert!(!at("c.data.12345678").exists());
    }

    #[test]
    fn paths_of_other_kinds_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let shown = path.display();
        let folder_sentence = format!("{shown} is a folder, but a checkpoint is a file");
        assert_eq!(load(path).unwrap_err().to_string(), folder_sentence);
        assert_eq!(save(&small(), path, Layout::State).unwrap_err().to_string(), folder_sentence);
        let nowhere = path.join("no").join("c");
        assert_eq!(
            load(&nowhere).unwrap_err().to_string(),
            format!("there is no file {}", nowhere.display())
        );
        assert_eq!(
            save(&small(), &nowhere, Layout::State).unwrap_err().to_string(),
            format!("cannot write {}: there is no folder {shown}/no; create it first", nowhere.display())
        );
        let below_a_file = path.join("empty").join("c");
        fs::write(path.join("empty"), "").unwrap();
        let sentence = save(&small(), &below_a_file, Layout::State).unwrap_err().to_string();
        assert!(sentence.starts_with(&format!("cannot write {}: ", below_a_file.display())), "{sentence}");
        for no_file in [load("").unwrap_err(), save(&small(), "", Layout::State).unwrap_err()] {
            assert_eq!(no_file.to_string(), "\"\" is not the path of a file");
        }
        let empty = path.join("empty");
        fs::write(&empty, "").unwrap();
        assert_eq!(
            load(&empty).unwrap_err().to_string(),
            format!("{}: the checkpoint is empty", empty.display())
        );
        assert_eq!(names(path), ["empty"]);
    }

    #[cfg(unix)]
    #[test]
    fn devices_are_refused() {
        assert_eq!(load("/dev/zero").unwrap_err().to_string(), "/dev/zero is not a regular file");
    }

    #[cfg(unix)]
    mod unix {
        use std::fs::Permissions;
        use std::os::unix::fs::{PermissionsExt, symlink};

        use super::*;

        type Writer = fn(&Path) -> crate::Result<()>;

        /// Every function that writes a file.
        const WRITERS: [(&str, Writer); 4] = [
            ("checkpoint", |path| save(&small(), path, Layout::State)),
            ("two files", |path| save(&sample(), path, external(Layout::State))),
            ("artifact", |path| stage(&small(), path, Layout::Artifacts)?.persist()),
            ("safetensors", |path| save_safetensors(&tensors(), path)),
        ];

        fn tensors() -> Vec<NamedTensor> {
            vec![NamedTensor::new("w", Tensor::f32(&[1], &[1.0]))]
        }

        /// Returns true if a file can be read in the format of its writer.
        fn sound(name: &str, path: &Path) -> bool {
            match name {
                "safetensors" => load_safetensors(path).unwrap() == tensors(),
                _ => load(path).is_ok(),
            }
        }

        fn mode(path: &Path) -> u32 {
            fs::metadata(path).unwrap().permissions().mode() & 0o7777
        }

        #[test]
        fn every_writer_keeps_the_mode() {
            for (name, write) in WRITERS {
                let folder = tempfile::tempdir().unwrap();
                let (path, side) = (folder.path().join("c"), folder.path().join("c.data"));
                for file_mode in [0o640, 0o600, 0o664, 0o440] {
                    fs::write(&path, "old").unwrap();
                    fs::set_permissions(&path, Permissions::from_mode(file_mode)).unwrap();
                    let _ = fs::remove_file(&side);
                    write(&path).unwrap();
                    write(&path).unwrap();
                    assert!(sound(name, &path), "{name}");
                    assert_eq!(format!("{:o}", mode(&path)), format!("{file_mode:o}"), "{name}");
                    if side.exists() {
                        assert_eq!(format!("{:o}", mode(&side)), format!("{file_mode:o}"), "{name}");
                    }
                    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
                }
            }
        }

        #[test]
        fn every_writer_follows_links() {
            for (name, write) in WRITERS {
                let folder = tempfile::tempdir().unwrap();
                let at = |name: &str| folder.path().join(name);
                fs::create_dir(at("store")).unwrap();
                for (link, target) in [("c", "store/one"), ("c.data", "store/two")] {
                    symlink(target, at(link)).unwrap();
                }
                // The links dangle in the first round, and lead to the written files in the second.
                for round in 0..2 {
                    write(&at("c")).unwrap();
                    assert!(sound(name, &at("c")), "{name} in round {round}");
                    assert_eq!(fs::read_link(at("c")).unwrap(), Path::new("store/one"), "{name}");
                    assert_eq!(fs::read_link(at("c.data")).unwrap(), Path::new("store/two"), "{name}");
                    let expected: &[&str] = if name == "two files" { &["one", "two"] } else { &["one"] };
                    assert_eq!(names(&at("store")), expected, "{name} in round {round}");
                    assert_eq!(names(folder.path()), ["c", "c.data", "store"], "{name}");
                }
                symlink("loop", at("loop")).unwrap();
                assert_eq!(
                    write(&at("loop")).unwrap_err().to_string(),
                    format!(
                        "cannot write {}: it is a symbolic link that leads back to itself; remove it or name another \
                         file",
                        at("loop").display()
                    ),
                    "{name}"
                );
            }
        }

        #[test]
        fn failed_save_through_links_leaves_a_complete_state() {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            fs::create_dir(at("store")).unwrap();
            symlink("store/one", at("c")).unwrap();
            symlink("store/two", at("c.data")).unwrap();
            let [first, second] = pair();
            let options = external(Layout::State);
            for failing in 0.. {
                save(&first, at("c"), options).unwrap();
                let (saved, _) = faults::with(Some(failing), || save(&second, at("c"), options));
                let actual = load(at("c")).unwrap();
                assert!(actual == first || actual == second, "failing at {failing}");
                if saved.is_ok() {
                    break;
                }
            }
            assert_eq!(names(&at("store")), ["one", "two"]);
        }

        #[test]
        fn every_writer_rejects_special_files() {
            let folder = tempfile::tempdir().unwrap();
            let pipe = folder.path().join("pipe");
            assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
            for (name, write) in WRITERS {
                for (path, kind) in [(Path::new("/dev/null"), "a device"), (&pipe, "a pipe")] {
                    assert_eq!(
                        write(path).unwrap_err().to_string(),
                        format!(
                            "cannot write {}: it is {kind}, and only regular files are replaced; name another file",
                            path.display()
                        ),
                        "{name}"
                    );
                }
            }
            assert_eq!(names(folder.path()), ["pipe"]);
            assert!(!fs::metadata("/dev/null").unwrap().is_file());
        }

        #[test]
        fn every_writer_supports_long_names_and_sweeps() {
            for (name, write) in WRITERS {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("c".repeat(250));
                for suffix in ["", ".data"] {
                    let target = crate::disk::with_suffix(&path, suffix);
                    fs::write(ortrain_files::sibling_path(&target, "77-0.tmp"), "half of").unwrap();
                }
                write(&path).unwrap();
                write(&path).unwrap();
                assert!(sound(name, &path), "{name}");
                let left = names(folder.path());
                let unswept = left.iter().filter(|name| name.ends_with(".tmp")).count();
                assert_eq!(unswept, 0, "{name}: {left:?}");
            }
        }

        #[test]
        fn second_file_of_a_long_name_can_wait() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("c".repeat(250));
            let [first, second] = pair();
            let options = external(Layout::State);
            for failing in 0.. {
                save(&first, &path, options).unwrap();
                let (saved, _) = faults::with(Some(failing), || save(&second, &path, options));
                let actual = load(&path).unwrap();
                assert!(actual == first || actual == second, "failing at {failing}");
                if saved.is_ok() {
                    break;
                }
            }
        }
    }
}

mod safetensors {
    use super::*;

    #[test]
    fn every_type_round_trips() {
        let tensors = parameters(&sample());
        let bytes = Bytes::from(write_safetensors(&tensors).unwrap());
        assert!(bytes == write_safetensors(&tensors).unwrap(), "same tensors, same bytes");
        let mut actual = read_safetensors(bytes).unwrap();
        actual.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(actual, tensors);
    }

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let tensors = [NamedTensor::new("a", Tensor::f32(&[2], &[1.0, 2.0]))];
        save_safetensors(&tensors, &path).unwrap();
        assert_eq!(load_safetensors(&path).unwrap(), tensors);
        fs::write(&path, "?").unwrap();
        let sentence = format!("{}: this is not a valid safetensors file: header too small", path.display());
        assert_eq!(load_safetensors(&path).unwrap_err().to_string(), sentence);
        assert!(matches!(load_safetensors(folder.path()), Err(Error::Directory { .. })));
    }

    #[test]
    fn sentences() {
        let twice = vec![NamedTensor::new("a", Tensor::f32(&[], &[1.0])); 2];
        let error = write_safetensors(&twice).unwrap_err();
        assert_eq!(error.to_string(), "two tensors have the name 'a'");
        let header = br#"{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}"#;
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header, b"\0"].concat();
        let error = read_safetensors(bytes.into()).unwrap_err();
        assert_eq!(error.to_string(), "tensor 'a' has the element type F8_E4M3, which is not supported");
    }

    #[test]
    fn damaged_files_never_panic() {
        let good = write_safetensors(&parameters(&small())).unwrap();
        for position in 0..good.len() {
            assert!(read_safetensors(good[..position].to_vec().into()).is_err());
            for flip in [1, 0x80, 0xff] {
                let mut bytes = good.clone();
                bytes[position] ^= flip;
                let _ = read_safetensors(bytes.into());
            }
        }
    }
}
