//! Quantized weights of a graph: their numbers, and new integers for changed numbers.

use ortrain_graph::{DType, Graph, Node, Tensor, ValueId};

use super::targets::AdapterTarget;
use super::weights::{in_layout_of, merge_error};
use crate::Error;
use crate::class::Class;
use crate::registry::class_of;
use crate::support::packed_integers::{positive, read_bits, read_block};
use crate::support::quantization_grid::Layout;
use crate::support::weight_grids::{LinearGrid, NumberTable, quantize_unsigned, read_code, write_code};

/// Quantized weight with its scales.
pub(super) struct StoredWeight {
    form: Form,
    codes: Constant,
    scales: Constant,
    zero_points: Option<Constant>,
}

struct Constant {
    name: String,
    value: Tensor,
}

/// Layout of the integers.
enum Form {
    /// Rows of integers of a few bits. Each list has the positions in a row of a block.
    Packed { columns: usize, rows: usize, bits: usize, blocks: Vec<Vec<usize>>, row_bytes: usize },
    /// Codes of a table, two in a byte, with blocks that may span rows.
    Table { table: NumberTable, count: usize, block: usize },
    /// Integers with the index of the scale of each.
    Linear { grid: LinearGrid, scale_of: Vec<usize> },
}

/// New elements and constants.
type Quantized = (Vec<f64>, Vec<(String, Tensor)>);

/// Bits of a code of a table.
const TABLE_BITS: usize = 4;
/// Bits of an integer of packed weights without the attribute.
const DEFAULT_BITS: usize = 4;

impl StoredWeight {
    /// Returns the quantized weight of a layer.
    ///
    /// # Errors
    /// If its layout is unknown, or if nodes read the integers with different scales.
    pub(super) fn find(graph: &Graph, target: &AdapterTarget) -> Result<StoredWeight, Error> {
        let fail = |reason: &str| merge_error(target, reason);
        let node = reader(graph, target).ok_or_else(|| fail("the layout of the weight is unknown"))?;
        let is_packed = class_of(node) == Class::PackedProduct;
        let first = usize::from(is_packed);
        let weight = graph.find(&target.weight);
        let of = |node: &Node, k: usize| node.inputs.get(k).copied().flatten();
        if of(node, first) != weight {
            return Err(fail("nodes are between the integers and their scale"));
        }
        let mut readers =
            graph.nodes.iter().filter(|other| other.present_inputs().any(|id| Some(id) == weight));
        let is_same = |other: &Node| {
            class_of(other) == class_of(node)
                && other.attrs == node.attrs
                && (0..3 + first).all(|k| of(other, first + k) == of(node, first + k))
        };
        if !readers.all(is_same) {
            return Err(fail("nodes read its integers with different scales"));
        }
        let constant = |k: usize, meaning: &str| -> Result<Option<Constant>, Error> {
            let Some(id) = of(node, k) else { return Ok(None) };
            let value = graph.value(id).content().cloned();
            let value = value.ok_or_else(|| fail(&format!("{meaning} are no constant")))?;
            Ok(Some(Constant { name: graph.name_of(id).to_owned(), value }))
        };
        let missing = || fail("the layout of the weight is unknown");
        let codes = constant(first, "the integers")?.ok_or_else(missing)?;
        let scales = constant(first + 1, "the scales")?.ok_or_else(missing)?;
        let has_table = node.attrs.int("quant_type").is_ok_and(|kind| kind.is_some());
        let zero_points = if has_table { None } else { constant(first + 2, "the zero points")? };
        let form = if !is_packed {
            linear_form(node, [&codes, &scales], zero_points.as_ref()).ok_or_else(missing)?
        } else if has_table {
            table_form(node).ok_or_else(missing)?
        } else {
            let groups = constant(GROUPS, "the groups")?;
            packed_form(node, groups.as_ref()).ok_or_else(missing)?
        };
        let stored = StoredWeight { form, codes, scales, zero_points };
        if stored.has_fitting_sizes() { Ok(stored) } else { Err(missing()) }
    }

