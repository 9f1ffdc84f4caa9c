use std::sync::Arc;

use ortrain_graph::{DType, Graph, Tensor};
use ortrain_onnx::{ExternalData, LoadedModel, ModelProto};
use ortrain_program::{Memory, PlaneId, Scalars, Schedule};

use super::*;
use crate::passes::functions::inline_functions;
use crate::passes::{infer::infer, versions::upgrade};
use crate::testing::run_bound;
use crate::{OperatorLibrary, PartTensor, PlanePart, Role};

/// Returns the specifications of all element-wise rows with all combinations of their flags.
fn elementwise_specs() -> Vec<OptimizerSpec> {
    let mut specs = Vec::new();
    for row in OPTIMIZERS.iter().filter(|row| matches!(row.update, Rule::Elements(_))) {
        for choice in 0..1 << row.flags.len() {
            let mut spec = OptimizerSpec::new(row.name).expect("the optimizer is in the table");
            for (k, flag) in row.flags.iter().enumerate() {
                spec.flags.insert(flag.name.into(), choice >> k & 1 == 1);
            }
            if let Some(momentum) = spec.settings.get_mut("momentum") {
                *momentum = 0.9;
            }
            specs.push(spec.complete().expect("the settings are valid"));
        }
    }
    specs
}

fn load_bound(model: &ModelProto) -> (Graph, BoundInputs) {
    let mut model = model.clone();
    inline_functions(&mut model, &OperatorLibrary::default()).expect("functions are sound");
    let model = LoadedModel::from_proto(model, ExternalData::none());
    let mut graph = Graph::from_model(&model).expect("the graph can be read");
    let bound = bind(&mut graph).expect("it fits").expect("it maps tensors");
    upgrade(&mut graph).expect("its operators are known");
    infer(&mut graph).expect("its types fit");
    (graph, bound)
}

/// Sizes of the parameters.
const SIZES: [usize; 3] = [1, 70, 5];

fn plane_part(plane: u32, slot: SlotShape) -> PlanePart {
    let mut start = 0;
    let tensors: Vec<PartTensor> = SIZES
        .iter()
        .enumerate()
        .map(|(k, &len)| match slot {
            SlotShape::Scalar => PartTensor { start: k, len: 1 },
            _ => {
                let tensor = PartTensor { start, len };
                start = (start + len).next_multiple_of(64);
                tensor
            }
        })
        .collect();
    let len = if slot == SlotShape::Scalar { SIZES.len() } else { start };
    PlanePart { dtype: DType::F32, plane: PlaneId(plane), offset: 0, len, tensors: tensors.into() }
}

/// Runs a step. The planes are parameters, gradients, and slots.
fn step(spec: &OptimizerSpec, planes: &[Memory], t: i64) -> (Arc<Schedule>, Vec<Tensor>) {
    let model = optimizer_model(spec, &[DType::F32]).expect("the graph can be written");
    let (graph, bound) = load_bound(&model);
    let mut roles = Vec::new();
    let mut feeds = Vec::new();
    for &id in &graph.inputs {
        let name = graph.name_of(id);
        let slot = spec.slots.iter().position(|slot| slot.name == name);
        let bind = |plane: usize, shape| Role::Planes(vec![plane_part(plane as u32, shape)]);
        roles.push(match name {
            "params" => bind(0, SlotShape::Same),
            "gradients" => bind(1, SlotShape::Same),
            _ if slot.is_some() => {
                let k = slot.expect("just seen");
                bind(2 + k, SlotShape::from_name(&spec.slots[k].shape).expect("known"))
            }
            _ => Role::User,
        });
        let table = || {
            let row = bound.columns.iter().map(|name| match name.as_str() {
                "lr" | "skipped_steps" => 0.0,
                "lr_factor" => 1.0,
                name => spec.settings[name],
            });
            let row: Vec<f64> = row.collect();
            Tensor::from_f64(DType::F64, vec![SIZES.len(), row.len()], &row.repeat(SIZES.len()))
        };
        match name {
            "learning_rate" => feeds.push(Tensor::f32(&[1], &[spec.learning_rate as f32])),
            "step" | "gathered_steps" => feeds.push(Tensor::i64(&[1], &[t])),
            "max_norm" => {
                feeds.push(Tensor::from_f64(DType::F64, vec![1], &[spec.max_norm.expect("asked for")]));
            }
            "settings" => feeds.push(table()),
            _ => {}
        }
    }
    let planes: Vec<&Memory> = planes.iter().collect();
    run_bound(&graph, roles, &planes, &feeds, Scalars::default()).expect("the graph runs")
}

