//! Gradient of Resize in operators of `ai.onnx`.

use ortrain_expr::{Scalar, Type};
use ortrain_graph::{Attrs, DType, Dim, Shape, Tensor, ValueId};

use super::sampling::{AspectRatioPolicy, CoordinateMode, ResizeAttributes, ResizeInputs};
use crate::OpError;
use crate::axis_map::AxisMap;
use crate::families::resize::sampling::{ROI, SCALES, SIZES};
use crate::support::onnx_decomposition::NodeSink;

/// Maximum number of elements of a weight matrix: larger matrices are not worth their memory.
const MAX_MATRIX_ELEMENTS: usize = 1 << 22;

/// State of knowledge about roi, scales or sizes.
#[derive(Clone, Copy)]
pub(super) enum ListInput<'a> {
    Absent,
    Unknown,
    Known(&'a Tensor),
}

/// Gradient in operators of `ai.onnx`.
pub(super) struct OnnxDecomposition {
    rank: usize,
    /// A shape that separates the copies of each element of the input into axes of their own, and these axes.
    split: Option<(Vec<i64>, Vec<i64>)>,
    /// Axes that are multiplied with weight matrices.
    products: Vec<(usize, AxisMap)>,
}

/// Returns the number of copies of each element if the map only copies: element `k` to positions from `k * copies` on.
fn copies_per_element(map: &AxisMap) -> Option<usize> {
    let copies = map.len().checked_div(map.source_size()).filter(|&copies| copies > 0)?;
    let repeats = |k: usize| matches!(map.row(k), [tap] if tap.index == k / copies && tap.weight == 1.0);
    (map.source_size() * copies == map.len() && (0..map.len()).all(repeats)).then_some(copies)
}

