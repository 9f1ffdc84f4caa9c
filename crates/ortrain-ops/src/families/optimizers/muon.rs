//! Muon: orthogonalized momentum of matrices.

use ortrain_graph::{Attrs, ValueId};

use super::tensors::TensorBuilder;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, SlotShape, flag, setting, slot};

/// Coefficients of the polynomial of an iteration. Its large slope at zero brings singular values near to 1 in five
/// iterations.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
const ITERATIONS: usize = 5;
/// Root mean square of an AdamW step, which `match_rms_adamw` gives to the steps of matrices.
const RMS_OF_ADAMW: f64 = 0.2;

pub(super) const MUON: Optimizer = Optimizer {
    name: "Muon",
    summary: "orthogonal steps for matrices, AdamW for other parameters and for groups with adamw=1",
    source: "Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; torch.optim.Muon",
    slots: &[slot("momentum0"), slot("momentum1").with_shape(SlotShape::ByAdamW)],
    settings: &[
        setting("momentum", 0.95, Range::BelowOne, "decay rate of the momentum of matrices"),
        setting("eps", 1e-7, Range::Positive, "smallest norm that divides the momentum of a matrix"),
        setting(
            "weight_decay",
            0.1,
            Range::NotNegative,
            "decoupled weight decay (a step subtracts `lr * weight_decay * weight`)",
        ),
        setting("adamw", 0.0, Range::NotNegative, "1: train matrices with AdamW (for example embeddings)"),
        BETAS[0],
        BETAS[1],
        setting(
            "adamw_eps",
            1e-8,
            Range::NotNegative,
            "added to the square root that divides a step of AdamW",
        ),
    ],
    flags: &[
        flag("nesterov", true, "use Nesterov's momentum"),
        flag("match_rms_adamw", false, "scale the steps of matrices to the size of AdamW's steps"),
    ],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Tensors {
        numbers: |u| {
            let (beta1, beta2) = (u.setting("beta1"), u.setting("beta2"));
            let matched = if u.flag("match_rms_adamw") { 1.0 } else { 0.0 };
            let nesterov = if u.flag("nesterov") { u.setting("momentum") } else { u.constant(1.0) };
            vec![
                ("rate", u.rate),
                ("decay", u.rate * u.setting("weight_decay")),
                ("taken", 1.0 - u.setting("momentum")),
                ("of_momentum", nesterov),
                ("matched", u.constant(matched)),
                ("eps", u.setting("eps")),
                ("first_taken", 1.0 - beta1),
                ("second_taken", 1.0 - beta2),
                ("corrected_rate", u.rate / u.bias_correction(beta1)),
                ("second_root", u.bias_correction(beta2).sqrt()),
                ("adamw_eps", u.setting("adamw_eps")),
            ]
        },
        step: |t| {
            // Only parameters that AdamW trains have a second moment.
            let (size, none) = (t.op("Size", &[t.get("momentum1")]), t.integer(0));
            let has_none = t.op("Equal", &[size, none]);
            let is_matrix = t.has_rank(t.get("parameter"), 2);
            let is_orthogonal = t.op("And", &[is_matrix, has_none]);
            let results = t.add_if(is_orthogonal, 3, orthogonal_step, adamw_step);
            let lost = t.op("Mul", &[t.get("decay"), t.get("parameter")]);
            let total_step = t.op("Add", &[lost, results[0]]);
            let parameter = t.op("Sub", &[t.get("parameter"), total_step]);
            (parameter, vec![("momentum0".into(), results[1]), ("momentum1".into(), results[2])])
        },
    },
};

/// Returns the step of a matrix, and the slots.
fn orthogonal_step(t: &mut TensorBuilder<'_>) -> Vec<ValueId> {
    let gradient = t.get("gradient");
    let momentum = t.lerp(t.get("momentum0"), gradient, t.get("taken"));
    let direction = t.lerp(gradient, momentum, t.get("of_momentum"));
    let (rows, columns) = matrix_sizes(t);
    let is_tall = t.op("Less", &[columns, rows]);
    t.name_value("direction", direction);
    let orthogonal = t.add_if(is_tall, 1, |t| orthogonalize(t, true), |t| orthogonalize(t, false))[0];
    let step = t.op("Mul", &[t.get("rate"), orthogonal]);
    let (as_muon, as_adamw) = (tall_matrix_factor(t, rows, columns), adamw_size_factor(t, rows, columns));
    let scale = t.lerp(as_muon, as_adamw, t.get("matched"));
    vec![t.op("Mul", &[scale, step]), momentum, t.get("momentum1")]
}