fn planes(spec: &OptimizerSpec) -> Vec<Memory> {
    let fill = |seed: usize, scale: f32| {
        let part = plane_part(0, SlotShape::Same);
        let memory = Memory::new(part.len * 4);
        for tensor in part.tensors.iter() {
            for k in 0..tensor.len {
                let value = scale * (((k * 37 + seed * 11 + tensor.start) % 19) as f32 - 9.0) / 9.0;
                memory.write((tensor.start + k) * 4, &value.to_le_bytes()).unwrap();
            }
        }
        memory
    };
    let mut planes = vec![fill(1, 1.0), fill(2, 0.1)];
    planes.extend(spec.slots.iter().map(|_| fill(3, 0.0)));
    planes
}

#[test]
fn every_elementwise_step_is_one_instruction() {
    for spec in elementwise_specs() {
        let planes = planes(&spec);
        let before = planes[0].to_vec(0, planes[0].len()).unwrap();
        let (schedule, _) = step(&spec, &planes, 1);
        let steps: Vec<String> = schedule
            .programs()
            .into_iter()
            .flat_map(|program| {
                program.instructions.iter().map(|scheduled| scheduled.instruction.name().to_owned())
            })
            .collect();
        assert_eq!(steps.len(), 1, "{} {:?}: {schedule}", spec.optimizer, spec.flags);
        assert_ne!(
            planes[0].to_vec(0, planes[0].len()).unwrap(),
            before,
            "{} {:?}",
            spec.optimizer,
            spec.flags
        );
    }
}

/// Returns the contents of the planes after some steps.
fn planes_after(spec: &OptimizerSpec, steps: i64) -> Vec<Vec<f32>> {
    let planes = planes(spec);
    (1..=steps).for_each(|t| drop(step(spec, &planes, t)));
    let floats = |memory: &Memory| {
        let bytes = memory.to_vec(0, memory.len()).unwrap();
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect()
    };
    planes.iter().map(floats).collect()
}

#[test]
fn sgd_with_momentum_matches_formula() {
    let mut spec = OptimizerSpec::new("SGD").expect("the optimizer is in the table");
    spec.settings.insert("momentum".into(), 0.9);
    spec.settings.insert("weight_decay".into(), 0.1);
    let spec = spec.complete().expect("the settings are valid");
    let (before, after) = (planes_after(&spec, 0), planes_after(&spec, 3));
    for (k, &gradient) in before[1].iter().enumerate() {
        let (mut weight, mut velocity) = (f64::from(before[0][k]), 0.0);
        for _ in 0..3 {
            velocity = 0.9 * velocity + f64::from(gradient) + 0.1 * weight;
            weight -= 1e-3 * velocity;
        }
        assert!((f64::from(after[0][k]) - weight).abs() < 1e-6, "element {k}: {} for {weight}", after[0][k]);
    }
}

#[test]
fn lamb_rate_is_per_tensor() {
    let spec = OptimizerSpec::new("LAMB")
        .expect("the optimizer is in the table")
        .complete()
        .expect("the settings are valid");
    let (before, after) = (planes_after(&spec, 0), planes_after(&spec, 1));
    for tensor in plane_part(0, SlotShape::Same).tensors.iter() {
        let range = tensor.start..tensor.start + tensor.len;
        let weights = &before[0][range.clone()];
        let gradients = &before[1][range.clone()];
        // After one step the corrected moments are the gradient and its square.
        let direction: Vec<f64> = weights
            .iter()
            .zip(gradients)
            .map(|(&w, &g)| {
                let g = f64::from(g);
                g / (g.abs() + 1e-6) + 0.01 * f64::from(w)
            })
            .collect();
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let ratio = norm(&mut weights.iter().map(|&w| f64::from(w))) / norm(&mut direction.iter().copied());
        for (k, at) in range.enumerate() {
            let expected = f64::from(weights[k]) - 1e-3 * ratio * direction[k];
            assert!(
                (f64::from(after[0][at]) - expected).abs() < 1e-6,
                "element {at}: {} for {expected}",
                after[0][at]
            );
        }
    }
}

