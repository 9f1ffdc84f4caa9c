//! Helpers that several families of operators use.

pub(crate) mod activation_functions;
pub(crate) mod casts;
pub(crate) mod channels_last;
pub(crate) mod convolution;
pub(crate) mod element_indices;
pub(crate) mod formula;
pub(crate) mod gemm;
pub(crate) mod low_rank;
pub(crate) mod matrix_form;
pub(crate) mod ml;
pub(crate) mod norms;
pub(crate) mod onnx_decomposition;
pub(crate) mod packed_integers;
pub(crate) mod quantization_grid;
pub(crate) mod quantized_nodes;
pub(crate) mod random;
pub(crate) mod rewritten_on_read;
pub(crate) mod row_weights;
pub(crate) mod rows;
pub(crate) mod size_arithmetic;
pub(crate) mod sizes;
pub(crate) mod small_casts;
pub(crate) mod state_update;
pub(crate) mod subgraphs;
pub(crate) mod weight_grids;
