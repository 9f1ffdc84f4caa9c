//! Rearrangement of image blocks into channels (`SpaceToDepth`), and of channels into blocks (`DepthToSpace`).
//!
//! SpaceToDepth-1, 13, 28 (<https://onnx.ai/onnx/operators/onnx__SpaceToDepth.html>) and DepthToSpace-1, 11, 13, 28
//! (<https://onnx.ai/onnx/operators/onnx__DepthToSpace.html>) of ONNX. Both have a mode. In `DCR` the channels of a
//! block are separated by the number of channels of the image, in `CRD` they are adjacent. SpaceToDepth has the mode
//! from opset 28 on; for older opsets `CRD` is written as Reshape and Transpose. Each operator is the gradient of the
//! other.

use ortrain_expr::Strides;
use ortrain_graph::{Attrs, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

const TO_DEPTH: &str = "SpaceToDepth";
const TO_SPACE: &str = "DepthToSpace";

struct Blocks {
    to_depth: bool,
    size: usize,
    /// True if the channels of a block are adjacent (mode `CRD`).
    adjacent_channels: bool,
}

impl Blocks {
    fn read(node: &Node) -> Result<Blocks, OpError> {
        let size = Attrs::required("blocksize", node.attrs.int("blocksize")?)?;
        let size =
            usize::try_from(size).ok().filter(|size| (1..=1 << 15).contains(size)).ok_or_else(|| {
                OpError::invalid(format!("blocksize must be from 1 to {}, got {size}", 1 << 15))
            })?;
        let together = match node.attrs.string("mode")?.unwrap_or("DCR") {
            "DCR" => false,
            "CRD" => true,
            other => {
                return Err(OpError::invalid(format!("mode must be \"DCR\" or \"CRD\", got {other:?}")));
            }
        };
        Ok(Blocks { to_depth: &*node.op == TO_DEPTH, size, adjacent_channels: together })
    }

    fn attrs(&self) -> Attrs {
        let attrs = Attrs::new().with("blocksize", self.size as i64);
        if self.adjacent_channels { attrs.with("mode", "CRD") } else { attrs }
    }

    fn shape(&self, cx: &Infer<'_>, shape: &Shape) -> Result<Shape, OpError> {
        let square = self.size * self.size;
        let wrong = |axis: usize, by: usize| {
            OpError::invalid(format!(
                "axis {axis} of shape {shape} must be a multiple of {by} (blocksize {})",
                self.size
            ))
        };
        if shape.rank() != 4 {
            return Err(OpError::invalid(format!("input 0 has shape {shape}; [N, C, H, W] is needed")));
        }
        let times = |axis: usize, by: usize| match shape[axis].known() {
            Some(size) => size.checked_mul(by).map(Dim::Known).ok_or_else(|| {
                OpError::invalid(format!("axis {axis} of shape {shape}, multiplied by {by}, is too large"))
            }),
            None if by == 1 => Ok(shape[axis].clone()),
            None => Ok(cx.unknown_dim(0, axis)),
        };
        let part = |axis: usize, by: usize| match shape[axis].known() {
            Some(size) if size % by == 0 => Ok(Dim::Known(size / by)),
            Some(_) => Err(wrong(axis, by)),
            None if by == 1 => Ok(shape[axis].clone()),
            None => Ok(cx.unknown_dim(0, axis)),
        };
        Ok(if self.to_depth {
            let sizes = [times(1, square)?, part(2, self.size)?, part(3, self.size)?];
            [shape[0].clone()].into_iter().chain(sizes).collect()
        } else {
            let sizes = [part(1, square)?, times(2, self.size)?, times(3, self.size)?];
            [shape[0].clone()].into_iter().chain(sizes).collect()
        })
    }
}

impl Op for Blocks {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.dtype(0)?;
        let shape = cx.shape(0).map(|shape| self.shape(cx, shape)).transpose()?;
        cx.set_output(0, dtype, Some(shape.unwrap_or_else(|| cx.unknown_shape(0, 4))));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let gradient = cx.add(if self.to_depth { TO_SPACE } else { TO_DEPTH }, &[g], self.attrs());
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let image = if self.to_depth { cx.dims(0) } else { cx.out_dims(0) };
        let b = self.size;
        let &[n, c, high, wide] = image.as_slice() else {
            return Err(OpError::invalid("input 0 must have four axes"));
        };
        let (h, w) = (high / b, wide / b);
        // Batch, channel, and for each axis of the image the block and the pixel in the block.
        let space = [n, c, h, b, w, b];
        let to_strides = |strides: [usize; 6]| -> Strides { strides.iter().map(|&s| s as isize).collect() };
        let in_image = to_strides([c * high * wide, high * wide, b * wide, wide, b, 1]);
        let plane = h * w;
        let in_depth = to_strides(if self.adjacent_channels {
            [b * b * c * plane, b * b * plane, w, b * plane, 1, plane]
        } else {
            [b * b * c * plane, plane, w, b * c * plane, 1, c * plane]
        });
        let (from, to) = if self.to_depth { (in_image, in_depth) } else { (in_depth, in_image) };
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&space, 0);
        let value = nest.load_strided(cx, input, 0, &from);
        nest.store_strided(cx, output, 0, to, value);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Blocks::read(node)?))
}

