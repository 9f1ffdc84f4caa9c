//! Written by `generate/`; see its README. Nothing here is edited by hand.

#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub(crate) mod onnx;
pub(crate) mod schema;
