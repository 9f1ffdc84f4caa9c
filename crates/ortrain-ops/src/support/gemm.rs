//! Attributes of Gemm.

use ortrain_graph::Node;

use crate::OpError;

/// `alpha * A' B' + beta * C`.
pub(crate) struct Gemm {
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) trans_a: bool,
    pub(crate) trans_b: bool,
}

impl Gemm {
    /// Reads the attributes of a node.
    ///
    /// # Errors
    /// If an attribute has another type.
    pub(crate) fn read(node: &Node) -> Result<Gemm, OpError> {
        Ok(Gemm {
            alpha: node.attrs.float("alpha")?.unwrap_or(1.0),
            beta: node.attrs.float("beta")?.unwrap_or(1.0),
            trans_a: node.attrs.int("transA")?.unwrap_or(0) != 0,
            trans_b: node.attrs.int("transB")?.unwrap_or(0) != 0,
        })
    }
}
