//! Quantization of the float weights of linear layers.

use ortrain_graph::{DType, Tensor};
use ortrain_onnx::GraphProto;

use super::targets::{AdapterTarget, LayerKind};
use crate::Error;
use crate::support::quantized_nodes::{self, PackedForm, dequantization, replace_by_packed_product};
use crate::support::weight_grids::{LinearGrid, NumberTable, quantize_unsigned, read_code, write_code};

/// Format of quantized weights of linear layers, as the package `onnxruntime.quantization` writes it.
///
/// ```
/// use ortrain_ops::training::WeightFormat;
///
/// assert_eq!(WeightFormat::Int4.name(), "int4");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// `DequantizeLinear` of signed integers with a scale for each output.
    Int8,
    /// `MatMulNBits` with blocks of 32 and without zero points.
    Int4,
    /// `MatMulBnb4` with 4-bit normal floats and blocks of 64.
    Nf4,
}

/// Size of a block of 4-bit integers: the default of onnxruntime's training and of llama.cpp.
const INT4_BLOCK: usize = 32;
/// Size of a block of normal floats: the default of onnxruntime's `MatMulBnb4Quantizer` and of bitsandbytes.
const NF4_BLOCK: usize = 64;
/// Bits of a packed integer.
const BITS: usize = 4;
/// First version of `ai.onnx` in which a scale belongs to an index of an axis.
const MIN_OPSET_OF_INT8: i64 = 13;
/// First version of `ai.onnx` in which a scale may be no float32.
const MIN_OPSET_OF_SHORT_SCALES: i64 = 19;

impl WeightFormat {
    /// Returns the name of the format in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::Int8 => "int8",
            WeightFormat::Int4 => "int4",
            WeightFormat::Nf4 => "nf4",
        }
    }

    /// Returns the domain of the operators that read the format.
    ///
    /// ```
    /// use ortrain_ops::training::WeightFormat;
    ///
    /// assert_eq!([WeightFormat::Nf4.domain(), WeightFormat::Int8.domain()], ["com.microsoft", ""]);
    /// ```
    #[must_use]
    pub fn domain(self) -> &'static str {
        if self == WeightFormat::Int8 { "" } else { quantized_nodes::MICROSOFT }
    }

    /// Returns the ends of the names of the integers and of the scales, as onnxruntime's quantizers write them.
    fn suffixes(self) -> [&'static str; 2] {
        match self {
            WeightFormat::Int8 => ["_quantized", "_scale"],
            WeightFormat::Int4 => ["_Q4", "_scales"],
            WeightFormat::Nf4 => ["_Bnb4", "_absmax"],
        }
    }
}

/// End of the name of the zero points of integers of 8 bits.
const ZERO_POINT_SUFFIX: &str = "_zero_point";

/// Splits each product that is fused with an activation (`FusedGemm`), so that an adapter can follow the product. `opset` is
/// the version of `ai.onnx`.
pub fn split_fused_products(graph: &mut GraphProto, opset: i64) {
    quantized_nodes::split_fused_products(graph, opset);
}

/// Weight that was quantized.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// New constants.
    pub constants: Vec<(String, Tensor)>,
    /// Results of the layers, in the order of the layers.
    pub values: Vec<String>,
}

impl AdapterTarget {
    /// Returns true if the weight is a matrix of floats of a linear layer, possibly behind `Transpose` and `Cast`.
    #[must_use]
    pub fn can_be_quantized(&self) -> bool {
        self.kind == LayerKind::Linear && !self.has_integers() && self.stores_outputs_last().is_some()
    }
}

