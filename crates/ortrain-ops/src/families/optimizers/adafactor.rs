//! Adafactor: the second moment of a matrix, factored into rows and columns.

use ortrain_graph::ValueId;

use super::tensors::TensorBuilder;
use crate::families::optimizers::row::{Optimizer, Range, Rule, SlotShape, setting, slot};

pub(super) const ADAFACTOR: Optimizer = Optimizer {
    name: "Adafactor",
    summary: "Adam with second moments of rows and columns instead of elements, which takes little memory",
    source: "Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018; torch.optim.Adafactor",
    slots: &[
        slot("row_average").with_shape(SlotShape::Rows),
        slot("column_average").with_shape(SlotShape::Columns),
        slot("square_average").with_shape(SlotShape::Vectors),
    ],
    settings: &[
        setting(
            "beta2_decay",
            -0.8,
            Range::Finite,
            "exponent of the weight of new squares in the averages (`t ** beta2_decay` at step t)",
        ),
        setting(
            "eps1",
            f32::EPSILON as f64,
            Range::Positive,
            "smallest root of the second moment that divides a gradient",
        ),
        setting(
            "eps2",
            1e-3,
            Range::NotNegative,
            "smallest root mean square of a parameter that scales its steps",
        ),
        setting("d", 1.0, Range::Positive, "largest root mean square of a step before the learning rate"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "decoupled weight decay (a step subtracts `lr * weight_decay * weight`)",
        ),
    ],
    flags: &[],
    learning_rate: 1e-2,
    average: None,
    update: Rule::Tensors {
        numbers: |u| {
            let relative = u.rate.min(1.0 / u.step.sqrt());
            let decay = u.rate * u.setting("weight_decay");
            let new_weight = u.step.pow(u.setting("beta2_decay"));
            vec![
                ("taken", new_weight),
                ("relative", relative),
                ("decay", decay),
                ("eps1", u.setting("eps1")),
                ("eps2", u.setting("eps2")),
                ("d", u.setting("d")),
            ]
        },
        step: |t| {
            let (rank, one) = (t.rank(t.get("parameter")), t.integer(1));
            let is_matrix = t.op("Less", &[one, rank]);
            let results = t.add_if(is_matrix, 4, factored_second_moment, elementwise_second_moment);
            let [root, slots @ ..] = results.as_slice() else { unreachable!("add_if returns four values") };
            let parameter = update(t, *root);
            let names = ["row_average", "column_average", "square_average"];
            (parameter, names.map(String::from).into_iter().zip(slots.iter().copied()).collect())
        },
    },
};

/// Returns the root of the second moment of a matrix, and the slots.
///
/// The second moment is the product of the averages of rows and columns. The roots are computed per row and per column,
/// so that each element only takes a product.
fn factored_second_moment(t: &mut TensorBuilder<'_>) -> Vec<ValueId> {
    let gradient = t.get("gradient");
    let square = t.op("Mul", &[gradient, gradient]);
    let (of_rows, of_columns) = (t.mean(square, -1), t.mean(square, -2));
    let rows = t.lerp(t.get("row_average"), of_rows, t.get("taken"));
    let columns = t.lerp(t.get("column_average"), of_columns, t.get("taken"));
    let row_mean = t.mean(rows, -2);
    let safe_mean = t.op("Max", &[row_mean, t.get("eps1")]);
    let share = t.op("Div", &[rows, safe_mean]);
    let (root_of_row, root_of_column) = (t.op("Sqrt", &[share]), t.op("Sqrt", &[columns]));
    let root = t.op("Mul", &[root_of_row, root_of_column]);
    vec![root, rows, columns, t.get("square_average")]
}

/// Returns the root of the second moment of a vector or scalar, element by element, and the slots.
fn elementwise_second_moment(t: &mut TensorBuilder<'_>) -> Vec<ValueId> {
    let gradient = t.get("gradient");
    let square = t.op("Mul", &[gradient, gradient]);
    let squares = t.lerp(t.get("square_average"), square, t.get("taken"));
    let root = t.op("Sqrt", &[squares]);
    vec![root, t.get("row_average"), t.get("column_average"), squares]
}

/// Returns the new parameter, from the root of the second moment of each element.
fn update(t: &mut TensorBuilder<'_>, root: ValueId) -> ValueId {
    let (parameter, gradient) = (t.get("parameter"), t.get("gradient"));
    let root = t.op("Max", &[root, t.get("eps1")]);
    let direction = t.op("Div", &[gradient, root]);
    let size = root_mean_square(t, direction);
    let size = t.op("Div", &[size, t.get("d")]);
    let one = t.constant(1.0);
    let size = t.op("Max", &[size, one]);
    let scale = root_mean_square(t, parameter);
    let scale = t.op("Max", &[scale, t.get("eps2")]);
    let rate = t.op("Mul", &[scale, t.get("relative")]);
    let rate = t.op("Div", &[rate, size]);
    let step = t.op("Mul", &[rate, direction]);
    let lost = t.op("Mul", &[t.get("decay"), parameter]);
    let total_step = t.op("Add", &[lost, step]);
    t.op("Sub", &[parameter, total_step])
}

/// Returns the root mean square of all elements.
fn root_mean_square(t: &mut TensorBuilder<'_>, x: ValueId) -> ValueId {
    let square = t.op("Mul", &[x, x]);
    let mean = t.op_with_attrs("ReduceMean", &[square], ortrain_graph::Attrs::new().with("keepdims", 0i64));
    t.op("Sqrt", &[mean])
}