    /// Returns true if the sizes of the constants fit the layout.
    fn has_fitting_sizes(&self) -> bool {
        let (codes, scales) = (self.codes.value.len(), self.scales.value.len());
        match &self.form {
            Form::Packed { columns, blocks, row_bytes, bits, .. } => {
                let zero_points = self.zero_points.as_ref().is_none_or(|points| {
                    let row = match points.value.dtype() {
                        DType::U8 => (blocks.len() * bits).div_ceil(8),
                        _ => blocks.len(),
                    };
                    points.value.len() == columns * row
                });
                codes == columns * row_bytes && scales == columns * blocks.len() && zero_points
            }
            Form::Table { count, block, .. } => {
                codes == count.div_ceil(2) && scales == count.div_ceil(*block)
            }
            Form::Linear { scale_of, .. } => {
                let zero_points = self.zero_points.as_ref().is_none_or(|points| points.value.len() == scales);
                scale_of.iter().all(|&at| at < scales) && zero_points
            }
        }
    }

    /// Returns a matrix `[outputs, inputs]` in the order of the elements.
    pub(super) fn in_order(&self, target: &AdapterTarget, matrix: Vec<f64>) -> Result<Vec<f64>, Error> {
        let matrix = match &self.form {
            Form::Linear { .. } => in_layout_of(target, self.codes.value.dims(), matrix)?,
            _ => matrix,
        };
        if matrix.len() == self.len() {
            return Ok(matrix);
        }
        Err(merge_error(target, "the sizes of the factors do not fit the weight"))
    }

    fn len(&self) -> usize {
        match &self.form {
            Form::Packed { columns, rows, .. } => columns * rows,
            Form::Table { count, .. } => *count,
            Form::Linear { scale_of, .. } => scale_of.len(),
        }
    }

    /// Returns the zero point of each block.
    fn block_zero_points(&self) -> Vec<f64> {
        let Some(Constant { value, .. }) = &self.zero_points else {
            let middle = match &self.form {
                Form::Packed { bits, .. } => f64::from(1u32 << (bits - 1)),
                _ => 0.0,
            };
            return vec![middle; self.scales.value.len()];
        };
        match &self.form {
            Form::Packed { bits, blocks, .. } if value.dtype() == DType::U8 => {
                let row_bytes = (blocks.len() * bits).div_ceil(8).max(1);
                let rows = value.data().chunks_exact(row_bytes);
                rows.flat_map(|row| (0..blocks.len()).map(|at| f64::from(read_code(row, at, *bits))))
                    .collect()
            }
            _ => value.to_f64(),
        }
    }

    /// Returns the numbers that the integers mean.
    pub(super) fn elements(&self) -> Vec<f64> {
        let (scales, zero_points) = (self.scales.value.to_f64(), self.block_zero_points());
        match &self.form {
            Form::Packed { columns, rows, bits, blocks, row_bytes } => {
                let mut elements = vec![0.0; columns * rows];
                for (n, line) in elements.chunks_exact_mut((*rows).max(1)).enumerate() {
                    let row = &self.codes.value.data()[n * row_bytes..(n + 1) * row_bytes];
                    for (b, block) in blocks.iter().enumerate() {
                        let at = n * blocks.len() + b;
                        for &k in block {
                            line[k] = (f64::from(read_code(row, k, *bits)) - zero_points[at]) * scales[at];
                        }
                    }
                }
                elements
            }
            Form::Table { table, count, block } => {
                let numbers = table.numbers();
                let code = |at: usize| self.codes.value.data()[at / 2] >> (TABLE_BITS * (1 - at % 2)) & 15;
                (0..*count).map(|at| numbers[usize::from(code(at))] * scales[at / block]).collect()
            }
            Form::Linear { scale_of, .. } => {
                let integers = self.codes.value.to_f64();
                let number = |(integer, &at): (f64, &usize)| (integer - zero_points[at]) * scales[at];
                integers.into_iter().zip(scale_of).map(number).collect()
            }
        }
    }

