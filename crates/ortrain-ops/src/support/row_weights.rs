//! Nodes that weigh the results of adapters for each row of a batch.

use ortrain_graph::{DType, Tensor};
use ortrain_onnx::NodeProto;

use super::low_rank::{Nodes, integer};

/// Rows of the result of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowAxis {
    /// This axis has the rows of the batch.
    Axis(usize),
    /// The first axis has several positions of the first row, of the second row, and so on.
    Merged,
}

/// Result of an adapter that is weighed.
pub(crate) struct WeighedSite<'a> {
    /// Result of the adapter.
    pub(crate) delta: &'a str,
    /// Weights of the rows: one number for each, or one for all.
    pub(crate) column: &'a str,
    /// Number of axes of the result, and the axis of its rows.
    pub(crate) rank: usize,
    pub(crate) axis: RowAxis,
    pub(crate) dtype: DType,
    /// Begin of the names of all other values.
    pub(crate) prefix: &'a str,
}

/// Ends of the names of the values between the weights and the weighed result.
pub(crate) const ROW_PARTS: [&str; 14] = [
    WEIGHED,
    ROW_WEIGHTS,
    ROW_WEIGHTS_CAST,
    WEIGHT_AXES,
    FIRST,
    ALL_SIZES,
    POSITIONS,
    ROWS,
    REPEATS,
    ONE,
    REPEATED_SIZES,
    COLUMN,
    REPEATED,
    ALIGNED,
];
/// End of the name of the weighed result.
pub(crate) const WEIGHED: &str = "/weighed";
const ROW_WEIGHTS: &str = "/row_weights";
const ROW_WEIGHTS_CAST: &str = "/row_weights_cast";
const WEIGHT_AXES: &str = "/weight_axes";
const FIRST: &str = "/first";
const ALL_SIZES: &str = "/all_sizes";
const POSITIONS: &str = "/positions";
const ROWS: &str = "/rows";
const REPEATS: &str = "/repeats";
const ONE: &str = "/one";
const REPEATED_SIZES: &str = "/repeated_sizes";
const COLUMN: &str = "/column";
const REPEATED: &str = "/repeated";
const ALIGNED: &str = "/aligned";

/// Returns the nodes of the weights of one adapter: a column of the weights of all adapters.
pub(crate) fn column_nodes(weights: &str, index: usize, column: &str) -> Vec<NodeProto> {
    let mut nodes = Nodes::new(column);
    let index = nodes.tensor("/index", &Tensor::i64(&[], &[index as i64]));
    let mut gather = nodes.into_list();
    gather.push(NodeProto {
        op_type: "Gather".into(),
        name: column.to_owned(),
        input: vec![weights.to_owned(), index],
        output: vec![column.to_owned()],
        attribute: vec![integer("axis", 1)],
        ..NodeProto::default()
    });
    gather
}

/// Returns the nodes that weigh the result of an adapter, in topological order.
pub(crate) fn weighed_nodes(site: &WeighedSite<'_>) -> Vec<NodeProto> {
    let mut nodes = Nodes::new(site.prefix);
    let mut weights = site.column.to_owned();
    if site.dtype != DType::F32 {
        let to = integer("to", i64::from(site.dtype.to_onnx()));
        weights = nodes.add("Cast", &[&weights], ROW_WEIGHTS_CAST, vec![to]);
    }
    let mut sizes = vec![1; site.rank];
    match site.axis {
        RowAxis::Axis(axis) => sizes[axis] = -1,
        RowAxis::Merged => {
            sizes[0] = -1;
            let first = nodes.constant(FIRST, &[0]);
            let all = nodes.add("Shape", &[site.delta], ALL_SIZES, Vec::new());
            let positions = nodes.add("Gather", &[&all, &first], POSITIONS, vec![integer("axis", 0)]);
            let rows = nodes.add("Shape", &[site.column], ROWS, Vec::new());
            let repeats = nodes.add("Div", &[&positions, &rows], REPEATS, Vec::new());
            let one = nodes.constant(ONE, &[1]);
            let repeated = nodes.add("Concat", &[&one, &repeats], REPEATED_SIZES, vec![integer("axis", 0)]);
            let column_sizes = nodes.constant(COLUMN, &[-1, 1]);
            let column = nodes.add("Reshape", &[&weights, &column_sizes], ROW_WEIGHTS, Vec::new());
            weights = nodes.add("Expand", &[&column, &repeated], REPEATED, Vec::new());
        }
    }
    let sizes = nodes.constant(WEIGHT_AXES, &sizes);
    let weights = nodes.add("Reshape", &[&weights, &sizes], ALIGNED, Vec::new());
    nodes.add("Mul", &[site.delta, &weights], WEIGHED, Vec::new());
    nodes.into_list()
}
