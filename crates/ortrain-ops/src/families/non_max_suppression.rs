//! Selection of the best of overlapping boxes: `NonMaxSuppression`.
//!
//! NonMaxSuppression-10 and 11 of ONNX (<https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html>). For each image
//! and class, boxes are selected by score, in descending order. Of equal scores the lower index is first. A box is
//! skipped if its overlap with a selected box exceeds `iou_threshold`.
//!
//! The number of selected boxes depends on values, so the operator runs on the host. Boxes with a NaN score are not
//! selected. Indices have no gradient.

use std::sync::Arc;

use ortrain_expr::Steps;
use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor};
use ortrain_program::HostFunction;

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Definition, Op, Placement};

const BOXES: usize = 0;
const SCORES: usize = 1;
const MAX_OUTPUT_BOXES: usize = 2;
const IOU_THRESHOLD: usize = 3;
const SCORE_THRESHOLD: usize = 4;

#[derive(Clone, Copy, Debug)]
struct NonMaxSuppression {
    /// True if boxes are centers and sizes; false if they are two corners (`center_point_box`).
    centered: bool,
    /// True for each input that the node has.
    present: [bool; 5],
}

impl Op for NonMaxSuppression {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 5, 1)?;
        for k in [BOXES, SCORES, IOU_THRESHOLD, SCORE_THRESHOLD] {
            if cx.has_input(k) {
                cx.expect_dtype(k, "float32", |dtype| dtype == DType::F32)?;
            }
        }
        if cx.has_input(MAX_OUTPUT_BOXES) {
            cx.expect_dtype(MAX_OUTPUT_BOXES, "int64", |dtype| dtype == DType::I64)?;
        }
        for k in [MAX_OUTPUT_BOXES, IOU_THRESHOLD, SCORE_THRESHOLD] {
            // An input without elements is equivalent to an omitted input.
            if let Some(shape) = cx.shape(k)
                && shape.iter().any(|dim| dim.known().is_some_and(|size| size > 1))
            {
                return Err(OpError::invalid(format!("input {k} has shape {shape}, expected one element")));
            }
        }
        if let (Some(boxes), Some(scores)) = (cx.shape(BOXES), cx.shape(SCORES)) {
            let differ = |a: &Dim, b: &Dim| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            let fits = boxes.rank() == 3
                && scores.rank() == 3
                && boxes[2].known().is_none_or(|size| size == 4)
                && !differ(&boxes[0], &scores[0])
                && !differ(&boxes[1], &scores[2]);
            if !fits {
                return Err(OpError::invalid(format!(
                    "boxes have shape {boxes} and scores {scores}, expected [images, boxes, 4] and [images, \
                     classes, boxes]"
                )));
            }
        }
        let shape: Shape = [cx.unknown_dim(0, 0), Dim::Known(3)].into_iter().collect();
        cx.set_output(0, DType::I64, Some(shape));
        Ok(())
    }

    fn grad(&self, _: &mut Grad<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::Host(Arc::new(*self))
    }
}

/// Start and end of a box along both axes.
type BoxSides = [[f32; 2]; 2];

impl NonMaxSuppression {
    fn box_sides(&self, numbers: &[f64]) -> BoxSides {
        let n = |k: usize| numbers[k] as f32;
        if self.centered {
            let side = |middle: f32, size: f32| [middle - size / 2.0, middle + size / 2.0];
            return [side(n(0), n(2)), side(n(1), n(3))];
        }
        // The two corners may be any diagonally opposite pair.
        let side = |a: f32, b: f32| if a >= b { [b, a] } else { [a, b] };
        [side(n(1), n(3)), side(n(0), n(2))]
    }
}

/// Returns the intersection over union of two boxes.
fn intersection_over_union(a: &BoxSides, b: &BoxSides) -> f32 {
    let mut both = 1.0;
    for axis in 0..2 {
        let shared = a[axis][1].min(b[axis][1]) - a[axis][0].max(b[axis][0]);
        if shared <= 0.0 {
            return 0.0;
        }
        both *= shared;
    }
    let area = |sides: &BoxSides| (sides[0][1] - sides[0][0]) * (sides[1][1] - sides[1][0]);
    let (of_a, of_b) = (area(a), area(b));
    let any = of_a + of_b - both;
    if of_a <= 0.0 || of_b <= 0.0 || any <= 0.0 { 0.0 } else { both / any }
}