    /// Quantizes new numbers. Blocks without a changed element keep their integers and scales. Returns the numbers that
    /// the new integers mean, and the new constants.
    pub(super) fn quantize(mut self, sums: &[f64], changed: &[bool]) -> Quantized {
        match &self.form {
            Form::Packed { .. } => self.quantize_packed(sums, changed),
            Form::Table { .. } => self.quantize_table(sums, changed),
            Form::Linear { .. } => self.quantize_linear(sums, changed),
        }
        let elements = self.elements();
        let constants = [Some(self.codes), Some(self.scales), self.zero_points];
        (elements, constants.into_iter().flatten().map(|constant| (constant.name, constant.value)).collect())
    }

    fn quantize_packed(&mut self, sums: &[f64], changed: &[bool]) {
        let Form::Packed { columns, rows, bits, blocks, row_bytes } = &self.form else { return };
        let mut codes = self.codes.value.data().to_vec();
        let mut scales = self.scales.value.to_f64();
        let mut zero_points = self.block_zero_points();
        let dtype = self.scales.value.dtype();
        for n in 0..*columns {
            for (b, block) in blocks.iter().enumerate() {
                if !block.iter().any(|&k| changed[n * rows + k]) {
                    continue;
                }
                let floats: Vec<f32> = block.iter().map(|&k| sums[n * rows + k] as f32).collect();
                let new = quantize_unsigned(&floats, *bits, self.zero_points.is_some(), dtype);
                scales[n * blocks.len() + b] = f64::from(new.scale);
                zero_points[n * blocks.len() + b] = f64::from(new.zero_point);
                let row = &mut codes[n * row_bytes..(n + 1) * row_bytes];
                for (&k, &code) in block.iter().zip(&new.codes) {
                    write_code(row, k, *bits, code);
                }
            }
        }
        if let Some(Constant { value, .. }) = &mut self.zero_points {
            *value = if value.dtype() == DType::U8 {
                let mut bytes = value.data().to_vec();
                let size = (blocks.len() * bits).div_ceil(8).max(1);
                for (row, points) in
                    bytes.chunks_exact_mut(size).zip(zero_points.chunks_exact(blocks.len().max(1)))
                {
                    for (at, &point) in points.iter().enumerate() {
                        write_code(row, at, *bits, point as u8);
                    }
                }
                Tensor::from_slice(DType::U8, value.dims(), &bytes)
            } else {
                Tensor::from_f64(value.dtype(), value.dims().to_vec(), &zero_points)
            };
        }
        self.codes.value = Tensor::from_slice(DType::U8, self.codes.value.dims(), &codes);
        self.scales.value = Tensor::from_f64(dtype, self.scales.value.dims().to_vec(), &scales);
    }

    fn quantize_table(&mut self, sums: &[f64], changed: &[bool]) {
        let Form::Table { table, block, .. } = &self.form else { return };
        let mut codes = self.codes.value.data().to_vec();
        let mut scales = self.scales.value.to_f64();
        for (b, (sums, changed)) in sums.chunks(*block).zip(changed.chunks(*block)).enumerate() {
            if !changed.contains(&true) {
                continue;
            }
            let floats: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
            let (largest, new) = table.quantize(&floats);
            scales[b] = f64::from(largest);
            for (i, code) in new.into_iter().enumerate() {
                let at = b * block + i;
                let shift = TABLE_BITS * (1 - at % 2);
                codes[at / 2] = codes[at / 2] & !(15 << shift) | code << shift;
            }
        }
        self.codes.value = Tensor::from_slice(DType::U8, self.codes.value.dims(), &codes);
        let dims = self.scales.value.dims().to_vec();
        self.scales.value = Tensor::from_f64(self.scales.value.dtype(), dims, &scales);
    }

