//! Attention subgraphs of exporters: each becomes one instruction, and one for its gradients, with the same
//! results.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_graph::{DType, Graph, Tensor};
use ortrain_ops::{Role, Specialiser};
use ortrain_program::{Instruction, Program, Reference};
use ortrain_testkit::suites::attention::{BATCH, Config, Spelling, agree, configs};
use ortrain_testkit::{check_gradient, gradient_graph, run, tolerance};

fn program(graph: Graph, inputs: &[Tensor]) -> Arc<Program> {
    let roles = vec![Role::User; graph.inputs.len()];
    let schedule = Specialiser::new(graph, roles).schedule(inputs).unwrap();
    schedule.single_program().unwrap().clone()
}

fn attentions(program: &Program) -> usize {
    program.instructions.iter().filter(|i| matches!(i.instruction, Instruction::Attention(_))).count()
}

/// No buffer with the size of the scores remains, and only the new instructions access them.
#[test]
fn attention_becomes_one_instruction_per_pass() {
    // Consumers of the scores, or of weights rounded to float16, prevent fusion.
    let keeps = |config: &Config| matches!(config.spelling, Spelling::PaddedSafe | Spelling::PaddedNarrow);
    let fused = |config: &Config| config.queries > 1 && !keeps(config);
    for config in configs().into_iter().filter(fused) {
        let case = config.case();
        let forward = program(case.graph.clone(), &case.inputs);
        let backward = program(gradient_graph(&case).unwrap(), &case.inputs);
        assert_eq!(
            (attentions(&forward), attentions(&backward)),
            (1, 2),
            "{config:?}\n{forward}\n{backward}"
        );
        let steps = |program: &Program| -> Vec<&str> {
            program
                .instructions
                .iter()
                .map(|i| i.instruction.name())
                .filter(|name| *name == "MatMul")
                .collect()
        };
        assert!(steps(&backward).is_empty(), "{config:?}\n{backward}");
        let scores = BATCH * config.heads * config.queries * config.keys;
        for program in [forward, backward] {
            let used = |id: &ortrain_program::BufferId| program.buffer(*id).len == scores;
            let instructions = program
                .instructions
                .iter()
                .flat_map(|i| [i.instruction.reads(), i.instruction.writes()].concat());
            // Operands may have the same number of elements by chance.
            if config.size != config.keys && config.size != config.queries {
                assert_eq!(instructions.filter(used).count(), 0, "{config:?}\n{program}");
            }
        }
    }
}

/// Gradients in float64 agree with central differences.
#[test]
fn gradients_are_those_of_differences() {
    for config in configs().into_iter().filter(|config| config.queries < 10) {
        check_gradient(&config.case()).unwrap();
    }
}

/// A fully masked row is NaN temporarily. After NaN is replaced by zero, every gradient is finite, with and
/// without fusion.
#[test]
fn gradients_are_finite() {
    for dtype in [DType::F32, DType::F64] {
        for config in configs() {
            for exposes_weights in [false, true] {
                let case = Config { dtype, exposes_weights, ..config }.case();
                let mut graph = gradient_graph(&Config { dtype, ..config }.case()).unwrap();
                if exposes_weights {
                    let softmax = graph.nodes.iter().find(|node| &*node.op == "Softmax").unwrap();
                    graph.outputs.push(softmax.outputs[0].unwrap());
                }
                let gradients = graph.outputs.len() - usize::from(exposes_weights);
                for backend in every_level().into_iter().chain([Arc::new(Reference) as _]) {
                    let got = run(&graph, &case.inputs, backend).unwrap();
                    let finite = got[..gradients].iter().all(|x| x.to_f64().iter().all(|x| x.is_finite()));
                    assert!(finite, "{config:?}, seen: {exposes_weights}");
                }
            }
        }
    }
}

/// Every kernel level agrees with the reference evaluator, forward and backward.
#[test]
fn backends_agree() {
    every_level().iter().for_each(|backend| agree(backend).passes());
}

/// If the softmax is a result, attention is not fused; the results are the same.
#[test]
fn fused_and_unfused_are_the_same() {
    for dtype in [DType::F32, DType::F64] {
        for config in configs() {
            let config = Config { dtype, ..config };
            let (fused, exposed) = (config.case(), Config { exposes_weights: true, ..config }.case());
            // The same gradients: the softmax is not part of the loss.
            let mut backward = gradient_graph(&fused).unwrap();
            let softmax =
                backward.nodes.iter().find(|node| &*node.op == "Softmax").unwrap().outputs[0].unwrap();
            let unfused_forward = program(exposed.graph.clone(), &exposed.inputs);
            assert_eq!(attentions(&unfused_forward), 0, "{config:?}\n{unfused_forward}");
            let reference = || Arc::new(Reference) as Arc<dyn ortrain_program::Backend>;
            let mut got = run(&fused.graph, &fused.inputs, reference()).unwrap();
            let mut expected = run(&exposed.graph, &exposed.inputs, reference()).unwrap();
            expected.pop();
            got.extend(run(&backward, &fused.inputs, reference()).unwrap());
            backward.outputs.push(softmax);
            let unfused = program(backward.clone(), &fused.inputs);
            assert_eq!(attentions(&unfused), 0, "{config:?}\n{unfused}");
            expected.extend(run(&backward, &fused.inputs, reference()).unwrap());
            expected.pop();
            for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let (got, expected) = (got.to_f64(), expected.to_f64());
                let scale = expected
                    .iter()
                    .fold(1e-3f64, |scale, v| if v.is_nan() { scale } else { scale.max(v.abs()) });
                for (got, expected) in got.iter().zip(&expected) {
                    let is_close = got.is_nan() && expected.is_nan()
                        || (got - expected).abs() <= tolerance::FLOAT32 * scale;
                    assert!(is_close, "{config:?}: result {k} has {got}, not {expected}");
                }
            }
        }
    }
}
