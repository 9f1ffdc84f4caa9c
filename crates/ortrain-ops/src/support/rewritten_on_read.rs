//! Operators that are rewritten to others when a model is read.

use ortrain_graph::{Graph, Node};

use crate::OpError;
use crate::infer::Infer;
use crate::op::Op;

pub(crate) struct RewrittenOnRead;

impl Op for RewrittenOnRead {
    fn infer(&self, _: &mut Infer<'_>) -> Result<(), OpError> {
        Err(OpError::unsupported(
            "the operator is rewritten when a model is read and cannot be part of a graph",
        ))
    }
}

/// Builds an operator for definitions that are rewritten to other operators when a model is read.
pub(crate) fn build_rewritten_on_read(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(RewrittenOnRead))
}