/// Quantizes the weight of linear layers, and changes their nodes. `weight` is the constant. The constant and the nodes
/// between are removed if nothing else reads them. The new constants are not added.
///
/// # Errors
/// Returns an error if the weight is of float64 or has elements that are infinite or NaN, or if the version of `ai.onnx`
/// is too old. Also if a layer is not in the main graph.
pub fn quantize_weight(
    graph: &mut GraphProto,
    layers: &[&AdapterTarget],
    weight: &Tensor,
    (format, opset): (WeightFormat, i64),
) -> Result<QuantizedWeight, Error> {
    let Some(target) = layers.first() else {
        return Ok(QuantizedWeight { constants: Vec::new(), values: Vec::new() });
    };
    check(target, weight, (format, opset))?;
    let [codes, scales] = format.suffixes().map(|suffix| format!("{}{suffix}", target.weight));
    let dtype = if format == WeightFormat::Int8 { weight.dtype() } else { target.dtype };
    let mut constants = match format {
        WeightFormat::Int8 => linear(target, weight),
        WeightFormat::Int4 => packed(target, &rows(target, weight)?, dtype),
        WeightFormat::Nf4 => normal_floats(&rows(target, weight)?, dtype),
    };
    let mut names = vec![codes.clone(), scales.clone()];
    if format == WeightFormat::Int8 {
        let zero_point = format!("{}{ZERO_POINT_SUFFIX}", target.weight);
        let node = dequantization([&codes, &scales, &zero_point], output_axis(target), &target.weight);
        remove_constant(graph, &target.weight);
        graph.node.insert(0, node);
        names.push(zero_point);
        let values = layers.iter().map(|layer| layer.value.clone()).collect();
        return Ok(QuantizedWeight { constants: names.into_iter().zip(constants).collect(), values });
    }
    let form = PackedForm {
        columns: target.outputs,
        rows: target.inputs,
        block: if format == WeightFormat::Int4 { INT4_BLOCK } else { NF4_BLOCK },
        has_normal_floats: format == WeightFormat::Nf4,
    };
    let mut values = Vec::new();
    for layer in layers {
        let at = graph.node.iter().position(|node| node.output.first() == Some(&layer.value));
        let Some(at) = at else {
            return Err(Error::Adapter(format!(
                "{} is not a node of the main graph, and only the weights of such nodes are quantized",
                layer.node
            )));
        };
        let (product, factor) = replace_by_packed_product(graph, at, [&codes, &scales], form);
        if let Some((factor, number)) = factor {
            names.push(factor);
            constants.push(Tensor::scalar(layer.dtype, f64::from(number)));
        }
        values.push(product);
    }
    for layer in layers {
        remove_unread(graph, &layer.read);
    }
    Ok(QuantizedWeight { constants: names.into_iter().zip(constants).collect(), values })
}

fn check(target: &AdapterTarget, weight: &Tensor, (format, opset): (WeightFormat, i64)) -> Result<(), Error> {
    let fail = |reason: String, advice: &str| {
        let (name, node) = (format.name(), &target.node);
        let weight = &target.weight;
        Err(Error::Adapter(format!(
            "the weight {weight:?} of {node} cannot be quantized to {name}: {reason}; {advice}"
        )))
    };
    let dtype = weight.dtype();
    if dtype == DType::F64 || target.dtype == DType::F64 {
        return fail("it is of float64".into(), "exclude it, or convert the model to float32");
    }
    if let Some((at, element)) = weight.first_not_finite() {
        return fail(format!("element {at} is {element}"), "repair the model, or exclude it");
    }
    let least = if dtype == DType::F32 { MIN_OPSET_OF_INT8 } else { MIN_OPSET_OF_SHORT_SCALES };
    if format == WeightFormat::Int8 && opset < least {
        let reason = format!("the model has opset {opset}, and its weights of {dtype} need opset {least}");
        return fail(reason, "convert the model, or choose int4");
    }
    Ok(())
}

/// Returns the axis of the outputs in the constant.
fn output_axis(target: &AdapterTarget) -> usize {
    usize::from(target.stores_outputs_last() == Some(true))
}

/// Returns a weight as rows `[outputs, inputs]` of float32, in the type that the layer computes with.
fn rows(target: &AdapterTarget, weight: &Tensor) -> Result<Vec<Vec<f32>>, Error> {
    let (outputs, inputs) = (target.outputs, target.inputs);
    let weight = if weight.dtype() == target.dtype { weight.clone() } else { weight.converted(target.dtype) };
    if weight.len() != outputs * inputs {
        return Err(Error::Adapter(format!("the weight {:?} has an unknown layout", target.weight)));
    }
    let elements = floats(&weight);
    let row = |n: usize| match output_axis(target) {
        0 => elements[n * inputs..(n + 1) * inputs].to_vec(),
        _ => (0..inputs).map(|k| elements[k * outputs + n]).collect(),
    };
    Ok((0..outputs).map(row).collect())
}

/// Returns the elements of a tensor of floats of at most 32 bits.
fn floats(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        DType::F32 => tensor.to_vec::<f32>(),
        _ => tensor.to_f64().into_iter().map(|number| number as f32).collect(),
    }
}

