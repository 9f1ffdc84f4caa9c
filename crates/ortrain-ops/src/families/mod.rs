//! Operator families, one file each, and the list of all operators.

mod affine_grid;
mod argmax;
mod attention;
pub(crate) mod batch_norm;
mod bit_cast;
mod causal_conv;
mod center_crop_pad;
mod clip;
mod col2im;
mod concat;
pub(crate) mod control_flow;
mod conv;
mod conv_transpose;
mod cumulative;
pub(crate) mod custom_gradient;
mod depth_space;
mod determinant;
mod dft;
mod diagonal;
mod diffusion;
mod div_grad;
pub(crate) mod dropout;
mod einsum;
pub(crate) mod elementwise;
mod fake_quant;
pub(crate) mod features;
mod fused_activation;
mod gather;
mod gather_elements;
mod grid_sample;
mod layer_norm;
mod linear_attention;
pub(crate) mod linear_model;
mod loss;
mod lrn;
mod matmul;
mod mixture_of_experts;
mod non_max_suppression;
mod nonzero;
mod normalize;
mod one_hot;
pub(crate) mod optimizer_ops;
pub mod optimizers;
mod pad;
mod pool;
mod quantization;
mod range;
mod reduce;
pub(crate) mod refused;
mod resize;
mod reverse_sequence;
mod rnn;
mod rotary_embedding;
mod scatter;
mod select;
pub(crate) mod shape;
mod skip_layer_norm;
mod slice;
mod softmax;
mod split;
mod tile;
mod top_k;
mod training_graph;
mod unique;
mod yield_op;

use crate::op::Definition;

/// Functions that return the operators of a family.
const FAMILIES: &[fn() -> Vec<Definition>] = &[
    affine_grid::definitions,
    argmax::definitions,
    attention::definitions,
    bit_cast::definitions,
    causal_conv::definitions,
    center_crop_pad::definitions,
    clip::definitions,
    col2im::definitions,
    concat::definitions,
    control_flow::definitions,
    conv::definitions,
    conv_transpose::definitions,
    cumulative::definitions,
    custom_gradient::definitions,
    depth_space::definitions,
    determinant::definitions,
    dft::definitions,
    diagonal::definitions,
    diffusion::definitions,
    div_grad::definitions,
    dropout::definitions,
    einsum::definitions,
    elementwise::definitions,
    fake_quant::definitions,
    features::definitions,
    fused_activation::definitions,
    gather::definitions,
    gather_elements::definitions,
    grid_sample::definitions,
    layer_norm::definitions,
    linear_attention::definitions,
    linear_model::definitions,
    loss::definitions,
    lrn::definitions,
    matmul::definitions,
    mixture_of_experts::definitions,
    non_max_suppression::definitions,
    nonzero::definitions,
    batch_norm::definitions,
    normalize::definitions,
    one_hot::definitions,
    optimizer_ops::definitions,
    optimizers::definitions,
    optimizers::definitions_of_nodes,
    training_graph::definitions,
    pad::definitions,
    pool::definitions,
    quantization::definitions,
    range::definitions,
    reduce::definitions,
    resize::definitions,
    reverse_sequence::definitions,
    rnn::definitions,
    rotary_embedding::definitions,
    scatter::definitions,
    select::definitions,
    shape::definitions,
    skip_layer_norm::definitions,
    slice::definitions,
    softmax::definitions,
    split::definitions,
    tile::definitions,
    top_k::definitions,
    unique::definitions,
    yield_op::definitions,
];

/// Returns the definitions of all operators.
pub(crate) fn definitions() -> Vec<Definition> {
    FAMILIES.iter().flat_map(|family| family()).collect()
}