impl OnnxDecomposition {
    /// Plans the gradient. Returns `None` if sizes are unknown or the weight matrices are too large. `x` and `y` are
    /// the shapes before and after resizing; axes of unknown size must not be resized. `list` returns roi, scales and
    /// sizes.
    pub(super) fn new<'a>(
        settings: &ResizeAttributes,
        [x, y]: [&Shape; 2],
        list: impl Fn(usize) -> ListInput<'a>,
    ) -> Result<Option<OnnxDecomposition>, OpError> {
        let crops = settings.coordinates == CoordinateMode::TfCropAndResize;
        let mut inputs = ResizeInputs::default();
        match list(ROI) {
            ListInput::Known(roi) if crops => inputs.roi = Some(roi.to_f64()),
            ListInput::Unknown if crops => return Ok(None),
            _ => {}
        }
        match list(SCALES) {
            ListInput::Known(scales) => inputs.scales = Some(scales.to_f64()),
            ListInput::Unknown => return Ok(None),
            ListInput::Absent => {}
        }
        let rank = x.rank();
        let axes = settings.axes(rank)?;
        if y.rank() != rank {
            return Err(OpError::invalid(format!("{x} cannot be resized to {y}, because the ranks differ")));
        }
        // A part of an axis of unknown size is unknown, too.
        let keeps_all = |k: usize| {
            let ends = inputs.roi.as_ref().map(|roi| (roi.get(k), roi.get(axes.len() + k)));
            ends.is_none_or(|ends| ends == (Some(&0.0), Some(&1.0)))
        };
        let is_unchanged = |(k, axis): (usize, usize)| x[axis] == y[axis] && keeps_all(k);
        let open = |axis: usize| x[axis].known().is_none() || y[axis].known().is_none();
        if axes.iter().copied().enumerate().any(|(k, axis)| open(axis) && !is_unchanged((k, axis))) {
            return Ok(None);
        }
        let size = |dim: &Dim| dim.known().unwrap_or(1);
        if inputs.scales.is_none() {
            inputs.sizes = match (settings.policy, list(SIZES)) {
                (AspectRatioPolicy::Stretch, _) => {
                    Some(axes.iter().map(|&axis| size(&y[axis]) as i64).collect())
                }
                (_, ListInput::Known(sizes)) => sizes.to_i64(),
                _ => return Ok(None),
            };
        }
        let dims: Vec<usize> = x.iter().map(size).collect();
        let mut products = Vec::new();
        let mut repeated: Vec<Option<usize>> = vec![None; rank];
        for plan in settings.plan(&dims, &inputs)? {
            let Some((map, _)) = settings.sampling(&plan)? else { continue };
            if map.is_identity() {
                continue;
            }
            match copies_per_element(&map) {
                Some(count) => repeated[plan.axis] = Some(count),
                None => products.push((plan.axis, map)),
            }
        }
        if products.iter().any(|(_, map)| map.source_size().saturating_mul(map.len()) > MAX_MATRIX_ELEMENTS) {
            return Ok(None);
        }
        // Sums come last: the products have restored the sizes of the other axes.
        let split = repeated.iter().any(Option::is_some).then(|| {
            let (mut sizes, mut sums) = (Vec::new(), Vec::new());
            for (axis, dim) in x.iter().enumerate() {
                sizes.push(match dim.known() {
                    Some(size) => size as i64,
                    // 0 copies the size at the same position, which is valid until an axis is split.
                    None if sums.is_empty() => 0,
                    None => -1,
                });
                if let Some(copies) = repeated[axis] {
                    sums.push(sizes.len() as i64);
                    sizes.push(copies as i64);
                }
            }
            (sizes, sums)
        });
        if let Some((sizes, _)) = &split {
            let open = sizes.iter().filter(|&&size| size == -1).count();
            // Reshape reads a size of 0 as the size at the same position.
            if open > 1 || x.contains(&Dim::Known(0)) {
                return Ok(None);
            }
        }
        Ok(Some(OnnxDecomposition { rank, split, products }))
    }

    pub(super) fn emit(&self, to: &mut impl NodeSink, mut g: ValueId, dtype: DType) -> ValueId {
        for (axis, map) in &self.products {
            let (rows, columns) = (map.len(), map.source_size());
            // For the axis before the last, the matrix is the left factor, which maps results to sources.
            let left = axis + 2 == self.rank;
            let scalars: Vec<Scalar> =
                map.matrix(left).into_iter().map(|w| Scalar::from_f64(Type::of(dtype), w)).collect();
            let bytes = Scalar::to_bytes(dtype, &scalars);
            let dims = if left { vec![columns, rows] } else { vec![rows, columns] };
            let matrix = Tensor::new(dtype, dims, bytes.into())
                .expect("the matrix has a weight for each pair of elements");
            let matrix = to.emit_constant(matrix);
            if left {
                g = to.emit("MatMul", &[Some(matrix), Some(g)], Attrs::new());
                continue;
            }
            let mut perm: Vec<i64> = (0..self.rank as i64).collect();
            perm.swap(*axis, self.rank - 1);
            let needs_transpose = axis + 1 != self.rank;
            let turn = || Attrs::new().with("perm", perm.clone());
            if needs_transpose {
                g = to.emit("Transpose", &[Some(g)], turn());
            }
            g = to.emit("MatMul", &[Some(g), Some(matrix)], Attrs::new());
            if needs_transpose {
                g = to.emit("Transpose", &[Some(g)], turn());
            }
        }
        if let Some((sizes, sums)) = &self.split {
            let ints = |values: &[i64]| Tensor::i64(&[values.len()], values);
            let (sizes, sums) = (to.emit_constant(ints(sizes)), to.emit_constant(ints(sums)));
            g = to.emit("Reshape", &[Some(g), Some(sizes)], Attrs::new());
            g = to.emit("ReduceSum", &[Some(g), Some(sums)], Attrs::new().with("keepdims", 0i64));
        }
        if self.products.is_empty() && self.split.is_none() {
            g = to.emit("Identity", &[Some(g)], Attrs::new());
        }
        g
    }
}
