//! Instructions: one file each, with the definition and the implementation of [`Body`].

mod attention;
mod body;
mod conv;
mod integer_product;
mod matmul;
mod nest;
mod nest_group;
mod quantized_matmul;
mod scatter_add;
mod window;
mod yield_values;

pub use attention::{Attention, AttentionGradients, AttentionPass};
pub(crate) use body::Body;
pub use conv::Conv;
pub use integer_product::{IntegerProduct, IntegerShape};
pub use matmul::MatMul;
pub use nest_group::NestGroup;
pub use quantized_matmul::{QuantizedFactor, QuantizedMatMul};
pub use scatter_add::ScatterAdd;
pub use window::{Window, WindowIndex};
pub use yield_values::Yield;
