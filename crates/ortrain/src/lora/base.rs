//! Quantization of the weights that get adapters (QLoRA).
//!
//! (T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.)

use ortrain_onnx::OperatorSetIdProto;
use ortrain_ops::training::{AdapterTarget, FactorName, WeightFormat, quantize_weight, weight_readers};
use rustc_hash::FxHashSet;

use super::{LoraOptions, Prepared, adapter_error};
use crate::model::graph::{infer_graph, opset_of};
use crate::{Error, Result};

/// Form of the adapted weights of linear layers.
///
/// ```
/// use ortrain::lora::Base;
///
/// assert_eq!(Base::from_name("int4"), Some(Base::Int4));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Base {
    /// As they are.
    #[default]
    Keep,
    /// Integers of 8 bits with a scale for each output (`DequantizeLinear`).
    Int8,
    /// Integers of 4 bits in blocks of 32 (`MatMulNBits`).
    Int4,
    /// 4-bit normal floats in blocks of 64 (`MatMulBnb4`).
    Nf4,
}

impl Base {
    /// Returns the form of a name.
    ///
    /// ```
    /// use ortrain::lora::Base;
    ///
    /// assert_eq!(Base::from_name("keep"), Some(Base::Keep));
    /// assert_eq!(Base::from_name("int2"), None);
    /// ```
    #[must_use]
    pub fn from_name(name: &str) -> Option<Base> {
        match name {
            "keep" => Some(Base::Keep),
            "int8" => Some(Base::Int8),
            "int4" => Some(Base::Int4),
            "nf4" => Some(Base::Nf4),
            _ => None,
        }
    }

    /// Returns the format of quantized weights; `None` for weights as they are.
    fn format(self) -> Option<WeightFormat> {
        match self {
            Base::Keep => None,
            Base::Int8 => Some(WeightFormat::Int8),
            Base::Int4 => Some(WeightFormat::Int4),
            Base::Nf4 => Some(WeightFormat::Nf4),
        }
    }
}

/// Quantizes the weights of the selected linear layers, one at a time. Returns the selected layers of the new model.
/// Weights that other nodes read, and weights of integers, stay as they are.
pub(super) fn quantize(
    prepared: &mut Prepared,
    targets: Vec<AdapterTarget>,
    options: &LoraOptions,
) -> Result<Vec<AdapterTarget>> {
    let Some(format) = options.base.format() else { return Ok(targets) };
    let opset = opset_of(&prepared.model.proto);
    let mut values: Vec<String> = targets.iter().map(|target| target.value.clone()).collect();
    let mut quantized: FxHashSet<&str> = FxHashSet::default();
    let adapted: FxHashSet<String> = prepared
        .typed
        .value_ids()
        .filter_map(|id| FactorName::split(prepared.typed.name_of(id)).map(|name| name.weight.to_owned()))
        .collect();
    for target in targets.iter().filter(|target| target.can_be_quantized()) {
        if !quantized.insert(&target.weight) {
            continue;
        }
        let of_weight: Vec<usize> =
            (0..targets.len()).filter(|&at| targets[at].weight == target.weight).collect();
        let is_layer = |reader: &String| of_weight.iter().any(|&at| targets[at].value == *reader);
        if adapted.contains(&target.weight) {
            return Err(Error::Argument(format!(
                "the weight {:?} has an adapter already, so it cannot be quantized to {}; quantize with the first \
                 adapter, or merge the present one",
                target.weight,
                format.name()
            )));
        }
        if !weight_readers(&prepared.typed, &target.weight).iter().all(is_layer) {
            quantized.remove(target.weight.as_str());
            continue;
        }
        let weight = prepared.constant(&target.weight)?;
        let layers: Vec<&AdapterTarget> = of_weight.iter().map(|&at| &targets[at]).collect();
        let new =
            quantize_weight(prepared.graph()?, &layers, &weight, (format, opset)).map_err(adapter_error)?;
        prepared.add_constants(new.constants)?;
        for (&at, value) in of_weight.iter().zip(new.values) {
            values[at] = value;
        }
    }
    if quantized.is_empty() {
        return Err(Error::Argument(format!(
            "the base {:?} needs linear layers whose weights are matrices of floats that no other node reads, and no \
             selected layer of {} has one; select such layers, or use the base \"keep\"",
            format.name(),
            prepared.label
        )));
    }
    prepared.infer_again(format)?;
    let all = prepared.targets()?;
    let find = |value: &String| all.iter().find(|target| target.value == *value).cloned();
    values.iter().map(find).collect::<Option<Vec<AdapterTarget>>>().ok_or_else(|| {
        Error::Argument(format!(
            "{} has a layer that is lost by the quantization of its weight",
            prepared.label
        ))
    })
}

impl Prepared {
    /// Infers the types of the changed model again.
    fn infer_again(&mut self, format: WeightFormat) -> Result<()> {
        let domain = format.domain();
        let imports = &mut self.model.proto.opset_import;
        if !domain.is_empty() && !imports.iter().any(|set| set.domain == domain) {
            imports.push(OperatorSetIdProto { domain: domain.to_owned(), version: 1 });
        }
        self.typed = infer_graph(&self.label, &self.model)?;
        Ok(())
    }
}
