//! Profiles: real steps that change nothing.
#![allow(clippy::unwrap_used)]

mod common;

use common::{batch, gradient, module_on, recorded, run_input, state_of, train};
use ortrain::{Module, ModuleOptions, Profile, ProfileOptions, RunOptions, backend, collect};

const CASE: &str = "mlp_adamw_ce";

fn profile(backend_name: &str, training: bool) -> Profile {
    let mut state = state_of(CASE);
    let options = ModuleOptions::from(RunOptions::default().backend(backend(backend_name, 0).unwrap()));
    let [train, eval] = ["training_model.onnx", "eval_model.onnx"].map(|file| recorded(CASE, file).into());
    let mut module = Module::new(train, &mut state, Some(eval), options).unwrap();
    let data = batch(8, 3);
    let inputs = [run_input(&data.0), run_input(&data.1)];
    let options = ProfileOptions::default().steps(3).training(training);
    module.profile(&state, &inputs, options, &mut |_, _| Ok(())).unwrap()
}

#[test]
fn profiling_changes_no_results() {
    let data = batch(16, 3);
    let inputs = [run_input(&data.0), run_input(&data.1)];
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    train(&mut module, &mut state, &data);
    let before = (gradient(&module, "fc1.weight"), state.train_step_count());

    let mut plain_state = state_of(CASE);
    let mut plain = module_on(CASE, &mut plain_state);
    train(&mut plain, &mut plain_state, &data);

    let options = ProfileOptions::default().steps(4);
    let profiled = collect(|deliver| module.profile(&state, &inputs, options, deliver).map(|_| ())).unwrap();
    assert_eq!((gradient(&module, "fc1.weight"), state.train_step_count()), before);
    let expected = collect(|deliver| plain.train_step(&mut plain_state, &inputs, deliver)).unwrap();
    assert_eq!(profiled, expected);
    // A pending reset remains pending.
    module.lazy_reset_grad();
    module.profile(&state, &inputs, options, &mut |_, _| Ok(())).unwrap();
    train(&mut module, &mut state, &data);
    assert_eq!(gradient(&module, "fc1.weight"), before.0, "the first step's gradient, not twice that");
}

#[test]
fn every_instruction_is_listed() {
    for backend in ["cpu", "reference"] {
        let result = profile(backend, true);
        assert_eq!(result.steps.len(), 3);
        let products: Vec<_> = result.instructions.iter().filter(|i| i.kind == "MatMul").collect();
        // Two layers in the forward pass; both weights and the hidden layer in the backward pass.
        assert_eq!(products.len(), 5, "{result}");
        for product in &products {
            assert_eq!(product.calls, 3);
            assert!(product.min <= product.median && product.median <= product.total, "{result}");
            assert!(product.flops > 0 && product.bytes > 0 && product.share() > 0.0, "{result}");
        }
        // [8, 10] x [24, 10], with bias and activation as epilogue; an activation only compares and selects.
        let first = products.iter().find(|i| i.shapes == "[] 8x24x10").unwrap();
        assert!(first.node.contains("(Gemm) + ") && first.node.ends_with("(Relu)"), "{result}");
        assert_eq!(first.flops, 2 * 8 * 24 * 10 + 8 * 24, "{result}");
        assert_eq!(first.bytes, 4 * (8 * 10 + 24 * 10 + 24 + 8 * 24), "{result}");
        assert!(result.total() <= result.steps.iter().sum());
        let listed = profile(backend, false);
        assert!(listed.instructions.len() < result.instructions.len());
    }
}

#[test]
fn table_totals_match() {
    let result = profile("cpu", true);
    let table = result.to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 4 + result.instructions.len(), "{table}");
    assert!(lines[0].starts_with("3 steps of "), "{table}");
    assert!(lines[lines.len() - 2].ends_with("all"), "{table}");
    assert!(lines.last().unwrap().contains(" ms to plan for new shapes: shapes and lowering "), "{table}");
    let parts: Vec<&str> = result.planning.iter().map(|&(part, _)| part).collect();
    assert_eq!((parts.first(), parts.last()), (Some(&"shapes and lowering"), Some(&"kernels")));
    assert!(parts.contains(&"fusion") && parts.contains(&"memory_plan"), "{parts:?}");
    let slowest = result.instructions.iter().max_by_key(|i| i.total).unwrap();
    assert!(lines[2].contains(slowest.kind) && lines[2].contains(&format!("# {}", slowest.node)), "{table}");
}

#[test]
fn trace_has_one_event_per_call() {
    let result = profile("cpu", true);
    let calls: usize = result.instructions.iter().map(|i| i.calls).sum();
    let json = result.chrome_trace_json();
    assert_eq!(json.matches("\"ph\":\"X\"").count(), calls + 3);
    let file = tempfile::NamedTempFile::new().unwrap();
    result.chrome_trace(file.path()).unwrap();
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), json);
    let error = result.chrome_trace("/nowhere/at/all.json").unwrap_err();
    assert!(error.to_string().starts_with("cannot write /nowhere/at/all.json"), "{error}");
}