/// Returns the sizes of the two axes, in the element type.
fn matrix_sizes(t: &mut TensorBuilder<'_>) -> (ValueId, ValueId) {
    let shape = t.op("Shape", &[t.get("parameter")]);
    let side = |t: &mut TensorBuilder<'_>, axis: i64| {
        let at = t.integer(axis);
        let size = t.op_with_attrs("Gather", &[shape, at], Attrs::new().with("axis", 0i64));
        t.cast(size)
    };
    (side(t, 0), side(t, 1))
}

/// Returns the factor of a step of a tall matrix, `sqrt(max(1, rows / columns))`.
fn tall_matrix_factor(t: &mut TensorBuilder<'_>, rows: ValueId, columns: ValueId) -> ValueId {
    let one = t.constant(1.0);
    let ratio = t.op("Div", &[rows, columns]);
    let ratio = t.op("Max", &[ratio, one]);
    t.op("Sqrt", &[ratio])
}

/// Returns the factor that gives a step the size of an AdamW step, `0.2 sqrt(max(rows, columns))`.
fn adamw_size_factor(t: &mut TensorBuilder<'_>, rows: ValueId, columns: ValueId) -> ValueId {
    let larger = t.op("Max", &[rows, columns]);
    let (root, scale) = (t.op("Sqrt", &[larger]), t.constant(RMS_OF_ADAMW));
    t.op("Mul", &[scale, root])
}

/// Orthogonalizes a matrix by Newton-Schulz iterations. A tall matrix is transposed first, so that the Gram matrix is
/// the smaller one.
fn orthogonalize(t: &mut TensorBuilder<'_>, is_tall: bool) -> Vec<ValueId> {
    let transposed = |t: &mut TensorBuilder<'_>, x| {
        t.op_with_attrs("Transpose", &[x], Attrs::new().with("perm", vec![1i64, 0]))
    };
    let direction = t.get("direction");
    let wide = if is_tall { transposed(t, direction) } else { direction };
    let norm = t.norm(wide);
    let norm = t.op("Max", &[norm, t.get("eps")]);
    let mut x = t.op("Div", &[wide, norm]);
    let [a, b, c] = COEFFICIENTS.map(|value| t.constant(value));
    for _ in 0..ITERATIONS {
        let other = transposed(t, x);
        let gram = t.op("MatMul", &[x, other]);
        let (square, linear) = (t.op("MatMul", &[gram, gram]), t.op("Mul", &[b, gram]));
        let square = t.op("Mul", &[c, square]);
        let polynomial = t.op("Add", &[linear, square]);
        let (moved, scaled) = (t.op("MatMul", &[polynomial, x]), t.op("Mul", &[a, x]));
        x = t.op("Add", &[scaled, moved]);
    }
    vec![if is_tall { transposed(t, x) } else { x }]
}

/// Returns the step of any other parameter, and the slots.
fn adamw_step(t: &mut TensorBuilder<'_>) -> Vec<ValueId> {
    let gradient = t.get("gradient");
    let square = t.op("Mul", &[gradient, gradient]);
    let first = t.lerp(t.get("momentum0"), gradient, t.get("first_taken"));
    let second = t.lerp(t.get("momentum1"), square, t.get("second_taken"));
    let root = t.op("Sqrt", &[second]);
    let root = t.op("Div", &[root, t.get("second_root")]);
    let size = t.op("Add", &[root, t.get("adamw_eps")]);
    let scaled = t.op("Mul", &[t.get("corrected_rate"), first]);
    vec![t.op("Div", &[scaled, size]), first, second]
}