#[test]
fn options_return_gradient_norm() {
    for mut spec in elementwise_specs() {
        spec.max_norm = Some(0.5);
        spec.mean_of_gathered = true;
        for (name, value) in [("max_value", 0.05), ("max_norm_per_tensor", 0.3), ("ema_decay", 0.4)] {
            spec.settings.insert(name.into(), value);
        }
        let spec = spec.complete().expect("the settings are valid");
        let planes = planes(&spec);
        let gradients = &planes_after(&spec, 0)[1];
        let (_, results) = step(&spec, &planes, 1);
        let of_tensor = |tensor: &PartTensor| {
            let clipped =
                gradients[tensor.start..tensor.start + tensor.len].iter().map(|g| g.clamp(-0.05, 0.05));
            let norm = clipped.map(|g| f64::from(g).powi(2)).sum::<f64>().sqrt();
            (norm * (0.3 / (norm + 1e-6)).min(1.0)).powi(2)
        };
        let expected = plane_part(0, SlotShape::Same).tensors.iter().map(of_tensor).sum::<f64>().sqrt();
        let norm = results[0].to_f64()[0];
        assert!((norm - expected).abs() < 1e-6 * expected, "{}: {norm} for {expected}", spec.optimizer);
    }
}

#[test]
fn frozen_parameters_and_slots_do_not_change() {
    let spec = OptimizerSpec::new("Lion")
        .expect("the optimizer is in the table")
        .complete()
        .expect("the settings are valid");
    // The step count is 0 for a parameter that was frozen in all steps.
    let planes = planes(&spec);
    let before: Vec<Vec<u8>> = planes.iter().map(|plane| plane.to_vec(0, plane.len()).unwrap()).collect();
    step(&spec, &planes, 0);
    let after: Vec<Vec<u8>> = planes.iter().map(|plane| plane.to_vec(0, plane.len()).unwrap()).collect();
    assert_eq!(after, before);
}

#[test]
fn rejects_invalid_settings() {
    let refused = |change: &dyn Fn(&mut OptimizerSpec)| {
        let mut spec = OptimizerSpec::new("AdamW").expect("the optimizer is in the table");
        change(&mut spec);
        spec.complete().expect_err("it makes no sense").to_string()
    };
    let set = |spec: &mut OptimizerSpec, name: &str, value| {
        spec.settings.insert(name.into(), value);
    };
    let beta = refused(&|spec| set(spec, "beta1", 1.0));
    assert!(beta.contains("beta1 must be a number from 0 to below 1, got 1"), "{beta}");
    let rate = refused(&|spec| spec.learning_rate = f64::NAN);
    assert!(rate.contains("the learning rate must be finite and at least 0, got NaN"), "{rate}");
    let unknown = refused(&|spec| set(spec, "rho", 0.5));
    assert!(unknown.contains("AdamW has no setting \"rho\""), "{unknown}");
    let twice = refused(&|spec| {
        let group = || Group { parameters: vec!["w".into()], ..Group::default() };
        spec.groups = vec![group(), group()];
    });
    assert!(twice.contains("parameter \"w\" is in groups 0 and 1"), "{twice}");
}

#[test]
fn descriptions_round_trip() {
    for mut spec in elementwise_specs() {
        spec.groups.push(Group { parameters: vec!["w".into()], lr: Some(0.1 + 0.2), ..Group::default() });
        assert_eq!(OptimizerSpec::from_text(&spec.to_text()).expect("it was written"), spec);
    }
    assert!(OptimizerSpec::from_text("{").is_err());
}