/// Downgrades SpaceToDepth. Before opset 28 only `DCR` exists. `CRD` splits one axis after the other, so no size must
/// be known.
fn downgrade_to_depth(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let blocks = Blocks::read(rw.node())?;
    if rw.version() >= 28 {
        return Ok(());
    }
    if !blocks.adjacent_channels {
        if rw.attrs().0.contains_key("mode") {
            let inputs = rw.node().inputs.to_vec();
            rw.emit_same_op(&inputs, blocks.attrs());
        }
        return Ok(());
    }
    let b = blocks.size as i64;
    let reshape = |rw: &mut Rewrite<'_>, value: ValueId, sizes: &[i64]| {
        let sizes = rw.ints("sizes", sizes);
        rw.add("Reshape", &[value, sizes], Attrs::new())
    };
    let turn = |rw: &mut Rewrite<'_>, value: ValueId, perm: &[i64]| {
        rw.add("Transpose", &[value], Attrs::new().with("perm", perm.to_vec()))
    };
    let x = rw.required_input(0)?;
    // [N, C, H, w, b]; then the rows become the last axis and are split as well.
    let columns = reshape(rw, x, &[0, 0, 0, -1, b]);
    let transposed = turn(rw, columns, &[0, 1, 3, 4, 2]);
    let split = reshape(rw, transposed, &[0, 0, 0, 0, -1, b]);
    // [N, C, w, b, h, b]; then the channel and both positions in the block become one last axis.
    let last = turn(rw, split, &[0, 4, 2, 1, 5, 3]);
    let joined = reshape(rw, last, &[0, 0, 0, -1]);
    let result = turn(rw, joined, &[0, 3, 1, 2]);
    rw.replace_output(0, result);
    Ok(())
}

/// Downgrades DepthToSpace. Before opset 11 there is no mode.
fn downgrade_to_space(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let blocks = Blocks::read(rw.node())?;
    if rw.version() >= 11 || !rw.attrs().0.contains_key("mode") {
        return Ok(());
    }
    if blocks.adjacent_channels {
        return Err(OpError::unsupported("the mode \"CRD\" needs opset 11 or newer"));
    }
    let inputs = rw.node().inputs.to_vec();
    rw.emit_same_op(&inputs, blocks.attrs());
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", TO_DEPTH, &[1, 13, 28], build).downgrade(downgrade_to_depth),
        Definition::new("", TO_SPACE, &[1, 11, 13, 28], build).downgrade(downgrade_to_space),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_downgrade, check_gradients, generic_tensor, one_node_graph, run, run_node,
    };

    fn attrs(size: i64, mode: &str) -> Attrs {
        Attrs::new().with("blocksize", size).with("mode", mode)
    }

    #[test]
    fn dcr_and_crd_channel_order() {
        let x = Tensor::f32(&[1, 8, 1, 1], &(0..8).map(|k| k as f32).collect::<Vec<_>>());
        let get =
            |mode| run_node(("", TO_SPACE), &[Some(&x)], 1, attrs(2, mode)).expect("it runs")[0].to_f64();
        assert_eq!(get("DCR"), [0., 2., 4., 6., 1., 3., 5., 7.]);
        assert_eq!(get("CRD"), [0., 1., 2., 3., 4., 5., 6., 7.]);
    }

    #[test]
    fn round_trip_gradients_and_downgrades() {
        for mode in ["DCR", "CRD"] {
            for (op, dims) in [(TO_DEPTH, [2, 3, 4, 6]), (TO_SPACE, [2, 8, 2, 3])] {
                let x = generic_tensor(&dims, 1);
                let graph =
                    one_node_graph(NEWEST_OPSET, ("", op), &[Some(&x)], 1, attrs(2, mode)).expect("valid");
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
                let y = run(&graph, std::slice::from_ref(&x)).expect("it runs").remove(0);
                let other = if op == TO_DEPTH { TO_SPACE } else { TO_DEPTH };
                let restored =
                    run_node(("", other), &[Some(&y)], 1, attrs(2, mode)).expect("it runs").remove(0);
                assert_eq!(restored, x);
                let oldest = if op == TO_SPACE && mode == "CRD" { 11 } else { 7 };
                for opset in [oldest, 13, 28] {
                    check_downgrade(&graph, std::slice::from_ref(&x), opset);
                }
            }
        }
    }

    #[test]
    fn rejects_invalid_sizes() {
        for (op, dims, attrs, message) in [
            (
                TO_DEPTH,
                &[1, 1, 3, 2][..],
                attrs(2, "DCR"),
                "axis 2 of shape [1, 1, 3, 2] must be a multiple of 2",
            ),
            (
                TO_SPACE,
                &[1, 6, 1, 1],
                attrs(2, "DCR"),
                "axis 1 of shape [1, 6, 1, 1] must be a multiple of 4",
            ),
            (TO_SPACE, &[1, 4], attrs(2, "DCR"), "[N, C, H, W] is needed"),
            (TO_DEPTH, &[1, 1, 2, 2], attrs(0, "DCR"), "blocksize must be from 1 to 32768, got 0"),
            (TO_DEPTH, &[1, 1, 2, 2], attrs(2, "RCD"), "mode must be \"DCR\" or \"CRD\", got \"RCD\""),
        ] {
            let failure =
                run_node(("", op), &[Some(&generic_tensor(dims, 1))], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
