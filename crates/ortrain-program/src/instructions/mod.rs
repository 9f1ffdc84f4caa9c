//! The instructions, a file each: what it computes, and what it says of itself.

mod attention;
mod body;
mod conv;
mod hand_over;
mod matmul;
mod nest;
mod nest_group;
mod scatter_add;
mod window;

pub use attention::{Attention, AttentionGradients, AttentionPass};
pub(crate) use body::Body;
pub use conv::Conv;
pub use hand_over::HandOver;
pub use matmul::MatMul;
pub use nest_group::NestGroup;
pub use scatter_add::ScatterAdd;
pub use window::{Window, WindowIndex};