    fn quantize_linear(&mut self, sums: &[f64], changed: &[bool]) {
        let Form::Linear { grid, scale_of } = &self.form else { return };
        let dtype = self.scales.value.dtype();
        let mut scales = self.scales.value.to_f64();
        let mut zero_points = self.block_zero_points();
        let mut ranges = vec![(0.0_f64, 0.0_f64); scales.len()];
        let mut is_changed = vec![false; scales.len()];
        for ((&sum, &changed), &at) in sums.iter().zip(changed).zip(scale_of) {
            let sum = f64::from(sum as f32);
            ranges[at] = (ranges[at].0.min(sum), ranges[at].1.max(sum));
            is_changed[at] |= changed;
        }
        for at in (0..scales.len()).filter(|&at| is_changed[at]) {
            (scales[at], zero_points[at]) = grid.scale(ranges[at].0, ranges[at].1, dtype);
        }
        let mut integers = self.codes.value.to_f64();
        for ((integer, &sum), &at) in integers.iter_mut().zip(sums).zip(scale_of) {
            if is_changed[at] {
                *integer = grid.integer(sum as f32, scales[at], zero_points[at]);
            }
        }
        let of = |tensor: &Tensor, elements: &[f64]| {
            Tensor::from_f64(tensor.dtype(), tensor.dims().to_vec(), elements)
        };
        self.codes.value = of(&self.codes.value, &integers);
        self.scales.value = of(&self.scales.value, &scales);
        if let Some(Constant { value, .. }) = &mut self.zero_points {
            *value = of(value, &zero_points);
        }
    }
}

/// Input of packed products with the group of each weight of a column.
const GROUPS: usize = 4;

/// Returns the node that reads the integers of a layer.
fn reader<'g>(graph: &'g Graph, target: &AdapterTarget) -> Option<&'g Node> {
    let maker =
        |id: ValueId| graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == id));
    let layer = maker(graph.find(&target.value)?)?;
    if class_of(layer) == Class::PackedProduct {
        return Some(layer);
    }
    let mut node = maker(graph.find(&target.read)?)?;
    while class_of(node) != Class::Dequantization {
        node = maker(node.inputs.first().copied().flatten()?)?;
    }
    Some(node)
}

fn packed_form(node: &Node, groups: Option<&Constant>) -> Option<Form> {
    let attrs = &node.attrs;
    let (columns, rows) = (positive(attrs, "N").ok()?, positive(attrs, "K").ok()?);
    let (bits, block) = (read_bits(attrs, "bits", DEFAULT_BITS).ok()?, read_block(attrs, None).ok()?);
    let count = rows.div_ceil(block);
    let mut blocks = vec![Vec::new(); count];
    match groups {
        None => (0..rows).for_each(|k| blocks[k / block].push(k)),
        Some(groups) => {
            let groups = groups.value.to_i64().filter(|groups| groups.len() == rows)?;
            for (k, group) in groups.into_iter().enumerate() {
                blocks.get_mut(usize::try_from(group).ok()?)?.push(k);
            }
        }
    }
    Some(Form::Packed { columns, rows, bits, blocks, row_bytes: count * block * bits / 8 })
}

fn table_form(node: &Node) -> Option<Form> {
    let attrs = &node.attrs;
    let count = positive(attrs, "N").ok()?.checked_mul(positive(attrs, "K").ok()?)?;
    let table = match attrs.int("quant_type").ok()?? {
        0 => NumberTable::Fp4,
        1 => NumberTable::Nf4,
        _ => return None,
    };
    Some(Form::Table { table, count, block: read_block(attrs, None).ok()? })
}

fn linear_form(node: &Node, [codes, scales]: [&Constant; 2], zero_points: Option<&Constant>) -> Option<Form> {
    let shape = |constant: &Constant| constant.value.dims().iter().map(|&size| size.into()).collect();
    let layout = Layout::new(&node.attrs, Some(&shape(codes)), Some(&shape(scales))).ok()??;
    let has_zero_point =
        zero_points.is_some_and(|points| points.value.to_f64().iter().any(|&point| point != 0.0));
    let grid = LinearGrid::new(codes.value.dtype(), has_zero_point)?;
    Some(Form::Linear { grid, scale_of: layout.scale_indices(codes.value.dims()) })
}