impl HostFunction for NonMaxSuppression {
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let mut present_inputs = inputs.iter();
        let ports: Vec<Option<&Tensor>> =
            self.present.iter().map(|&present| if present { present_inputs.next() } else { None }).collect();
        let (Some(boxes), Some(scores)) = (ports[BOXES], ports[SCORES]) else {
            return Err("boxes or scores are missing".into());
        };
        let (&[images, count, 4], &[other_images, classes, other_count]) = (boxes.dims(), scores.dims())
        else {
            return Err(format!(
                "boxes of shape {:?} do not fit scores of shape {:?}",
                boxes.dims(),
                scores.dims()
            ));
        };
        if (images, count) != (other_images, other_count) {
            return Err(format!(
                "boxes of shape {:?} do not fit scores of shape {:?}",
                boxes.dims(),
                scores.dims()
            ));
        }
        let scalar = |k: usize| ports[k].and_then(|tensor| tensor.to_f64().first().copied());
        let max_outputs = scalar(MAX_OUTPUT_BOXES).unwrap_or(0.0).max(0.0) as usize;
        let max_overlap = scalar(IOU_THRESHOLD).unwrap_or(0.0) as f32;
        let score_threshold = scalar(SCORE_THRESHOLD);
        let (boxes, scores) = (boxes.to_f64(), scores.to_f64());
        let mut chosen = Vec::new();
        let steps = Steps::default();
        for image in 0..images {
            let sides: Vec<BoxSides> = boxes[image * count * 4..][..count * 4]
                .chunks(4)
                .map(|numbers| self.box_sides(numbers))
                .collect();
            for class in 0..classes {
                let scores = &scores[(image * classes + class) * count..][..count];
                let counts = |&k: &usize| {
                    !scores[k].is_nan() && score_threshold.is_none_or(|threshold| scores[k] > threshold)
                };
                let mut order: Vec<usize> = (0..count).filter(counts).collect();
                // The sort is stable: of equal scores the lower index is first.
                order.sort_by(|&a, &b| {
                    steps.step();
                    scores[b].total_cmp(&scores[a])
                });
                let mut selected_of_class: Vec<usize> = Vec::new();
                for k in order {
                    if selected_of_class.len() == max_outputs {
                        break;
                    }
                    let overlaps = |&other: &usize| {
                        steps.step();
                        intersection_over_union(&sides[k], &sides[other]) > max_overlap
                    };
                    if !selected_of_class.iter().any(overlaps) {
                        selected_of_class.push(k);
                    }
                }
                chosen.extend(
                    selected_of_class.into_iter().flat_map(|k| [image as i64, class as i64, k as i64]),
                );
            }
        }
        Ok(vec![Tensor::i64(&[chosen.len() / 3, 3], &chosen)])
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let centered = match node.attrs.int("center_point_box")?.unwrap_or(0) {
        0 => false,
        1 => true,
        other => return Err(OpError::invalid(format!("center_point_box must be 0 or 1, got {other}"))),
    };
    let present = [0, 1, 2, 3, 4].map(|k| node.inputs.get(k).copied().flatten().is_some());
    Ok(Box::new(NonMaxSuppression { centered, present }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "NonMaxSuppression", &[10, 11], build)]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Attrs;

    use super::*;
    use crate::testing::{Failure, run_node};

    const OP: (&str, &str) = ("", "NonMaxSuppression");

    fn select_boxes(boxes: &[f32], scores: &[f32], limits: [Option<f32>; 3], attrs: Attrs) -> Vec<i64> {
        let boxes = Tensor::f32(&[1, boxes.len() / 4, 4], boxes);
        let scores = Tensor::f32(&[1, 1, scores.len()], scores);
        let max_outputs = limits[0].map(|count| Tensor::i64(&[1], &[count as i64]));
        let [overlap, score] =
            [limits[1], limits[2]].map(|limit| limit.map(|limit| Tensor::f32(&[1], &[limit])));
        let ports = [Some(&boxes), Some(&scores), max_outputs.as_ref(), overlap.as_ref(), score.as_ref()];
        let got = run_node(OP, &ports, 1, attrs).expect("the graph runs").remove(0);
        assert_eq!(got.dims()[1], 3);
        got.to_i64().expect("integers").chunks(3).map(|row| row[2]).collect()
    }

    #[test]
    fn selects_best_of_overlapping_boxes() {
        let boxes = [0., 0., 2., 2., 0., 1., 2., 3., 2., 2., 0., 0., 5., 5., 6., 6.];
        let scores = [0.5, 0.9, 0.5, 0.1];
        let limits = |max_outputs: f32, overlap: f32| [Some(max_outputs), Some(overlap), None];
        // Box 2 equals box 0, with the other pair of corners.
        assert_eq!(select_boxes(&boxes, &scores, limits(9.0, 0.5), Attrs::new()), [1, 0, 3]);
        assert_eq!(select_boxes(&boxes, &scores, limits(9.0, 0.2), Attrs::new()), [1, 3]);
        assert_eq!(select_boxes(&boxes, &scores, limits(2.0, 1.0), Attrs::new()), [1, 0]);
        assert_eq!(select_boxes(&boxes, &scores, [Some(9.0), None, Some(0.1)], Attrs::new()), [1]);
        assert!(select_boxes(&boxes, &scores, [None, Some(0.5), None], Attrs::new()).is_empty());
        let centered = [1., 1., 2., 2., 2., 1., 2., 2., 9., 9., 1., 1.];
        let attrs = Attrs::new().with("center_point_box", 1i64);
        assert_eq!(select_boxes(&centered, &[0.5, 0.9, f32::NAN], limits(9.0, 0.2), attrs), [1]);
    }

    #[test]
    fn rejects_invalid_nodes() {
        for (boxes, scores, attrs, message) in [
            (
                vec![1, 2, 3],
                vec![1, 1, 2],
                Attrs::new(),
                "expected [images, boxes, 4] and [images, classes, boxes]",
            ),
            (vec![1, 2, 4], vec![1, 1, 3], Attrs::new(), "expected [images"),
            (
                vec![1, 2, 4],
                vec![1, 1, 2],
                Attrs::new().with("center_point_box", 2i64),
                "center_point_box must be 0 or 1, got 2",
            ),
        ] {
            let [boxes, scores] = [boxes, scores].map(|dims| Tensor::filled(DType::F32, &dims, 1.0));
            let failure = run_node(OP, &[Some(&boxes), Some(&scores)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