/// Returns packed integers `[outputs, blocks, bytes]` and scales `[outputs, blocks]`.
fn packed(target: &AdapterTarget, rows: &[Vec<f32>], dtype: DType) -> Vec<Tensor> {
    let blocks = target.inputs.div_ceil(INT4_BLOCK);
    let bytes = INT4_BLOCK * BITS / 8;
    let mut codes = vec![0_u8; rows.len() * blocks * bytes];
    let mut scales = Vec::with_capacity(rows.len() * blocks);
    for (row, codes) in rows.iter().zip(codes.chunks_exact_mut(blocks * bytes)) {
        for (block, codes) in row.chunks(INT4_BLOCK).zip(codes.chunks_exact_mut(bytes)) {
            let block = quantize_unsigned(block, BITS, false, dtype);
            scales.push(block.scale);
            for (at, &code) in block.codes.iter().enumerate() {
                write_code(codes, at, BITS, code);
            }
        }
        // The quantizer of onnxruntime fills the second half of a last byte with the half of the byte before, unless two
        // blocks start there. The half has no meaning, but files are compared by their bytes.
        let inputs = target.inputs;
        if inputs % 2 == 1 && inputs % (2 * INT4_BLOCK) != 1 {
            let code = read_code(codes, inputs - 2, BITS);
            write_code(codes, inputs, BITS, code);
        }
    }
    let scales = Tensor::f32(&[rows.len(), blocks], &scales);
    let scales = if dtype == DType::F32 { scales } else { scales.converted(dtype) };
    vec![Tensor::from_slice(DType::U8, &[rows.len(), blocks, bytes], &codes), scales]
}

/// Returns packed 4-bit normal floats and the largest absolute values of blocks, which may span rows.
fn normal_floats(rows: &[Vec<f32>], dtype: DType) -> Vec<Tensor> {
    let mut largest = Vec::new();
    let mut codes: Vec<u8> = Vec::new();
    let flat = rows.concat();
    for block in flat.chunks(NF4_BLOCK) {
        let (scale, block) = NumberTable::Nf4.quantize(block);
        largest.push(scale);
        codes.extend(block);
    }
    let zero = NumberTable::Nf4.quantize(&[0.0]).1[0];
    let pairs: Vec<u8> = codes.chunks(2).map(|pair| pair[0] << BITS | pair.get(1).unwrap_or(&zero)).collect();
    let largest = Tensor::f32(&[largest.len()], &largest);
    let largest = if dtype == DType::F32 { largest } else { largest.converted(dtype) };
    vec![Tensor::from_slice(DType::U8, &[pairs.len()], &pairs), largest]
}

/// Returns signed integers in the layout of the constant, the scale of each output, and zero points.
fn linear(target: &AdapterTarget, weight: &Tensor) -> Vec<Tensor> {
    let (outputs, inputs) = (target.outputs, target.inputs);
    let grid = LinearGrid::new(DType::I8, false).expect("integers");
    let elements = floats(weight);
    let is_last = output_axis(target) == 1;
    let place = |n: usize, k: usize| if is_last { k * outputs + n } else { n * inputs + k };
    let mut codes = vec![0_i8; elements.len()];
    let mut scales = Vec::with_capacity(outputs);
    for n in 0..outputs {
        let column = (0..inputs).map(|k| f64::from(elements[place(n, k)]));
        let (least, greatest) =
            column.fold((0.0, 0.0), |(least, greatest): (f64, f64), x| (least.min(x), greatest.max(x)));
        let (scale, zero_point) = grid.scale(least, greatest, weight.dtype());
        scales.push(scale);
        for k in 0..inputs {
            codes[place(n, k)] = grid.integer(elements[place(n, k)], scale, zero_point) as i8;
        }
    }
    vec![
        Tensor::from_slice(DType::I8, weight.dims(), &codes),
        Tensor::from_f64(weight.dtype(), vec![outputs], &scales),
        Tensor::filled(DType::I8, &[outputs], 0.0),
    ]
}

/// Removes a value that nothing reads, with the nodes and constants that only it needs.
fn remove_unread(graph: &mut GraphProto, value: &str) {
    if is_read(graph, value) {
        return;
    }
    remove_constant(graph, value);
    let makes = |outputs: &[String]| outputs.iter().any(|output| output == value);
    let Some(at) = graph.node.iter().position(|node| makes(&node.output)) else { return };
    for input in graph.node.remove(at).input {
        remove_unread(graph, &input);
    }
}

/// Removes a constant: an initializer, or the value of a node without inputs.
fn remove_constant(graph: &mut GraphProto, name: &str) {
    graph.initializer.retain(|tensor| tensor.name != name);
    graph.input.retain(|input| input.name != name);
    graph.node.retain(|node| !node.input.is_empty() || !node.output.iter().any(|output| output == name));
}

/// Returns true if a node of the graph, a node of a nested graph, or an output of one of them reads a value.
fn is_read(graph: &GraphProto, value: &str) -> bool {
    graph.output.iter().any(|output| output.name == value)
        || graph.node.iter().any(|node| {
            node.input.iter().any(|input| input == value)
                || node.attribute.iter().any(|attribute| {
                    attribute
                        .g
                        .as_deref()
                        .into_iter()
                        .chain(&attribute.graphs)
                        .any(|nested| is_read(nested, value))
                })
        })
}
